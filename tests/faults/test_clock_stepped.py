"""The clock is set, by hours, forwards and back: no session ends by it, deadlines and forecasts stay sane."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator

import pytest

from fgpu_scheduler import Deadlines, EndCause, SessionEnded, SessionState, Store
from fgpu_scheduler.core.reclaim import End, Warn
from lab import HOUR_S, NODE, Lab


@pytest.fixture
async def lab(caplog: pytest.LogCaptureFixture) -> AsyncIterator[Lab]:
    """A lab of one GPU, with a clock that tests set."""
    caplog.set_level(logging.WARNING)
    store = Store("sqlite://")
    store.open()
    made = Lab(store)
    await made.scheduler.start([NODE])
    yield made
    await made.scheduler.stop()
    store.close()


STEPS = [30 * HOUR_S, -30 * HOUR_S, 10 * 365 * 24 * HOUR_S]


@pytest.mark.parametrize("step_s", STEPS)
async def test_clock_step_ends_no_session(lab: Lab, step_s: int) -> None:
    runs = await lab.ask("alice")
    await lab.run(runs)
    waits = await lab.ask("bob")
    await lab.rounds()
    lab.clock.at_s += step_s
    await lab.rounds()
    assert (await lab.state(runs), await lab.state(waits)) == (SessionState.RUNNING, SessionState.PENDING)
    later = await lab.ask("carol")
    await lab.end(runs)
    await lab.run(waits)
    assert await lab.state(later) is SessionState.PENDING, "the order is of ids, and not of instants"


@pytest.mark.parametrize("step_s", STEPS)
async def test_forecast_error_after_a_clock_step_is_bounded(lab: Lab, step_s: int) -> None:
    for n in range(5):  # A typical length needs this number of ended sessions.
        short = await lab.ask(f"early{n}")
        await lab.run(short)
        lab.clock.at_s += 600
        await lab.end(short)
    runs = await lab.ask("alice")
    await lab.run(runs)
    waits = await lab.ask("bob")
    at = (await lab.forecast(waits)).expected_start_at_s
    assert at == lab.clock.at_s + 600
    lab.clock.at_s += step_s
    found = await lab.forecast(waits)
    assert found.position == 1
    assert found.expected_start_at_s is not None
    assert lab.clock.at_s < found.expected_start_at_s <= lab.clock.at_s + 600
    # And what ends now, with a length that no session had, changes the typical one neither.
    await lab.end(runs)
    await lab.run(waits)
    another = await lab.ask("carol")
    expected = (await lab.forecast(another)).expected_start_at_s
    assert expected == lab.clock.at_s + 600


async def test_wait_of_a_request_ignores_clock_steps(lab: Lab) -> None:
    runs = await lab.ask("alice")
    await lab.run(runs)
    # From here on it is real time, and alice's request must not wait longer.
    lab.deadlines = Deadlines(queue_timeout_s=4, resume_grace_s=1, reconcile_every_s=0.02)
    await lab.restart()
    lab.clock.at_s -= 30 * HOUR_S
    waits = await lab.ask("bob")
    lab.clock.at_s -= 30 * HOUR_S
    with pytest.raises(SessionEnded, match=r"within the queue's limit of 4 s"):
        await asyncio.wait_for(lab.waiting[waits], 60)
    assert await lab.state(runs) is SessionState.RUNNING


async def test_clock_set_back_without_a_hub_ends_nothing(lab: Lab) -> None:
    runs = await lab.ask("alice")
    await lab.run(runs)
    waits = await lab.ask("bob")
    lab.clock.at_s -= 30 * HOUR_S
    await lab.restart()
    await lab.rounds()
    assert (await lab.state(runs), await lab.state(waits)) == (SessionState.RUNNING, SessionState.PENDING)


async def test_what_waited_before_a_restart_counts(lab: Lab) -> None:
    runs = await lab.ask("alice")
    await lab.run(runs)
    waits = await lab.ask("bob")
    lab.clock.at_s += 25 * HOUR_S
    await lab.restart()
    await lab.rounds()
    ended = await lab.scheduler.session(waits)
    assert (ended.state, ended.end_cause) == (SessionState.CANCELLED, EndCause.QUEUE_TIMEOUT)
    assert await lab.state(runs) is SessionState.RUNNING


async def test_requeued_session_waits_since_its_requeue_after_a_restart(lab: Lab) -> None:
    runs = await lab.ask("alice")
    await lab.run(runs)
    lab.clock.at_s += 8 * 24 * HOUR_S
    now_s, store = lab.clock.at_s, lab.store
    store.reclaim([Warn(runs, EndCause.PREEMPTED, now_s)], store.version(), now_s=now_s)
    ends = End(runs, EndCause.PREEMPTED, "why", requeue=True)
    _, again = store.reclaim([ends], store.version(), now_s=now_s)
    await lab.restart()
    await lab.rounds()
    assert await lab.state(again.id) is SessionState.PENDING
    lab.clock.at_s += 25 * HOUR_S
    await lab.restart()
    await lab.rounds()
    assert await lab.state(again.id) is SessionState.CANCELLED
