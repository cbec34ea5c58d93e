"""The command ``fgpu node``: what is to become of a node, or of one of its GPUs."""

from __future__ import annotations

import argparse
import time
from typing import Any

from fgpu_scheduler import BadSettings, NodeAction, act_on_gpu, act_on_node
from fgpuspawner.cli.command import add_command, add_config, loaded, who, writable


def add_to(commands: Any) -> None:
    parser = add_command(
        commands,
        run,
        "node",
        "take a machine or a GPU out of use, or say that a machine is gone",
        "Take a machine, or with --gpu one of its GPUs, out of use and back. cordon: it takes no more sessions, and "
        "keeps those that it has. uncordon: it takes sessions again. gone: the machine does not answer, and you know "
        "that nothing runs on it any more; its sessions are ended, and their shares are free.",
    )
    parser.add_argument("node", metavar="NODE", help="the node's name")
    parser.add_argument("action", choices=sorted(map(str, NodeAction)), help="what becomes of it")
    parser.add_argument("--gpu", metavar="GPU", help="only this GPU of it: its index or UUID")
    parser.add_argument("--reason", default="", help="why this GPU is cordoned, for the other administrators")
    add_config(parser)


def run(given: argparse.Namespace) -> list[str]:
    """Set the state of a node or of a GPU, and return what follows."""
    if given.reason and given.gpu is None:
        raise BadSettings("--reason: only with --gpu")
    with writable(loaded(given.config)[1]) as store:
        action, by, now_s = NodeAction(given.action), f"{who()} (fgpu)", int(time.time())
        if given.gpu is None:
            return [f"node {given.node}: {act_on_node(store, given.node, action, by=by, now_s=now_s)}"]
        follows = act_on_gpu(store, given.node, given.gpu, action, reason=given.reason, by=by, now_s=now_s)
        return [f"GPU {given.gpu} of node {given.node}: {follows}"]
