"""What sessions have used, and how it is forgotten."""

from __future__ import annotations

from dataclasses import replace

import pytest
from simulator import world

from fgpu_scheduler.core.model import SessionState
from fgpu_scheduler.core.usage import decayed, fgpu_seconds


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
