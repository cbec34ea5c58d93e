"""Pulls: shared, in turns, cut off, tried again where that can help; against servers that stand in for engines."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from standindaemon import StandIn, connected
from waiting import eventually

from fgpuspawner.engines.base import EngineSilent, PullFailed
from fgpuspawner.engines.docker.daemon import Daemon
from fgpuspawner.engines.docker.fleet import Fleet
from fgpuspawner.engines.docker.images import fetch as fetching
from fgpuspawner.engines.docker.images import pulls as module
from fgpuspawner.engines.docker.images.fetch import EngineRequest
from fgpuspawner.engines.docker.images.pull_output import Kind, Reason
from fgpuspawner.engines.docker.images.pulls import Pulls
from fgpuspawner.images.availability import Where
from fgpuspawner.images.model import Image
from fgpuspawner.images.pull_state import Phase

A_DIGEST = "sha256:" + "a" * 64
OTHER_DIGEST = "sha256:" + "b" * 64


def image(reference: str = "lab/torch:1", **more: Any) -> Image:
    return Image("torch", "Torch", "pytorch", "2", "3.11", reference, **more)


@pytest.fixture
def engine() -> Iterator[StandIn]:
    with contextlib.closing(StandIn()) as found:
        yield found


@pytest.fixture
def other() -> Iterator[StandIn]:
    with contextlib.closing(StandIn()) as found:
        yield found


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "AGAIN_AFTER_S", (0.01, 0.01))


class Lab:
    """The pulls of the engines that are stood in for."""

    def __init__(self, fleet: Fleet, **more: Any) -> None:
        self.pulls = Pulls(fleet, **more)
        self.daemons: tuple[Daemon, ...] = fleet.daemons

    def waits(self, session_id: int, wanted: Image, *, ahead: bool = False) -> asyncio.Task[Any]:
        """Have a session wait for an image on the first engine."""
        return asyncio.create_task(self.pulls.ensure(self.daemons[0], wanted, session_id, ahead=ahead))


@pytest.fixture
def lab() -> Iterator[Callable[..., Lab]]:
    with contextlib.ExitStack() as opened:

        def make(*stand_ins: StandIn, **more: Any) -> Lab:
            return Lab(opened.enter_context(contextlib.closing(connected(*stand_ins))), **more)

        yield make


def threads() -> int:
    return sum(thread.name == "fgpu-long" for thread in threading.enumerate())


async def test_engine_may_be_silent_while_all_layers_wait_for_other_pulls(
    engine: StandIn, lab: Callable[..., Lab], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetching, "SILENT_S", 0.05)
    go = threading.Event()
    engine.pulls["lab/torch:1"] = [[{"status": "Waiting", "id": "1"}, go, {"status": "x"}]]
    world = lab(engine)
    task = world.waits(1, image())
    await eventually(lambda: (state := world.pulls.states().get(1)) and state.progress.layers)
    await asyncio.sleep(0.5)
    go.set()
    assert (await task)["Id"] == "sha256:pulled"
    assert engine.asked["lab/torch:1"] == 1


async def test_engine_that_falls_silent_during_a_download_is_given_up(
    engine: StandIn, lab: Callable[..., Lab], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetching, "SILENT_S", 0.05)
    monkeypatch.setattr(module, "AGAIN_AFTER_S", ())
    steps = [{"status": "Waiting", "id": "1"}, {"status": "Downloading", "id": "2"}, threading.Event()]
    engine.pulls["lab/torch:1"] = [steps]
    async with asyncio.timeout(60):
        with pytest.raises(PullFailed, match="silent for too long"):
            await lab(engine).waits(1, image())


async def test_credentials_are_read_for_each_pull(
    engine: StandIn, lab: Callable[..., Lab], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))

    def login(user: str) -> None:
        auth = base64.b64encode(f"{user}:word".encode()).decode()
        (tmp_path / "config.json").write_text(json.dumps({"auths": {"127.0.0.1:5000": {"auth": auth}}}))

    login("first")
    world = lab(engine)
    for user in ("first", "second"):
        login(user)
        reference = f"127.0.0.1:5000/{user}:1"
        engine.pulls[reference] = [[{"status": "x"}]]
        await world.waits(1, image(reference))
        sent = json.loads(base64.urlsafe_b64decode(engine.auth[-1] or ""))
        assert sent["username"] == user


async def test_pull_after_a_stopped_one_starts_again(engine: StandIn, lab: Callable[..., Lab]) -> None:
    engine.pulls["lab/torch:1"] = [[{"status": "x"}, threading.Event()], [{"status": "x"}]]
    world = lab(engine)
    first = world.waits(1, image())
    await eventually(lambda: engine.asked["lab/torch:1"])
    first.cancel()
    second = world.waits(2, image())
    await eventually(engine.cut.is_set)
    engine.cut.clear()
    assert (await second)["Id"] == "sha256:pulled"
    assert engine.asked["lab/torch:1"] == 2


async def test_cancelled_pull_on_a_silent_engine_leaves_no_thread(
    lab: Callable[..., Lab], engine: StandIn
) -> None:
    engine.pulls["lab/torch:1"] = []
    world = lab(engine)
    silent = threading.Event()
    # Before the first byte of its answer.
    engine._pull = lambda request, reference, steps: engine._wait(request, silent)  # type: ignore[method-assign]
    engine.pulls["lab/torch:1"] = [[]]
    task = world.waits(1, image())
    await eventually(lambda: engine.asked["lab/torch:1"])
    assert threads() == 1
    task.cancel()
    await eventually(engine.cut.is_set)
    await eventually(lambda: threads() == 0)


async def test_failure_is_reported_after_the_last_try(engine: StandIn, lab: Callable[..., Lab]) -> None:
    refused = {"message": "dial tcp 10.0.0.1:443: connect: connection refused"}
    engine.pulls["lab/torch:1"] = [[500, refused]] * 4
    with pytest.raises(PullFailed) as caught:
        await lab(engine).waits(1, image())
    assert engine.asked["lab/torch:1"] == 3
    assert str(caught.value) == (
        "image lab/torch:1 is not on the engine and could not be fetched: the registry does not answer: "
        "dial tcp 10.0.0.1:443: connect: connection refused"
    )


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ("manifest for lab/torch:1 not found: manifest unknown", "the registry has no such image"),
        ("pull access denied for lab/torch, repository does not exist", "the registry denies access to it"),
        ("dial tcp: lookup nowhere on 1.1.1.1:53: no such host", "there is no such registry"),
        ("write /x: no space left on device", "the disk of the engine is full"),
        ("filesystem layer verification failed for digest sha256:1", "what came is not what its digest says"),
        (
            "no matching manifest for linux/amd64 in the manifest list",
            "the image is for another kind of machine",
        ),
    ],
)
async def test_permanent_failure_is_not_retried(
    engine: StandIn, lab: Callable[..., Lab], said: str, words: str
) -> None:
    engine.pulls["lab/torch:1"] = [[500, {"message": said}], [{"status": "x"}]]
    with pytest.raises(PullFailed) as caught:
        await lab(engine).waits(1, image())
    assert engine.asked["lab/torch:1"] == 1
    assert words in str(caught.value)
    assert said in str(caught.value)


async def test_image_with_another_digest_is_pulled_and_checked_again(
    engine: StandIn, lab: Callable[..., Lab]
) -> None:
    engine.images["lab/torch:1"] = {"Id": "sha256:old", "RepoDigests": [f"lab/torch@{OTHER_DIGEST}"]}
    world, wanted = lab(engine), image(digest=A_DIGEST)
    assert await world.pulls.found(world.daemons[0], wanted) is None
    new = {"Id": "sha256:new", "RepoDigests": [f"lab/torch@{A_DIGEST}"]}
    arrived = threading.Event()
    engine.pulls["lab/torch:1"] = [[{"status": "x"}, arrived]]
    task = world.waits(1, wanted)
    await eventually(lambda: engine.asked["lab/torch:1"])
    engine.images["lab/torch:1"] = new
    arrived.set()
    assert await task == new


@pytest.mark.parametrize("pinned", [False, True])
async def test_wrong_digest_after_a_pull_is_refused_with_both_digests(
    engine: StandIn, lab: Callable[..., Lab], pinned: bool
) -> None:
    wanted = image(f"lab/torch@{A_DIGEST}") if pinned else image(digest=A_DIGEST)
    engine.images[wanted.reference] = {"Id": "sha256:old", "RepoDigests": [f"lab/torch@{OTHER_DIGEST}"]}
    engine.pulls[wanted.reference] = [[{"status": "x"}]] * 2
    with pytest.raises(PullFailed) as caught:
        await lab(engine).waits(1, wanted)
    assert f"the engine has {OTHER_DIGEST} and sha256:old, the catalogue wants {A_DIGEST}" in str(
        caught.value
    )
    assert engine.asked[wanted.reference] == 1


async def test_an_image_can_be_pinned_by_the_engines_own_id(engine: StandIn, lab: Callable[..., Lab]) -> None:
    engine.images["lab/torch:1"] = {"Id": A_DIGEST}
    assert await lab(engine).waits(1, image(digest=A_DIGEST)) == {"Id": A_DIGEST}


@pytest.mark.parametrize("digest", ["", "sha256:copied"], ids=["by name", "by the engine's id"])
async def test_image_that_no_registry_has_is_copied_from_another_engine(
    engine: StandIn, other: StandIn, lab: Callable[..., Lab], digest: str
) -> None:
    engine.pulls["lab/torch:1"] = [[404, {"message": "manifest unknown"}]]
    other.images["lab/torch:1"] = {"Id": "sha256:copied", "Size": 18}
    assert await lab(engine, other).waits(1, image(digest=digest)) == {"Id": "sha256:copied"}
    assert engine.loaded == [b"tar of lab/torch:1"]


@pytest.mark.parametrize("pinned", [False, True])
async def test_image_pinned_by_a_registrys_digest_is_not_copied(
    engine: StandIn, other: StandIn, lab: Callable[..., Lab], pinned: bool
) -> None:
    wanted = image(f"lab/torch@{A_DIGEST}") if pinned else image(digest=A_DIGEST)
    refused = {"message": "dial tcp 10.0.0.1:443: connect: connection refused"}
    engine.pulls[wanted.reference] = [[500, refused], [{"status": "x"}]]
    other.images[wanted.reference] = {"Id": "sha256:copied", "RepoDigests": [f"lab/torch@{A_DIGEST}"]}
    assert (await lab(engine, other).waits(1, wanted))["Id"] == "sha256:pulled"
    assert not other.asked["get"]


async def test_failed_copy_is_followed_by_another_pull(
    engine: StandIn, other: StandIn, lab: Callable[..., Lab], monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = {"message": "dial tcp 10.0.0.1:443: connect: connection refused"}
    engine.pulls["lab/torch:1"] = [[500, refused]] * 3
    other.images["lab/torch:1"] = {"Id": "sha256:copied", "Size": 18}
    monkeypatch.setattr(module, "copy", lambda *_: Reason(Kind.ENGINE, "it went away"))
    with pytest.raises(PullFailed, match="the registry does not answer: dial tcp"):
        await lab(engine, other).waits(1, image())
    assert engine.asked["lab/torch:1"] == 3


async def test_a_private_image_is_copied_as_soon_as_the_engine_that_has_it_answers_again(
    engine: StandIn, other: StandIn, lab: Callable[..., Lab], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "AGAIN_AFTER_S", (0.01,) * 1000)
    other.images["lab/torch:1"] = {"Id": "sha256:copied", "Size": 18}
    world = lab(engine, other)
    world.daemons[1].answers = False
    task = world.waits(1, image(owner="alice", node_id="b"))
    await eventually(lambda: (state := world.pulls.states().get(1)) and state.attempt > 1)
    world.daemons[1].answers = True
    assert await task == {"Id": "sha256:copied"}
    assert not engine.asked, "it is never pulled"


async def test_copy_waits_for_long_silent_engines(
    engine: StandIn, other: StandIn, lab: Callable[..., Lab], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        module, "EngineRequest", lambda client, *, silent_s=0.05: EngineRequest(client, silent_s=silent_s)
    )
    monkeypatch.setattr(module, "AGAIN_AFTER_S", ())
    other.images["lab/torch:1"] = {"Id": "sha256:copied", "Size": 18}
    other.holds = threading.Event()
    world = lab(engine, other)
    task = world.waits(1, image(owner="alice", node_id="b"))
    await eventually(lambda: (state := world.pulls.states().get(1)) and state.progress.bytes_done)
    await asyncio.sleep(0.5)
    other.holds.set()
    assert await task == {"Id": "sha256:copied"}


@pytest.mark.parametrize(
    ("node_id", "answers", "words"),
    [
        ("a", True, "the Docker engine of a, where it was made, no longer has it"),
        ("b", True, "the Docker engine of b no longer has it"),
        ("b", False, "the Docker engine of b, which has it, does not answer now"),
        ("z", True, "node z is no longer configured"),
    ],
)
async def test_a_private_image_that_cannot_be_copied_says_why(
    engine: StandIn, other: StandIn, lab: Callable[..., Lab], node_id: str, answers: bool, words: str
) -> None:
    world = lab(engine, other)
    world.daemons[1].answers = answers
    with pytest.raises(PullFailed, match=words):
        await world.waits(1, image(owner="alice", node_id=node_id))


async def test_copy_without_waiters_is_stopped_on_both_engines(
    engine: StandIn, other: StandIn, lab: Callable[..., Lab]
) -> None:
    other.images["lab/torch:1"] = {"Id": "sha256:copied", "Size": 18}
    other.holds = threading.Event()
    world = lab(engine, other)
    task = world.waits(1, image(owner="alice", node_id="b"))
    await eventually(lambda: (state := world.pulls.states().get(1)) and state.progress.bytes_done)
    state = world.pulls.states()[1]
    assert (state.phase, state.progress.bytes_total) == (Phase.COPYING, 18)
    task.cancel()
    await eventually(lambda: engine.cut.is_set() and other.cut.is_set())
    await eventually(lambda: threads() == 0)
    assert engine.loaded == []


async def test_pulls_take_turns_and_launches_come_first(engine: StandIn, lab: Callable[..., Lab]) -> None:
    goes = {name: threading.Event() for name in "abcd"}
    for name, go in goes.items():
        engine.pulls[f"lab/{name}:1"] = [[{"status": "x"}, go]]
    world = lab(engine, at_a_time=2)
    tasks = {"a": world.waits(0, image("lab/a:1"), ahead=True)}
    await eventually(lambda: engine.asked["lab/a:1"])
    for n, name in enumerate("bc", start=1):
        tasks[name] = world.waits(n, image(f"lab/{name}:1"), ahead=True)
        await eventually(lambda: [s.phase for s in world.pulls.states().values()].count(Phase.WAITING) == n)  # noqa: B023
    # One is kept free for a launch.
    assert not engine.asked["lab/b:1"]
    tasks["d"] = world.waits(3, image("lab/d:1"))
    await eventually(lambda: engine.asked["lab/d:1"])
    # A pre-pull gets its turn when a launch waits for it.
    joined = world.waits(4, image("lab/c:1"))
    goes["a"].set()
    await eventually(lambda: engine.asked["lab/c:1"])
    assert not engine.asked["lab/b:1"]
    for go in goes.values():
        go.set()
    await asyncio.gather(joined, *tasks.values())
    assert engine.asked["lab/b:1"] == 1


async def test_slow_engine_delays_no_pull_on_another_engine(engine: StandIn, lab: Callable[..., Lab]) -> None:
    engine.pulls = {f"lab/{n}:1": [[{"status": "x"}, threading.Event()]] for n in range(3)}
    engine.images["lab/there:1"] = {"Id": "sha256:1"}
    world = lab(engine)
    tasks = [world.waits(n, image(f"lab/{n}:1")) for n in range(3)]
    await eventually(lambda: sum(engine.asked.values()) == 3)
    async with asyncio.timeout(60):
        assert await world.waits(9, image("lab/there:1")) == {"Id": "sha256:1"}
    for task in tasks:
        task.cancel()
    await eventually(lambda: threads() == 0)


async def test_availability_follows_engine_and_registry(
    engine: StandIn, other: StandIn, lab: Callable[..., Lab]
) -> None:
    engine.images["lab/here:1"] = {"Id": "sha256:x"}
    labels = {"fgpu.version": "2.1+cu126", "fgpu.python": "3.12"}
    engine.images["lab/labels:1"] = {"Id": "sha256:x", "Config": {"Labels": labels}}
    other.images["lab/there:1"] = {"Id": "sha256:x"}
    engine.registry = {
        "lab/old:1": (200, "{}"),
        "lab/gone:1": (403, "denied: requested access to the resource is denied"),
        "lab/busy:1": (429, "toomanyrequests: slow down"),
        "lab/odd:1": (404, "page not found"),
        "lab/guarded:1": (403, "authorization denied by plugin guard: pulls only"),
    }
    world = lab(engine, other)

    async def at(reference: str, **more: Any) -> tuple[Where, str]:
        found = await world.pulls.availability(world.daemons[0], image(reference, **more))
        return found.where, found.words

    assert await at("lab/here:1") == (Where.HERE, "")
    assert await at("lab/labels:1") == (Where.HERE, "its labels say python 3.12, not 3.11")
    assert (await at("lab/there:1"))[0] is Where.FETCHABLE
    assert not any("there" in asked for asked in engine.asked)
    assert await at("lab/old:1") == (Where.FETCHABLE, "")
    where, why = await at("lab/gone:1")
    assert (where, "denies access to it, or has no such image" in why) == (Where.CANNOT, True)
    where, why = await at("fgpuspawner/pytorch-1.5:0.1")
    assert (where, why.partition("; ")[2]) == (Where.CANNOT, "build it there: fgpu images build pytorch-1.5")
    assert "build" not in (await at("lab/never-built:1"))[1]
    assert (await at("lab/busy:1"))[0] is Where.UNKNOWN
    assert (await at("lab/odd:1"))[0] is Where.UNKNOWN
    assert (await at("lab/guarded:1"))[0] is Where.UNKNOWN
    # The image of this name has another digest, and there is no other source.
    where, why = await at("lab/here:1", digest=OTHER_DIGEST)
    assert (where, "not the one that is wanted" in why) == (Where.CANNOT, True)
    # A private image comes from the engine that has it alone.
    assert (await at("ann/more:1", owner="ann", node_id="b"))[0] is Where.CANNOT
    other.images["ann/more:1"] = {"Id": "sha256:x"}
    assert (await at("ann/more:1", owner="ann", node_id="b"))[0] is Where.FETCHABLE
    # The registry is not asked again at once.
    names = ("old", "gone", "never-built", "busy", "odd", "guarded", "here")
    assert {asked: n for asked, n in engine.asked.items() if asked.startswith("registry lab/")} == {
        f"registry lab/{name}:1": 1 for name in names
    }
    # What an engine that is away may have is not known.
    world.daemons[1].answers = False
    for silent in (await at("lab/gone:1"), await at("ann/lost:1", owner="ann", node_id="b")):
        assert silent[0] is Where.UNKNOWN


async def test_a_registry_is_asked_once_at_a_time_and_not_again_once_it_has_the_image(
    engine: StandIn, lab: Callable[..., Lab], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.registry = {"lab/torch:1": (200, "{}"), "lab/gone:1": (404, "manifest unknown")}
    world = lab(engine)
    (daemon,) = world.daemons
    for times in (2, 1):
        names = ("lab/torch:1", "lab/gone:1") * times
        looks = [world.pulls.availability(daemon, image(name)) for name in names]
        found = [one.where for one in await asyncio.gather(*looks)]
        assert found == [Where.FETCHABLE, Where.CANNOT] * times
        monkeypatch.setattr(module, "ASK_REFUSED_EVERY_S", 0.0)
        monkeypatch.setattr(module, "ASK_EVERY_S", 0.0)
    assert (engine.asked["registry lab/torch:1"], engine.asked["registry lab/gone:1"]) == (1, 2)


async def test_slow_registry_delays_no_answer_and_counts_as_unknown(
    engine: StandIn, lab: Callable[..., Lab], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "ASK_PATIENCE_S", 0.01)
    engine.registry_waits = threading.Event()
    world = lab(engine)
    names = [f"lab/{n}:1" for n in range(6)]
    engine.registry = {name: (200, "{}") for name in names}

    async def look() -> set[Where]:
        looks = [world.pulls.availability(world.daemons[0], image(name)) for name in names]
        return {one.where for one in await asyncio.gather(*looks)}

    assert await look() == {Where.UNKNOWN}
    await eventually(lambda: sum(engine.asked[f"registry {name}"] for name in names) == module.AT_A_TIME)
    assert await look() == {Where.UNKNOWN}
    assert threads() == module.AT_A_TIME
    engine.registry_waits.set()
    await eventually(lambda: all(engine.asked[f"registry {name}"] == 1 for name in names) and threads() == 0)
    assert await look() == {Where.FETCHABLE}


async def test_image_is_coming_during_a_pull_and_unknown_while_the_engine_is_silent(
    engine: StandIn, lab: Callable[..., Lab]
) -> None:
    go = threading.Event()
    engine.pulls["lab/torch:1"] = [[{"status": "Pulling fs layer", "id": "1"}, go]]
    world = lab(engine)
    (daemon,) = world.daemons
    task = world.waits(1, image())
    await eventually(lambda: engine.asked["lab/torch:1"])
    assert (await world.pulls.availability(daemon, image())).where is Where.COMING
    go.set()
    await task
    assert (await world.pulls.availability(daemon, image())).where is Where.HERE
    engine.silent = True
    with pytest.raises(EngineSilent):
        await world.pulls.availability(daemon, image())
