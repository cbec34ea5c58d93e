"""What sessions have used, and how it is forgotten."""

from __future__ import annotations

from dataclasses import replace

import pytest
from simulator import world

from fgpu_scheduler.core.model import SessionIndex, SessionState, Size
from fgpu_scheduler.core.usage import decayed, fgpu_seconds, taken_by_account, used_by_account


def test_a_session_uses_its_shares_from_its_placement_to_its_end() -> None:
    lab = world(devices=3).running("a", "0.5", started_ago_s=100).running("b", "2")
    running = lab.of("a")
    assert fgpu_seconds(running, lab.now_s) == 500 * 100
    ended = replace(running, state=SessionState.TERMINATED, ended_at_s=lab.now_s - 40)
    assert fgpu_seconds(ended, lab.now_s + 9999) == 500 * 60
    assert fgpu_seconds(lab.of("b"), lab.now_s + 3) == 2000 * 3


def test_waiting_session_has_no_usage_and_usage_is_never_negative() -> None:
    lab = world().pending("a", "1").running("b", "1")
    assert fgpu_seconds(lab.of("a"), lab.now_s + 100) == 0
    assert fgpu_seconds(lab.of("b"), lab.now_s - 100) == 0


@pytest.mark.parametrize(("age_s", "left"), [(0, 1000), (50, 500), (100, 250), (-50, 1000)])
def test_half_is_left_after_each_half_life(age_s: int, left: float) -> None:
    assert decayed(1000.0, age_s=age_s, half_life_s=50) == pytest.approx(left)


def test_usage_by_account_follows_every_change_of_a_session() -> None:
    lab = (
        world(devices=4)
        .running("a", "0.5", started_ago_s=100)
        .running("a", "2", started_ago_s=10)
        .running("b", "1")
    )
    assert used_by_account(lab, "default") == {"": {"a": 500 * 100 + 2000 * 10, "b": 0}}
    first, second, other = lab.sessions
    parked = replace(
        first,
        state=SessionState.PARKED,
        parked_at_s=lab.now_s - 40,
        sizes=(Size(lab.now_s - 40, 500, 500_000, 0, 50),),
    )
    then = lab.changed([(first, parked), (other, None)])
    assert used_by_account(then, "default") == {"": {"a": 500 * 60 + 2000 * 10}}
    assert taken_by_account(then, "default") == {"": {"a": 2000}}
    only_parked = then.changed([(second, None)])
    assert taken_by_account(only_parked, "default") == {}, "it would be a sibling that holds nothing"
    assert then.index == SessionIndex.of(then.sessions)
    assert used_by_account(then.changed([(parked, None), (second, None)]), "default") == {}
