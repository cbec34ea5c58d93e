"""Pre-pulls: which images are pulled early, on which nodes, and until when."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
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

    def __init__(self) -> None:
        self.nodes: tuple[Node, ...] = (node("a"), node("b"))
        self.sessions: list[Session] = []
        self.order: list[int] = []
        self.daemons = StandIn(), StandIn()
        for one in self.daemons:
            one.pulls = {
                f"lab/i{n}:1": [[{"status": "x"}, threading.Event()] for _ in range(4)] for n in range(9)
            }
        self.engine = Fetching(connected(*self.daemons))
        self.images = [f"i{n}" for n in range(9)]
        self.looks_ahead(2)

    def looks_ahead(self, first: int) -> tuple[StandIn, StandIn]:
        """Pull for this number of requests at the head of the queue; return the engines of "a" and "b"."""
        self.prefetch = Prefetch(self.engine, self, first=first, catalogue=self.catalogue)
        return self.daemons

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
async def lab() -> AsyncIterator[Lab]:
    made = Lab()
    yield made
    await made.look()
    await eventually(lambda: not made.states())
    await eventually(lambda: not any(t.name == "fgpu-long" for t in threading.enumerate()))
    made.engine.fleet.close()
    for one in made.daemons:
        one.close()


async def test_images_of_the_first_requests_are_pulled_to_all_fitting_nodes(lab: Lab) -> None:
    a, b = lab.looks_ahead(1)
    lab.nodes = (node("a", 4000), node("b"))
    lab.order = [2, 1]
    await lab.look(waits(1, "i1"), waits(2, "i2", milli=2000))
    await eventually(lambda: a.asked["lab/i2:1"] and b.asked["lab/i2:1"])
    assert not a.asked["lab/i1:1"]
    await lab.look(waits(3, "i3", milli=4000))
    await eventually(lambda: a.asked["lab/i3:1"])
    assert not b.asked["lab/i3:1"]


async def test_request_placed_at_once_starts_no_pre_pull(lab: Lab) -> None:
    a, b = lab.looks_ahead(2)
    lab.sessions = [waits(1, "i1")]
    assert await lab.prefetch.look()
    place = Placement("a", (Share.of(device("a"), 1000),))
    await lab.look(replace(waits(1, "i1"), state=S.SCHEDULED, placement=place))
    assert not lab.prefetch._running
    assert not a.asked
    assert not b.asked


@pytest.mark.parametrize(
    "elsewhere",
    [node("b", state=NodeState.CORDONED), node("b", state=NodeState.LOST), node("b", group="other")],
)
async def test_unfit_nodes_pull_nothing(lab: Lab, elsewhere: Node) -> None:
    a, b = lab.looks_ahead(2)
    lab.nodes = (node("a"), elsewhere)
    await lab.look(waits(1, "i1"))
    await eventually(lambda: a.asked["lab/i1:1"])
    assert not b.asked


async def test_silent_node_pulls_when_it_answers(lab: Lab) -> None:
    a, b = lab.looks_ahead(2)
    silent = lab.engine.fleet.daemons[0]
    silent.answers = False
    await lab.look(waits(1, "i1"))
    await eventually(lambda: b.asked["lab/i1:1"] and len(lab.prefetch._running) == 1)
    silent.answers = True
    await lab.look(waits(1, "i1"))
    await eventually(lambda: a.asked["lab/i1:1"])


async def test_held_requests_and_unknown_images_are_skipped(lab: Lab) -> None:
    a, _ = lab.looks_ahead(1)
    lab.order = [1, 2, 3]
    await lab.look(replace(waits(1, "i1"), held=True), waits(2, "gone"), waits(3, "i3"))
    assert {session_id for session_id, *_ in lab.prefetch._running} == {3}
    await eventually(lambda: a.asked["lab/i3:1"])
    assert sum(a.asked.values()) == 1


async def test_pre_pulls_continue_after_an_unexpected_error(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("LOOK_EVERY_S", "QUIET_S"):
        monkeypatch.setattr(module, name, 0.001)
    a, _ = lab.looks_ahead(2)
    ways = iter([KeyError("x"), ValueError("y")])

    async def snapshot() -> Snapshot:
        for way in ways:
            raise way
        return await Lab.snapshot(lab)

    monkeypatch.setattr(lab, "snapshot", snapshot)
    lab.sessions = [waits(1, "i1")]
    background = Background(module.log)
    lab.prefetch.begin(background)
    await eventually(lambda: a.asked["lab/i1:1"])
    await background.close()


async def test_running_pre_pull_continues_if_its_request_loses_its_position(lab: Lab) -> None:
    a, _ = lab.looks_ahead(1)
    await lab.look(waits(1, "i1"))
    await eventually(lambda: a.asked["lab/i1:1"])
    lab.order = [2, 1]
    await lab.look(waits(1, "i1"), waits(2, "i2"))
    await eventually(lambda: a.asked["lab/i2:1"])
    assert set(lab.states()) == {1, 2}
    assert not a.cut.is_set()


async def test_placed_request_keeps_only_the_pull_of_its_node(lab: Lab) -> None:
    a, b = lab.looks_ahead(2)
    await lab.look(waits(1, "i1"))
    await eventually(lambda: a.asked["lab/i1:1"] and b.asked["lab/i1:1"])
    place = Placement("a", (Share.of(device("a"), 1000),))
    await lab.look(replace(waits(1, "i1"), state=S.SCHEDULED, placement=place))
    await eventually(b.cut.is_set)
    assert set(lab.states()) == {1}
    assert not a.cut.is_set()


async def test_failed_pre_pull_is_reported_and_not_repeated_at_once(lab: Lab) -> None:
    a, b = lab.looks_ahead(2)
    lab.nodes = (node("a"),)
    a.pulls["lab/i1:1"] = [[404, {"message": "manifest unknown"}]]
    await lab.look(waits(1, "i1"))
    await eventually(lambda: (state := lab.states().get(1)) and state.phase is Phase.FAILED)
    state = lab.states().get(1)
    assert state is not None
    assert "the registry has no such image: manifest unknown" in state.words()
    await eventually(lambda: not lab.prefetch._running)
    await lab.look(waits(1, "i1"))
    assert not lab.prefetch._running
    assert a.asked["lab/i1:1"] == 1
    await lab.look()
    assert lab.states() == {}
    assert not b.asked


@pytest.mark.parametrize("late", [False, True])
async def test_failed_pre_pull_is_not_reported_if_another_node_has_the_image(lab: Lab, late: bool) -> None:
    a, b = lab.looks_ahead(2)
    a.pulls["lab/i1:1"] = [[404, {"message": "manifest unknown"}]]
    go = threading.Event()
    b.pulls["lab/i1:1"] = [[{"status": "x"}, go]]
    if not late:
        b.images["lab/i1:1"] = {"Id": "sha256:1", "RepoDigests": []}
        # Nor copied from there.
        a.pulls["lab/i1:1"] = [[500, {"message": "no space left on device"}]]
    await lab.look(waits(1, "i1"))
    await eventually(lambda: a.asked["lab/i1:1"] and len(lab.prefetch._running) == int(late))
    go.set()
    await eventually(lambda: not lab.prefetch._running)
    assert lab.states() == {}


async def test_present_image_is_not_pulled(lab: Lab) -> None:
    a, b = lab.looks_ahead(2)
    for one in (a, b):
        one.images["lab/i1:1"] = {"Id": "sha256:1"}
    await lab.look(waits(1, "i1"))
    await eventually(lambda: not lab.prefetch._running)
    await lab.look(waits(1, "i1"))
    assert not lab.prefetch._running
    assert not a.asked
    assert not b.asked
