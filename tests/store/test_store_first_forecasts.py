"""Stored forecasts are compared with the starts, and correct the next forecasts."""

from __future__ import annotations

from dataclasses import replace

from store_worlds import S, ask, end, node, schedule

from fgpu_scheduler.core.forecast import Forecast
from fgpu_scheduler.core.forecast_accuracy import (
    LEAST_OUTCOMES,
    LEAST_WAIT_S,
    Calibration,
    ForecastOutcome,
    StartRange,
)
from fgpu_scheduler.core.model import EndCause, WaitReason
from fgpu_scheduler.store.history import FirstForecasts
from fgpu_scheduler.store.retention import Retention
from fgpu_scheduler.store.store import Store

PLANNED = StartRange(100, 200, 300)


def told(session_id: int, planned: StartRange = PLANNED) -> Forecast:
    range_s = planned.early_at_s, planned.middle_at_s, planned.late_at_s
    early_s, middle_s, late_s = range_s
    return Forecast(
        session_id, 1, WaitReason.RESOURCES, "", middle_s, "", None, None, early_s, late_s, planned
    )


def waiting(store: Store, user: str) -> int:
    return store.submit([ask(user)], now_s=10)[0].id


def test_first_forecast_is_compared_with_the_start(store: Store) -> None:
    store.set_nodes([node()], now_s=0)
    forecasts = FirstForecasts(store)
    session_id = waiting(store, "alice")
    forecasts.record([told(session_id)], now_s=10)
    forecasts.record([told(session_id, StartRange(900, 901, 902))], now_s=20)
    assert forecasts.newest() == ()
    schedule(store, now_s=250)
    assert forecasts.newest() == (ForecastOutcome(10, PLANNED, PLANNED, 250),)


def test_cancelled_session_counts_as_not_started(store: Store) -> None:
    forecasts = FirstForecasts(store)
    store.set_nodes([node()], now_s=0)
    session_id = waiting(store, "alice")
    forecasts.record([told(session_id)], now_s=10)
    store.move(session_id, S.CANCELLED, now_s=400, cause=EndCause.USER)
    assert forecasts.newest() == (ForecastOutcome(10, PLANNED, PLANNED, 400, started=False),)


def test_unknown_start_is_not_stored_and_changes_no_version(store: Store) -> None:
    store.set_nodes([node()], now_s=0)
    session_id = waiting(store, "alice")
    version = store.version()
    FirstForecasts(store).record([replace(told(session_id), expected_start_at_s=None)], now_s=10)
    FirstForecasts(store).record([told(session_id)], now_s=10)
    assert store.version() == version


def test_late_starts_move_the_next_forecasts_of_their_group(store: Store) -> None:
    store.set_nodes([node()], now_s=0)
    for number in range(LEAST_OUTCOMES):
        session_id = waiting(store, f"user{number}")
        FirstForecasts(store).record([told(session_id)], now_s=10)
        schedule(store, now_s=400)
        store.move(session_id, S.PREPARING, now_s=400)
        end(store, session_id, now_s=401)
    part = (400 - 200) / (200 - 10 + LEAST_WAIT_S)
    assert store.experience("lab").stretch == Calibration(part, part, part)
    assert store.experience("other").stretch is None


def test_stored_forecast_is_deleted_with_its_session(store: Store) -> None:
    store.set_nodes([node()], now_s=0)
    session_id = waiting(store, "alice")
    FirstForecasts(store).record([told(session_id)], now_s=10)
    store.move(session_id, S.CANCELLED, now_s=400, cause=EndCause.USER)
    waiting(store, "bob")
    assert Retention(store).delete_old_sessions(1000, now_s=2000) == 1
    assert FirstForecasts(store).newest() == ()
