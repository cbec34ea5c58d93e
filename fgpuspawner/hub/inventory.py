"""The nodes on other machines and their devices: read as the Hub starts, and kept up to date while it runs."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace

from fgpu_scheduler import (
    BadSettings,
    FGPUError,
    Node,
    NodeState,
    Queue,
    filled_from_store,
    format_milli,
)
from fgpuspawner.concurrency.background import Background, Failures
from fgpuspawner.engines.base import EngineSilent
from fgpuspawner.isolation.manager import Isolation
from fgpuspawner.settings import FGPU
from fgpuspawner.settings.nodes import DevicesComing, MachineFacts, as_far_as_known

log = logging.getLogger("fgpu")

LOOK_EVERY_S = 60.0
LOOK_SOON_S = 10.0
"""Used while a machine is silent or cannot be used."""

TOGETHER_S = 1.0

Survey = Callable[[], Mapping[str, MachineFacts | None]]


def nodes_at_start(settings: FGPU, survey: Survey, stored: Collection[Node]) -> tuple[Node, ...]:
    """Return the nodes that a Hub starts with, sorted by id; silent ones as the store remembers them. Blocks.

    Raises:
        BadSettings, ProbeFailed: something configured is missing.
    """
    if not settings.finds_nodes:
        known = [node.id for node in stored if node.devices]
        machines = as_far_as_known(survey(), settings.nodes, known)
        return filled_from_store(settings.discover_nodes(machines), stored)
    before = {node.id: replace(node, state=NodeState.LOST) for node in stored}
    try:
        found, troubles = described(settings, survey(), before)
    except EngineSilent as e:
        log.error("%s; nodes take no sessions until it does", e)
        return tuple(before.values())
    for node_id, trouble in troubles.items():
        log.log(_level_of(trouble), "Node %s cannot be used yet: %s", node_id, trouble)
    for node_id in settings.node_ids():
        if node_id not in {node.id for node in found}:
            log.warning("c.FGPU.nodes: there is no node %s now", node_id)
    return filled_from_store(found, stored)


def described(
    settings: FGPU,
    machines: Mapping[str, MachineFacts | None],
    before: Mapping[str, Node],
    others: Iterable[Node] = (),
) -> tuple[tuple[Node, ...], dict[str, FGPUError]]:
    """Return the nodes of these machines, and the trouble of each that cannot be used; such a node stays as before.

    ``others`` are unchanged nodes, with which no device may be shared.
    """
    found: list[Node] = []
    troubles: dict[str, FGPUError] = {}
    owners = {device.uuid: node.id for node in others for device in node.devices}
    # If two machines show one GPU, the machine that had it keeps it.
    for name in sorted(machines, key=lambda name: (name not in before, name)):
        machine, node = machines[name], before.get(name)
        try:
            if machine is not None or node is None:
                new = settings.node_of(name, machine)
                for uuid in (device.uuid for device in new.devices if device.uuid in owners):
                    raise BadSettings(f"GPU {uuid} of node {name!r} is on node {owners[uuid]!r} too")
                node = new
        except BadSettings as e:
            troubles[name] = e
        if node is not None:
            owners |= {device.uuid: name for device in node.devices}
            found.append(node)
    return tuple(found), troubles


class Inventory:
    """Surveys the machines periodically and after `changed`, and applies the differences."""

    def __init__(
        self,
        settings: FGPU,
        survey: Survey,
        isolation: Isolation,
        queue: Queue,
        nodes: tuple[Node, ...],
        *,
        heard: bool = True,
    ) -> None:
        #: All nodes, with this machine's own, sorted by id.
        self.nodes = nodes
        #: Whether the engine has ever answered; otherwise ``nodes`` is what was known before.
        self.heard = heard
        self._settings = settings
        self._survey = survey
        self._isolation = isolation
        self._queue = queue
        self._failures: dict[tuple[str, int], Failures] = {}
        self._wake = asyncio.Event()
        self._left_s = 0.0

    def begin(self, background: Background) -> None:
        """Begin, if anything but this machine says which nodes there are."""
        if self._settings.finds_nodes or any(spec.get("engine") for spec in self._settings.nodes):
            background.every(
                LOOK_SOON_S,
                self._round,
                failed="Which nodes there are cannot be told now, and all stays as it was",
                first_after_s=LOOK_SOON_S,
                wake=self._wake,
            )

    def changed(self) -> None:
        """Survey soon. In the Hub's event loop."""
        self._left_s = 0.0
        self._wake.set()

    async def _round(self) -> None:
        self._left_s -= LOOK_SOON_S
        if self._left_s > 0:
            return
        # One survey for changes that come together; a change during it causes another one soon.
        await asyncio.sleep(TOGETHER_S)
        self._wake.clear()
        if await self.look() and not self._wake.is_set():
            self._left_s = LOOK_EVERY_S

    async def look(self) -> bool:
        """Survey once and apply the result; return whether every machine answered and can be used.

        Raises:
            EngineSilent, StoreUnavailable: nothing is applied; the next survey does it.
        """
        machines = await asyncio.to_thread(self._survey)
        before = {node.id: node for node in self.nodes}
        # Where the engine lists all nodes, missing ones are gone; otherwise they are this machine's.
        others = [] if self._settings.finds_nodes else [n for n in self.nodes if n.id not in machines]
        found, troubles = await asyncio.to_thread(described, self._settings, machines, before, others)
        taken = [node for node in [await self._taken(n, before, troubles) for n in found] if node is not None]
        nodes = tuple(sorted((*others, *taken), key=lambda node: node.id))
        # Every time: a removed node leaves the queue only when nothing runs on it.
        await self._queue.change_nodes(nodes)
        gone = before.keys() - {node.id for node in nodes}
        if gone:
            await asyncio.to_thread(self._isolation.forget_nodes, gone)
        self.nodes, self.heard = nodes, True
        self._say(before, gone, troubles)
        return not troubles and None not in machines.values()

    async def _taken(
        self, node: Node, before: Mapping[str, Node], troubles: dict[str, FGPUError]
    ) -> Node | None:
        """Return a node once its isolation is chosen; as it was before, if none works."""
        old = before.get(node.id)
        if old is None or node.devices != old.devices:
            try:
                await asyncio.to_thread(self._isolation.add_node, node)
            except FGPUError as e:
                troubles[node.id] = e
                return old
            except Exception as e:
                # An unexpected error, such as a full disk, must not keep the other nodes from being applied.
                log.debug("Node %s", node.id, exc_info=e)
                troubles[node.id] = FGPUError(repr(e))
                return old
        return node

    def _say(
        self, before: Mapping[str, Node], gone: Iterable[str], troubles: Mapping[str, FGPUError]
    ) -> None:
        for node_id in sorted(gone):
            log.warning("Node %s is gone", node_id)
        for node in self.nodes:
            if node != before.get(node.id) and node.id not in troubles:
                cpu, closed = format_milli(node.cpu_milli), ", closed by its cluster" if node.closed else ""
                log.info(
                    "Node %s: %d GPUs, %s CPU, %d MiB%s",
                    node.id,
                    len(node.devices),
                    cpu,
                    node.memory_mib,
                    closed,
                )
        for node_id, trouble in sorted(troubles.items()):
            words = f"Node {node_id} cannot be used as it is now"
            own = node_id, _level_of(trouble)
            self._failures.setdefault(own, Failures(log, words, level=own[1])).failed(trouble)
        self._failures = {own: said for own, said in self._failures.items() if own[0] in troubles}


def _level_of(trouble: FGPUError) -> int:
    return logging.INFO if isinstance(trouble, DevicesComing) else logging.ERROR
