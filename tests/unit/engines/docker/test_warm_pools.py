"""The warm pools of one daemon: each is filled independently, and a session takes only a container of its shape."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from docker.errors import ImageNotFound
from docker.types import DeviceRequest
from waiting import eventually

from fgpu_scheduler import Device, Node, Placement, Request, Session, SessionState, Share
from fgpuspawner.concurrency.background import Background
from fgpuspawner.engines.base import HubSide
from fgpuspawner.engines.docker import warm_pool as warm
from fgpuspawner.engines.docker.containers import Containers
from fgpuspawner.engines.docker.homes import CannotMount
from fgpuspawner.engines.docker.warm_pool import WarmPool
from fgpuspawner.isolation.manager import Isolation
from fgpuspawner.settings import FGPU

S = SessionState
GPUS = tuple(Device(uuid, "lab", n, "NVIDIA A100", 40960, 2000) for n, uuid in enumerate(("GPU-a", "GPU-b")))
NODES = (Node("lab", "default", 16000, 65536, GPUS), Node("far", "default", 16000, 65536, ()))


class Daemon:
    """Makes containers that are ready at once; ``gone`` are the ids of removed images."""

    def __init__(self) -> None:
        self.made: dict[str, dict[str, Any]] = {}
        self.gone: set[str] = set()

    def create_container(self, **kwargs: Any) -> dict[str, str]:
        if kwargs["image"] in self.gone:
            raise ImageNotFound(f"No such image: {kwargs['image']}")
        self.made[kwargs["name"]] = kwargs
        return {"Id": kwargs["name"]}

    def rename(self, container: str, name: str) -> None:
        self.made[name] = self.made.pop(container)

    def remove_container(self, name: str, *, v: bool, force: bool) -> None:
        self.made.pop(name, None)

    def containers(self, **_: Any) -> list[dict[str, Any]]:
        return [{"Names": [f"/{name}"]} for name in self.made]

    def inspect_container(self, _: str) -> dict[str, Any]:
        return {"State": {"Running": True, "Pid": 1}}

    def logs(self, _: str, tail: int) -> bytes:
        return warm.WAITING

    def inspect_network(self, _: str) -> dict[str, Any]:
        return {}

    def _nothing(self, *_: Any, **__: Any) -> None:
        pass

    def post(self, url: str, **_: Any) -> Any:
        assert url.endswith("/update")
        return SimpleNamespace(status_code=200, close=self._nothing)

    base_url = api_version = timeout = ""
    start = remove_network = _nothing
    connect_container_to_network = disconnect_container_from_network = _nothing


class Queue:
    """The sessions that live, as a test lays them out."""

    def __init__(self) -> None:
        self.sessions: list[Session] = []
        self.moved = asyncio.Event()
        self.asked = asyncio.Event()

    async def live(self) -> list[Session]:
        self.asked.set()
        return self.sessions

    async def changes(self, *, at_least_every_s: float) -> AsyncIterator[None]:
        while True:
            yield
            await self.moved.wait()
            self.moved.clear()

    def has(self, *sessions: Session) -> None:
        self.sessions = list(sessions)
        self.moved.set()


class NoHomes:
    """This Hub may not mount."""

    def __init__(self, installation: str) -> None:
        pass

    def open(self) -> None:
        raise CannotMount("the Hub is not root")

    def names(self) -> list[str]:
        return []

    def remove(self, names: Collection[str]) -> None:
        assert not names


class Lab:
    """A node with two GPUs and a warm container for each image and GPU that was started; another machine beside."""

    def __init__(self, folder: Path, background: Background, **images: int) -> None:
        self.daemon, self.queue = Daemon(), Queue()
        self.fetching: set[int] = set()
        client: Any = self.daemon
        queue: Any = self.queue
        settings = FGPU(data_dir=str(folder), accounting_dir=str(folder / "shm"), isolation="none")
        self.isolation = Isolation(settings, NODES)
        self.isolation.open(own_root=True, installation="abc")
        self.pool = WarmPool(
            Containers(client, installation="abc"),
            HubSide(self.isolation, queue, background, (), lambda: None, lambda _: (), tuple),
            sizes=images,
            node_ids=["lab"],
            data=folder,
            fetching=lambda: self.fetching,
        )

    async def start(self, session: Session, *, shared_memory: int = 0) -> str | None:
        """Return the name of the warm container that a session takes; None: it starts cold."""
        self.isolation.prepare(session, [session.id])
        assert session.placement is not None
        own, slug = self.isolation.folder(session.id), session.request.image
        uuids = [share.device_uuid for share in session.placement.shares]
        kwargs = {
            "name": f"fgpu-abc-{session.id}-1",
            "image": f"lab/{slug}:1",
            "environment": {"FGPU_SESSION_ID": str(session.id)},
            "labels": {"fgpu.session": str(session.id)},
            "host_config": {
                "Binds": [],
                "ShmSize": shared_memory,
                "Tmpfs": {"/run/fgpu/written": "size=4m"},
                "Mounts": [{"Type": "bind", "Source": f"{own}/limits", "Target": "/run/fgpu/limits"}],
                "DeviceRequests": [DeviceRequest(driver="nvidia", device_ids=uuids)] if uuids else None,
            },
        }
        told = {"FGPU_SESSION_ID": str(session.id)}
        return await self.pool.take(
            session, kwargs, image_id=f"sha256:{slug}", slice_environment=told, network="u-1"
        )

    def waiting(self) -> list[tuple[str, list[str]]]:
        """Return image and GPUs of the containers that wait."""
        return sorted(
            (
                made["labels"]["fgpu.image"],
                [gpu for r in made["host_config"]["DeviceRequests"] or () for gpu in r["DeviceIDs"]],
            )
            for name, made in self.daemon.made.items()
            if name.startswith("fgpu-abc-warm-")
        )

    async def opened(self) -> None:
        """Begin, and wait until sessions may take what waits."""
        self.pool.begin()
        await eventually(lambda: self.pool._opened)


@pytest.fixture
async def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Callable[..., Lab]]:
    monkeypatch.setattr(warm, "Homes", NoHomes)
    background = Background(warm.log)
    made: list[Lab] = []

    def make(**images: int) -> Lab:
        made.append(Lab(tmp_path, background, **images))
        return made[-1]

    yield make
    for one in made:
        one.queue.has()
    await background.close()
    for one in made:
        one.pool._threads.shutdown()


def session(number: int, *uuids: str, image: str = "torch", node_id: str = "lab") -> Session:
    shares = tuple(Share(uuid, 500, 2048, 25) for uuid in uuids)
    asked = Request(f"u{number}", "", image, "default", 500, 1000, 1024)
    return Session(number, asked, S.PREPARING, 0, placement=Placement(node_id, shares))


async def test_a_warm_container_has_the_gpu_that_the_session_has(lab: Callable[..., Lab]) -> None:
    world = lab(torch=1)
    await world.opened()
    assert await world.start(session(1, "GPU-a")) is None, "what it is made with is learnt from it"
    await eventually(lambda: world.waiting() == [("torch", ["GPU-a"])])
    assert await world.start(session(2, "GPU-b")) is None, "no running container can be given another GPU"
    await eventually(lambda: world.waiting() == [("torch", ["GPU-a"]), ("torch", ["GPU-b"])])
    taken = await world.start(session(3, "GPU-b"))
    assert taken is not None
    (request,) = world.daemon.made["fgpu-abc-3-1"]["host_config"]["DeviceRequests"]
    assert request["DeviceIDs"] == ["GPU-b"]
    await eventually(lambda: world.waiting() == [("torch", ["GPU-a"]), ("torch", ["GPU-b"])])


async def test_container_with_other_gpu_access_is_not_taken(
    lab: Callable[..., Lab],
) -> None:
    world = lab(torch=1)
    await world.opened()
    await world.start(session(1, "GPU-a"))
    await eventually(world.waiting)
    assert await world.start(session(2)) is None
    await eventually(lambda: world.waiting() == [("torch", []), ("torch", ["GPU-a"])])


async def test_a_session_of_several_gpus_starts_cold(lab: Callable[..., Lab]) -> None:
    world = lab(torch=1)
    await world.opened()
    for number in (1, 2):
        assert await world.start(session(number, "GPU-a", "GPU-b")) is None
    assert not world.pool._recipes


async def test_recipes_survive_a_restart(
    lab: Callable[..., Lab],
) -> None:
    world = lab(torch=1)
    await world.opened()
    for number, gpu in ((1, "GPU-a"), (2, "GPU-b")):
        await world.start(session(number, gpu))
    await eventually(lambda: len(world.waiting()) == 2)
    again = lab(torch=1)
    await again.opened()
    await eventually(lambda: again.waiting() == [("torch", ["GPU-a"]), ("torch", ["GPU-b"])])
    assert await again.start(session(3, "GPU-a")) is not None


@pytest.mark.parametrize(
    "noted", ["no JSON", "[7]", '[[["torch", "lab", []], {"files": "a word of the file"}]]']
)
async def test_unreadable_recipes_are_logged_once_and_learnt_again(
    lab: Callable[..., Lab], tmp_path: Path, caplog: pytest.LogCaptureFixture, noted: str
) -> None:
    world = lab(torch=1)
    (tmp_path / "warm.json").write_text(noted)
    await world.opened()
    (said,) = (r.getMessage() for r in caplog.records if "learnt again" in r.getMessage())
    assert said.startswith(f"{tmp_path / 'warm.json'} is of no use")
    assert "\n" not in said
    assert "a word of the file" not in said
    assert await world.start(session(1, "GPU-a")) is None
    await eventually(lambda: world.waiting() == [("torch", ["GPU-a"])])


async def test_missing_image_stops_no_other_pool_and_is_logged(
    lab: Callable[..., Lab], caplog: pytest.LogCaptureFixture
) -> None:
    world = lab(gone=1, torch=1)
    world.daemon.gone = {"sha256:gone"}
    await world.opened()
    # Both are learnt before the next look: the one that is gone comes first.
    world.queue.has(session(9))
    for number, image in ((1, "gone"), (2, "torch")):
        assert await world.start(session(number, "GPU-a", image=image)) is None
    world.queue.has()
    await eventually(lambda: world.waiting() == [("torch", ["GPU-a"])])
    said = [r.getMessage() for r in caplog.records if "could not be made" in r.getMessage()]
    assert said == ["A warm container of image gone on lab could not be made: No such image: sha256:gone"]


@pytest.mark.parametrize(
    "elsewhere",
    [
        replace(session(9, node_id="far"), state=S.PULLING),
        session(9, node_id="far"),
        replace(session(8), state=S.PULLING),
        replace(session(9), state=S.RUNNING),
    ],
    ids=["fetched on another machine", "launched on another machine", "fetched here", "runs here"],
)
async def test_pool_waits_only_for_launches_on_its_engine(
    lab: Callable[..., Lab], elsewhere: Session
) -> None:
    world = lab(torch=1)
    world.fetching = {8}
    await world.opened()
    launched = session(7, "GPU-b")
    world.queue.has(launched, elsewhere)
    await world.start(session(1, "GPU-a"))
    async with asyncio.timeout(60):
        await world.queue.asked.wait()
    assert not world.waiting()
    world.queue.has(elsewhere)
    await eventually(lambda: world.waiting() == [("torch", ["GPU-a"])])


async def test_warm_container_is_taken_by_sessions_that_need_its_shared_memory_or_less(
    lab: Callable[..., Lab],
) -> None:
    world = lab(torch=1)

    def sizes() -> list[int]:
        made = world.daemon.made.items()
        return [m["host_config"]["ShmSize"] for name, m in made if name.startswith("fgpu-abc-warm-")]

    await world.opened()
    assert await world.start(session(1, "GPU-a"), shared_memory=4) is None, (
        "what it is made with is learnt from it"
    )
    await eventually(lambda: sizes() == [4])
    assert await world.start(session(2, "GPU-a"), shared_memory=8) is None, "it has too little"
    await eventually(lambda: sizes() == [8])
    assert await world.start(session(3, "GPU-a"), shared_memory=2) is not None
    await eventually(lambda: sizes() == [8])
    assert await world.start(session(4, "GPU-a"), shared_memory=8) is not None
