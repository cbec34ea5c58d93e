"""The command ``fgpu node``."""

from __future__ import annotations

import time

import click

from fgpu_scheduler import BadSettings, NodeAction, act_on_gpu, act_on_node
from fgpuspawner.cli.command import command, config_option, who, writable
from fgpuspawner.cli.hub_config import loaded


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
