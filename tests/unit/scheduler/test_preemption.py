"""Which sessions end for requests of higher priority."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

from hypothesis import given, settings
from hypothesis import strategies as st
from simulator import World, world
from simulator.world import NOW_S, request

from fgpu_scheduler.core import placement
from fgpu_scheduler.core.model import EndCause, NodeState, Quota, QuotaScope, Request, Session, SessionState
from fgpu_scheduler.core.planner import Policy, plan
from fgpu_scheduler.core.reclaim import (
    AllRules,
    End,
    Reclaim,
    Rules,
    Warn,
    WithdrawWarning,
    end_message,
    reclaims,
)

PREEMPTED, LIMIT = EndCause.PREEMPTED, EndCause.TIME_LIMIT
ON = Rules(grace_s=600, preempt=True)


def runs(
    lab: World, user: str, fgpu: str, *, priority: int = 0, ago_s: int = 100, on: str | None = None
) -> World:
    return lab.holding(replace(request(user, fgpu), priority=priority), on=on, started_ago_s=ago_s)


def waits(lab: World, user: str, fgpu: str, *, priority: int = 1, held: bool = False) -> World:
    return lab.pending(user, fgpu, held=held).having(user, priority=priority)


def decided(lab: World, rules: Rules = ON, warned_for_s: int = 0) -> tuple[Reclaim, ...]:
    stood = {session.id: warned_for_s for session in lab.sessions}
    return reclaims(lab, plan(lab, Policy()), AllRules(rules), warned_for_s=stood)


def who(lab: World, rules: Rules = ON) -> list[str]:
    """Return the users of the sessions that are warned."""
    users = {s.id: s.request.user for s in lab.sessions}
    found = decided(lab, rules)
    assert all(isinstance(one, Warn) and one.cause is PREEMPTED for one in found)
    return [users[one.session_id] for one in found]


FULL = runs(runs(world(devices=2), "a", "1", ago_s=50), "b", "1", ago_s=90)


def test_it_is_off_by_default() -> None:
    assert decided(waits(FULL, "x", "1", priority=9), Rules()) == ()
    other = AllRules(Rules(), {"elsewhere": ON})
    lab = waits(FULL, "x", "1", priority=9)
    assert reclaims(lab, plan(lab, Policy()), other, warned_for_s={}) == ()


def test_the_youngest_of_lower_priority_is_warned_first() -> None:
    assert decided(waits(FULL, "x", "1")) == (Warn(1, PREEMPTED, NOW_S + 600),)


def test_the_lowest_priority_goes_before_the_youngest() -> None:
    lab = runs(runs(world(devices=2), "a", "1", priority=2, ago_s=1), "b", "1", priority=1, ago_s=900)
    assert who(waits(lab, "x", "1", priority=5)) == ["b"]


def test_nobody_is_ended_for_one_who_starts_now_or_is_held_or_is_over_a_quota() -> None:
    free = runs(world(devices=2), "a", "1")
    assert who(waits(free, "x", "1")) == []
    assert who(waits(FULL, "x", "1", held=True)) == []
    lab = waits(FULL, "x", "1")
    assert who(replace(lab, quotas=(Quota(QuotaScope.USER, "x", max_sessions=0),))) == []


def test_nobody_is_ended_for_more_requests_of_a_user_than_the_quota_allows() -> None:
    lab = waits(waits(FULL, "x", "1"), "x", "1")
    assert who(lab) == ["a", "b"]
    assert who(replace(lab, quotas=(Quota(QuotaScope.USER, "x", max_sessions=1),))) == ["a"]


def test_what_gives_back_its_share_anyway_is_waited_for() -> None:
    assert who(waits(FULL.having("a", state=SessionState.TERMINATING), "x", "1")) == []
    limited = FULL.having("b", started_at_s=NOW_S - 7000)
    found = decided(waits(limited, "x", "1"), replace(ON, max_lifetime_s=7200))
    assert found == (Warn(2, LIMIT, NOW_S + 600),)


def test_who_was_warned_is_not_spared_for_a_younger_one() -> None:
    lab = waits(FULL.having("b", ends_at_s=NOW_S + 60, ends_cause=PREEMPTED), "x", "1")
    assert decided(lab) == ()
    assert decided(runs(lab, "c", "0", ago_s=0)) == ()


def test_who_was_warned_is_spared_once_nobody_needs_the_place() -> None:
    lab = FULL.having("b", ends_at_s=NOW_S + 60, ends_cause=PREEMPTED)
    assert decided(lab) == (WithdrawWarning(2),)
    assert decided(waits(lab, "x", "1"), Rules()) == (WithdrawWarning(2),)
    assert decided(waits(lab.having("a", state=SessionState.TERMINATING), "x", "1")) == (WithdrawWarning(2),)


def test_at_its_instant_the_warned_session_is_ended_and_queued_again() -> None:
    lab = waits(FULL.having("b", ends_at_s=NOW_S, ends_cause=PREEMPTED), "x", "1")
    assert decided(lab, warned_for_s=600) == (End(2, PREEMPTED, end_message(PREEMPTED, requeued=True), True),)
    assert decided(lab, replace(ON, requeue=False), 600) == (End(2, PREEMPTED, end_message(PREEMPTED)),)
    assert decided(lab, warned_for_s=599) == (Warn(2, PREEMPTED, NOW_S + 1),)


def test_nobody_is_pre_empted_before_the_least_run_time() -> None:
    lab = waits(runs(runs(world(devices=2), "a", "1", ago_s=2999), "b", "1", ago_s=3000), "x", "1")
    least = replace(ON, min_runtime_s=3600)
    # The warning comes a grace ahead, the end not before the hour is over.
    assert decided(lab, least) == (Warn(2, PREEMPTED, NOW_S + 600),)
    assert who(waits(FULL, "x", "2"), least) == []
    assert who(waits(lab, "y", "1"), least) == ["b"]
    assert decided(lab, replace(least, min_runtime_s=3601)) == ()


def test_a_clock_that_is_set_back_shortens_no_least_run_time() -> None:
    least = replace(ON, min_runtime_s=3600)
    lab = runs(world(devices=1), "a", "1", ago_s=3590)
    lab = waits(lab.having("a", ends_at_s=NOW_S + 900, ends_cause=PREEMPTED), "x", "1")
    assert decided(lab, least, 595) == (Warn(1, PREEMPTED, NOW_S + 10),)
    early = lab.having("a", ends_at_s=NOW_S)
    assert decided(early, least, 600) == (Warn(1, PREEMPTED, NOW_S + 10),)
    assert decided(early.having("a", started_at_s=NOW_S - 2999), least, 600) == (WithdrawWarning(1),)


def test_two_blocked_sessions_do_not_count_on_the_same_place() -> None:
    assert who(waits(waits(FULL, "x", "1"), "y", "1")) == ["a", "b"]
    assert who(waits(waits(FULL, "x", "0.5"), "y", "0.5")) == ["a"]


def test_a_node_that_takes_nothing_gives_nothing() -> None:
    lab = waits(FULL, "x", "1")
    assert who(lab.cordoned("n1")) == []
    lost = tuple(replace(n, state=NodeState.LOST) for n in lab.nodes)
    assert who(replace(lab, nodes=lost)) == []


def test_the_processor_of_the_node_counts_too() -> None:
    lab = world(devices=2, cpu=4).running("a", "0.5", cpu=3).running("b", "0.5", cpu=1)
    assert who(waits(lab, "x", "0.5").having("x", cpu_milli=3000)) == ["a"]


def test_many_small_sessions_are_freed_without_trying_every_set() -> None:
    lab = world(devices=4, cpu=200)
    for number in range(80):
        lab = runs(lab, f"u{number:02d}", "0.05", on=f"GPU-n1-{number % 4}", ago_s=number)
    found = who(waits(lab, "x", "1"))
    assert len(found) == 20
    assert len({int(user[1:]) % 4 for user in found}) == 1


AMOUNTS = ("0.2", "0.3", "0.5", "1")
RUNNING = st.lists(st.tuples(st.sampled_from(AMOUNTS), st.integers(0, 2), st.integers(0, 99)), max_size=7)


@settings(derandomize=True, database=None, deadline=None, max_examples=150)
@given(RUNNING, st.sampled_from((*AMOUNTS, "2")), st.integers(0, 2))
def test_the_victims_are_the_fewest_that_any_choice_could_be(
    held: list[tuple[str, int, int]], asked: str, priority: int
) -> None:
    lab = world(devices=2).node("n2")
    for number, (fgpu, own, ago_s) in enumerate(held):
        one = replace(request(f"u{number}", fgpu), priority=own)
        if placement.place(one, placement.free(lab), score=placement.best_fit) is not None:
            lab = lab.holding(one, started_ago_s=ago_s)
    lab = waits(lab, "x", asked, priority=priority)
    found = [lab.session(one.session_id) for one in decided(lab)]
    blocked = not plan(lab, Policy()).placed
    assert all(s is not None and s.request.priority < priority for s in found)
    lower = [s for s in lab.sessions[:-1] if s.request.priority < priority]
    enough = [
        number
        for number in range(1, len(lower) + 1)
        if any(starts(lab, lab.sessions[-1].request, some) for some in combinations(lower, number))
    ]
    assert len(found) == (enough[0] if blocked and enough else 0)
    if found:
        assert starts(lab, lab.sessions[-1].request, [s for s in found if s is not None])


def starts(lab: World, asked: Request, ended: list[Session] | tuple[Session, ...]) -> bool:
    rest = replace(lab, sessions=tuple(s for s in lab.sessions if s not in ended))
    return placement.place(asked, placement.free(rest), score=placement.best_fit) is not None
