"""The API's forecasts in words and numbers."""

from __future__ import annotations

import pytest
from worlds import ALICE, Build

from fgpu_scheduler import (
    Refusal,
    RequestForecast,
    WaitReason,
)
from fgpu_scheduler.core.forecast import Ahead
from fgpuspawner.service.api.forecast import forecast_object, refused_object


def test_a_forecast_offers_what_would_start_soonest_and_says_who_is_ahead() -> None:
    world = Build().running("bob", 2000).world()
    found = RequestForecast(
        0,
        1,
        900,
        "time limits",
        "why",
        None,
        reason=WaitReason.RESOURCES,
        ahead=Ahead(1, 2000, (1,)),
        soonest_milli=300,
        soonest_at_s=700,
    )
    told = forecast_object(found, world, ALICE, count=1, simulated=False)
    assert (told["wait_reason"], told["soonest"], told["soonest_at_s"]) == ("RESOURCES", "0.3", 700)
    assert told["waits_for"] == {
        "count": 1,
        "fgpu": "2",
        "sessions": [],
        "text": "1 session that holds 2 fGPU has to end first",
    }
    refused = refused_object([], count=1, simulated=False)
    assert refused.keys() == told.keys()


@pytest.mark.parametrize(
    ("count", "startable", "text"),
    [
        (1, 1, "starts now"),
        (3, 3, "all 3 start now"),
        (1, 0, "waits: why"),
        (3, 2, "2 start now, 1 waits: after those, why"),
        (3, 1, "1 starts now, 2 wait: after those, why"),
        (3, 0, "all 3 wait: why"),
    ],
)
def test_a_forecast_is_one_sentence(count: int, startable: int, text: str) -> None:
    found = RequestForecast(startable, None if count == startable else 2, None, "basis", "why", 300)
    told = forecast_object(found, Build().world(), ALICE, count=count, simulated=False)
    assert (told["text"], told["starts_now"], told["largest_now"]) == (text, count == startable, "0.3")


def test_a_refused_request_carries_every_reason() -> None:
    reasons = [
        Refusal("fgpu", "above_cap", "fgpu: too much", "2", "2"),
        Refusal("cpu", "too_small", "cpu: none"),
    ]
    told = refused_object(reasons, count=2, simulated=True)
    assert told["text"] == "fgpu: too much; cpu: none"
    assert told["refusals"][1] == {
        "field": "cpu",
        "code": "too_small",
        "message": "cpu: none",
        "limit": None,
        "nearest": None,
    }
