"""A running session's slice changes: by what is free of its GPU, within quotas, and never by what is kept for others."""

from __future__ import annotations

from dataclasses import replace

import pytest
from simulator import World, world
from simulator.world import NOW_S, request

from fgpu_scheduler.core.model import EndCause, Quota, QuotaScope, Session, SessionState, Size
from fgpu_scheduler.core.policies import GroupPolicy, Policy
from fgpu_scheduler.core.records import HeldShares
from fgpu_scheduler.core.resizing import (
    Amount,
    NotResized,
    available_to,
    harms_pending,
    resized,
)
from fgpu_scheduler.core.usage import fgpu_seconds

HALF, LARGE = Amount(500), Amount(800)
EASY = Policy(GroupPolicy())


def mine(lab: World, amount: Amount) -> Session | NotResized:
    return resized(lab, lab.of("me"), amount)


def test_a_session_grows_by_what_is_free_of_its_own_gpu() -> None:
    lab = (
        world(devices=2, fgpu_per_gpu=1)
        .running("me", "0.5", started_ago_s=60)
        .running("x", "0.2", on="GPU-n1-0")
    )
    grown = mine(lab, LARGE)
    assert isinstance(grown, Session)
    assert grown.placement is not None
    (share,) = grown.placement.shares
    assert (share.fgpu_milli, share.memory_mib, share.compute_percent) == (800, 6528, 80)
    assert grown.request.fgpu_milli == 800
    assert grown.sizes == (Size(lab.now_s, 500, 500_000, 4096, 50),)
    assert mine(lab, Amount(900)) is NotResized.NO_ROOM
    left = available_to(lab, lab.of("me"))
    assert left is not None
    assert left.fgpu_milli == 800


def test_a_session_shrinks_whatever_is_free() -> None:
    lab = world().running("me", "0.5").running("x", "0.5")
    shrunk = mine(lab.cordoned("n1"), Amount(200))
    assert isinstance(shrunk, Session)
    assert shrunk.placement is not None
    assert shrunk.placement.shares[0].fgpu_milli == 200


def test_the_amount_that_it_has_changes_nothing() -> None:
    lab = world().running("me", "0.5")
    assert mine(lab, HALF) == lab.of("me")


@pytest.mark.parametrize(
    ("lab", "amount", "why"),
    [
        (world().pending("me", "0.5"), LARGE, NotResized.NOT_RUNNING),
        (world().running("me", "0.5", state=SessionState.TERMINATING), LARGE, NotResized.NOT_RUNNING),
        (world(devices=2).running("me", "2"), Amount(1000), NotResized.SEVERAL_GPUS),
        (world().running("me", "1"), HALF, NotResized.WHOLE_GPU),
        (world().holding(request("me", "0")), HALF, NotResized.NO_GPU),
        (world().running("me", "0.5"), Amount(2000), NotResized.IMPOSSIBLE),
        (world().running("me", "0.5"), Amount(0, 4096), NotResized.OTHER_KIND),
        (world().cordoned_gpu("GPU-n1-0").running("me", "0.5", on="GPU-n1-0"), LARGE, NotResized.CORDONED),
        (world().running("me", "0.5").cordoned("n1"), LARGE, NotResized.CORDONED),
        (world().running("me", "0.5").lost("n1"), LARGE, NotResized.CORDONED),
    ],
    ids=lambda value: value.value if isinstance(value, NotResized) else "",
)
def test_what_is_against_it_is_named(lab: World, amount: Amount, why: NotResized) -> None:
    assert mine(lab, amount) is why


def test_explicit_memory_and_compute_change_together_and_stay_of_one_kind() -> None:
    asked = request("me", "0", gpu_memory_mib=2048, compute_percent=25)
    lab = world().holding(asked, on="GPU-n1-0")
    grown = mine(lab, Amount(0, 4096, 50))
    assert isinstance(grown, Session)
    assert (grown.request.gpu_memory_mib, grown.request.compute_percent) == (4096, 50)
    assert mine(lab, Amount(0, 4096, 20)) is NotResized.BOTH_WAYS
    assert mine(lab, Amount(0, 4096)) is NotResized.OTHER_KIND
    assert mine(lab, LARGE) is NotResized.OTHER_KIND
    assert Amount.before(grown) == Amount.of(lab.of("me"))


def test_a_quota_holds_what_a_session_grows_to() -> None:
    lab = world().running("me", "0.5")
    own = Quota(QuotaScope.USER, "*", max_fgpu_milli=700, max_sessions=1)
    assert mine(replace(lab, quotas=(own,)), LARGE) is NotResized.QUOTA
    assert isinstance(mine(replace(lab, quotas=(own,)), Amount(700)), Session)


FOR_BOTH = replace(world(devices=2).running("me", "0.5").pending("a", "2"), now_s=2 * NOW_S)
"""a has waited for long for both GPUs, and it is not known when the first one is free."""
STARTS_NOW = world().running("me", "0.5").pending("a", "0.5")
PROMISED = world().running("me", "0.5").running("x", "0.3").having("x", time_limit_s=3600).pending("a", "0.5")
BEHIND = world(devices=2).running("me", "0.5").running("x", "1", on="GPU-n1-1").pending("a", "0.8")


@pytest.mark.parametrize(
    ("lab", "milli", "policy", "harms"),
    [
        pytest.param(
            FOR_BOTH, 600, Policy(GroupPolicy(longest_wait_s=60)), True, id="it takes of a kept place"
        ),
        pytest.param(FOR_BOTH, 600, EASY, False, id="nothing is kept"),
        pytest.param(FOR_BOTH.ended("a"), 600, EASY, False, id="no session waits for the kept place"),
        pytest.param(STARTS_NOW, 600, EASY, True, id="it takes from a session that starts now"),
        pytest.param(
            world(devices=2).running("me", "0.5").pending("a", "1"),
            600,
            EASY,
            False,
            id="that starts on another GPU",
        ),
        pytest.param(PROMISED, 600, EASY, True, id="it delays a promised start"),
        pytest.param(PROMISED.ended("a"), 700, EASY, False, id="no start is promised"),
        pytest.param(
            BEHIND, 600, Policy(GroupPolicy(strict=True)), True, id="it overtakes in a strict queue"
        ),
        pytest.param(BEHIND, 600, EASY, False, id="it may overtake"),
    ],
)
def test_growth_takes_nothing_from_sessions_that_wait(
    lab: World, milli: int, policy: Policy, harms: bool
) -> None:
    grown = mine(lab, Amount(milli))
    assert isinstance(grown, Session)
    assert harms_pending(lab, grown, policy) is harms


def test_each_amount_counts_for_as_long_as_it_was_held() -> None:
    lab = world().running("me", "0.5", started_ago_s=100)
    grown = mine(lab, LARGE)
    assert isinstance(grown, Session)
    now_s = lab.now_s
    assert fgpu_seconds(grown, now_s) == 100 * 500
    assert fgpu_seconds(grown, now_s + 10) == 100 * 500 + 10 * 800
    ended = replace(grown, state=SessionState.TERMINATED, ended_at_s=now_s + 20, end_cause=EndCause.USER)
    assert fgpu_seconds(ended, now_s + 999) == 100 * 500 + 20 * 800
    whose = grown.id, "me", "default", (), "image", now_s - 100
    held = HeldShares(*whose, now_s - 100, now_s - 100, None, 800_000, 800, grown.sizes)
    assert list(held.held(now_s + 20)) == [
        (now_s - 100, now_s, 500, 500_000),
        (now_s, now_s + 20, 800, 800_000),
    ]


def test_a_clock_that_was_set_back_makes_no_amount_count_for_less_than_nothing() -> None:
    lab = world().running("me", "0.5", started_ago_s=100)
    grown = mine(replace(lab, now_s=lab.now_s - 500), LARGE)
    assert isinstance(grown, Session)
    assert fgpu_seconds(grown, lab.now_s) == 100 * 800
