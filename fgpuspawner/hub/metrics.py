"""Prometheus metrics at the Hub's ``/hub/metrics``: queue, starts, ends, GPUs. No names of users or images.

Current values are read every `EVERY_S` and cached, so a scrape never waits for the database. Unreadable values are left
out rather than shown as old or 0. Counters restart with the Hub.
"""

from __future__ import annotations

import time
from collections import Counter as Counts
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from prometheus_client import Counter, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import REGISTRY, Collector, CollectorRegistry

from fgpu_scheduler import (
    LIVE,
    FGPUError,
    Queue,
    Session,
    SessionState,
    Snapshot,
    holds_shares,
    parked_mib,
)
from fgpuspawner.concurrency.background import Background
from fgpuspawner.meter.gpu_health import HEALTH, GpuHealthState

EVERY_S = 10
OLD_S = 60
"""Older readings are not shown."""
WAITS_S = (1, 5, 15, 60, 300, 900, 3600, 4 * 3600, 12 * 3600, 24 * 3600, 72 * 3600)
STARTS_S = (0.5, 1, 2, 3, 5, 8, 13, 20, 30, 60, 120, 300, 600)
READS_S = (0.005, 0.02, 0.1, 0.5, 2, 10)
CALLS_S = (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 300)

GPU_LABELS = ("node", "gpu", "model")
DRIVER_FIGURES = (
    ("memory_used_bytes", "Memory in use, as the driver says.", "memory_used_mib", 2**20),
    ("busy_ratio", "Part of the time in which it computed, as the driver says.", "use_percent", 0.01),
    ("power_watts", "Power, as the driver says.", "power_w", 1),
    ("temperature_celsius", "Temperature, as the driver says.", "temperature_c", 1),
    ("ecc_errors", "Uncorrected memory errors since the driver was loaded.", "ecc_errors", 1),
)
"""Metric, help, attribute of `GpuHealth`, and its unit in the metric's."""


@dataclass(frozen=True, slots=True)
class MetricsReading:
    """What was read at a monotonic time."""

    at_s: float
    snapshot: Snapshot
    health: GpuHealthState


class HubMetrics(Collector):
    """The collector that a registry scrapes, and the counters that the Hub updates. One for the Hub."""

    def __init__(
        self,
        queue: Queue,
        answering: Callable[[], tuple[int, int]],
        *,
        data: Path,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._queue = queue
        self._answering = answering
        self._data = data
        self._now_s = monotonic
        self._reading: MetricsReading | None = None
        self._counted = CollectorRegistry()
        self.waits = self._histogram("wait", "From a request to its place on a GPU.", WAITS_S, "group")
        self.starts = self._histogram(
            "start",
            "From the place to a server that answers, with its limits proved. way: warm (from the pool), cold, or "
            "fetched (the image was fetched first).",
            STARTS_S,
            "way",
        )
        self.transactions = self._histogram(
            "database",
            "A transaction of the scheduler's database, with what it waited for. kind: read or write.",
            READS_S,
            "kind",
        )
        self.passes = self._histogram("pass", "Making one plan, and writing it.", READS_S)
        self.forecasts = self._histogram("forecast", "Forecasting for all pending requests.", READS_S)
        self.engine = self._histogram(
            "engine",
            "What the engine takes to fetch an image, and to start or stop a session.",
            CALLS_S,
            "call",
        )
        self.parking = self._histogram(
            "parking",
            "Moving the GPU memory of a session. way: parked (to the host) or resumed (back).",
            STARTS_S,
            "way",
        )
        self.ends = self._counter("sessions_ended", "Sessions that have ended, by cause.", "group", "cause")
        self.resizes = self._counter(
            "resizes", "Requests to resize a running session, by outcome.", "outcome"
        )
        self.actions = self._counter("watchdog_actions", "What the watchdog did to sessions.", "action")

    def _histogram(self, name: str, what: str, buckets: Sequence[float], *labels: str) -> Histogram:
        return Histogram(f"fgpu_{name}_seconds", what, labels, buckets=buckets, registry=self._counted)

    def _counter(self, name: str, what: str, *labels: str) -> Counter:
        return Counter(f"fgpu_{name}", what, labels, registry=self._counted)

    def begin(self, background: Background) -> None:
        REGISTRY.register(self)
        background.every(EVERY_S, self.read, failed="The queue could not be read for the metrics")

    def started(self, session: Session, *, way: str, took_s: float) -> None:
        """Record that a session has started: its wait until it was placed, and the duration of its launch."""
        if session.scheduled_at_s is not None:
            waited_s = max(0, session.scheduled_at_s - session.waits_since_s)
            self.waits.labels(session.request.resource_group).observe(waited_s)
        self.starts.labels(way).observe(took_s)

    def transaction(self, kind: str, took_s: float) -> None:
        """Record the end of a database transaction. From any thread."""
        self.transactions.labels(kind).observe(took_s)

    def ended(self, session: Session) -> None:
        cause = "unknown" if session.end_cause is None else session.end_cause.value
        self.ends.labels(session.request.resource_group, cause).inc()

    async def read(self) -> None:
        """Read the current values; raises FGPUError if they cannot be read; the old ones are no longer shown."""
        try:
            snapshot = await self._queue.snapshot()
        except FGPUError:
            self._reading = None
            raise
        self._reading = MetricsReading(self._now_s(), snapshot, HEALTH.read(self._data))

    def describe(self) -> Iterable[Metric]:
        """Return nothing, so that registering does not collect."""
        return ()

    def collect(self) -> Iterator[Metric]:
        yield from self._counted.collect()
        away = float(self._queue.database_is_away)
        yield _gauge("database_away", "1 while the scheduler's database does not answer.", (), [((), away)])
        answer, silent = self._answering()
        machines = [(("yes",), answer), (("no",), silent)]
        yield _gauge("engines", "Machines of the engine, by whether they answer.", ("answering",), machines)
        reading = self._reading
        if reading is not None and self._now_s() - reading.at_s <= OLD_S:
            yield from of_queue(reading.snapshot)
            yield from of_gpus(reading.snapshot, reading.health)


def _gauge(
    name: str, what: str, labels: Sequence[str], values: Iterable[tuple[Sequence[str], float]] = ()
) -> GaugeMetricFamily:
    found = GaugeMetricFamily(f"fgpu_{name}", what, labels=labels)
    for own, value in values:
        found.add_metric(own, value)
    return found


def of_queue(snapshot: Snapshot) -> Iterator[Metric]:
    """Return each resource group's sessions and oldest wait, and the state of each node."""
    groups = sorted(
        {n.resource_group for n in snapshot.nodes} | {s.request.resource_group for s in snapshot.sessions}
    )
    counts = Counts((s.request.resource_group, s.state) for s in snapshot.sessions)
    oldest = dict.fromkeys(groups, snapshot.now_s)
    for session in snapshot.sessions:
        if session.state is SessionState.PENDING:
            group = session.request.resource_group
            oldest[group] = min(oldest[group], session.waits_since_s)
    states = [((group, state.value), counts[group, state]) for group in groups for state in LIVE]
    yield _gauge("sessions", "Live sessions.", ("group", "state"), states)
    waits = [((group,), snapshot.now_s - since_s) for group, since_s in oldest.items()]
    yield _gauge(
        "oldest_wait_seconds", "Wait of the oldest pending request; 0: none is pending.", ("group",), waits
    )
    nodes = [((node.id, node.resource_group, node.state.value), 1) for node in snapshot.nodes]
    parked = parked_mib(snapshot)
    kept = [((node.id, node.resource_group), parked.get(node.id, 0) * 2**20) for node in snapshot.nodes]
    yield _gauge(
        "parked_memory_bytes", "Host memory with the GPU memory of parked sessions.", ("node", "group"), kept
    )
    yield _gauge("node_state", "1 for the state that a node is in.", ("node", "group", "state"), nodes)


def of_gpus(snapshot: Snapshot, health: GpuHealthState) -> Iterator[Metric]:
    """Return each GPU's capacity, what sessions hold of it, and the driver's figures."""

    def family(name: str, what: str) -> GaugeMetricFamily:
        return _gauge(f"gpu_{name}", what, GPU_LABELS)

    capacity = family("capacity_fgpu", "fGPU that a GPU is.")
    held = family("held_fgpu", "fGPU that sessions hold.")
    shares = family("sessions", "Sessions that hold a part of it.")
    memory = family("memory_bytes", "Memory that it has.")
    entitled = family("memory_held_bytes", "Memory that the sessions' shares are.")
    trouble = family("trouble", "1 where an administrator has to see to it (page Machines).")
    figures = {attribute: (family(name, what), unit) for name, what, attribute, unit in DRIVER_FIGURES}
    of_device: dict[str, list[tuple[int, int]]] = {}
    for session in snapshot.sessions:
        if session.placement is not None and holds_shares(session):
            for share in session.placement.shares:
                of_device.setdefault(share.device_uuid, []).append((share.fgpu_milli, share.memory_mib))
    for device in (d for node in snapshot.nodes for d in node.devices):
        labels = [device.node_id, str(device.index), device.model]
        own = of_device.get(device.uuid, [])
        capacity.add_metric(labels, device.capacity_milli / 1000)
        held.add_metric(labels, sum(milli for milli, _ in own) / 1000)
        shares.add_metric(labels, len(own))
        memory.add_metric(labels, device.memory_mib * 2**20)
        entitled.add_metric(labels, sum(mib for _, mib in own) * 2**20)
        known = health.of(device.uuid, snapshot.now_s)
        if known is None:
            continue
        trouble.add_metric(labels, float(bool(known.problem)))
        for attribute, (figure, unit) in figures.items():
            if (value := getattr(known, attribute)) is not None:
                figure.add_metric(labels, value * unit)
    yield from (capacity, held, shares, memory, entitled, trouble)
    yield from (figure for figure, _ in figures.values())
