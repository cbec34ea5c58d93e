"""The commands ``fgpu node`` and ``fgpu firewall``: machines and GPUs out of use and back, and their firewall."""

from __future__ import annotations

import time

import click

from fgpu_scheduler import BadSettings, NodeAction, act_on_gpu, act_on_node
from fgpuspawner.cli.command import command, config_option, read_only, who, writable
from fgpuspawner.cli.hub_config import checked_like_the_hub, load_config, loaded, quiet


@command("node")
@click.argument("node")
@click.argument("action", metavar="ACTION", type=click.Choice(sorted(map(str, NodeAction))))
@click.option("--gpu", metavar="GPU", help="only this GPU of it: its index or UUID")
@click.option("--reason", default="", help="why this GPU is cordoned, for the other administrators")
@config_option
def node_command(node: str, action: str, gpu: str | None, reason: str, config: str) -> list[str]:
    """Take a machine, or with --gpu one of its GPUs, out of use and back.

    cordon: it takes no new sessions, and keeps those that it has. uncordon: it takes sessions again. gone: the machine
    does not answer, and you know that nothing runs on it; its sessions are ended, and their shares are free.
    """
    if reason and gpu is None:
        raise BadSettings("--reason: only with --gpu")
    with writable(loaded(config)[1]) as store:
        to, by, now_s = NodeAction(action), f"{who()} (fgpu)", int(time.time())
        if gpu is None:
            return [f"node {node}: {act_on_node(store, node, to, by=by, now_s=now_s)}"]
        follows = act_on_gpu(store, node, gpu, to, reason=reason, by=by, now_s=now_s)
        return [f"GPU {gpu} of node {node}: {follows}"]


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
