"""What the waiting page is told while an image is on its way."""

from __future__ import annotations

import pytest

from fgpu_scheduler import Request, Session, SessionState, Snapshot
from fgpuspawner.images.pull_state import MIB, Phase, Progress, PullState
from fgpuspawner.service.model import World
from fgpuspawner.spawner.progress import starting_event, waiting_event

NOTHING_KNOWN = World(Snapshot(100, 1, (), ()))
HALF = PullState(Phase.FETCHING, Progress(1, 2, 100 * MIB, 200 * MIB, 12))
TEXT = "etching the image: 1 of 2 layers, 100 of 200 MiB, about 12 s left"


def session(state: SessionState) -> Session:
    return Session(7, Request("alice", "", "torch", "default", 500, 1000, 1024), state, 100)


def test_waiting_event_has_position_and_image() -> None:
    event = waiting_event(session(SessionState.PENDING), NOTHING_KNOWN, simulated=False, pull=HALF)
    assert event["message"] == "Waiting in the queue"
    assert event["fgpu"]["name"] == "torch 1", "the name that the list of sessions shows"
    assert event["fgpu"]["pull"]["text"] == f"f{TEXT}"
    assert (
        waiting_event(session(SessionState.PENDING), NOTHING_KNOWN, simulated=False)["fgpu"]["pull"] is None
    )


@pytest.mark.parametrize(("behind_s", "told"), [(0, None), (9, None), (10, 10), (75, 75)])
def test_age_of_a_forecast_is_shown_from_ten_seconds_on(behind_s: int, told: int | None) -> None:
    event = waiting_event(session(SessionState.PENDING), NOTHING_KNOWN, simulated=False, behind_s=behind_s)
    assert event["fgpu"]["behind_s"] == told


def test_starting_event_shows_the_image_first() -> None:
    event = starting_event(session(SessionState.PULLING), simulated=False, pull=HALF)
    # How far it is changes every second, and the sentence is read aloud when it changes.
    assert event["message"] == event["fgpu"]["text"] + " (0.5 fGPU)" == "Fetching the image (0.5 fGPU)"
    assert event["fgpu"]["pull"]["text"] == f"f{TEXT}"
    assert event["progress"] == 75
    assert event["fgpu"]["pull"]["bytes_done"] == 100 * MIB


@pytest.mark.parametrize("total", [None, 0])
def test_without_a_total_the_bar_stays(total: int | None) -> None:
    unknown = PullState(Phase.FETCHING, Progress(0, 2, 100 * MIB, total))
    assert starting_event(session(SessionState.PULLING), simulated=False, pull=unknown)["progress"] == 60


def test_starting_event_with_a_complete_image() -> None:
    event = starting_event(session(SessionState.PULLING), simulated=False, fetched=True)
    assert event["message"] == "The image is here. Starting your session (0.5 fGPU)"
    assert event["progress"] == 90
    preparing = starting_event(session(SessionState.PREPARING), simulated=False, fetched=True)
    assert preparing["message"] == "Starting your session (0.5 fGPU)"
