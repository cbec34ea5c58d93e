"""The database commits a step, and its answer is lost: the step is begun again, and has happened once."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from fgpu_scheduler import (
    EndCause,
    Observed,
    Request,
    Session,
    SessionEnded,
    SessionState,
    Store,
    StoreUnavailable,
)
from lab import NODE, Lab

ASKED = Request("alice", "", "python", "default", 500, 100, 256)


class Forgetful(Store):
    """A store that loses the next answers to some calls, after or before the commit."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.lost_after: Counter[str] = Counter()
        self.lost_before: Counter[str] = Counter()

    def _lossy(self, name: str, *args: Any, **kwargs: Any) -> Any:
        if self.lost_before[name] > 0:
            self.lost_before[name] -= 1
            raise StoreUnavailable("connection refused")
        answer = getattr(super(), name)(*args, **kwargs)
        if self.lost_after[name] > 0:
            self.lost_after[name] -= 1
            raise StoreUnavailable("server closed the connection unexpectedly")
        return answer

    def submit(self, *args: Any, **kwargs: Any) -> tuple[Session, ...]:
        return tuple(self._lossy("submit", *args, **kwargs))

    def move(self, *args: Any, **kwargs: Any) -> Session:
        moved: Session = self._lossy("move", *args, **kwargs)
        return moved

    def set_held(self, *args: Any, **kwargs: Any) -> Session:
        held: Session = self._lossy("set_held", *args, **kwargs)
        return held

    def states(self, session_id: int) -> list[str]:
        """Return the states that a session came into."""
        return [str(e.to_state) for e in self.events(limit=1000) if e.session_id == session_id and e.to_state]


@pytest.fixture
def store(tmp_path: Path) -> Forgetful:
    """A store that can lose its answers."""
    made = Forgetful(f"sqlite:///{tmp_path / 'fgpu.sqlite'}")
    made.open()
    return made


@pytest.fixture
async def lab(store: Forgetful) -> AsyncIterator[Lab]:
    """A lab of one GPU on that store."""
    made = Lab(store)
    await made.scheduler.start([NODE])
    yield made
    await made.scheduler.stop()
    store.close()


@pytest.mark.parametrize("when", ["after", "before"])
async def test_a_submission_of_several_is_queued_once(lab: Lab, store: Forgetful, when: str) -> None:
    (store.lost_after if when == "after" else store.lost_before)["submit"] = 1
    asked = [Request("alice", name, "python", "default", 500, 100, 256) for name in ("", "gpu-2")]
    sessions = await asyncio.wait_for(lab.scheduler.submit(asked), 60)
    assert [s.request for s in sessions] == asked
    assert [s.id for s in await lab.scheduler.live()] == [s.id for s in sessions]


async def test_one_of_several_may_end_before_the_lost_answer_is_asked_for_again(
    lab: Lab, store: Forgetful, monkeypatch: pytest.MonkeyPatch
) -> None:
    latest = store.latest

    def ended_by_then(*, user: str, limit: int) -> tuple[Session, ...]:
        waiting = next(s for s in store.snapshot(0).sessions if s.request.server_name == "gpu-2")
        if waiting.state is not SessionState.CANCELLED:
            Store.move(
                store, waiting.id, SessionState.CANCELLED, now_s=waiting.submitted_at_s, cause=EndCause.USER
            )
        return latest(user=user, limit=limit)

    monkeypatch.setattr(store, "latest", ended_by_then)
    store.lost_after["submit"] = 1
    asked = [Request("alice", name, "python", "default", 500, 100, 256) for name in ("", "gpu-2")]
    sessions = await asyncio.wait_for(lab.scheduler.submit(asked), 60)
    assert [s.request for s in sessions] == asked
    assert [s.state for s in sessions].count(SessionState.CANCELLED) == 1


async def test_a_submission_is_found_again_though_the_clock_was_set_back(
    lab: Lab, store: Forgetful, monkeypatch: pytest.MonkeyPatch
) -> None:
    instants = iter((100_000, 90_000, 90_001))
    monkeypatch.setattr(lab.scheduler.clock, "now_s", lambda: next(instants, 90_002))
    # The first try is not committed; the second is, with an instant that is before the first.
    store.lost_before["submit"] = store.lost_after["submit"] = 1
    (session,) = await asyncio.wait_for(lab.scheduler.submit([ASKED]), 60)
    assert [s.id for s in await lab.scheduler.live()] == [session.id]
    assert store.lost_after.total() + store.lost_before.total() == 0


async def test_equal_earlier_request_is_not_taken_for_the_lost_one(lab: Lab, store: Forgetful) -> None:
    (ended,) = await lab.scheduler.submit([ASKED])
    await lab.scheduler.end(ended.id, EndCause.USER)
    store.lost_before["submit"] = 1
    (session,) = await asyncio.wait_for(lab.scheduler.submit([ASKED]), 60)
    assert session.id > ended.id


@pytest.mark.parametrize("when", ["after", "before"])
async def test_every_step_of_a_launch_happens_once(lab: Lab, store: Forgetful, when: str) -> None:
    lost = store.lost_after if when == "after" else store.lost_before
    lost["submit"] = 1
    session_id = await lab.ask("alice")
    await asyncio.wait_for(lab.waiting[session_id], 60)
    lost["move"] = 1
    session = await asyncio.wait_for(lab.scheduler.prepare(session_id), 60)
    lost["move"] = 1
    pulling = await asyncio.wait_for(lab.scheduler.pulling(session_id, session.attempt), 60)
    assert pulling.state is SessionState.PULLING
    lab.launcher.things.append(Observed("a", session_id, session.attempt, "c1", True))
    lost["move"] = 1
    running = await asyncio.wait_for(lab.scheduler.running(session_id, session.attempt, "{}"), 60)
    assert (running.state, running.launched) == (SessionState.RUNNING, "{}")
    states = store.states(session_id)
    assert states.count("RUNNING") == states.count("PULLING") == states.count("SCHEDULED") == 1
    assert lost.total() == 0, "every answer that was to be lost was lost"


@pytest.mark.parametrize("when", ["after", "before"])
async def test_a_share_is_freed_once(lab: Lab, store: Forgetful, when: str) -> None:
    session_id = await lab.ask("alice")
    await lab.run(session_id)
    lost = store.lost_after if when == "after" else store.lost_before
    for step in (
        lambda: lab.scheduler.end(session_id, EndCause.USER),
        lambda: lab.scheduler.gone(session_id),
    ):
        lost["move"] = 1
        with pytest.raises(StoreUnavailable):
            await step()
        await step()
        lab.launcher.things = []
    states = store.states(session_id)
    assert states.count("TERMINATING") == states.count("TERMINATED") == 1


async def test_waiting_pages_show_that_the_database_is_away_and_back(lab: Lab, store: Forgetful) -> None:
    told: list[bool] = []

    async def listen() -> None:
        async for _ in lab.scheduler.changes(at_least_every_s=60):
            told.append(lab.scheduler.database_is_away)

    listening = asyncio.create_task(listen())
    await asyncio.sleep(0)
    store.lost_before["submit"] = 2
    session_id = await asyncio.wait_for(lab.ask("alice"), 60)
    await lab.run(session_id)
    assert told[:2] == [False, True]
    assert told[-1] is False
    assert told.count(True) == 1, "once for each turn"
    listening.cancel()


async def test_a_session_that_has_ended_before_it_was_known_to_run_says_how(
    lab: Lab, store: Forgetful
) -> None:
    session_id = await lab.ask("alice")
    await asyncio.wait_for(lab.waiting[session_id], 60)
    session = await lab.scheduler.prepare(session_id)
    store.lost_after["move"] = 1  # There is no container: the next look finds that it is gone.
    with pytest.raises(SessionEnded, match="removed outside JupyterHub"):
        await asyncio.wait_for(lab.scheduler.running(session_id, session.attempt, "{}"), 60)
