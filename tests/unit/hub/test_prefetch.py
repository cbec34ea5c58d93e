"""Pre-pulls: which images are pulled early, on which nodes, and until when."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from standindaemon import StandIn, connected
from waiting import eventually

from fgpu_scheduler import (
    Device,
    Forecast,
    Node,
    NodeState,
    Outlook,
    Placement,
    Request,
    Session,
    SessionState,
    Share,
    Snapshot,
    WaitReason,
)
from fgpuspawner.concurrency.background import Background
from fgpuspawner.engines.docker.engine import DockerEngine
from fgpuspawner.engines.docker.fleet import Fleet
from fgpuspawner.engines.docker.images.pulls import Pulls
from fgpuspawner.hub import image_pulls as module
from fgpuspawner.hub.image_pulls import Prefetch
from fgpuspawner.images.model import Catalogue, Image
from fgpuspawner.images.pull_state import Phase, PullState

S = SessionState


def device(name: str, milli: int = 2000) -> Device:
    return Device(f"GPU-{name}", name, 0, "card", 8192, milli, simulated=True)


def node(name: str, milli: int = 2000, **more: Any) -> Node:
    return Node(name, more.pop("group", "default"), 8000, 16384, (device(name, milli),), **more)


def waits(number: int, image: str, *, milli: int = 1000, group: str = "default") -> Session:
    return Session(number, Request(f"u{number}", "", image, group, milli, 1000, 1024), S.PENDING, number)


class Fetching(DockerEngine):
    """Daemons that only fetch images."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.pulls = Pulls(fleet)


class Lab:
    """A queue and a catalogue that a test changes as it likes."""

    def __init__(self, fleet: Fleet, first: int) -> None:
        self.nodes: tuple[Node, ...] = (node("a"), node("b"))
        self.sessions: list[Session] = []
        self.order: list[int] = []
        self.engine = Fetching(fleet)
        self.images = [f"i{n}" for n in range(9)]
        self.prefetch = Prefetch(self.engine, self, first=first, catalogue=self.catalogue)

    def states(self) -> dict[int, PullState]:
        """Return what is told of who waits, as the Hub does."""
        return {**self.prefetch.failed, **self.engine.fetching()}

    def catalogue(self) -> Catalogue:
        return Catalogue(tuple(Image(i, i, "x", "1", "3.11", f"lab/{i}:1") for i in self.images))

    async def snapshot(self) -> Snapshot:
        return Snapshot(1000, 1, self.nodes, tuple(self.sessions))

    async def outlook(self) -> Outlook:
        found = {i: Forecast(i, n, WaitReason.RESOURCES, "", None, "") for n, i in enumerate(self.order)}
        return Outlook(await self.snapshot(), found)

    async def changes(self, *, at_least_every_s: float) -> AsyncIterator[None]:
        while True:
            yield
            await asyncio.sleep(at_least_every_s)

    async def look(self, *sessions: Session) -> None:
        self.sessions = list(sessions)
        while await self.prefetch.look():
            pass


@pytest.fixture
def stand_ins() -> Iterator[tuple[StandIn, StandIn]]:
    found = StandIn(), StandIn()
    for one in found:
        one.pulls = {
            f"lab/i{n}:1": [[{"status": "x"}, threading.Event()] for _ in range(4)] for n in range(9)
        }
    yield found
    for one in found:
        one.close()


@pytest.fixture
async def lab(stand_ins: tuple[StandIn, StandIn]) -> AsyncIterator[Callable[..., Lab]]:
    made: list[Lab] = []
    fleet = connected(*stand_ins)

    def make(first: int = 2) -> Lab:
        made.append(Lab(fleet, first))
        return made[-1]

    yield make
    for one in made:
        await one.look()
        await eventually(lambda one=one: not one.states())  # type: ignore[misc]
    await eventually(lambda: not any(t.name == "fgpu-long" for t in threading.enumerate()))
    fleet.close()


async def test_images_of_the_first_requests_are_pulled_to_all_fitting_nodes(
    lab: Callable[..., Lab], stand_ins: tuple[StandIn, StandIn]
) -> None:
    world, (a, b) = lab(first=1), stand_ins
    world.nodes = (node("a", 4000), node("b"))
    world.order = [2, 1]
    await world.look(waits(1, "i1"), waits(2, "i2", milli=2000))
    await eventually(lambda: a.asked["lab/i2:1"] and b.asked["lab/i2:1"])
    assert not a.asked["lab/i1:1"]
    await world.look(waits(3, "i3", milli=4000))
    await eventually(lambda: a.asked["lab/i3:1"])
    assert not b.asked["lab/i3:1"]


async def test_request_placed_at_once_starts_no_pre_pull(
    lab: Callable[..., Lab], stand_ins: tuple[StandIn, StandIn]
) -> None:
    world, (a, b) = lab(), stand_ins
    world.sessions = [waits(1, "i1")]
    assert await world.prefetch.look()
    place = Placement("a", (Share.of(device("a"), 1000),))
    await world.look(replace(waits(1, "i1"), state=S.SCHEDULED, placement=place))
    assert not world.prefetch._running
    assert not a.asked
    assert not b.asked


@pytest.mark.parametrize(
    "elsewhere",
    [node("b", state=NodeState.CORDONED), node("b", state=NodeState.LOST), node("b", group="other")],
)
async def test_unfit_nodes_pull_nothing(
    lab: Callable[..., Lab], stand_ins: tuple[StandIn, StandIn], elsewhere: Node
) -> None:
    world, (a, b) = lab(), stand_ins
    world.nodes = (node("a"), elsewhere)
    await world.look(waits(1, "i1"))
    await eventually(lambda: a.asked["lab/i1:1"])
    assert not b.asked


async def test_silent_node_pulls_when_it_answers(
    lab: Callable[..., Lab], stand_ins: tuple[StandIn, StandIn]
) -> None:
    world, (a, b) = lab(), stand_ins
    silent = world.engine.fleet.daemons[0]
    silent.answers = False
    await world.look(waits(1, "i1"))
    await eventually(lambda: b.asked["lab/i1:1"] and len(world.prefetch._running) == 1)
    silent.answers = True
    await world.look(waits(1, "i1"))
    await eventually(lambda: a.asked["lab/i1:1"])


async def test_held_requests_and_unknown_images_are_skipped(
    lab: Callable[..., Lab], stand_ins: tuple[StandIn, StandIn]
) -> None:
    world, (a, _) = lab(first=1), stand_ins
    world.order = [1, 2, 3]
    await world.look(replace(waits(1, "i1"), held=True), waits(2, "gone"), waits(3, "i3"))
    assert {session_id for session_id, *_ in world.prefetch._running} == {3}
    await eventually(lambda: a.asked["lab/i3:1"])
    assert sum(a.asked.values()) == 1


async def test_pre_pulls_continue_after_an_unexpected_error(
    lab: Callable[..., Lab], stand_ins: tuple[StandIn, StandIn], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("LOOK_EVERY_S", "QUIET_S"):
        monkeypatch.setattr(module, name, 0.001)
    world, (a, _) = lab(), stand_ins
    ways = iter([KeyError("x"), ValueError("y")])

    async def snapshot() -> Snapshot:
        for way in ways:
            raise way
        return await Lab.snapshot(world)

    monkeypatch.setattr(world, "snapshot", snapshot)
    world.sessions = [waits(1, "i1")]
    background = Background(module.log)
    world.prefetch.begin(background)
    await eventually(lambda: a.asked["lab/i1:1"])
    await background.close()


async def test_running_pre_pull_continues_if_its_request_loses_its_position(
    lab: Callable[..., Lab], stand_ins: tuple[StandIn, StandIn]
) -> None:
    world, (a, _) = lab(first=1), stand_ins
    await world.look(waits(1, "i1"))
    await eventually(lambda: a.asked["lab/i1:1"])
    world.order = [2, 1]
    await world.look(waits(1, "i1"), waits(2, "i2"))
    await eventually(lambda: a.asked["lab/i2:1"])
    assert set(world.states()) == {1, 2}
    assert not a.cut.is_set()


async def test_ended_request_stops_its_pre_pull(
    lab: Callable[..., Lab], stand_ins: tuple[StandIn, StandIn]
) -> None:
    world, (a, b) = lab(), stand_ins
    await world.look(waits(1, "i1"), waits(2, "i1"))
    await eventually(lambda: a.asked["lab/i1:1"] and b.asked["lab/i1:1"])
    await eventually(lambda: set(world.states()) == {1, 2})
    await world.look(waits(2, "i1"))
    await eventually(lambda: set(world.states()) == {2})
    assert not a.cut.is_set()
    await world.look()
    await eventually(lambda: a.cut.is_set() and b.cut.is_set())


async def test_placed_request_keeps_only_the_pull_of_its_node(
    lab: Callable[..., Lab], stand_ins: tuple[StandIn, StandIn]
) -> None:
    world, (a, b) = lab(), stand_ins
    await world.look(waits(1, "i1"))
    await eventually(lambda: a.asked["lab/i1:1"] and b.asked["lab/i1:1"])
    place = Placement("a", (Share.of(device("a"), 1000),))
    await world.look(replace(waits(1, "i1"), state=S.SCHEDULED, placement=place))
    await eventually(b.cut.is_set)
    assert set(world.states()) == {1}
    assert not a.cut.is_set()


async def test_failed_pre_pull_is_reported_and_not_repeated_at_once(
    lab: Callable[..., Lab], stand_ins: tuple[StandIn, StandIn]
) -> None:
    world, (a, b) = lab(), stand_ins
    world.nodes = (node("a"),)
    a.pulls["lab/i1:1"] = [[404, {"message": "manifest unknown"}]]
    await world.look(waits(1, "i1"))
    await eventually(lambda: (state := world.states().get(1)) and state.phase is Phase.FAILED)
    state = world.states().get(1)
    assert state is not None
    assert "the registry has no such image: manifest unknown" in state.words()
    await eventually(lambda: not world.prefetch._running)
    await world.look(waits(1, "i1"))
    assert not world.prefetch._running
    assert a.asked["lab/i1:1"] == 1
    await world.look()
    assert world.states() == {}
    assert not b.asked


@pytest.mark.parametrize("late", [False, True])
async def test_failed_pre_pull_is_not_reported_if_another_node_has_the_image(
    lab: Callable[..., Lab], stand_ins: tuple[StandIn, StandIn], late: bool
) -> None:
    world, (a, b) = lab(), stand_ins
    a.pulls["lab/i1:1"] = [[404, {"message": "manifest unknown"}]]
    go = threading.Event()
    b.pulls["lab/i1:1"] = [[{"status": "x"}, go]]
    if not late:
        b.images["lab/i1:1"] = {"Id": "sha256:1", "RepoDigests": []}
        # Nor copied from there.
        a.pulls["lab/i1:1"] = [[500, {"message": "no space left on device"}]]
    await world.look(waits(1, "i1"))
    await eventually(lambda: a.asked["lab/i1:1"] and len(world.prefetch._running) == int(late))
    go.set()
    await eventually(lambda: not world.prefetch._running)
    assert world.states() == {}


async def test_present_image_is_not_pulled(
    lab: Callable[..., Lab], stand_ins: tuple[StandIn, StandIn]
) -> None:
    world, (a, b) = lab(), stand_ins
    for one in (a, b):
        one.images["lab/i1:1"] = {"Id": "sha256:1"}
    await world.look(waits(1, "i1"))
    await eventually(lambda: not world.prefetch._running)
    await world.look(waits(1, "i1"))
    assert not world.prefetch._running
    assert not a.asked
    assert not b.asked
