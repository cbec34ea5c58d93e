"""What is free, what fits, and which of the fitting placements is taken.

`after` is the one fit check: the planner and the committing store both call it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from fgpu_scheduler.core.lifecycle import HOLDING
from fgpu_scheduler.core.model import (
    Device,
    Node,
    NodeState,
    Placement,
    Request,
    Session,
    ShareMode,
    Snapshot,
)
from fgpu_scheduler.core.shares import devices_needed, explicit, liked, shares_of, takes_model


@dataclass(frozen=True, slots=True)
class DeviceFree:
    """What is left of one device. ``mode`` is that of the shares on it, None where there is none.

    Of a cordoned one no ``shares`` are left, or fewer than none.
    """

    device: Device
    fgpu_milli: int
    memory_mib: int
    compute_percent: int
    shares: int
    mode: ShareMode | None = None

    @property
    def untouched(self) -> bool:
        """Whether no session holds any of it, and one may take it all."""
        return self.shares == self.device.max_shares


@dataclass(frozen=True, slots=True)
class NodeFree:
    """What is left of one node; devices in order of their index."""

    node: Node
    cpu_milli: int
    memory_mib: int
    devices: tuple[DeviceFree, ...]


Free = tuple[NodeFree, ...]
"""What is left of every node, in order of the nodes' ids."""


def untouched(node: Node) -> NodeFree:
    """Return ``node`` with nothing taken."""
    devices = tuple(
        DeviceFree(d, d.capacity_milli, d.memory_mib, 100, d.shares_offered) for d in node.devices
    )
    return NodeFree(node, node.cpu_milli, node.memory_mib, devices)


def free(snapshot: Snapshot) -> Free:
    """Return what the sessions that hold shares leave of each node.

    Amounts can be below zero where an administrator has made a node smaller than what runs on it.
    """
    on_node = snapshot.groups.on_node
    return tuple(
        left_beside(node, on_node[node.id]) if node.id in on_node else untouched(node)
        for node in snapshot.nodes
    )


def left_beside(node: Node, there: Mapping[int, Session]) -> NodeFree:
    """Return what those who have a place on a node leave of it, all at once: one after the other takes long."""
    held = [
        (session.request, session.placement)
        for _, session in sorted(there.items())
        if session.placement is not None and session.state in HOLDING
    ]
    cpu_milli, memory_mib = node.cpu_milli, node.memory_mib
    taken: dict[str, list[int]] = {}
    modes: dict[str, ShareMode] = {}
    # In order of their ids: it decides whose mode counts.
    for asked, where in held:
        cpu_milli -= asked.cpu_milli
        memory_mib -= asked.memory_mib
        for share in where.shares:
            uuid = share.device_uuid
            sums = taken.get(uuid)
            if sums is None:
                taken[uuid] = [share.fgpu_milli, share.memory_mib, share.compute_percent, 1]
                modes[uuid] = share.mode
            else:
                sums[0] += share.fgpu_milli
                sums[1] += share.memory_mib
                sums[2] += share.compute_percent
                sums[3] += 1
    devices = tuple(
        DeviceFree(d, d.capacity_milli, d.memory_mib, 100, d.shares_offered)
        if (sums := taken.get(d.uuid)) is None
        else DeviceFree(
            d,
            d.capacity_milli - sums[0],
            d.memory_mib - sums[1],
            100 - sums[2],
            d.shares_offered - sums[3],
            modes[d.uuid],
        )
        for d in node.devices
    )
    return NodeFree(node, cpu_milli, memory_mib, devices)


def _taken(left: NodeFree, request: Request, placement: Placement) -> NodeFree:
    return _changed(left, request, placement, -1)


def claimed(left: NodeFree, request: Request, placement: Placement) -> NodeFree:
    """Return what ``placement`` would leave of a node, below zero where others still hold what it needs."""
    return _taken(left, request, placement)


def returned(left: NodeFree, request: Request, placement: Placement) -> NodeFree:
    """Return what is left of a node once a session that `free` or `after` counted has ended."""
    return _changed(left, request, placement, 1)


def _changed(left: NodeFree, request: Request, placement: Placement, sign: int) -> NodeFree:
    by_uuid = {share.device_uuid: share for share in placement.shares}
    devices = tuple(
        d
        if (share := by_uuid.get(d.device.uuid)) is None
        else DeviceFree(
            d.device,
            d.fgpu_milli + sign * share.fgpu_milli,
            d.memory_mib + sign * share.memory_mib,
            d.compute_percent + sign * share.compute_percent,
            d.shares + sign,
            (d.mode or share.mode) if d.shares + sign != d.device.shares_offered else None,
        )
        for d in left.devices
    )
    return NodeFree(
        left.node,
        left.cpu_milli + sign * request.cpu_milli,
        left.memory_mib + sign * request.memory_mib,
        devices,
    )


def after(left: NodeFree, request: Request, placement: Placement) -> NodeFree | None:
    """Return what ``placement`` of ``request`` leaves of a node, or None if it does not fit there.

    The shares must be what the request is worth on the devices (`shares_of`). Memory and compute are
    checked beside fGPU, because shares taken under an earlier unit may be worth more than their fGPU says
    today. All shares of one device are of one mode.
    """
    if left.node.state is not NodeState.READY or left.node.resource_group != request.resource_group:
        return None
    by_uuid = {d.device.uuid: d for d in left.devices}
    wanted = [share.device_uuid for share in placement.shares]
    if len(set(wanted)) != len(wanted) or any(uuid not in by_uuid for uuid in wanted):
        return None
    if shares_of(request, [by_uuid[uuid].device for uuid in wanted]) != placement.shares:
        return None
    if any(by_uuid[share.device_uuid].mode not in (None, share.mode) for share in placement.shares):
        return None
    taken = _taken(left, request, placement)
    if taken.cpu_milli < 0 or taken.memory_mib < 0:
        return None
    for device in taken.devices:
        if device.device.uuid in wanted and (
            min(device.fgpu_milli, device.memory_mib, device.compute_percent, device.shares) < 0
        ):
            return None
    return taken


def placements(left: NodeFree, request: Request) -> Iterator[tuple[Placement, NodeFree]]:
    """Yield each way that ``request`` fits on a node, with what that leaves: by liked model, then by device uuid.

    For whole devices there is one for each capacity: those of the lowest uuids. (They are alike, being
    untouched.)
    """
    if left.cpu_milli < request.cpu_milli or left.memory_mib < request.memory_mib:
        return
    for devices in (devices for one in liked(request) for devices in _device_sets(left, one)):
        shares = shares_of(request, devices)
        if shares is not None:
            placement = Placement(left.node.id, shares)
            leaves = after(left, request, placement)
            if leaves is not None:
                yield placement, leaves


def _device_sets(left: NodeFree, request: Request) -> Iterator[tuple[Device, ...]]:
    """Yield the devices that are worth a try together; `after` decides."""
    if request.fgpu_milli == 0 and not explicit(request):
        yield ()
        return
    whole: dict[int, list[Device]] = {}
    for free in sorted(left.devices, key=lambda d: d.device.uuid):
        device, capacity = free.device, free.device.capacity_milli
        # Most devices of a busy cluster end here.
        if free.fgpu_milli < min(request.fgpu_milli, capacity) or not takes_model(request, device.model):
            continue
        needed = devices_needed(request.fgpu_milli, capacity_milli=capacity)
        if needed == 1:
            yield (device,)
        elif needed is not None and free.untouched:
            group = whole.setdefault(capacity, [])
            group.append(device)
            if len(group) == needed:
                yield tuple(group)


class Room(NamedTuple):
    """What a score sees of one node: what is free, and each device's capacity and model, in order of their uuids."""

    cpu_milli: int
    memory_mib: int
    free_milli: tuple[int, ...]
    capacity_milli: tuple[int, ...]
    models: tuple[str, ...] = ()

    @classmethod
    def of(cls, left: NodeFree) -> Room:
        """Return what a score sees of a node."""
        devices = sorted(left.devices, key=lambda d: d.device.uuid)
        free_milli = tuple(d.fgpu_milli for d in devices)
        capacities = tuple(d.device.capacity_milli for d in devices)
        models = tuple(d.device.model for d in devices)
        return cls(left.cpu_milli, left.memory_mib, free_milli, capacities, models)


Score = Callable[[Room, Room, tuple[int, ...]], tuple[int, ...]]
"""Of a node before and after, and the places of the devices taken in it. Lower is better; compared before
the node's id and the uuids, which break ties. Equal arguments must give equal scores: they are kept."""


def best_fit(before: Room, after: Room, taken: tuple[int, ...]) -> tuple[int, ...]:
    """Score by the share of its devices that a placement leaves free, in millionths: [0, 10^6 x n].

    For whole devices that is 0 everywhere, so the node's untouched devices decide: fewer is better.
    """
    free, capacity = after.free_milli, after.capacity_milli
    rest = sum(10**6 * free[i] // capacity[i] for i in taken)
    return rest, sum(1 for i, own in enumerate(capacity) if free[i] == own)


def place(request: Request, left: Free, *, score: Score) -> tuple[Placement, Free] | None:
    """Return the best placement of ``request`` and what it leaves, or None if none fits."""
    found = (_place(one, left, score=score) for one in liked(request))
    return next((one for one in found if one is not None), None)


def _place(request: Request, left: Free, *, score: Score) -> tuple[Placement, Free] | None:
    found: tuple[tuple[tuple[int, ...], str, tuple[str, ...]], Placement, int, NodeFree] | None = None
    for at, node in enumerate(left):
        if node.node.resource_group != request.resource_group:
            continue
        before = Room.of(node)
        at_uuid = {uuid: i for i, uuid in enumerate(sorted(d.device.uuid for d in node.devices))}
        for placement, leaves in placements(node, request):
            uuids = tuple(share.device_uuid for share in placement.shares)
            taken = tuple(at_uuid[uuid] for uuid in uuids)
            key = score(before, Room.of(leaves), taken), placement.node_id, uuids
            if found is None or key < found[0]:
                found = key, placement, at, leaves
    if found is None:
        return None
    _, placement, at, leaves = found
    return placement, (*left[:at], leaves, *left[at + 1 :])


def could_ever_fit(request: Request, nodes: Iterable[Node]) -> bool:
    """Return whether ``request`` fits on some node when nothing else runs, cordoned or not."""
    empty = tuple(untouched(node.opened()) for node in nodes if node.resource_group == request.resource_group)
    return place(request, empty, score=best_fit) is not None
