"""The place that is reserved for a blocked session, the known ends that free it, and until when others may use it.

1. If enough sessions on a node have time limits, it is known when the place is free at the latest.
   `ReleaseSchedule.soonest` finds the place that is free soonest. It is reserved from then on; sessions that end before
   may still use it (EASY backfill: Lifka, "The ANL/IBM SP scheduling system", 1995).
2. If that is known of no place, `least_missing_place` reserves the one that lacks least; no other session gets a part of
   it. What it lacks never grows: each end there makes it smaller, and the reservation moves only to a place that lacks
   less still. So the session starts, if sessions end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from heapq import heapify, heappop, heappush, heapreplace
from operator import itemgetter
from typing import NamedTuple

from fgpu_scheduler.core.model import (
    Device,
    EndCause,
    NodeState,
    Placement,
    Request,
    Session,
    SessionState,
    Share,
    WaitReason,
)
from fgpu_scheduler.core.placement import (
    DeviceFree,
    NodeFree,
    Score,
    claimed,
    fits_on,
    may_fit,
    place,
    released,
)
from fgpu_scheduler.core.shares import (
    RequestShape,
    accepts_model,
    devices_needed,
    is_explicit,
    per_preferred_model,
    shape,
    shares_of,
)

#: The longest launch that promises allow for: a time limit counts from the end of the launch.
LAUNCH_S = 600
#: The time from the end of a session until its shares are free that promises allow for.
ENDING_S = 60
#: Other sessions may use this part (1/LENT) of the time until a promised start, and of the rest again in each plan.
#: Set on seeds 1 to 12 and 101 to 110 of bench/scheduler/lab.py (decision 0027).
LENT = 4
#: The ends that an owner was warned of and cannot avert. An end for idleness can be averted.
SURE_ENDS = (EndCause.TIME_LIMIT, EndCause.PREEMPTED)

#: Later than every real instant.
NEVER_S = 1 << 62
#: Sorts releases.
FREE_AT = itemgetter(0)


@dataclass(frozen=True, slots=True)
class Reservation:
    """Capacity that is kept for a session from one instant until another, in UTC seconds.

    Other sessions may use the shares of ``placement`` before ``from_s``. The session starts by ``until_s``; None: that
    is not known. ``remaining`` is the free capacity of the node at the start, less these shares: below zero where other
    sessions still hold what is reserved.
    """

    session_id: int
    placement: Placement
    from_s: int
    until_s: int | None
    remaining: NodeFree | None = field(default=None, compare=False, repr=False)

    @property
    def reason(self) -> WaitReason:
        """Why the session waits."""
        return WaitReason.RESERVED

    def ends_before(self, free_at_s: int | None) -> bool:
        """Return whether shares that are free again at that instant do not delay the reserved start."""
        return free_at_s is not None and free_at_s <= self.from_s

    def delayed_to(self, promised_at_s: int | None) -> Reservation:
        """Return the reservation with a later promised start; other sessions may use part of the time until then."""
        if self.until_s is None or promised_at_s is None or promised_at_s <= self.until_s:
            return self
        return replace(
            self, from_s=self.from_s + (promised_at_s - self.from_s) // LENT, until_s=promised_at_s
        )


def free_at_s(session: Session, now_s: int, *, limit_s: int | None) -> int | None:
    """Return the instant by which a session's shares are free again, or None if its end is not known.

    For a session that waits it is the instant if it started now. ``limit_s`` is the longest that it may run.
    """
    if session.state is SessionState.TERMINATING:
        return now_s + ENDING_S
    if session.ends_at_s is not None and session.ends_cause in SURE_ENDS:
        end_s = session.ends_at_s
    elif limit_s is None:
        return None
    elif session.started_at_s is not None:
        # The clock may have been set back since.
        end_s = min(session.started_at_s, now_s) + limit_s
    else:
        placed_at_s = now_s if session.scheduled_at_s is None else min(session.scheduled_at_s, now_s)
        end_s = placed_at_s + LAUNCH_S + limit_s
    return max(end_s, now_s) + ENDING_S


def least_missing_place(session: Session, nodes: Mapping[str, NodeFree], now_s: int) -> Reservation | None:
    """Reserve the place that lacks least, from now on, without a known start; None if no node could ever hold it."""
    request = session.request
    found: tuple[tuple[int, int, str, tuple[str, ...]], Placement, NodeFree] | None = None
    for node_id, node in nodes.items():
        if node.node.state is not NodeState.READY or node.node.resource_group != request.resource_group:
            continue
        if request.cpu_milli > node.node.cpu_milli or request.memory_mib > node.node.memory_mib:
            continue
        for preference, one in enumerate(per_preferred_model(request)):
            for shares in _places(node, one):
                placement = Placement(node_id, shares)
                remaining, lack = _claim(node, request, placement)
                key = lack, preference, node_id, tuple(share.device_uuid for share in shares)
                if found is None or key < found[0]:
                    found = key, placement, remaining
    return None if found is None else Reservation(session.id, found[1], now_s, None, found[2])


def _places(left: NodeFree, request: Request) -> Iterator[tuple[Share, ...]]:
    """Yield the shares of a request on each device, or on the whole devices with the least held."""
    if request.fgpu_milli == 0 and not is_explicit(request):
        yield ()
        return
    whole: dict[int, list[DeviceFree]] = {}
    for free in left.devices:
        device = free.device
        if device.cordoned:
            continue
        needed = devices_needed(request.fgpu_milli, capacity_milli=device.capacity_milli)
        if needed == 1:
            shares = shares_of(request, (device,))
            if shares is not None:
                yield shares
        elif needed is not None and accepts_model(request, device.model):
            whole.setdefault(device.capacity_milli, []).append(free)
    for capacity, devices in sorted(whole.items()):
        needed = devices_needed(request.fgpu_milli, capacity_milli=capacity) or 0
        devices.sort(key=lambda d: (_lack_as_whole(d), d.device.uuid))
        chosen: Sequence[Device] = sorted((d.device for d in devices[:needed]), key=lambda d: d.uuid)
        shares = shares_of(request, chosen) if len(chosen) == needed else None
        if shares is not None:
            yield shares


def _claim(left: NodeFree, request: Request, placement: Placement) -> tuple[NodeFree, int]:
    """Return what a place leaves of its node once the request has it, and how much it lacks now.

    The lack is a sum over fGPU, GPU memory, compute, shares, CPU and memory, each in thousandths of the whole.
    """
    modes = {share.device_uuid: share.mode for share in placement.shares}
    remaining = claimed(left, request, placement)
    lack = _lack(remaining.cpu_milli, left.node.cpu_milli) + _lack(remaining.memory_mib, left.node.memory_mib)
    devices = []
    for before, device in zip(left.devices, remaining.devices, strict=True):
        whole = device.device
        if whole.uuid not in modes:
            devices.append(device)
            continue
        mode = modes[whole.uuid]
        if before.mode not in (None, mode):
            # Shares of another mode must end before the first share of this one: all of the device is reserved.
            held = whole.max_shares - before.shares
            fgpu_milli = before.fgpu_milli - whole.capacity_milli - 1
            device = replace(device, fgpu_milli=fgpu_milli, shares=-held, mode=mode)
        lack += _device_lack(device)
        devices.append(device)
    return replace(remaining, devices=tuple(devices)), lack


def _lack_as_whole(free: DeviceFree) -> int:
    """Return what a device would lack if all of it were claimed."""
    whole = free.device
    return (
        _lack(free.fgpu_milli - whole.capacity_milli, whole.capacity_milli)
        + _lack(free.memory_mib - whole.memory_mib, whole.memory_mib)
        + _lack(free.compute_percent - 100, 100)
        + _lack(free.shares, whole.max_shares)
    )


def _device_lack(free: DeviceFree) -> int:
    return (
        _lack(free.fgpu_milli, free.device.capacity_milli)
        + _lack(free.memory_mib, free.device.memory_mib)
        + _lack(free.compute_percent, 100)
        + _lack(free.shares, free.device.max_shares)
    )


def _lack(free: int, whole: int) -> int:
    # Rounded up: even the smallest lack counts.
    return -(-1000 * -free // whole) if free < 0 < whole else 0


class Release(NamedTuple):
    """A session that ends, and the instant by which its shares are free again, in UTC seconds."""

    free_at_s: int
    session: Session
    placement: Placement


class _Fit(NamedTuple):
    """When and where a request fits on a node; the best sorts first.

    ``place`` is the request with one GPU model, and the free capacity of the node then; None: it does not fit before
    ``at_s``.
    """

    at_s: int
    preference: int
    node_id: str
    #: The number of changes of the node when this was computed.
    change: int
    computed_at_s: int
    place: tuple[Request, NodeFree] | None = None


class ReleaseSchedule:
    """The known ends on the nodes of one resource group.

    For each request shape it keeps the result of each node until a session starts or ends there.
    """

    def __init__(self, in_snapshot: Callable[[str], Sequence[Release]]) -> None:
        """``in_snapshot`` returns the known ends of the snapshot's sessions on a node, by its id, the next one first."""
        self._in_snapshot = in_snapshot
        #: By node id, the known ends of the sessions that have started since.
        self._started: dict[str, tuple[Release, ...]] = {}
        #: The ids of the sessions that have ended since.
        self._ended: dict[int, None] = {}
        #: By node id, the known ends where sessions have started or ended since, the next one first.
        self._known: dict[str, list[Release]] = {}
        #: By node id, how often a session has started or ended there.
        self._changes: dict[str, int] = {}
        #: For each request shape a heap; entries of nodes that have changed since are stale.
        self._fits: dict[RequestShape, list[_Fit]] = {}

    def copy(self) -> ReleaseSchedule:
        """Return an independent copy."""
        other = copy(self)
        other._started, other._ended = dict(self._started), dict(self._ended)
        other._known, other._changes = dict(self._known), dict(self._changes)
        other._fits = {asked: list(fits) for asked, fits in self._fits.items()}
        return other

    def start(self, session: Session, where: Placement, free_at_s: int | None) -> None:
        """Add a session that starts. ``free_at_s`` None: its end is not known."""
        if free_at_s is not None:
            release = Release(free_at_s, session, where)
            self._started[where.node_id] = (*self._started.get(where.node_id, ()), release)
        self._changed(where.node_id)

    def end(self, session_id: int, node_id: str) -> None:
        """Remove a session that has ended."""
        self._ended[session_id] = None
        self._changed(node_id)

    def _changed(self, node_id: str) -> None:
        change = self._changes[node_id] = self._changes.get(node_id, 0) + 1
        for fits in self._fits.values():
            heappush(fits, _Fit(0, 0, node_id, change, 0))
        self._known.pop(node_id, None)

    def soonest(
        self, session: Session, nodes: Mapping[str, NodeFree], *, now_s: int, score: Score
    ) -> Reservation | None:
        """Reserve the place where a session that fits nowhere now can start soonest; None if no end is known.

        ``nodes`` are the free capacities of the nodes of its resource group, by id.
        """
        request, changes = session.request, self._changes
        fits = self._fits.get(shape(request))
        if fits is None:
            ends = ((known[0].free_at_s, i) for i in nodes if (known := self._on_node(i)))
            fits = self._fits[shape(request)] = [_Fit(at_s, 0, i, changes.get(i, 0), 0) for at_s, i in ends]
            heapify(fits)
        # An end that is overdue is still to come.
        least_s, until_s = now_s + ENDING_S, NEVER_S

        def is_known(fit: _Fit) -> bool:
            current = fit.change == changes.get(fit.node_id, 0) and fit.node_id in nodes
            return current and (fit.at_s > least_s or fit.computed_at_s == now_s)

        while fits:
            best = fits[0]
            node_id = best.node_id
            if best.change != changes.get(node_id, 0) or node_id not in nodes:
                heappop(fits)
            elif best.place is not None and is_known(best):
                one, left = best.place
                found = place(one, (left,), score=score)
                assert found is not None
                return Reservation(session.id, found[0], best.at_s, best.at_s, found[1][0])
            elif best.at_s < least_s:
                heapreplace(fits, _Fit(least_s, 0, node_id, best.change, 0))
            else:
                heappop(fits)
                if fits and fits[0].place and is_known(fits[0]):
                    until_s = min(until_s, fits[0].at_s)
                fit = self._first_fit(request, nodes[node_id], now_s, max(until_s, least_s))
                if fit is not None:
                    heappush(fits, fit)
                    if fit.place:
                        until_s = min(until_s, fit.at_s)
        return None

    def _first_fit(self, request: Request, left: NodeFree, now_s: int, until_s: int) -> _Fit | None:
        """Return when a request first fits on a node, if that is not after ``until_s``; None if it never does."""
        node_id, least_s = left.node.id, now_s + ENDING_S
        change = self._changes.get(node_id, 0)
        before, releases = left, self._on_node(node_id)
        ended, gives = list[Release](), dict[str, int]()
        for number, release in enumerate(releases):
            at_s = max(release.free_at_s, least_s)
            if at_s > until_s:
                return _Fit(at_s, 0, node_id, change, now_s)
            ended.append(release)
            for share in release.placement.shares:
                gives[share.device_uuid] = gives.get(share.device_uuid, 0) + share.fgpu_milli
            more = number + 1 < len(releases) and max(releases[number + 1].free_at_s, least_s) == at_s
            if more or not may_fit(before, request, gives):
                continue
            for one_end in ended:
                left = released(left, one_end.session.request, one_end.placement)
            ended.clear()
            for preference, one in enumerate(per_preferred_model(request)):
                if fits_on(left, one):
                    return _Fit(at_s, preference, node_id, change, now_s, (one, left))
        return None

    def _on_node(self, node_id: str) -> Sequence[Release]:
        if node_id not in self._changes:
            return self._in_snapshot(node_id)
        if node_id not in self._known:
            there = (*self._in_snapshot(node_id), *self._started.get(node_id, ()))
            still = [release for release in there if release.session.id not in self._ended]
            self._known[node_id] = sorted(still, key=FREE_AT)
        return self._known[node_id]
