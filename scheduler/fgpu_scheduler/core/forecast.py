"""Position, expected start and reason: the same `plan`, run forward on a snapshot.

No second implementation of the policy: a session is expected to start when, in a world where running
sessions end after their typical length, the planner would place it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush

from fgpu_scheduler.core import order, placement
from fgpu_scheduler.core.admission import Caps, amounts_that_fit
from fgpu_scheduler.core.lifecycle import HOLDING
from fgpu_scheduler.core.model import (
    MAX_SHARES,
    NodeState,
    Request,
    Session,
    SessionState,
    Snapshot,
    WaitReason,
)
from fgpu_scheduler.core.planner import Plan, Policy, place_in_order, plan
from fgpu_scheduler.core.shares import Shape, devices_needed, shape
from fgpu_scheduler.core.units import format_milli

BASIS_NOW = "free now"
BASIS_TYPICAL = "typical length of sessions here"
BASIS_UNKNOWN = "unknown: too few sessions have ended to tell"
BASIS_NO_NODE = "unknown: no node that takes sessions now could hold it"

STARTS_NOW = "starts now"

SOON_S = 60
"""A session that has outlived the typical length is expected to end about this much later."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """What is known of one waiting session.

    ``position`` 0 means that it starts now; 1 is the first of those of its resource group that wait on.
    """

    session_id: int
    position: int
    reason: WaitReason
    text: str
    expected_start_at_s: int | None
    basis: str


def forecast(snapshot: Snapshot, policy: Policy, *, typical_length_s: int | None) -> tuple[Forecast, ...]:
    """Return a forecast for every waiting session, in queue order.

    ``typical_length_s`` is the median length of sessions that ended here, or None while too few have.
    A held session is forecast as if somebody waited for it again.
    """
    now = plan(snapshot, policy)
    # What starts in this very pass is not free for those who wait on.
    left = placement.free(_applied(snapshot, now))
    sessions = {s.id: s for s in snapshot.sessions}
    length: dict[str, int] = {}
    shortages: dict[Shape, str] = {}
    starts = _starts(snapshot, policy, now, typical_length_s)
    placed_now = {p.session_id for p in now.placed}
    found = []
    for decision in now.decisions:
        session = sessions[decision.session_id]
        start = starts.get(session.id)
        if session.id in placed_now:
            found.append(Forecast(session.id, 0, WaitReason.RESOURCES, STARTS_NOW, start, BASIS_NOW))
            continue
        group, asked = session.request.resource_group, shape(session.request)
        length[group] = length.get(group, 0) + 1
        if session.held:
            reason, text = WaitReason.HELD, "the Hub restarted; it resumes this request by itself"
        else:
            if asked not in shortages:
                shortages[asked] = shortage(session.request, left)
            reason, text = WaitReason.RESOURCES, shortages[asked]
        basis = _basis(start, typical_length_s)
        found.append(Forecast(session.id, length[group], reason, text, start, basis))
    return tuple(found)


def _basis(start: int | None, typical_length_s: int | None) -> str:
    if start is not None:
        return BASIS_TYPICAL
    return BASIS_UNKNOWN if typical_length_s is None else BASIS_NO_NODE


def _starts(snapshot: Snapshot, policy: Policy, now: Plan, typical_length_s: int | None) -> dict[int, int]:
    """Return the expected start of each waiting session for which one can be told."""
    starts = {p.session_id: snapshot.now_s for p in now.placed}
    if typical_length_s is None:
        return starts
    now_s = snapshot.now_s
    left = {n.node.id: n for n in placement.free(snapshot)}
    holding = {
        s.id: (s.request, s.placement) for s in snapshot.sessions if s.state in HOLDING and s.placement
    }
    ends = [
        (_expected_end_at_s(s, now_s, typical_length_s), s.id) for s in snapshot.sessions if s.id in holding
    ]
    heapify(ends)
    waiting = list(order.queue(snapshot.sessions))
    # What did not fit can fit only where something has ended since: the other nodes need no second try.
    changed = tuple(left)
    # Each turn ends at least one session, and each session ends once: this comes to an end.
    while waiting:
        placed, leaves = place_in_order(waiting, tuple(left[i] for i in changed), policy.default)
        left.update((n.node.id, n) for n in leaves)
        if placed:
            for s in waiting:
                if s.id in placed:
                    starts.setdefault(s.id, now_s)
                    holding[s.id] = s.request, placed[s.id]
                    heappush(ends, (now_s + typical_length_s, s.id))
            waiting = [s for s in waiting if s.id not in placed]
        if not ends:
            break
        instant = ends[0][0]
        now_s = max(now_s, instant)
        gone: dict[str, None] = {}
        while ends and ends[0][0] == instant:
            request, where = holding[heappop(ends)[1]]
            if where.node_id in left:
                left[where.node_id] = placement.returned(left[where.node_id], request, where)
                gone[where.node_id] = None
        changed = tuple(sorted(gone))
    return starts


def _expected_end_at_s(session: Session, now_s: int, typical_length_s: int) -> int:
    if session.state is SessionState.TERMINATING:
        return now_s + 1
    # The clock may have been set back since.
    started = min(now_s, session.started_at_s) if session.started_at_s is not None else now_s
    end = started + typical_length_s
    return end if end > now_s else now_s + SOON_S


def _applied(snapshot: Snapshot, step: Plan) -> Snapshot:
    where = {p.session_id: p.placement for p in step.placed}
    if not where:
        return snapshot
    return snapshot.with_sessions(
        replace(s, state=SessionState.RUNNING, placement=where[s.id], started_at_s=snapshot.now_s)
        if s.id in where
        else s
        for s in snapshot.sessions
    )


def shortage(request: Request, left: placement.Free) -> str:
    """Say in plain words why ``request`` does not fit now, or that it would."""
    if placement.place(request, left, score=placement.best_fit) is not None:
        return "waits for its turn"
    own = [
        n for n in left if n.node.resource_group == request.resource_group and n.node.state is NodeState.READY
    ]
    if not own:
        return f"no node of resource group {request.resource_group!r} takes sessions now"
    enough = [n for n in own if _has_fgpu(n, request.fgpu_milli)]
    if not enough:
        return _fgpu_shortage(request.fgpu_milli, own)
    asked = format_milli(request.fgpu_milli)
    roomy = [n for n in enough if n.cpu_milli >= request.cpu_milli and n.memory_mib >= request.memory_mib]
    if not roomy:
        return (
            f"{asked} fGPU is free, but not together with {format_milli(request.cpu_milli)} CPU and "
            f"{request.memory_mib} MiB memory on the same node"
        )
    free_there = [d for n in roomy for d in n.devices if d.fgpu_milli >= request.fgpu_milli]
    if all(d.shares < 1 for d in free_there):
        most = max((d.device.max_shares for d in free_there), default=MAX_SHARES)
        return f"{asked} fGPU is free, but {most} sessions already share that GPU"
    return f"{asked} fGPU is free, but its GPU memory or compute is still held by earlier sessions"


def _has_fgpu(left: placement.NodeFree, asked: int) -> bool:
    if any(asked <= d.fgpu_milli for d in left.devices):
        return True
    untouched, needed = _whole(left, asked)
    return 0 < needed <= untouched


def _whole(left: placement.NodeFree, asked: int) -> tuple[int, int]:
    """Return how many untouched devices a node has of those it would give whole, and how many it takes.

    (0, 0) where the amount is not a number of whole devices there. Fewest missing where models differ.
    """
    found = []
    for capacity in sorted({d.device.capacity_milli for d in left.devices}):
        needed = devices_needed(asked, capacity_milli=capacity)
        alike = [d for d in left.devices if d.device.capacity_milli == capacity]
        if needed is not None and 1 < needed <= len(alike):
            found.append((sum(1 for d in alike if d.untouched), needed))
    return max(found, key=lambda f: (f[0] - f[1], f[1]), default=(0, 0))


def _fgpu_shortage(asked_milli: int, own: list[placement.NodeFree]) -> str:
    asked = format_milli(asked_milli)
    per_device = [d.fgpu_milli for n in own for d in n.devices]
    most, total = max(0, max(per_device, default=0)), sum(m for m in per_device if m > 0)
    if asked_milli > max((d.device.capacity_milli for n in own for d in n.devices), default=0):
        wholes = [w for n in own if (w := _whole(n, asked_milli))[1]]
        if not wholes:
            return f"{asked} fGPU is more than any node that takes sessions now has"
        untouched, needed = max(wholes, key=lambda w: w[0] - w[1])
        return f"{asked} fGPU needs {needed} whole GPUs on one node: at most {untouched} are free on one now"
    if asked_milli <= total:
        return (
            f"{asked} fGPU does not fit on one GPU: {format_milli(total)} fGPU is free in all, "
            f"but at most {format_milli(most)} on one GPU"
        )
    free = f"{format_milli(most)} fGPU" if most else "nothing"
    return f"{asked} fGPU is not free: {free} is free now"


@dataclass(frozen=True, slots=True)
class RequestForecast:
    """What would become of ``count`` sessions submitted now, and the largest amount that starts now."""

    startable_now: int
    position: int | None
    expected_start_at_s: int | None
    basis: str
    text: str
    largest_now_milli: int | None


def forecast_request(
    request: Request,
    count: int,
    snapshot: Snapshot,
    policy: Policy,
    caps: Caps,
    *,
    typical_length_s: int | None,
) -> RequestForecast:
    """Forecast a request that is not submitted yet, by submitting it to a copy of the world.

    ``position`` and the expected start are those of the last of the sessions, when all have started.
    """
    next_id = max((s.id for s in snapshot.sessions), default=0) + 1
    new = [Session(next_id + n, request, SessionState.PENDING, snapshot.now_s) for n in range(count)]
    world = snapshot.with_sessions((*snapshot.sessions, *new))
    found = {f.session_id: f for f in forecast(world, policy, typical_length_s=typical_length_s)}
    own = [found[s.id] for s in new]
    waiting = [f for f in own if f.basis != BASIS_NOW]
    largest = largest_now_milli(request, snapshot, policy, caps)
    if not waiting:
        return RequestForecast(count, None, snapshot.now_s, BASIS_NOW, STARTS_NOW, largest)
    last = waiting[-1]
    return RequestForecast(
        startable_now=count - len(waiting),
        position=last.position,
        expected_start_at_s=last.expected_start_at_s,
        basis=last.basis,
        text=waiting[0].text,
        largest_now_milli=largest,
    )


def largest_now_milli(request: Request, snapshot: Snapshot, policy: Policy, caps: Caps) -> int | None:
    """Return the largest amount that would start at once beside the same CPU and memory, or None."""
    # What is placed from the queue in this very pass is ahead of a newcomer.
    world = _applied(snapshot, plan(snapshot, policy))
    left = placement.free(world)
    own = [n for n in snapshot.nodes if n.resource_group == request.resource_group]
    score = policy.of(request.resource_group).score
    for amount in reversed(amounts_that_fit(own, caps)):
        if placement.place(replace(request, fgpu_milli=amount), left, score=score) is not None:
            return amount
    return None
