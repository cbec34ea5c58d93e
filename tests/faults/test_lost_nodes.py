"""A node that is lost at the wrong moment: while a session is about to be launched on it, and with ghosts on it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from fgpu_scheduler import (
    EndCause,
    NodeState,
    Observed,
    Requeued,
    Seen,
    SessionEnded,
    SessionState,
    Store,
    filled_from_store,
)
from lab import NODE, Lab, Standing

S = SessionState


class Reached(Standing):
    """A launcher with a node that can be cut off, and with containers that can refuse their removal."""

    def __init__(self) -> None:
        super().__init__()
        self.is_reached, self.lets_go = True, True

    async def observe(self) -> Seen:
        seen = await super().observe()
        return seen if self.is_reached else Seen((), ())

    async def remove(self, observed: Observed) -> bool:
        return self.lets_go and await super().remove(observed)


@asynccontextmanager
async def begun(folder: Path) -> AsyncIterator[tuple[Lab, Reached]]:
    store = Store(f"sqlite:///{folder / 'fgpu.sqlite'}")
    store.open()
    lab, launcher = Lab(store), Reached()
    lab.launcher = launcher
    lab.scheduler = lab._made()
    await lab.scheduler.start([NODE])
    try:
        yield lab, launcher
    finally:
        await lab.scheduler.stop()
        store.close()


async def reached(lab: Lab, condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await lab.rounds(1)


def node_state(lab: Lab) -> NodeState:
    return lab.store.snapshot(0).nodes[0].state


def state(lab: Lab, session_id: int) -> SessionState:
    session = lab.store.session(session_id)
    assert session is not None
    return session.state


async def test_a_node_that_is_lost_between_place_and_launch_sends_its_session_back_to_wait(
    tmp_path: Path,
) -> None:
    async with begun(tmp_path) as (lab, launcher):
        first = await lab.ask("alice")
        await asyncio.wait_for(lab.waiting[first], 60)
        launcher.is_reached = False
        await reached(lab, lambda: state(lab, first) is S.PENDING)
        with pytest.raises(Requeued):
            await lab.scheduler.prepare(first)
        launcher.is_reached = True
        again = await asyncio.wait_for(lab.scheduler.placed(first), 60)
        assert (await lab.scheduler.prepare(again.id)).attempt == 1


async def test_a_session_that_was_ended_between_place_and_launch_says_how(tmp_path: Path) -> None:
    async with begun(tmp_path) as (lab, _):
        first = await lab.ask("alice")
        await asyncio.wait_for(lab.waiting[first], 60)
        await lab.scheduler.end(first, EndCause.USER, "an administrator ended it")
        with pytest.raises(SessionEnded, match="an administrator ended it"):
            await lab.scheduler.prepare(first)


@pytest.mark.parametrize("restarts", [False, True])
async def test_a_node_that_is_back_takes_nothing_before_its_ghosts_are_gone(
    tmp_path: Path, restarts: bool
) -> None:
    async with begun(tmp_path) as (lab, launcher):
        first = await lab.ask("alice")
        await lab.run(first)
        launcher.is_reached = False
        await reached(lab, lambda: node_state(lab) is NodeState.LOST)
        lab.store.set_node_state("a", NodeState.GONE, now_s=0)
        await reached(lab, lambda: state(lab, first) is S.ERROR)
        await reached(lab, lambda: node_state(lab) is NodeState.LOST)
        second = await lab.ask("bob")
        launcher.is_reached, launcher.lets_go = True, False
        if restarts:
            await lab.scheduler.stop()
            lab.scheduler = lab._made()
            await lab.scheduler.start(filled_from_store([NODE], lab.store.snapshot(0).nodes))
            lab.waiting[second] = asyncio.ensure_future(lab.scheduler.placed(second))
        await lab.rounds(6)
        assert state(lab, second) is S.PENDING, "alice's container still uses the GPU"
        launcher.lets_go = True
        await asyncio.wait_for(lab.waiting[second], 60)
        assert launcher.things == []


async def test_a_node_is_gone_for_a_launch_in_flight_too_once_that_has_failed(tmp_path: Path) -> None:
    async with begun(tmp_path) as (lab, launcher):
        first = await lab.ask("alice")
        await asyncio.wait_for(lab.waiting[first], 60)
        with lab.scheduler.launching(first):
            await lab.scheduler.prepare(first)
            launcher.is_reached = False
            await reached(lab, lambda: node_state(lab) is NodeState.LOST)
            lab.store.set_node_state("a", NodeState.GONE, now_s=0)
            await lab.rounds()
            assert state(lab, first) is S.PREPARING
        await reached(lab, lambda: state(lab, first) is S.ERROR)
        await reached(lab, lambda: node_state(lab) is NodeState.LOST)


async def test_a_cordon_between_a_look_and_what_follows_from_it_stays(tmp_path: Path) -> None:
    async with begun(tmp_path) as (lab, _):
        looked_at = lab.store.snapshot(0)
        lab.store.set_node_state("a", NodeState.CORDONED, now_s=0)
        await lab.scheduler.healer.update_nodes(looked_at, Seen((), ()))
        assert node_state(lab) is NodeState.CORDONED
