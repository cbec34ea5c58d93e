"""Machines that did not answer when the Hub started: what they have is found out when they do."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping

from fgpu_scheduler import Node
from fgpuspawner.concurrency.background import Background, Failures
from fgpuspawner.settings.nodes import Machine

log = logging.getLogger("fgpu")

ASK_EVERY_S = 10.0


class LateNodes:
    """Asks the machines of the nodes ``away`` until each has answered, and hands over what its node has.

    ``survey`` and ``described`` block. A machine whose driver fails, or whose node cannot be taken, is asked again:
    whatever it was, as where a disk was full here, the node would else be away until the Hub restarts.
    """

    def __init__(
        self,
        away: Collection[str],
        survey: Callable[[Collection[str]], Mapping[str, Machine | None]],
        described: Callable[[Mapping[str, Machine | None]], Collection[Node]],
        taken: Callable[[Node], Awaitable[None]],
    ) -> None:
        self._left = {
            node_id: Failures(log, f"Node {node_id} answers, and cannot be used yet", level=logging.ERROR)
            for node_id in sorted(away)
        }
        self._survey = survey
        self._described = described
        self._taken = taken

    def begin(self, background: Background) -> None:
        """Ask from now on, if any is away."""
        if self._left:
            background.every(
                ASK_EVERY_S,
                self.ask,
                failed=f"Nodes {', '.join(self._left)} cannot be asked now",
                first_after_s=ASK_EVERY_S,
            )

    async def ask(self) -> None:
        """Ask those that are left, once."""
        if not self._left:
            return
        machines = await asyncio.to_thread(self._survey, list(self._left))
        for node_id, failures in list(self._left.items()):
            machine = machines.get(node_id)
            if machine is None:
                continue
            try:
                nodes = await asyncio.to_thread(self._described, {node_id: machine})
                (node,) = (n for n in nodes if n.id == node_id)
                await self._taken(node)
            except Exception as e:
                failures.failed(e)
                continue
            del self._left[node_id]
            log.info("Node %s answers: %d GPUs", node_id, len(node.devices))
