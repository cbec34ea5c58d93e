"""Machines that did not answer when the Hub started: what they have is found out when they do."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping

from fgpu_scheduler import FGPUError, Node
from fgpuspawner.nodes import Machine

log = logging.getLogger("fgpu")

ASK_EVERY_S = 10.0


async def take_in(
    away: Collection[str],
    survey: Callable[[Collection[str]], Mapping[str, Machine | None]],
    described: Callable[[Mapping[str, Machine | None]], Collection[Node]],
    taken: Callable[[Node], Awaitable[None]],
) -> None:
    """Ask the machines of the nodes ``away`` until each has answered, and hand over what its node has.

    ``survey`` and ``described`` block. A machine whose driver fails, or whose node cannot be taken, is asked again:
    whatever it was, as where a disk was full here, the node would else be away until the Hub restarts.
    """
    left, told = set(away), dict[str, str]()
    while left:
        await asyncio.sleep(ASK_EVERY_S)
        try:
            machines = await asyncio.to_thread(survey, sorted(left))
        except Exception:
            log.exception("Nodes %s cannot be asked now", ", ".join(sorted(left)))
            continue
        for node_id in sorted(left):
            machine = machines.get(node_id)
            if machine is None:
                continue
            try:
                nodes = await asyncio.to_thread(described, {node_id: machine})
                (node,) = (n for n in nodes if n.id == node_id)
                await taken(node)
            except Exception as e:
                if told.get(node_id) != str(e):
                    trace = None if isinstance(e, FGPUError) else e
                    log.error("Node %s answers, and cannot be used yet: %s", node_id, e, exc_info=trace)
                    told[node_id] = str(e)
                continue
            left.discard(node_id)
            log.info("Node %s answers: %d GPUs", node_id, len(node.devices))
