"""When parked sessions that want their shares back are expected to get them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from simulator import World, world
from simulator.world import NOW_S, lasting
from test_returning import GPU, parked

from fgpu_scheduler.core.expected_starts import BASIS_LIMITS, BASIS_QUOTA, BASIS_TYPICAL, BASIS_UNKNOWN
from fgpu_scheduler.core.forecast import Forecast, outlook
from fgpu_scheduler.core.model import EndCause, Quota, QuotaScope
from fgpu_scheduler.core.policies import Policy


def told(lab: World, length_s: int | None = None) -> dict[str, Forecast]:
    """Return the forecast of each session that wants its shares back, by user; others run for ``length_s``."""
    found = outlook(lab, Policy(), lambda group: lasting(length_s)).wanted
    return {s.request.user: found[s.id] for s in lab.sessions if s.id in found}


def away(*wants: tuple[str, int]) -> World:
    """Return a GPU that "holds" uses, and these users who have wanted it back for some seconds."""
    lab = world()
    for user, wanted_ago_s in wants:
        lab = parked(lab.running(user, "1", on=GPU), user, wanted_ago_s)
    return lab.running("holds", "1", on=GPU, started_ago_s=100)


def test_a_free_gpu_is_given_back_now() -> None:
    lab = parked(world().running("me", "1"), "me", 5)
    found = told(lab)["me"]
    assert (found.position, found.expected_start_at_s, found.text) == (
        0,
        NOW_S,
        "its GPU is free, and it comes back now",
    )


@pytest.mark.parametrize(
    ("limit_s", "length_s", "at_s", "basis"),
    [(600, None, 500, BASIS_LIMITS), (None, 400, 300, BASIS_TYPICAL), (None, None, None, BASIS_UNKNOWN)],
)
def test_the_ends_on_its_gpu_say_when_a_session_gets_it_back(
    limit_s: int | None, length_s: int | None, at_s: int | None, basis: str
) -> None:
    lab = away(("me", 5))
    found = told(lab.having("holds", time_limit_s=limit_s), length_s)["me"]
    assert found.expected_start_at_s == (None if at_s is None else NOW_S + at_s)
    assert (found.position, found.basis) == (1, basis)


def test_the_second_one_has_position_two_and_comes_after_the_first() -> None:
    lab = away(("second", 5), ("first", 9))
    lab = lab.having("holds", ends_at_s=NOW_S + 50, ends_cause=EndCause.TIME_LIMIT)
    found = told(lab)
    assert (found["first"].position, found["first"].expected_start_at_s) == (1, NOW_S + 50)
    assert (found["second"].position, found["second"].expected_start_at_s) == (2, None)


def test_over_its_quota_a_session_learns_which_quota_it_is() -> None:
    lab = replace(away(("me", 5)), quotas=(Quota(QuotaScope.USER, "me", max_fgpu_milli=500),))
    found = told(lab)["me"]
    assert found.basis == BASIS_QUOTA
    assert found.text == "the quota of user 'me' is used up until a session ends"


def test_sessions_that_wait_in_the_queue_are_not_among_them() -> None:
    lab = away(("me", 5)).pending("new", "1")
    found = outlook(lab, Policy(), lambda group: lasting(None))
    assert list(found.wanted) == [lab.of("me").id]
    assert list(found.forecasts) == [lab.of("new").id]
