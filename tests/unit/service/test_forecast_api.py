"""The API's forecasts in words and numbers, and for a request in place of a session of one's own."""

from __future__ import annotations

from dataclasses import replace

import pytest
from worlds import ALICE, Build

from fgpu_scheduler import (
    BlockingSessions,
    Refusal,
    Request,
    RequestForecast,
    Session,
    SessionState,
    Snapshot,
    WaitReason,
)
from fgpuspawner.service.api.forecast import forecast_object, refused_object, without_session
from fgpuspawner.service.model import World
from fgpuspawner.service.problems import Problem


def session(session_id: int, user: str) -> Session:
    asked = Request(user, "", "python", "default", 500, 1000, 512)
    return Session(session_id, asked, SessionState.PENDING, 0)


WORLD = World(Snapshot(0, 1, (), (session(1, "alice"), session(2, "bob"))))


def test_forecast_offers_the_soonest_amount_and_names_who_is_ahead() -> None:
    world = Build().running("bob", 2000).world()
    found = RequestForecast(
        0,
        1,
        900,
        "time limits",
        "why",
        None,
        reason=WaitReason.RESOURCES,
        ahead=BlockingSessions(1, 2000, (1,)),
        soonest_milli=300,
        soonest_at_s=700,
    )
    told = forecast_object(found, world, ALICE, count=1, simulated=False)
    assert (told["wait_reason"], told["soonest"], told["soonest_at_s"]) == ("RESOURCES", "0.3", 700)
    assert told.model_dump()["waits_for"] == {
        "count": 1,
        "fgpu": "2",
        "sessions": [],
        "text": "starts when 1 session ends (2 fGPU)",
    }


@pytest.mark.parametrize(
    ("startable", "text"),
    [
        (1, "opens now; a GPU when a cell needs it: one is free now"),
        (0, "opens now; a GPU when a cell needs it: none is free now: the 1st waits for alice"),
    ],
)
def test_session_on_demand_opens_now_and_says_when_it_would_get_a_gpu(startable: int, text: str) -> None:
    found = RequestForecast(startable, None, None, "", "the 1st waits for alice", None)
    told = forecast_object(found, WORLD, ALICE, count=1, simulated=False, on_demand=True)
    assert (told["starts_now"], told["text"]) == (True, text)


@pytest.mark.parametrize(
    ("count", "startable", "text"),
    [
        (1, 1, "starts now"),
        (3, 3, "all 3 start now"),
        (1, 0, "why"),
        (3, 2, "2 start now, 1 waits. Why"),
        (3, 1, "1 starts now, 2 wait. Why"),
        (3, 0, "all 3 wait: why"),
    ],
)
def test_forecast_text_is_one_sentence(count: int, startable: int, text: str) -> None:
    found = RequestForecast(startable, None if count == startable else 2, None, "basis", "why", 300)
    told = forecast_object(found, Build().world(), ALICE, count=count, simulated=False)
    assert (told["text"], told["starts_now"], told["largest_now"]) == (text, count == startable, "0.3")


def test_refused_forecast_lists_every_reason() -> None:
    reasons = [
        Refusal("fgpu", "above_cap", "fgpu: too much", "2", "2"),
        Refusal("cpu", "too_small", "cpu: none"),
    ]
    told = refused_object(reasons, count=2, simulated=True)
    assert told["text"] == "fgpu: too much; cpu: none"
    assert told.model_dump()["refusals"][1] == {
        "field": "cpu",
        "code": "too_small",
        "message": "cpu: none",
        "limit": None,
        "nearest": None,
    }


def test_instead_of_leaves_out_only_that_session() -> None:
    left = without_session(WORLD, "alice", "1")
    assert [s.id for s in left.snapshot.sessions] == [2]
    assert left.session(1) is None
    assert [s.id for s in WORLD.snapshot.sessions] == [1, 2]
    assert left == replace(WORLD, snapshot=left.snapshot)


@pytest.mark.parametrize("bad", ["2", "3", "", "-1", "x", "1.0", "٣", "9" * 40])
def test_instead_of_refuses_other_users_and_unknown_sessions_alike(bad: str) -> None:
    with pytest.raises(Problem) as told:
        without_session(WORLD, "alice", bad)
    assert (told.value.status, told.value.field) == (404, "instead_of")
    assert str(told.value) == "instead_of: you have no live session with this id"
