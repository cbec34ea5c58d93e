"""The Hub's resizer: whatever fails and wherever it dies, the limits file never allows more than the record."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from fgpu_scheduler import (
    Amount,
    Device,
    Node,
    NotResized,
    Placement,
    Plan,
    Request,
    Resizes,
    ResizeState,
    Session,
    SessionState,
    Share,
    Store,
    StoreUnavailable,
    SystemClock,
    resized,
)
from fgpu_scheduler.core.planner import StartDecision
from fgpuspawner.hub.resizing import MIB, Resizer
from fgpuspawner.isolation import limits
from fgpuspawner.isolation.limits import Limits
from fgpuspawner.isolation.manager import Isolation
from fgpuspawner.isolation.native import Native
from fgpuspawner.settings import FGPU

GPU = Device("GPU-simulated-lab-0", "lab", 0, "Simulated GPU 8192 MiB", 8192, 1000, True)
LAB = Node("lab", "default", 16000, 65536, (GPU,))


class OneSession:
    """A queue with one running session; only its slice changes. ``fails`` is raised by the next commit."""

    def __init__(self, store: Store, session_id: int) -> None:
        self._store = store
        self._id = session_id
        self.fails: Exception | None = None

    async def session(self, session_id: int) -> Session:
        found = self._store.session(session_id)
        assert found is not None
        return found

    async def snapshot(self) -> object:
        return self._store.snapshot(50)

    async def resizable(self, session_id: int, amount: Amount) -> Session | NotResized:
        return resized(self._store.snapshot(50), await self.session(session_id), amount)

    async def resize(self, session_id: int, amount: Amount) -> Session | NotResized:
        if self.fails is not None:
            raise self.fails
        return self._store.resize(session_id, amount, self._store.version(), now_s=50)

    def nudge(self) -> None:
        """There are no followers."""


class Lab:
    """A session of half a GPU, what it holds, and what the probe says."""

    def __init__(self, folder: Path) -> None:
        self.store = Store("sqlite://")
        self.store.open()
        self.store.set_nodes([LAB], now_s=0)
        (session,) = self.store.submit([Request("alice", "", "python", "default", 500, 1000, 1024)], now_s=0)
        self.id = session.id
        placed = Placement("lab", (Share.of(GPU, 500),))
        self.store.commit(Plan(self.store.version(), (StartDecision(session.id, placed),)), now_s=0)
        self.store.move(session.id, SessionState.PREPARING, now_s=0)
        self.store.move(session.id, SessionState.RUNNING, now_s=0)
        self.isolation = Isolation(
            FGPU(data_dir=str(folder / "data"), accounting_dir=str(folder / "shm")), (LAB,)
        )
        self.isolation.open(own_root=True, installation="abc")
        self.isolation.prepare(self.session, [session.id])
        self.queue = OneSession(self.store, session.id)
        self.held_mib = 0
        self.problems: Sequence[str] = ()
        self.driver_mib = 4096
        self.seen: list[tuple[int, int]] = []
        """At each look inside: what the file and what the record allow, in MiB."""

    @property
    def session(self) -> Session:
        found = self.store.session(self.id)
        assert found is not None
        return found

    @property
    def file_mib(self) -> int:
        return limits.read(self.isolation.folder(self.id)).devices[0].memory_mib

    @property
    def record_mib(self) -> int:
        assert self.session.placement is not None
        return self.session.placement.shares[0].memory_mib

    def look(self) -> None:
        self.seen.append((self.file_mib, self.record_mib))

    async def ask(self, milli: int) -> tuple[ResizeState, str | None]:
        """Wish an amount, let the Hub act once, and return what became of it."""
        Resizes(self.store).ask(self.id, Amount(milli), by="alice", now_s=9)
        return await self.act()

    async def act(self) -> tuple[ResizeState, str | None]:
        async def held(session: Session) -> int:
            self.look()
            return self.held_mib * MIB

        async def problems(session: Session, held_to: Limits) -> Sequence[str]:
            self.look()
            # Where the driver limits memory, it is told with the question.
            self.driver_mib = held_to.devices[0].memory_mib
            return self.problems

        resizer = Resizer(
            self.store,
            self.queue,  # type: ignore[arg-type]
            self.isolation,
            SystemClock(),
            held=held,
            problems=problems,
            step_milli=100,
        )
        await resizer.heal((self.session,))
        (wish,) = Resizes(self.store).asked()
        await resizer.act(wish)
        (told,) = Resizes(self.store).of_live()
        assert all(file <= record for file, record in self.seen), self.seen
        return told.state, told.message


@pytest.fixture
def lab(tmp_path: Path, native_parts: Native) -> Iterator[Lab]:
    (tmp_path / "data").mkdir()
    made = Lab(tmp_path)
    yield made
    made.store.close()


async def test_growth_is_recorded_before_the_limits_file_changes(lab: Lab) -> None:
    assert await lab.ask(800) == (ResizeState.DONE, None)
    assert (lab.file_mib, lab.record_mib) == (6528, 6528)


async def test_shrinking_changes_the_limits_file_before_the_record(lab: Lab) -> None:
    assert await lab.ask(200) == (ResizeState.DONE, None)
    assert (lab.file_mib, lab.record_mib, lab.driver_mib) == (1536, 1536, 1536)
    assert (1536, 4096) in lab.seen


async def test_memory_in_use_is_not_taken_away(lab: Lab) -> None:
    lab.held_mib = 3277
    state, message = await lab.ask(200)
    assert (state, message) == (
        ResizeState.REFUSED,
        "The session uses 3.2 GiB of GPU memory: choose at least 0.5, or free memory first.",
    )
    assert (lab.file_mib, lab.record_mib) == (4096, 4096)


@pytest.mark.parametrize("milli", [800, 200])
async def test_unproved_resize_is_undone(lab: Lab, milli: int) -> None:
    lab.problems = ["CUDA reported 1 MiB"]
    state, message = await lab.ask(milli)
    assert state is ResizeState.REFUSED
    assert "could not be put in force (CUDA reported 1 MiB)" in (message or "")
    assert (lab.file_mib, lab.record_mib, lab.driver_mib) == (4096, 4096, 4096)


async def test_limits_file_is_restored_after_a_crash_before_the_record(lab: Lab) -> None:
    lab.queue.fails = StoreUnavailable("away")
    with pytest.raises(StoreUnavailable):
        await lab.ask(200)
    assert (lab.file_mib, lab.record_mib, lab.driver_mib) == (1536, 4096, 1536), (
        "smaller than it may be, which harms nobody else"
    )
    lab.queue.fails = None
    lab.held_mib = 4000
    assert (await lab.act())[0] is ResizeState.REFUSED
    assert (lab.file_mib, lab.record_mib, lab.driver_mib) == (4096, 4096, 4096)


async def test_record_is_put_in_force_after_a_crash_before_the_file(lab: Lab) -> None:
    before = lab.isolation.folder(lab.id)
    kept = limits.read(before)
    assert (await lab.ask(800))[0] is ResizeState.DONE
    limits.change(before, kept)
    Resizes(lab.store).ask(lab.id, Amount(800), by="alice", now_s=9)
    assert await lab.act() == (ResizeState.DONE, None)
    assert (lab.file_mib, lab.record_mib) == (6528, 6528)


async def test_a_session_that_was_parked_since_the_request_is_not_resized_and_told_so(lab: Lab) -> None:
    Resizes(lab.store).ask(lab.id, Amount(300), by="alice", now_s=9)
    lab.store.park(lab.id, 64, now_s=10)
    assert await lab.act() == (
        ResizeState.REFUSED,
        "The session is parked. Resize it when it has its GPU again.",
    )
    assert (lab.file_mib, lab.record_mib) == (4096, 4096)
