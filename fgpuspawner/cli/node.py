"""The command ``fgpu node``: what is to become of a node."""

from __future__ import annotations

import argparse
import contextlib
import time
from typing import Any

from fgpu_scheduler import NodeAction, Store, act_on_node
from fgpuspawner.cli.command import add_command, add_config, settings_of, who


def add_to(commands: Any) -> None:
    """Add the command to the parser of ``fgpu``."""
    parser = add_command(
        commands,
        run,
        "node",
        "take a machine out of use, or say that it is gone",
        "Set what is to become of a node. cordon: it takes no more sessions, and keeps those that it has. uncordon: "
        "it takes sessions again. gone: of a node that does not answer, and of which you know that nothing runs on "
        "it any more; its sessions are ended, and their shares are free.",
    )
    parser.add_argument("node", metavar="NODE", help="the node's name")
    parser.add_argument("action", choices=sorted(NodeAction), help="what becomes of it")
    add_config(parser)


def run(given: argparse.Namespace) -> list[str]:
    """Set a node's state, and return what follows."""
    with contextlib.closing(Store(settings_of(given.config).database_url())) as store:
        store.open()
        action = NodeAction(given.action)
        follows = act_on_node(store, given.node, action, by=f"{who()} (fgpu)", now_s=int(time.time()))
    return [f"node {given.node}: {follows}"]
