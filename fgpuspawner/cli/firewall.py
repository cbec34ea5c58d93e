"""The command ``fgpu firewall``: the rules that close a machine to an installation's sessions."""

from __future__ import annotations

import argparse
from typing import Any

from fgpu_scheduler import BadSettings
from fgpuspawner.cli.command import add_command, add_config, read_only
from fgpuspawner.cli.hub_config import checked_like_the_hub, load_config, quiet


def add_to(commands: Any) -> None:
    parser = add_command(
        commands,
        run,
        "firewall",
        "close this machine to sessions in containers",
        "Print the script that closes a machine to an installation's sessions, but for the Hub, the service and "
        "what c.FGPU allows. It is for root, at every boot, where the Hub does not run as root.",
    )
    add_config(parser)
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--apply", action="store_true", help="apply the rules now, instead of printing the script"
    )
    what.add_argument("--remove", action="store_true", help="remove the rules from this machine")


def run(given: argparse.Namespace) -> list[str]:
    """Print, apply or remove the rules of the installation that a configuration is of."""
    config = load_config(given.config)
    with quiet():
        settings, app = checked_like_the_hub(config, given.config)
        if not app.spawner_class.capabilities.networks:
            raise BadSettings(f"{given.config}: sessions are local processes; no firewall holds these")
        app.init_hub()
    # By its id the networks and rules are named; the Hub must have started once.
    with read_only(settings.database_url()) as store:
        installation = store.installation_id
    wall = app.spawner_class.firewall(installation, settings, [app.hub.api_url, settings.service_url()])
    if given.remove:
        wall.remove()
        return [f"removed the rules of installation {installation}"]
    if not given.apply:
        return [wall.script().rstrip()]
    wall.apply()
    return [f"OK: the rules of installation {installation} are in force"]
