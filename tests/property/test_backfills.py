"""Backfill keeps its promises, whatever requests arrive later."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st
from simulator import World, world
from simulator.world import request

from fgpu_scheduler.core.model import Request, Session, SessionState, Snapshot
from fgpu_scheduler.core.orders import ORDERS
from fgpu_scheduler.core.placement import best_fit, free, place
from fgpu_scheduler.core.planner import Policy, Reservation, StartDecision, plan
from fgpu_scheduler.core.policies import group_policy
from fgpu_scheduler.core.reservations import ENDING_S, LAUNCH_S

AMOUNTS = ("0.1", "0.3", "0.5", "0.5", "0.7", "1", "1", "2")
HOUR_S = 3600
LONGEST_WAIT_S = HOUR_S

exact = settings(derandomize=True, database=None, deadline=None, max_examples=100)


@st.composite
def requests(draw: st.DrawFn) -> Request:
    """Requests of a few users, most with a time limit."""
    asked = request(draw(st.sampled_from("abcde")), draw(st.sampled_from(AMOUNTS)))
    return replace(asked, time_limit_s=draw(st.sampled_from((None, 60, 600, 1800, HOUR_S))))


@st.composite
def full_labs(draw: st.DrawFn) -> World:
    """One or two nodes, partly held by sessions that have just started."""
    lab = world(devices=draw(st.integers(1, 3)))
    if draw(st.booleans()):
        lab = lab.node("n2", devices=draw(st.integers(1, 2)))
    for asked in draw(st.lists(requests(), min_size=1, max_size=6)):
        if place(asked, free(lab), score=best_fit) is not None:
            lab = lab.holding(asked)
    return lab


Lasts = Callable[[Session], int | None]


def history(lab: World, arrivals: list[tuple[int, Request]], policy: Policy, lasts_s: Lasts) -> Snapshot:
    """Run a history and return a snapshot with all its sessions: requests arrive, plans are committed, sessions end.

    Each arrival has its seconds after the last one. ``lasts_s`` is a session's time from placement to freed shares.
    """
    live: dict[int, Session] = {s.id: s for s in lab.sessions}
    ended: list[Session] = []
    due = list(arrivals)
    next_at_s = lab.now_s + due[0][0] if due else None
    now_s = lab.now_s
    while True:
        snapshot = Snapshot(now_s, 1, lab.nodes, tuple(live.values()))
        for decision in plan(snapshot, policy).decisions:
            old = live[decision.session_id]
            if isinstance(decision, StartDecision):
                live[old.id] = replace(
                    old, state=SessionState.PULLING, placement=decision.placement, scheduled_at_s=now_s
                )
            elif isinstance(decision, Reservation) and old.promised_at_s is None:
                live[old.id] = replace(old, promised_at_s=decision.until_s)
        ends = {
            s.id: s.scheduled_at_s + lasts
            for s in live.values()
            if s.scheduled_at_s is not None and (lasts := lasts_s(s)) is not None
        }
        instants = [*ends.values(), *(() if next_at_s is None else (next_at_s,))]
        if not instants:
            return Snapshot(now_s, 1, lab.nodes, (*ended, *live.values()))
        now_s = min(instants)
        for session_id in [i for i, at_s in ends.items() if at_s == now_s]:
            ended.append(live.pop(session_id))
        if next_at_s == now_s:
            new = max((s.id for s in (*ended, *live.values())), default=0) + 1
            live[new] = Session(new, due.pop(0)[1], SessionState.PENDING, now_s)
            next_at_s = now_s + due[0][0] if due else None


@exact
@given(
    full_labs(),
    st.lists(st.tuples(st.sampled_from((0, 1, 60, 500, 2000)), requests()), min_size=2, max_size=14),
    st.sampled_from(sorted(ORDERS)),
    st.booleans(),
)
def test_backfill_never_delays_a_promised_start(
    lab: World, arrivals: list[tuple[int, Request]], order: str, in_full: bool
) -> None:
    """This holds in every order, and if sessions use their whole time limit, or run without end if they have none."""

    def lasts_s(session: Session) -> int | None:
        limit_s = session.request.time_limit_s
        launch_s = LAUNCH_S if session.started_at_s is None else 0
        if limit_s is None:
            return None
        return launch_s + limit_s + ENDING_S if in_full else limit_s // 3 + 1

    policy = Policy(group_policy(order=order))
    for session in history(lab, arrivals, policy, lasts_s).sessions:
        if session.promised_at_s is not None:
            assert session.scheduled_at_s is not None
            assert session.scheduled_at_s <= session.promised_at_s


@settings(exact, max_examples=20)
@given(
    full_labs(),
    st.sampled_from(("2", "3")),
    st.lists(requests(), min_size=3, max_size=8),
    st.sampled_from(sorted(ORDERS)),
)
def test_aged_session_starts_soon_under_constant_arrivals(
    lab: World, amount: str, newcomers: list[Request], order: str
) -> None:
    """A new session arrives every four minutes and runs for 10 to 40; an aged one waits only for running ones."""
    asked = request("z", amount)
    if place(asked, free(replace(lab, sessions=())), score=best_fit) is None:
        return
    waiting = Session(100, asked, SessionState.PENDING, lab.now_s)
    lab = replace(lab, sessions=(*lab.sessions, waiting))
    stream = [(240, replace(newcomers[n % len(newcomers)], time_limit_s=None)) for n in range(40)]

    def lasts_s(session: Session) -> int:
        return 600 * (1 + session.id % 4)

    policy = Policy(group_policy(order=order, usual_wait_s=LONGEST_WAIT_S))
    found = next(s for s in history(lab, stream, policy, lasts_s).sessions if s.id == waiting.id)
    assert found.scheduled_at_s is not None
    assert found.scheduled_at_s <= lab.now_s + LONGEST_WAIT_S + 2400
