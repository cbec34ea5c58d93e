"""A time limit may be extended if no promised start becomes later."""

from __future__ import annotations

from dataclasses import replace

import pytest
from simulator import World, world

from fgpu_scheduler.core.extending import Extension, NotExtended, delays_promised_start, not_extended
from fgpu_scheduler.core.model import EndCause, Session, SessionState
from fgpu_scheduler.core.planner import plan
from fgpu_scheduler.core.policies import GroupPolicy, Policy
from fgpu_scheduler.core.reclaim import AllRules, Rules, extended, reclaims

HOUR_S = 3600
EASY = Policy(GroupPolicy())
TWICE = Extension(by_s=HOUR_S, times=2, longest_s=4 * HOUR_S)


def half_full() -> World:
    """Two GPUs: x has one for an hour, y one for two; a wants both."""
    lab = world(devices=2).running("x", "1").running("y", "1")
    return lab.having("x", time_limit_s=HOUR_S).having("y", time_limit_s=2 * HOUR_S)


def mine(**changes: object) -> Session:
    return replace(half_full().of("x"), **changes)  # type: ignore[arg-type]


def test_a_running_session_with_a_limit_may_be_extended() -> None:
    assert not_extended(mine(), TWICE) is None
    longer = extended(mine(), HOUR_S)
    assert (longer.time_limit_s, longer.request.time_limit_s) == (2 * HOUR_S, HOUR_S)


@pytest.mark.parametrize(
    ("session", "allowed", "why"),
    [
        (mine(), Extension(), NotExtended.OFF),
        (mine(state=SessionState.TERMINATING), TWICE, NotExtended.NOT_RUNNING),
        (mine(request=replace(mine().request, time_limit_s=None)), TWICE, NotExtended.NO_LIMIT),
        (mine(ends_at_s=9, ends_cause=EndCause.PREEMPTED), TWICE, NotExtended.PREEMPTED),
        (mine(extended_s=2 * HOUR_S), TWICE, NotExtended.USED_UP),
        (mine(), replace(TWICE, longest_s=2 * HOUR_S - 1), NotExtended.LONGEST),
    ],
)
def test_what_is_against_it_is_named(session: Session, allowed: Extension, why: NotExtended) -> None:
    assert not_extended(session, allowed) is why


def test_nobody_is_made_to_wait_beyond_what_was_promised() -> None:
    lab = half_full().pending("a", "2")
    # y ends last: a was promised the instant after that.
    assert delays_promised_start(lab, lab.of("y"), HOUR_S, EASY)
    assert delays_promised_start(lab, lab.of("x"), HOUR_S + 1, EASY)
    assert not delays_promised_start(lab, lab.of("x"), HOUR_S, EASY)


def test_who_starts_beside_a_kept_place_may_not_outlast_its_start() -> None:
    lab = half_full().having("y", time_limit_s=3 * HOUR_S).pending("a", "1")
    # a gets the GPU of x, which is free first.
    assert delays_promised_start(lab, lab.of("x"), 60, EASY)
    assert not delays_promised_start(lab, lab.of("y"), 60, EASY)


@pytest.mark.parametrize(
    "lab",
    [
        half_full(),
        world(devices=2).running("x", "1").running("y", "1").pending("a", "2"),
        half_full()
        .node("n2", group="other")
        .pending("a", "1", group="other")
        .pending("b", "1", group="other"),
    ],
    ids=["nobody waits", "no end is known", "only in another resource group"],
)
def test_to_whom_nothing_is_promised_nothing_is_delayed(lab: World) -> None:
    assert not delays_promised_start(lab, lab.of("y"), HOUR_S, EASY)


def test_a_warned_session_gets_no_more_than_it_was_extended_by() -> None:
    lab = half_full()
    end_s = (lab.of("x").started_at_s or 0) + HOUR_S
    longer = extended(mine(ends_at_s=end_s, ends_cause=EndCause.TIME_LIMIT), 60)
    assert (longer.ends_at_s, longer.ends_cause) == (end_s + 60, EndCause.TIME_LIMIT)
    then = replace(lab, sessions=(longer,), now_s=end_s - 10)
    # It is not warned once more, with a grace of its own.
    assert (
        reclaims(then, plan(then, Policy()), AllRules(Rules(grace_s=600)), warned_for_s={longer.id: 600})
        == ()
    )
