"""A forecast equals the plan run forward, in every order and with every kind of backfill."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st
from property_worlds import STATES
from simulator import lasting, world
from simulator.world import request

from fgpu_scheduler.core.expected_starts import SOON_S
from fgpu_scheduler.core.forecast import forecast
from fgpu_scheduler.core.lifecycle import HOLDING
from fgpu_scheduler.core.model import EndCause, Placement, Session, SessionState, Snapshot, Usage
from fgpu_scheduler.core.orders import ORDERS, QueueSnapshot, queue_snapshots
from fgpu_scheduler.core.placement import best_fit, free, place
from fgpu_scheduler.core.planner import plan
from fgpu_scheduler.core.policies import Policy, group_policy
from fgpu_scheduler.core.reservations import SURE_ENDS

LONGEST_WAIT_S = 3 * 3600
AMOUNTS = ("0.1", "0.3", "0.5", "0.5", "0.7", "1", "1", "2", "3")
TYPICAL_S = (1, 600, 3600)


@st.composite
def policies(draw: st.DrawFn) -> Policy:
    """Every order, with aging."""
    return Policy(group_policy(order=draw(st.sampled_from(sorted(ORDERS))), usual_wait_s=LONGEST_WAIT_S))


@st.composite
def queues(draw: st.DrawFn) -> Snapshot:
    """Small full nodes and a queue with time limits, priorities, promises, announced ends and usage.

    The clock was never set back, so submission times are in the order of ids.
    """
    lab = world(devices=draw(st.integers(1, 3)))
    if draw(st.booleans()):
        lab = lab.node("n2", devices=draw(st.integers(1, 2)))
    found: list[Session] = []
    ago_s = LONGEST_WAIT_S + 600
    for session_id in range(1, draw(st.integers(4, 12))):
        ago_s -= draw(st.sampled_from((0, 1, 60, 600, 1800)))
        at_s = lab.now_s - max(0, ago_s)
        asked = replace(
            request(draw(st.sampled_from("abcd")), draw(st.sampled_from(AMOUNTS))),
            time_limit_s=draw(st.sampled_from((None, 60, 1800, 7200))),
            priority=draw(st.sampled_from((0, 0, 0, 0, 0, 0, 1, 2))),
        )
        where = place(asked, free(lab.with_sessions(found)), score=best_fit)
        if where is not None and draw(st.sampled_from((True, True, False))):
            state = draw(st.sampled_from(STATES))
            ends = draw(st.sampled_from((None, None, None, EndCause.TIME_LIMIT, EndCause.IDLE)))
            new = Session(
                session_id,
                asked,
                state,
                at_s,
                placement=where[0],
                scheduled_at_s=at_s,
                started_at_s=at_s if state is SessionState.RUNNING else None,
                ends_at_s=None if ends is None else lab.now_s + draw(st.sampled_from((-5, 90, 3000))),
                ends_cause=ends,
            )
        else:
            promised = draw(st.sampled_from((False,) * 5 + (True,)))
            new = Session(
                session_id,
                asked,
                SessionState.PENDING,
                at_s,
                held=draw(st.sampled_from((False,) * 5 + (True,))),
                promised_at_s=lab.now_s + 60 if promised else None,
            )
        found.append(new)
    usage = tuple(Usage(user, "default", draw(st.sampled_from((0, 10**6, 10**7)))) for user in "abcd")
    return Snapshot(lab.now_s, 1, lab.nodes, tuple(found), usage)


def starts(lab: Snapshot, policy: Policy, typical_length_s: int) -> dict[int, int]:
    """Return the start of each session if everything is planned again at each end: slow reference."""
    world = started(lab, policy)
    found = {s.id: lab.now_s for s in lab.sessions if s.state is SessionState.PENDING and not waits(world, s)}
    world = world.with_sessions(replace(s, held=False) for s in world.sessions)
    policy = with_ranks(policy, world)
    ends = {s.id: expected_end(s, lab.now_s, typical_length_s) for s in world.sessions if s.state in HOLDING}
    while True:
        before, world = world, started(world, policy)
        for session in before.sessions:
            if session.state is SessionState.PENDING and not waits(world, session):
                found[session.id] = world.now_s
                ends[session.id] = expected_end(session, world.now_s, typical_length_s)
        if not ends:
            return found
        instant = min(ends.values())
        gone = [i for i, at_s in ends.items() if at_s == instant]
        ends = {i: at_s for i, at_s in ends.items() if i not in gone}
        world = replace(world, now_s=max(world.now_s, instant)).with_sessions(
            s for s in world.sessions if s.id not in gone
        )


def started(world: Snapshot, policy: Policy) -> Snapshot:
    """Return the world after the plan is committed."""
    where: dict[int, Placement] = {p.session_id: p.placement for p in plan(world, policy).placed}
    return world.with_sessions(
        replace(s, state=SessionState.SCHEDULED, placement=where[s.id], scheduled_at_s=world.now_s)
        if s.id in where
        else s
        for s in world.sessions
    )


def waits(world: Snapshot, session: Session) -> bool:
    return any(s.id == session.id and s.state is SessionState.PENDING for s in world.sessions)


def with_ranks(policy: Policy, world: Snapshot) -> Policy:
    """Return the policy with the ranks that its order gives now, because forecasts ignore future usage."""
    ranks: dict[int, float] = {}
    for line in queue_snapshots(world).values():
        for session, rank in zip(line.waiting, policy.default.order(line), strict=True):
            ranks[session.id] = rank

    def order(line: QueueSnapshot) -> list[float]:
        return [ranks[s.id] for s in line.waiting]

    return Policy(replace(policy.default, order=order))


def expected_end(session: Session, now_s: int, typical_length_s: int) -> int:
    if session.state is SessionState.TERMINATING:
        return now_s + 1
    if session.ends_at_s is not None and session.ends_cause in SURE_ENDS:
        return max(session.ends_at_s, now_s + 1)
    started_s = now_s if session.started_at_s is None else session.started_at_s
    left_s = started_s + typical_length_s - now_s
    rest_s = left_s if left_s > 0 else SOON_S
    if session.request.time_limit_s is not None:
        left_s = started_s + session.request.time_limit_s - now_s
        rest_s = min(rest_s, left_s) if left_s > 0 else SOON_S
    return now_s + rest_s


@settings(derandomize=True, database=None, deadline=None, max_examples=400)
@given(queues(), policies(), st.sampled_from(TYPICAL_S))
def test_forecast_equals_the_plan_run_forward_under_every_policy(
    lab: Snapshot, policy: Policy, typical_length_s: int
) -> None:
    told = forecast(lab, policy, lasting(typical_length_s))
    expected = starts(lab, policy, typical_length_s)
    assert {f.session_id: f.expected_start_at_s for f in told} == {
        s.id: expected.get(s.id) for s in lab.sessions if s.state is SessionState.PENDING
    }
