"""The clock is set, by hours, forwards and back: no session ends by it, deadlines and forecasts stay sane."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence

import pytest

from fgpu_scheduler import (
    Caps,
    Device,
    EndCause,
    Forecast,
    Node,
    Observed,
    Policy,
    Request,
    Session,
    SessionState,
)
from fgpu_scheduler.service import Deadlines, Scheduler, SessionEnded
from fgpu_scheduler.store import Store

HOUR_S = 3600
BEGAN_S = 1_800_000_000
QUICK = Deadlines(
    queue_timeout_s=24 * HOUR_S, resume_grace_s=1, abandoned_after_s=900, reconcile_every_s=0.02
)
NODE = Node(
    id="a",
    resource_group="default",
    cpu_milli=8000,
    memory_mib=16384,
    devices=(Device(uuid="GPU-a", node_id="a", index=0, model="sim", memory_mib=8192, capacity_milli=2000),),
)


class SetClock:
    """A clock that the test sets."""

    def __init__(self) -> None:
        self.at_s = BEGAN_S

    def now_s(self) -> int:
        return self.at_s


class Standing:
    """A launcher whose containers stand until they are removed."""

    def __init__(self) -> None:
        self.things: list[Observed] = []
        self.looked = asyncio.Condition()

    def watch(self, changed: Callable[[], None]) -> None:
        return None

    async def observe(self) -> tuple[Sequence[Observed], Sequence[str]]:
        async with self.looked:
            self.looked.notify_all()
        return tuple(self.things), ("a",)

    async def remove(self, observed: Observed) -> bool:
        self.things = [o for o in self.things if o.handle != observed.handle]
        return True


class Lab:
    """A real scheduler with its store, and the spawner's part played by the test."""

    def __init__(self, store: Store, deadlines: Deadlines = QUICK) -> None:
        self.clock, self.launcher = SetClock(), Standing()
        self.store = store
        self.deadlines = deadlines
        self.scheduler = self._made()
        self.waiting: dict[int, asyncio.Task[Session]] = {}

    def _made(self) -> Scheduler:
        return Scheduler(
            self.store,
            policy=Policy(),
            caps=Caps(fgpu_step_milli=100, max_count=5, max_pending_per_user=9),
            launcher=self.launcher,
            deadlines=self.deadlines,
            clock=self.clock,
        )

    async def ask(self, user: str) -> int:
        """Ask for all of the GPU."""
        asked = Request(user, "", "python", "default", 2000, 100, 256)
        (session,) = await self.scheduler.submit([asked])
        self.waiting[session.id] = asyncio.ensure_future(self.scheduler.placed(session.id))
        return session.id

    async def run(self, session_id: int) -> None:
        """Launch a session as soon as it is placed."""
        await asyncio.wait_for(self.waiting[session_id], 5)
        session = await self.scheduler.prepare(session_id)
        self.launcher.things.append(Observed("a", session_id, session.attempt, f"c{session_id}", True))
        await self.scheduler.running(session_id, session.attempt, "{}")

    async def end(self, session_id: int) -> None:
        """End a running session."""
        await self.scheduler.end(session_id, EndCause.USER)
        self.launcher.things = [o for o in self.launcher.things if o.session_id != session_id]
        await self.scheduler.gone(session_id)

    async def rounds(self, count: int = 4) -> None:
        """Let the scheduler look at everything a few times."""
        async with asyncio.timeout(10):
            for _ in range(count):
                async with self.launcher.looked:
                    await self.launcher.looked.wait()

    async def state(self, session_id: int) -> SessionState:
        return (await self.scheduler.session(session_id)).state

    async def forecast(self, session_id: int) -> Forecast:
        return (await self.scheduler.forecasts())[session_id]

    async def restart(self) -> None:
        """Let another scheduler take over, as a restarted Hub does."""
        await self.scheduler.stop()
        self.scheduler = self._made()
        await self.scheduler.start([NODE])


@pytest.fixture
async def lab(caplog: pytest.LogCaptureFixture) -> AsyncIterator[Lab]:
    """A lab of one GPU, whose clock can be set."""
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
async def test_no_session_ends_by_a_step_of_the_clock(lab: Lab, step_s: int) -> None:
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
async def test_forecasts_after_a_step_are_no_further_off_than_a_session_is_long(
    lab: Lab, step_s: int
) -> None:
    for n in range(5):  # So many have to have ended for a typical length.
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


async def test_a_request_waits_its_time_whatever_the_clock_says(lab: Lab) -> None:
    lab.deadlines = Deadlines(queue_timeout_s=1, resume_grace_s=1, reconcile_every_s=0.02)
    await lab.restart()
    runs = await lab.ask("alice")
    await lab.run(runs)
    lab.clock.at_s -= 30 * HOUR_S
    waits = await lab.ask("bob")
    lab.clock.at_s -= 30 * HOUR_S
    with pytest.raises(SessionEnded, match=r"within the queue's limit of 1 seconds"):
        await asyncio.wait_for(lab.waiting[waits], 10)
    assert await lab.state(runs) is SessionState.RUNNING


async def test_a_clock_that_was_set_back_while_there_was_no_hub_ends_nothing(lab: Lab) -> None:
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
