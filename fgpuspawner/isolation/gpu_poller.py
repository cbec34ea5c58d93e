"""Periodic snapshots of the GPUs: the processes on each device, what they use, and which session owns each.

1. `Drivers` knows the NVML library behind each device, and keeps one child process for each library.
2. `GpuPoller` has a thread for each library that takes snapshots, so neither a busy Hub nor a slow machine delays
   another.
3. The observers (watchdog, meter, idle check) get each snapshot in the Hub's event loop.
"""

from __future__ import annotations

import asyncio
import logging
import random
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from fgpu_scheduler import (
    UP,
    FGPUError,
    Session,
    holds_shares,
)
from fgpuspawner.concurrency.background import Background
from fgpuspawner.isolation.manager import Isolation
from fgpuspawner.isolation.native import machine_folder
from fgpuspawner.isolation.nvml_reader import NVML, DeviceUse, NvmlReader

log = logging.getLogger("fgpu.poller")

LONGEST_PAUSE = 4
"""No pause is longer than this many times the mean."""
LONGEST_SNAPSHOT_S = 5.0
"""A snapshot of a healthy driver takes less."""
MOST_WAITING = 1000
"""Snapshots that are kept for a busy Hub; beyond that the oldest are dropped."""


class Machines(Protocol):
    """What is used of the engine here. Its methods block."""

    def sessions_of(self, pids: Sequence[int], node_id: str | None = None) -> Mapping[int, int]:
        """Return the session of each process of a node's machine that runs in a session."""

    def gpu_reader(self, node_id: str) -> NvmlReader:
        """Return the reader of the GPUs of a node on another machine."""


@dataclass(frozen=True, slots=True)
class NvmlSource:
    """The NVML library of this machine, of a simulated machine, or of another machine's node."""

    library: str
    node_id: str | None = None
    simulated: bool = False

    def __str__(self) -> str:
        return self.library if self.node_id is None else f"node {self.node_id}"

    @property
    def has_no_driver(self) -> bool:
        """Whether no program can use its GPUs: they are simulated, and the simulated driver is not built."""
        return self.simulated and self.node_id is None and not Path(self.library).exists()


class Drivers:
    """Keeps one child process for each library, shared by all callers. One for the Hub."""

    def __init__(
        self,
        isolation: Isolation,
        machines: Machines,
        *,
        make_reader: Callable[[str], NvmlReader] = NvmlReader,
    ) -> None:
        self._isolation = isolation
        self._machines = machines
        self._make_reader = make_reader
        self._readers: dict[NvmlSource, NvmlReader] = {}

    def sources(self) -> dict[NvmlSource, list[str]]:
        """Return the configured devices by the library that reads them; close readers of removed nodes."""
        found: dict[NvmlSource, list[str]] = {}
        for node in self._isolation.nodes:
            elsewhere = self._isolation.is_elsewhere(node.id)
            for device in node.devices:
                folder = machine_folder(self._isolation.host.data, node.id)
                library = str(folder / "libnvidia-ml.so.1") if device.simulated else NVML
                source = NvmlSource(library, node.id if elsewhere else None, device.simulated)
                found.setdefault(source, []).append(device.uuid)
        for source in [source for source in self._readers if source.node_id and source not in found]:
            self._readers.pop(source).close()
        return found

    def reader(self, source: NvmlSource) -> NvmlReader:
        """Return the reader of a library; raises FGPUError if its node is no longer configured."""
        if source not in self._readers:
            self._readers[source] = (
                self._make_reader(source.library)
                if source.node_id is None
                else self._machines.gpu_reader(source.node_id)
            )
        return self._readers[source]

    def owners(self, source: NvmlSource, pids: Sequence[int]) -> Mapping[int, int]:
        """Return the session of each process that runs in a session. Blocks.

        Raises:
            FGPUError: the engine cannot tell.
        """
        return self._machines.sessions_of(pids, source.node_id)

    def close(self) -> None:
        for reader in self._readers.values():
            reader.close()


@dataclass(frozen=True, slots=True)
class GpuSnapshot:
    """One snapshot of the GPUs behind one NVML library.

    ``at_s`` is a monotonic time. ``devices`` has each device's use, or why it is unknown. ``owners`` maps a process to
    its session.
    """

    source: NvmlSource
    at_s: float
    devices: Mapping[str, DeviceUse | str]
    owners: Mapping[int, int]


Observer = Callable[[GpuSnapshot, Sequence[Session]], Awaitable[None]]
"""Called with each snapshot and all live sessions."""


def pause_s(every_s: float) -> float:
    """Return a random pause before the next snapshot, in seconds, with mean ``every_s``.

    Exponential pauses have no memory: a session that was just observed cannot tell when it is observed next.
    """
    return min(random.SystemRandom().expovariate(1 / every_s), LONGEST_PAUSE * every_s)


class GpuPoller:
    """Takes snapshots wherever a session runs, until it is closed. One for the Hub."""

    def __init__(
        self, drivers: Drivers, live: Callable[[], Awaitable[Sequence[Session]]], *, every_s: float
    ) -> None:
        self._drivers = drivers
        self._live = live
        self._every_s = every_s
        self._pending: deque[GpuSnapshot] = deque(maxlen=MOST_WAITING)
        self._changed = threading.Condition()
        self._wanted: Mapping[NvmlSource, frozenset[int]] = {}
        self._urgent: set[NvmlSource] = set()
        self._due_at_s: dict[NvmlSource, float] = {}
        #: Owners at the last snapshot: nothing else tells the session of a process that has ended since.
        self._owners: dict[NvmlSource, Mapping[int, int]] = {}
        self._threads: dict[NvmlSource, threading.Thread] = {}
        self._closed = False

    def begin(self, background: Background, observers: Collection[Observer]) -> None:
        """Call these observers with every snapshot, one snapshot after the other."""
        loop, news = asyncio.get_running_loop(), asyncio.Event()

        def tell() -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(news.set)

        self._news = tell
        background.every(
            self._every_s,
            lambda: self.deliver(observers),
            failed="What was seen of the GPUs could not be judged yet",
            wake=news,
            level=logging.ERROR,
        )

    async def deliver(self, observers: Collection[Observer]) -> None:
        """Deliver the snapshots taken since the last round, and start a thread for every machine in use."""
        live = await self._live()
        self._start_threads(live)
        while self._pending:
            snapshot = self._pending.popleft()
            for observe in observers:
                try:
                    await observe(snapshot, live)
                except FGPUError as e:
                    log.error("What was seen at %s could not be judged: %s", snapshot.source, e)
                except Exception:
                    log.exception("What was seen at %s could not be judged", snapshot.source)

    def take_within(self, source: NvmlSource, after_s: float) -> None:
        """Take the next snapshot of this library within ``after_s`` seconds."""
        with self._changed:
            self._due_at_s[source] = time.monotonic() + after_s
            self._changed.notify_all()

    def close(self) -> None:
        """Stop taking snapshots. One in progress ends when its driver is closed."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    # -- in the threads -----------------------------------------------------------------------------------

    def _start_threads(self, live: Sequence[Session]) -> None:
        wanted = {source: on_gpus(uuids, live) for source, uuids in self._drivers.sources().items()}
        with self._changed:
            self._urgent |= {p for p, own in wanted.items() if own - self._wanted.get(p, frozenset())}
            self._wanted = wanted
            self._changed.notify_all()
        for source, own in wanted.items():
            if own and source not in self._threads:
                thread = threading.Thread(target=self._poll, args=(source,), name="fgpu-poller", daemon=True)
                self._threads[source] = thread
                thread.start()

    def _poll(self, source: NvmlSource) -> None:
        since_us: dict[str, int] = {}
        while self._pause(source):
            snapshot = self.take(source, since_us)
            seen = {uuid: use.seen_us for uuid, use in snapshot.devices.items() if isinstance(use, DeviceUse)}
            since_us.update(seen)
            self._pending.append(snapshot)
            self._news()

    def _pause(self, source: NvmlSource) -> bool:
        """Wait until the next snapshot is due, sooner if a session is new here; return whether to take it."""
        with self._changed:
            until_s = time.monotonic() + pause_s(self._every_s)
            while not self._closed and source not in self._urgent:
                left_s = min(until_s, self._due_at_s.get(source, until_s)) - time.monotonic()
                if left_s <= 0:
                    break
                self._changed.wait(left_s)
            self._changed.wait_for(lambda: self._closed or self._wanted.get(source))
            self._urgent.discard(source)
            if self._due_at_s.get(source, 0.0) <= time.monotonic():
                self._due_at_s.pop(source, None)
            return not self._closed

    def take(self, source: NvmlSource, since_us: Mapping[str, int]) -> GpuSnapshot:
        """Take one snapshot. A device that cannot be read gets a reason, never an empty result."""
        uuids = self._drivers.sources().get(source, [])
        owners: Mapping[int, int] = {}
        found: Mapping[str, DeviceUse | str]
        try:
            if source.has_no_driver:
                words = "it is simulated, and nothing simulates its driver"
                return GpuSnapshot(source, time.monotonic(), dict.fromkeys(uuids, words), {})
            found = self._drivers.reader(source).device_uses(uuids, since_us)
            uses = [use for use in found.values() if isinstance(use, DeviceUse)]
            pids = sorted({p.pid for use in uses for p in use.processes})
            known = {**self._owners.get(source, {}), **self._drivers.owners(source, pids)}
            owners = self._owners[source] = {pid: known[pid] for pid in pids if pid in known}
        except FGPUError as e:
            found = dict.fromkeys(uuids, str(e))
        except Exception as e:
            log.exception("The GPUs at %s could not be looked at", source)
            found = dict.fromkeys(uuids, f"it could not be looked at ({e!r})")
        return GpuSnapshot(source, time.monotonic(), found, owners)


def on_gpus(uuids: Collection[str], live: Sequence[Session]) -> frozenset[int]:
    """Return the sessions with a running server and with one of these GPUs, also the parked ones."""
    return frozenset(s.id for s in live if s.state in UP and not s.device_uuids.isdisjoint(uuids))


def running_on(uuids: Collection[str], live: Sequence[Session]) -> frozenset[int]:
    """Return the sessions that hold shares of these GPUs and whose server runs."""
    return on_gpus(uuids, [s for s in live if holds_shares(s)])
