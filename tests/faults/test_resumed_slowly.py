"""A Hub with thousands of pending requests takes an hour to resume them after a restart; none is given up."""

from __future__ import annotations

import asyncio
import time

from fgpu_scheduler import EndCause, Request, Session, SessionState, Store
from lab import NODE, Lab

LONG_S = 1000
"""Longer than a request is held for."""


async def test_while_others_are_still_resumed_no_held_request_is_cancelled() -> None:
    store = Store("sqlite://")
    store.open()
    lab = Lab(store)
    await lab.scheduler.start([NODE])
    runs = await lab.ask("alice")
    await lab.run(runs)
    resumed, held = await lab.ask("bob"), await lab.ask("carla")
    lab.clock.at_s += LONG_S
    await lab.restart()

    async def resume_late() -> Session:
        # In one step, so that no round comes between.
        lab.scheduler._resumed_at -= LONG_S
        lab.scheduler._started -= LONG_S
        return await lab.scheduler.placed(resumed)

    waiting = asyncio.ensure_future(resume_late())
    await lab.rounds()
    assert await lab.state(held) is SessionState.PENDING

    # No resume came within the grace period, so the request is given up.
    lab.scheduler._resumed_at -= LONG_S
    await lab.rounds()
    ended = await lab.scheduler.session(held)
    assert (ended.state, ended.end_cause) == (SessionState.CANCELLED, EndCause.QUEUE_TIMEOUT)
    assert await lab.state(resumed) is SessionState.PENDING
    waiting.cancel()
    await lab.scheduler.stop()
    store.close()


async def test_resume_of_thousands_does_not_block_the_loop() -> None:
    store = Store("sqlite://")
    store.open()
    asked = [Request(f"u{n}", "", "python", "default", 2000, 100, 256) for n in range(15_000)]
    store.submit(asked, now_s=0)
    lab = Lab(store)
    await lab.scheduler.start([NODE])
    worst_s, until = 0.0, time.monotonic() + 2
    while time.monotonic() < until:
        lab.scheduler.wake()
        # CPU time of this thread: other programs may use the cores.
        began = time.thread_time()
        await asyncio.sleep(0.01)
        worst_s = max(worst_s, time.thread_time() - began)
    # Compared pairwise they took seconds, in which the Hub did not answer.
    assert worst_s < 1
    await lab.scheduler.stop()
    store.close()
