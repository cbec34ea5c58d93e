"""Whose GPUs rest, as the driver says: what it does not tell is not taken for resting."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from fgpu_scheduler import Placement, Request, Session, SessionState, Share
from fgpuspawner.hub.gpu_use import idle_now
from fgpuspawner.isolation.nvml_reader import NvmlUnknown


def session(number: int = 1, *uuids: str) -> Session:
    shares = tuple(Share(uuid, 500, 2048, 25) for uuid in uuids or ("GPU-a",))
    asked = Request("alice", str(number), "python", "default", 500, 1000, 1024)
    return Session(number, asked, SessionState.RUNNING, 0, placement=Placement("n", shares), started_at_s=100)


UNKNOWN = NvmlUnknown("the driver is away")


@pytest.mark.parametrize(
    ("used", "owners", "idle"),
    [
        # Nobody there, or only programs that rest.
        ({"GPU-a": {}}, {}, True),
        ({"GPU-a": {7: 0}}, {7: 1}, True),
        ({"GPU-a": {7: 1}}, {7: 1}, False),
        ({"GPU-a": {7: 0, 8: 90}}, {7: 1, 8: 1}, False),
        # What is not told of one's own program is not idle; what others do is theirs.
        ({"GPU-a": {7: None}}, {7: 1}, False),
        ({"GPU-a": {7: 90, 8: None}}, {7: 2}, True),
        ({"GPU-a": UNKNOWN}, {}, False),
        ({}, {}, False),
    ],
)
def test_a_gpu_is_idle_when_the_driver_says_of_each_of_ones_programs_that_it_rests(
    used: Mapping[str, Any], owners: dict[int, int], idle: bool
) -> None:
    assert (1 in idle_now([session()], used, owners)) is idle


def test_all_gpus_of_a_session_have_to_rest_and_one_that_nobody_can_use_does() -> None:
    both = session(1, "GPU-a", "GPU-b")
    assert idle_now([both], {"GPU-a": {}, "GPU-b": {7: 5}}, {7: 1}) == frozenset()
    assert idle_now([both], {"GPU-a": {}}, {}) == frozenset()
    assert idle_now([both], {"GPU-a": {}}, {}, unusable=["GPU-b"]) == {1}
