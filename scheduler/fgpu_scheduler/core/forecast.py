"""Position, expected start and reason: the same `plan`, run forward on a snapshot.

No second implementation of the policy: a session is expected to start when, in a world where running
sessions end after their typical length, the planner would place it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from fgpu_scheduler.core import order, placement
from fgpu_scheduler.core.admission import Caps, amounts_that_fit
from fgpu_scheduler.core.lifecycle import HOLDING
from fgpu_scheduler.core.model import (
    Request,
    Session,
    SessionState,
    Snapshot,
    WaitReason,
)
from fgpu_scheduler.core.planner import Plan, Policy, plan
from fgpu_scheduler.core.units import format_milli

BASIS_NOW = "free now"
BASIS_TYPICAL = "typical length of sessions here"
BASIS_UNKNOWN = "unknown: too few sessions have ended to tell"

SOON_S = 60
"""A session that has outlived the typical length is expected to end about this much later."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """What is known of one waiting session. ``position`` 1 is next; 0 means that it starts now."""

    session_id: int
    position: int
    reason: WaitReason
    text: str
    expected_start_at_s: int | None
    basis: str


def forecast(
    snapshot: Snapshot, policy: Policy, *, typical_length_s: int | None
) -> tuple[Forecast, ...]:
    """Return a forecast for every waiting session, in queue order.

    ``typical_length_s`` is the median length of sessions that ended here, or None while too few have.
    A held session is forecast as if somebody waited for it again.
    """
    now = plan(snapshot, policy)
    left = placement.free(snapshot)
    positions = order.positions(snapshot.sessions, order=policy.order)
    starts = _starts(snapshot, policy, now, typical_length_s)
    placed_now = {p.session_id for p in now.placed}
    found = []
    for decision in now.decisions:
        session = snapshot.session(decision.session_id)
        assert session is not None
        start = starts.get(session.id)
        if session.id in placed_now:
            reason, text, basis = WaitReason.RESOURCES, "starts now", BASIS_NOW
        elif session.held:
            reason, text = WaitReason.HELD, "the Hub restarted; it resumes this request by itself"
            basis = BASIS_TYPICAL if start is not None else BASIS_UNKNOWN
        else:
            reason, text = WaitReason.RESOURCES, shortage(session.request, left)
            basis = BASIS_TYPICAL if start is not None else BASIS_UNKNOWN
        found.append(Forecast(session.id, positions[session.id], reason, text, start, basis))
    return tuple(found)


def _starts(
    snapshot: Snapshot, policy: Policy, now: Plan, typical_length_s: int | None
) -> dict[int, int]:
    """Return the expected start of each waiting session for which one can be told."""
    starts = {p.session_id: snapshot.now_s for p in now.placed}
    if typical_length_s is None:
        return starts
    world = _unheld(snapshot)
    ends = {
        s.id: _expected_end_at_s(s, snapshot.now_s, typical_length_s)
        for s in world.sessions
        if s.state in HOLDING
    }
    # Each turn ends at least one session, and each session ends once: this comes to an end.
    while True:
        step = plan(world, policy)
        world = _applied(world, step)
        for placed in step.placed:
            starts.setdefault(placed.session_id, world.now_s)
            ends[placed.session_id] = world.now_s + typical_length_s
        if not ends or not any(s.state is SessionState.PENDING for s in world.sessions):
            return starts
        instant = min(ends.values())
        gone = [i for i, at in ends.items() if at == instant]
        for i in gone:
            del ends[i]
        world = replace(world, now_s=max(world.now_s, instant)).with_sessions(
            s for s in world.sessions if s.id not in gone
        )


def _unheld(snapshot: Snapshot) -> Snapshot:
    return snapshot.with_sessions(
        replace(s, held=False) if s.state is SessionState.PENDING else s for s in snapshot.sessions
    )


def _expected_end_at_s(session: Session, now_s: int, typical_length_s: int) -> int:
    if session.state is SessionState.TERMINATING:
        return now_s + 1
    started = session.started_at_s if session.started_at_s is not None else now_s
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
    own = [n for n in left if n.node.resource_group == request.resource_group]
    asked = format_milli(request.fgpu_milli)
    per_device = [d.fgpu_milli for n in own for d in n.devices]
    most, total = max(per_device, default=0), sum(m for m in per_device if m > 0)
    whole = [d for n in own for d in n.devices if d.untouched]
    capacity = max((d.device.capacity_milli for n in own for d in n.devices), default=0)
    if request.fgpu_milli > capacity > 0:
        return (
            f"{asked} fGPU needs {request.fgpu_milli // capacity} whole GPUs on one node: "
            f"{len(whole)} are free now"
        )
    if most < request.fgpu_milli <= total:
        return (
            f"{asked} fGPU does not fit on one GPU: {format_milli(total)} fGPU is free in all, "
            f"but at most {format_milli(most)} on one GPU"
        )
    if most < request.fgpu_milli:
        free = f"{format_milli(max(0, most))} fGPU" if most > 0 else "nothing"
        return f"{asked} fGPU is not free: {free} is free now"
    return (
        f"{asked} fGPU is free, but not together with {format_milli(request.cpu_milli)} CPU and "
        f"{request.memory_mib} MiB memory on the same node"
    )


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
    new = [
        Session(next_id + n, request, SessionState.PENDING, snapshot.now_s) for n in range(count)
    ]
    world = _unheld(snapshot).with_sessions((*snapshot.sessions, *new))
    found = {f.session_id: f for f in forecast(world, policy, typical_length_s=typical_length_s)}
    own = [found[s.id] for s in new]
    waiting = [f for f in own if f.text != "starts now"]
    largest = largest_now_milli(request, snapshot, policy, caps)
    if not waiting:
        return RequestForecast(count, None, snapshot.now_s, BASIS_NOW, "starts now", largest)
    last = waiting[-1]
    return RequestForecast(
        startable_now=count - len(waiting),
        position=last.position - (count - len(waiting)),
        expected_start_at_s=last.expected_start_at_s,
        basis=last.basis,
        text=waiting[0].text,
        largest_now_milli=largest,
    )


def largest_now_milli(
    request: Request, snapshot: Snapshot, policy: Policy, caps: Caps
) -> int | None:
    """Return the largest amount that would start at once beside the same CPU and memory, or None."""
    # What is placed from the queue in this very pass is ahead of a newcomer.
    world = _applied(snapshot, plan(snapshot, policy))
    left = placement.free(world)
    own = [n for n in snapshot.nodes if n.resource_group == request.resource_group]
    for amount in reversed(amounts_that_fit(own, caps)):
        if placement.place(replace(request, fgpu_milli=amount), left, score=policy.score) is not None:
            return amount
    return None
