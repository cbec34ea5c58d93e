"""Races of the scheduler's loop in minimal worlds; on a virtual event loop they happen in every run."""

import asyncio
import gc
from collections.abc import Coroutine

from simulator import NOW_S, world
from simulator.virtual import VirtualLoop
from simulator.world import request

from fgpu_scheduler.core.admission import Caps
from fgpu_scheduler.core.lifecycle import ENDED
from fgpu_scheduler.core.model import EndCause, SessionState
from fgpu_scheduler.core.planner import plan
from fgpu_scheduler.core.policies import Policy
from fgpu_scheduler.ports import Seen
from fgpu_scheduler.service.scheduler import Deadlines, Scheduler
from fgpu_scheduler.store.store import Store

S = SessionState
NODES = world().nodes


class Loop(VirtualLoop):
    """A loop on which calls in threads take 10 ms."""

    def __init__(self) -> None:
        super().__init__(0.0, lambda: 0.01)

    def run_for(self, seconds: float) -> None:
        until_s = self.time() + seconds
        while (at_s := self.next_at_s()) is not None and at_s <= until_s:
            self.pass_to(at_s)
            self.step()
        self.pass_to(until_s)

    def run(self, what: Coroutine) -> asyncio.Task:
        task = self.create_task(what)
        self.run_for(10)
        return task


class Engine:
    """An engine that observes nothing and takes two seconds for it, with a fixed clock."""

    def now_s(self) -> int:
        return NOW_S

    def watch(self, changed) -> None:
        pass

    async def observe(self) -> Seen:
        await asyncio.sleep(2)
        return Seen((), ("n1",))


def opened(store: Store) -> Store:
    store.open()
    store.set_nodes(NODES, now_s=NOW_S)
    return store


def scheduler(store: Store, **deadlines) -> Scheduler:
    return Scheduler(
        store,
        policy=Policy(),
        caps=Caps(fgpu_step_milli=100, max_count=5, max_pending_per_user=6),
        launcher=Engine(),
        clock=Engine(),
        deadlines=Deadlines(**deadlines),
    )


def test_cancelled_call_during_a_database_outage_leaves_no_unhandled_error():
    loop, queue = Loop(), scheduler(Store("sqlite://"))
    leaves = loop.create_task(queue.snapshot())
    loop.step()
    leaves.cancel()
    loop.run_for(10)
    assert leaves.cancelled()
    # asyncio reports an unread exception when its future is deleted.
    del leaves
    loop.run(asyncio.sleep(0))
    gc.collect()
    assert loop.failures == []


def test_launch_in_progress_during_observation_is_not_reconciled():
    loop, store = Loop(), opened(Store("sqlite://"))
    queue = scheduler(store)
    (session,) = store.submit([request()], now_s=NOW_S)
    store.commit(plan(store.snapshot(NOW_S), Policy()), now_s=NOW_S)
    store.move(session.id, S.PREPARING, now_s=NOW_S)
    store.move(session.id, S.TERMINATING, now_s=NOW_S, cause=EndCause.USER)

    async def launch() -> None:
        with queue.launching(session.id):
            await asyncio.sleep(1)

    loop.create_task(launch())
    loop.run(queue.healer.round())
    assert store.session(session.id).state is S.TERMINATING
    loop.run(queue.healer.round())
    assert store.session(session.id).state in ENDED
    store.close()


class PlacesMeanwhile(Store):
    """A store in which another writer places the pending sessions right after a snapshot was read."""

    places = False

    def snapshot(self, now_s: int):
        found = super().snapshot(now_s)
        if self.places:
            self.places = False
            self.commit(plan(found, Policy()), now_s=now_s)
        return found


def test_session_placed_just_before_its_timeout_is_not_cancelled():
    loop, store = Loop(), opened(PlacesMeanwhile("sqlite://"))
    queue = scheduler(store, queue_timeout_s=0)
    (session,) = store.submit([request()], now_s=NOW_S)
    store.places = True
    loop.run(queue._deadlines_passed())
    assert store.session(session.id).state is S.SCHEDULED
    store.close()
