"""Free capacity, feasible placements, and the best of them.

`feasible_device_sets` and `best_device_set` search one node, `place` several nodes, and `placer` places many requests one
after the other. `claimed_if_fits` checks a placement again before it is committed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import NamedTuple

from fgpu_scheduler.core.lifecycle import HOLDING, claims_shares
from fgpu_scheduler.core.model import (
    Device,
    Node,
    NodeState,
    Placement,
    Request,
    Session,
    Share,
    ShareMode,
    Snapshot,
)
from fgpu_scheduler.core.shares import (
    AnyRequest,
    RequestShape,
    accepts_model,
    devices_needed,
    is_explicit,
    per_preferred_model,
    shares_of,
)


@dataclass(frozen=True, slots=True)
class DeviceFree:
    """The free amounts of one device. ``mode`` is the mode of the shares on it, None if there are none.

    ``shares`` is the number of further sessions that may share it: 0 or less if it is cordoned.
    """

    device: Device
    fgpu_milli: int
    memory_mib: int
    compute_percent: int
    shares: int
    mode: ShareMode | None = None

    @property
    def untouched(self) -> bool:
        """Whether no session holds a share of it and one session may take it whole."""
        return self.shares == self.device.max_shares


@dataclass(frozen=True, slots=True)
class NodeFree:
    """The free amounts of one node; devices in order of their UUIDs, in which they are tried."""

    node: Node
    cpu_milli: int
    memory_mib: int
    devices: tuple[DeviceFree, ...]


#: The free amounts of every node, in order of the nodes' ids.
Free = tuple[NodeFree, ...]


def untouched(node: Node) -> NodeFree:
    """Return the free amounts of an empty node."""
    return free_on_node(node, {})


def free(snapshot: Snapshot) -> Free:
    """Return the free amounts of each node.

    They are below zero where an administrator has made a node smaller than what runs on it.
    """
    on_node = snapshot.index.on_node
    return tuple(free_on_node(node, on_node.get(node.id, {})) for node in snapshot.nodes)


def free_on_node(node: Node, there: Mapping[int, Session]) -> NodeFree:
    """Return the free amounts of a node beside these sessions. One sum over all is faster than one `claimed` for each.

    The shares of parked sessions are free unless they claim them: then the amounts may be below zero.
    """
    cpu_milli, memory_mib = node.cpu_milli, node.memory_mib
    taken: dict[str, list[int]] = {}
    modes: dict[str, ShareMode] = {}
    holders, claims = list[Placement](), list[Placement]()
    for _, session in sorted(there.items()):
        if session.placement is None or session.state not in HOLDING:
            continue
        cpu_milli -= session.request.cpu_milli
        memory_mib -= session.request.memory_mib
        if session.parked_at_s is None:
            holders.append(session.placement)
        elif claims_shares(session):
            claims.append(session.placement)
    # In order of their ids: the first session on a device decides its mode.
    mixed: set[str] = set()
    for where in (*holders, *claims):
        for share in where.shares:
            if modes.setdefault(share.device_uuid, share.mode) is not share.mode:
                mixed.add(share.device_uuid)
            sums = taken.setdefault(share.device_uuid, [0, 0, 0, 0])
            sums[0] += share.fgpu_milli
            sums[1] += share.memory_mib
            sums[2] += share.compute_percent
            sums[3] += 1
    devices = []
    for d in sorted(node.devices, key=attrgetter("uuid")):
        fgpu_milli, own_mib, percent, shares = taken.get(d.uuid, (0, 0, 0, 0))
        if d.uuid in mixed:
            # Until the shares of one mode have ended, those of the other one are claimed in vain: nothing new starts.
            fgpu_milli += d.capacity_milli
        left = d.capacity_milli - fgpu_milli, d.memory_mib - own_mib, 100 - percent, d.shares_offered - shares
        devices.append(DeviceFree(d, *left, modes.get(d.uuid)))
    return NodeFree(node, cpu_milli, memory_mib, tuple(devices))


def claimed(left: NodeFree, request: Request | RequestShape, placement: Placement) -> NodeFree:
    """Return the free amounts with ``placement``, below zero where other sessions still hold what it needs."""
    return _changed(left, request, placement, -1)


def released(left: NodeFree, request: Request, placement: Placement) -> NodeFree:
    """Return the free amounts after the end of a session that was counted as holding this placement."""
    return _changed(left, request, placement, 1)


def without_machine(request: Request) -> Request:
    """Return a request for the same GPU share without CPU and memory, which a parked session has already."""
    return replace(request, cpu_milli=0, memory_mib=0)


def _changed(left: NodeFree, request: Request | RequestShape, placement: Placement, sign: int) -> NodeFree:
    changed = {share.device_uuid: share for share in placement.shares}
    devices = tuple(
        d
        if (share := changed.get(d.device.uuid)) is None
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


def claimed_if_fits(left: NodeFree, request: Request | RequestShape, placement: Placement) -> NodeFree | None:
    """Return the free amounts with ``placement``, or None if it does not fit.

    The shares must be what the request is worth on the devices (`shares_of`). Memory and compute are checked beside fGPU,
    because shares that were placed under an earlier unit may be worth more than their fGPU says today. All shares of one
    device have one mode.
    """
    if left.node.state is not NodeState.READY or left.node.resource_group != request.resource_group:
        return None
    there = {d.device.uuid: d.device for d in left.devices if not d.device.cordoned}
    wanted = [share.device_uuid for share in placement.shares]
    if len(set(wanted)) != len(wanted) or any(uuid not in there for uuid in wanted):
        return None
    if shares_of(request, [there[uuid] for uuid in wanted]) != placement.shares:
        return None
    parks = isinstance(request, Request) and request.on_demand
    return claimed_shares(left, request, Placement(placement.node_id, ()) if parks else placement)


def claimed_shares(left: NodeFree, request: Request | RequestShape, where: Placement) -> NodeFree | None:
    """Return the free amounts with these shares, or None if they do not fit."""
    if left.cpu_milli < request.cpu_milli or left.memory_mib < request.memory_mib:
        return None
    wanted = {share.device_uuid: share for share in where.shares}
    own = [d for d in left.devices if d.device.uuid in wanted]
    if len(own) < len(wanted) or not all(_holds(d, wanted[d.device.uuid]) for d in own):
        return None
    return claimed(left, request, where)


def _holds(free: DeviceFree, share: Share) -> bool:
    """Return whether a share fits on a device; all shares of a device have one mode."""
    return (
        free.fgpu_milli >= share.fgpu_milli
        and free.memory_mib >= share.memory_mib
        and free.compute_percent >= share.compute_percent
        and free.shares >= 1
        and free.mode in (None, share.mode)
    )


#: The share of a request on part of a device, for each kind of device: capacity, memory and model.
ShareOfKind = dict[tuple[int, int, str], Share | None]


def feasible_device_sets(
    left: NodeFree, asked: Request | RequestShape, share_of_kind: ShareOfKind
) -> Iterator[tuple[tuple[int, ...], int]]:
    """Yield each set of devices on which ``asked`` fits, by their indexes, and the fGPU x 1000 of each device.

    ``share_of_kind`` is a cache for all nodes. All models of the request have the same preference here. For whole
    devices there is one set per capacity: the first devices, as untouched ones are alike.
    """
    node, fgpu = left.node, asked.fgpu_milli
    if left.cpu_milli < asked.cpu_milli or left.memory_mib < asked.memory_mib:
        return
    if node.state is not NodeState.READY or node.resource_group != asked.resource_group:
        return
    if fgpu == 0 and not is_explicit(asked):
        yield (), 0
        return
    whole: dict[int, list[int]] = {}
    for at, free in enumerate(left.devices):
        device, capacity = free.device, free.device.capacity_milli
        # Most devices of a busy cluster end here.
        if free.fgpu_milli < min(fgpu, capacity) or free.shares < 1:
            continue
        if fgpu <= capacity:
            kind = capacity, device.memory_mib, device.model
            if kind not in share_of_kind:
                shares = shares_of(asked, (device,))
                share_of_kind[kind] = shares[0] if shares else None
            share = share_of_kind[kind]
            if share is not None and _holds(free, share):
                yield (at,), share.fgpu_milli
        elif free.untouched and accepts_model(asked, device.model):
            group = whole.setdefault(capacity, [])
            group.append(at)
            if len(group) == devices_needed(fgpu, capacity_milli=capacity) and shares_of(
                asked, [left.devices[i].device for i in group]
            ):
                yield tuple(group), capacity


def may_fit(left: NodeFree, request: Request, gives: Mapping[str, int]) -> bool:
    """Return whether a node has enough fGPU once these amounts are given back, by UUID: a quick check."""
    needed, found = request.fgpu_milli, 0
    for free in left.devices:
        device = free.device
        milli = free.fgpu_milli + gives.get(device.uuid, 0)
        if milli >= needed or milli >= device.capacity_milli:
            found += device.capacity_milli
    return found >= needed


def fits_on(left: NodeFree, request: AnyRequest) -> bool:
    """Return whether a request fits on a node."""
    return any(any(feasible_device_sets(left, asked, {})) for asked in per_preferred_model(request))


def placement_of(left: NodeFree, asked: Request | RequestShape, taken: Iterable[int]) -> Placement:
    """Return one of the `feasible_device_sets` as a placement."""
    shares = shares_of(asked, [left.devices[at].device for at in taken])
    assert shares is not None
    return Placement(left.node.id, shares)


def placements(left: NodeFree, request: Request) -> Iterator[tuple[Placement, NodeFree]]:
    """Yield each placement on a node and the free amounts with it, by preferred model, then by device uuid."""
    for asked in per_preferred_model(request):
        for taken, _ in feasible_device_sets(left, asked, {}):
            placement = placement_of(left, asked, taken)
            yield placement, claimed(left, asked, placement)


class NodeAmounts(NamedTuple):
    """What a score sees of a node: its free amounts, and each device's capacity and model, in order of their UUIDs."""

    cpu_milli: int
    memory_mib: int
    free_milli: tuple[int, ...]
    capacity_milli: tuple[int, ...]
    models: tuple[str, ...] = ()

    @classmethod
    def of(cls, left: NodeFree) -> NodeAmounts:
        free = tuple([d.fgpu_milli for d in left.devices])
        capacities = tuple([d.device.capacity_milli for d in left.devices])
        models = tuple([d.device.model for d in left.devices])
        return cls(left.cpu_milli, left.memory_mib, free, capacities, models)


#: Scores a placement from the node before and after it, and the indexes of the devices taken. Lower is better; ties go
#: to the lowest node id and uuids. Equal arguments must give equal scores, because scores are cached.
Score = Callable[[NodeAmounts, NodeAmounts, tuple[int, ...]], tuple[int, ...]]


def best_fit(before: NodeAmounts, after: NodeAmounts, taken: tuple[int, ...]) -> tuple[int, ...]:
    """Score by the share of its devices that a placement leaves free, in millionths: [0, 10^6 x n].

    For whole devices that is 0 everywhere, so the node's untouched devices decide: fewer is better.
    """
    free, capacity = after.free_milli, after.capacity_milli
    rest = sum(10**6 * free[i] // capacity[i] for i in taken)
    return rest, sum(1 for i, own in enumerate(capacity) if free[i] == own)


def best_device_set(
    left: NodeFree,
    asked: Request | RequestShape,
    *,
    score: Score,
    share_of_kind: ShareOfKind,
    within: NodeFree | None = None,
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Return the lowest score on a node and the indexes of its devices, or None if the request does not fit.

    With ``within``, the placement must fit into those free amounts as well.
    """
    before: NodeAmounts | None = None
    found: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    tried: list[tuple[int, int, int, str]] = []
    for taken, each in feasible_device_sets(left, asked, share_of_kind):
        if within is not None and claimed_if_fits(within, asked, placement_of(left, asked, taken)) is None:
            continue
        if before is None:
            before = NodeAmounts.of(left)
        _, _, free, capacities, models = before
        if taken:
            # Among devices that no score can tell apart only the first is scored.
            alike = each, free[taken[0]], capacities[taken[0]], models[taken[0]]
            if alike in tried:
                continue
            tried.append(alike)
        rest = list(free)
        for at in taken:
            rest[at] -= each
        cpu_milli, memory_mib = left.cpu_milli - asked.cpu_milli, left.memory_mib - asked.memory_mib
        own = score(before, NodeAmounts(cpu_milli, memory_mib, tuple(rest), capacities, models), taken)
        if found is None or own < found[0]:
            found = own, taken
    return found


def place(
    request: Request, left: Free, *, score: Score, within: NodeFree | None = None
) -> tuple[Placement, Free] | None:
    """Return the best placement of ``request`` and the free amounts with it, or None if none fits (``within`` as
    above)."""
    for asked in per_preferred_model(request):
        share_of_kind: ShareOfKind = {}
        found = [
            (best[0], node.node.id, at, best[1])
            for at, node in enumerate(left)
            if (best := best_device_set(node, asked, score=score, share_of_kind=share_of_kind, within=within))
            is not None
        ]
        if found:
            *_, at, taken = min(found)
            placement = placement_of(left[at], asked, taken)
            return placement, (*left[:at], claimed(left[at], asked, placement), *left[at + 1 :])
    return None


def could_ever_fit(request: Request, nodes: Iterable[Node]) -> bool:
    """Return whether ``request`` fits on some node when nothing else runs, cordoned or not."""
    own = (node for node in nodes if node.resource_group == request.resource_group)
    return any(fits_on(untouched(node.opened()), request) for node in own)
