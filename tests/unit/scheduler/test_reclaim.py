"""Who is warned, spared and ended: of lifetimes and of the idle."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from simulator import World, world
from simulator.world import NOW_S

from fgpu_scheduler.core.lifecycle import UP
from fgpu_scheduler.core.model import EndCause, Quota, QuotaScope, Session, SessionState, Snapshot
from fgpu_scheduler.core.planner import Policy, plan
from fgpu_scheduler.core.reclaim import (
    AllRules,
    End,
    Reclaim,
    Rules,
    Warn,
    WarningAges,
    WithdrawWarning,
    end_message,
    reclaims,
)

IDLE, LIMIT = EndCause.IDLE, EndCause.TIME_LIMIT
LIFE = Rules(grace_s=600, max_lifetime_s=7200)
NAP = Rules(grace_s=600, idle_after_s=1800)


def runs(ago_s: int = 0, **changes: Any) -> World:
    """A session of "a" that runs since then, with these fields changed."""
    lab = world(devices=2).running("a", "1", started_ago_s=ago_s)
    limit_s = changes.pop("time_limit_s", None)
    one = lab.sessions[0]
    one = replace(one, request=replace(one.request, time_limit_s=limit_s), **changes)
    return replace(lab, sessions=(one,))


def decided(lab: Snapshot, rules: Rules, warned_for_s: int = 0) -> tuple[Reclaim, ...]:
    return reclaims(lab, plan(lab, Policy()), AllRules(rules), warned_for_s={1: warned_for_s})


def test_without_rules_or_limits_nobody_is_ended() -> None:
    assert decided(runs(10**6, idle_since_s=0), Rules()) == ()


@pytest.mark.parametrize(
    ("ago_s", "warned_at"),
    [(6539, None), (6540, 7200), (6600, 7200), (7200, 7800), (9000, 9600)],
)
def test_the_end_of_a_lifetime_is_told_ahead_and_never_with_less_than_the_grace(
    ago_s: int, warned_at: int | None
) -> None:
    lab = runs(ago_s)
    expected = () if warned_at is None else (Warn(1, LIMIT, NOW_S - ago_s + warned_at),)
    assert decided(lab, LIFE) == expected


def test_the_shortest_of_all_lifetimes_holds() -> None:
    lab = runs(3600 - 600, time_limit_s=3600)
    assert decided(lab, LIFE) == decided(lab, Rules()) == (Warn(1, LIMIT, NOW_S + 600),)
    quota = Quota(QuotaScope.USER, "a", max_lifetime_s=1800)
    assert decided(replace(lab, quotas=(quota,)), LIFE) == (Warn(1, LIMIT, NOW_S + 600),)
    young = replace(runs(1200), quotas=(quota,))
    assert decided(young, LIFE) == (Warn(1, LIMIT, NOW_S + 600),)
    assert decided(runs(1200), LIFE) == ()


def test_of_a_short_limit_the_warning_comes_at_its_half() -> None:
    assert decided(runs(1, time_limit_s=100), LIFE) == (Warn(1, LIMIT, NOW_S + 99),)
    assert decided(runs(80, time_limit_s=100), LIFE) == (Warn(1, LIMIT, NOW_S + 50),)


def test_a_resource_group_has_its_own_rules() -> None:
    lab = runs(7200)
    rules = AllRules(Rules(), {"default": LIFE})
    assert reclaims(lab, plan(lab, Policy()), rules, warned_for_s={}) == (Warn(1, LIMIT, NOW_S + 600),)
    assert reclaims(lab, plan(lab, Policy()), AllRules(LIFE, {"default": Rules()}), warned_for_s={}) == ()


@pytest.mark.parametrize("state", [s for s in SessionState if s not in UP])
def test_only_what_runs_is_ended(state: SessionState) -> None:
    lab = runs(10**5, state=state, idle_since_s=0, ends_at_s=5, ends_cause=LIMIT)
    assert decided(lab, replace(LIFE, idle_after_s=1), 10**6) == ()


PARKS = replace(NAP, park_after_s=600, parked_for_s=3600)


@pytest.mark.parametrize(
    ("state", "changes", "warned"),
    [
        (SessionState.RUNNING, {"idle_since_s": NOW_S - 10**5}, False),
        (SessionState.PARKED, {"idle_since_s": NOW_S - 10**5, "parked_at_s": NOW_S - 3599}, False),
        (SessionState.PARKED, {"parked_at_s": NOW_S - 3600}, True),
        (SessionState.PARKED, {"parked_at_s": NOW_S - 3600, "kept_until_s": NOW_S + 1}, False),
        (SessionState.PARKED, {"parked_at_s": NOW_S - 3600, "wanted_at_s": NOW_S - 9}, False),
    ],
)
def test_where_sessions_are_parked_only_a_parked_one_that_stays_away_is_ended(
    state: SessionState, changes: dict[str, int], warned: bool
) -> None:
    lab = runs(10**5, state=state, **changes)
    assert decided(lab, PARKS) == ((Warn(1, IDLE, NOW_S + 600),) if warned else ())


def test_the_time_limit_of_a_parked_session_goes_on() -> None:
    lab = runs(7200, state=SessionState.PARKED, parked_at_s=NOW_S - 60)
    assert decided(lab, LIFE) == (Warn(1, LIMIT, NOW_S + 600),)


@pytest.mark.parametrize(("idle_s", "warned"), [(None, False), (1799, False), (1800, True), (10**5, True)])
def test_who_is_idle_for_long_is_warned(idle_s: int | None, warned: bool) -> None:
    lab = runs(10**5, idle_since_s=None if idle_s is None else NOW_S - idle_s)
    assert decided(lab, NAP) == ((Warn(1, IDLE, NOW_S + 600),) if warned else ())


def test_who_asked_to_be_kept_is_warned_again_only_after_that() -> None:
    lab = runs(10**5, idle_since_s=NOW_S - 9000, kept_until_s=NOW_S + 1)
    assert decided(lab, NAP) == ()
    assert decided(replace(lab, now_s=NOW_S + 1), NAP) == (Warn(1, IDLE, NOW_S + 601),)


@pytest.mark.parametrize(
    "now", [{"idle_since_s": None}, {"idle_since_s": NOW_S - 5}, {"kept_until_s": NOW_S + 1800}]
)
def test_a_warning_is_taken_back_once_its_reason_is_gone(now: dict[str, int | None]) -> None:
    lab = runs(10**5, idle_since_s=NOW_S - 9000, ends_at_s=NOW_S + 60, ends_cause=IDLE)
    assert decided(lab, NAP) == ()
    assert decided(replace(lab, sessions=(replace(lab.sessions[0], **now),)), NAP) == (WithdrawWarning(1),)  # type: ignore[arg-type]


def warned(ends_at_s: int, cause: EndCause = IDLE) -> World:
    return runs(10**5, idle_since_s=NOW_S - 9000, ends_at_s=ends_at_s, ends_cause=cause)


def test_who_was_warned_for_the_grace_is_ended_with_the_reason() -> None:
    assert decided(warned(NOW_S), NAP, 600) == (End(1, IDLE, end_message(IDLE)),)
    assert decided(warned(NOW_S + 1), NAP, 600) == ()
    assert decided(warned(NOW_S, LIMIT), LIFE, 600) == (End(1, LIMIT, end_message(LIMIT)),)


def test_a_jump_of_the_clock_or_a_restart_shortens_no_grace() -> None:
    assert decided(warned(NOW_S - 3600), NAP, 100) == (Warn(1, IDLE, NOW_S + 500),)
    assert decided(warned(NOW_S - 3600), NAP, 0) == (Warn(1, IDLE, NOW_S + 600),)


def test_a_clock_that_is_set_back_makes_no_warning_stand_for_days() -> None:
    assert decided(warned(NOW_S + 86400), NAP, 600) == (Warn(1, IDLE, NOW_S),)
    assert decided(warned(NOW_S + 86400), NAP, 0) == (Warn(1, IDLE, NOW_S + 600),)


def test_a_lifetime_that_became_longer_is_not_ended_at_the_old_instant() -> None:
    lab = runs(7000, ends_at_s=NOW_S, ends_cause=LIMIT)
    assert decided(lab, LIFE, 600) == (Warn(1, LIMIT, NOW_S + 200),)
    assert decided(lab, replace(LIFE, max_lifetime_s=10**6), 600) == (WithdrawWarning(1),)


def test_of_two_reasons_the_earlier_end_is_told() -> None:
    both = replace(LIFE, idle_after_s=1800)
    assert decided(runs(6700, idle_since_s=0), both) == (Warn(1, LIMIT, NOW_S + 600),)
    soon = runs(6700, idle_since_s=0, ends_at_s=NOW_S + 100, ends_cause=IDLE)
    assert decided(soon, both) == ()
    kept = replace(soon.sessions[0], kept_until_s=NOW_S + 9000)
    assert decided(replace(soon, sessions=(kept,)), both) == (Warn(1, LIMIT, NOW_S + 600),)


def test_a_warning_stands_from_when_it_was_first_seen_until_it_changes() -> None:
    one = warned(NOW_S).sessions[0]
    warnings = WarningAges()
    assert warnings.warned_for_s([one], 1000.0) == {1: 0}
    assert warnings.warned_for_s([replace(one, ends_at_s=NOW_S + 5)], 1090.9) == {1: 90}
    assert warnings.warned_for_s([replace(one, ends_cause=LIMIT)], 1100.0) == {1: 0}
    assert warnings.warned_for_s([replace(one, ends_cause=None)], 1200.0) == {}
    assert warnings.warned_for_s([one], 1300.0) == {1: 0}
    assert WarningAges().warned_for_s([one], 1400.0) == {1: 0}


def test_sessions_come_in_the_order_of_their_ids() -> None:
    lab = runs(9000)
    more: tuple[Session, ...] = tuple(replace(lab.sessions[0], id=n, placement=None) for n in (1, 2, 3))
    found = decided(replace(lab, sessions=more), LIFE)
    assert [decision.session_id for decision in found] == [1, 2, 3]
