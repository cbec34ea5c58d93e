"""The command ``fgpu firewall``."""

from __future__ import annotations

import click

from fgpu_scheduler import BadSettings
from fgpuspawner.cli.command import command, config_option, read_only
from fgpuspawner.cli.hub_config import checked_like_the_hub, load_config, quiet


@command("firewall", exclusive=("apply", "remove"))
@click.option("--apply", is_flag=True, help="apply the rules now, instead of printing the script")
@click.option("--remove", is_flag=True, help="remove the rules from this machine")
@config_option
def firewall_command(config: str, apply: bool, remove: bool) -> list[str]:
    """Print the script that closes a machine to an installation's sessions.

    They reach the Hub, the service and what c.FGPU allows. The script is for root, at every boot, where the Hub does not
    run as root.
    """
    found = load_config(config)
    with quiet():
        settings, app = checked_like_the_hub(found, config)
        if not app.spawner_class.capabilities.networks:
            raise BadSettings(f"{config}: sessions are local processes; no firewall holds these")
        app.init_hub()
    # The networks and rules are named by its id, so the Hub must have started once.
    with read_only(settings.database_url()) as store:
        installation = store.installation_id
    wall = app.spawner_class.firewall(installation, settings, [app.hub.api_url, settings.service_url()])
    if remove:
        wall.remove()
        return [f"removed the rules of installation {installation}"]
    if not apply:
        return [wall.script().rstrip()]
    wall.apply()
    return [f"OK: the rules of installation {installation} are in force"]
