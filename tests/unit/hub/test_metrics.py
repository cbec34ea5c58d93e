"""Metrics of queue and GPUs: unknown values are left out, and no user is named."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from fgpu_scheduler import (
    Device,
    EndCause,
    Node,
    Placement,
    Request,
    Session,
    SessionState,
    Share,
    Snapshot,
    Store,
    StoreUnavailable,
)
from fgpuspawner.hub.metrics import OLD_S, HubMetrics
from fgpuspawner.meter.gpu_health import HEALTH, GpuHealth, GpuHealthState

NOW_S = 100_000
FIRST = Device("GPU-1", "a", 0, "A100", 40_960, 4000)
SECOND = Device("GPU-2", "a", 1, "A100", 40_960, 4000)
ASKED = Request("ann", "", "python", "default", 1000, 1000, 1024)
RUNS = Session(
    1,
    ASKED,
    SessionState.RUNNING,
    NOW_S - 500,
    placement=Placement("a", (Share.of(FIRST, 1000),)),
    scheduled_at_s=NOW_S - 460,
)
WAITS = Session(2, replace(ASKED, user="bob"), SessionState.PENDING, NOW_S - 90)
SNAPSHOT = Snapshot(NOW_S, 7, (Node("a", "default", 8000, 65_536, (FIRST, SECOND)),), (RUNS, WAITS))


class AQueue:
    """A queue that is read, or cannot be."""

    database_is_away = False

    def __init__(self) -> None:
        self.found: Snapshot | Exception = SNAPSHOT

    async def snapshot(self) -> Snapshot:
        if isinstance(self.found, Exception):
            self.database_is_away = True
            raise self.found
        return self.found


class Told:
    """Metrics of this queue at an instant that the test sets, as Prometheus reads them."""

    def __init__(self, data: Path) -> None:
        self.queue, self.at_s = AQueue(), 0.0
        self.metrics = HubMetrics(
            self.queue,  # type: ignore[arg-type]
            lambda: (2, 1),
            data=data,
            monotonic=lambda: self.at_s,
        )

    def text(self) -> str:
        registry = CollectorRegistry()
        registry.register(self.metrics)
        return generate_latest(registry).decode()

    def of(self, name: str) -> Mapping[tuple[str, ...], float]:
        """Return the values of one metric by its labels' values, in order of the labels' names."""
        samples = (s for f in text_string_to_metric_families(self.text()) for s in f.samples)
        return {
            tuple(value for _, value in sorted(s.labels.items())): s.value for s in samples if s.name == name
        }


@pytest.fixture
def told(tmp_path: Path) -> Told:
    return Told(tmp_path)


async def test_metrics_have_sessions_waits_and_allocation_of_each_gpu(told: Told) -> None:
    await told.metrics.read()
    sessions = told.of("fgpu_sessions")
    assert sessions["default", "PENDING"] == sessions["default", "RUNNING"] == 1
    assert sessions["default", "PULLING"] == 0
    assert told.of("fgpu_oldest_wait_seconds") == {("default",): 90}
    assert told.of("fgpu_gpu_held_fgpu") == {("0", "A100", "a"): 1, ("1", "A100", "a"): 0}
    assert told.of("fgpu_gpu_memory_held_bytes")["0", "A100", "a"] == 10_240 * 2**20
    assert told.of("fgpu_gpu_capacity_fgpu")["1", "A100", "a"] == 4
    assert told.of("fgpu_node_state") == {("default", "a", "READY"): 1}
    assert told.of("fgpu_engines") == {("yes",): 2, ("no",): 1}


async def test_metrics_have_the_host_memory_of_parked_sessions(told: Told) -> None:
    away = replace(RUNS, id=3, state=SessionState.PARKED, parked_at_s=NOW_S, parked_mib=512)
    told.queue.found = replace(SNAPSHOT, sessions=(RUNS, away))
    await told.metrics.read()
    assert told.of("fgpu_parked_memory_bytes") == {("default", "a"): 512 * 2**20}


async def test_unknown_driver_figures_are_left_out(told: Told, tmp_path: Path) -> None:
    HEALTH.write(tmp_path, GpuHealthState({"GPU-1": GpuHealth(NOW_S, use_percent=50, memory_used_mib=None)}))
    await told.metrics.read()
    assert told.of("fgpu_gpu_busy_ratio") == {("0", "A100", "a"): 0.5}
    assert told.of("fgpu_gpu_memory_used_bytes") == {}
    assert told.of("fgpu_gpu_trouble") == {("0", "A100", "a"): 0}


async def test_unreadable_queue_and_old_readings_have_no_metrics(told: Told) -> None:
    await told.metrics.read()
    told.queue.found = StoreUnavailable("away")
    with pytest.raises(StoreUnavailable):
        await told.metrics.read()
    assert told.of("fgpu_sessions") == {}
    assert told.of("fgpu_database_away") == {(): 1}
    told.queue.found = SNAPSHOT
    await told.metrics.read()
    told.at_s = OLD_S + 1
    assert told.of("fgpu_sessions") == {}


async def test_starts_and_ends_are_counted_by_way_and_cause(told: Told) -> None:
    told.metrics.started(RUNS, way="warm", took_s=0.6)
    told.metrics.ended(replace(RUNS, state=SessionState.TERMINATING, end_cause=EndCause.USER))
    assert told.of("fgpu_wait_seconds_sum") == {("default",): 40}
    assert told.of("fgpu_start_seconds_count") == {("warm",): 1}
    assert told.of("fgpu_sessions_ended_total") == {("USER", "default"): 1}


async def test_database_reads_and_writes_are_counted_separately(told: Told, store: Store) -> None:
    store.on_transaction(told.metrics.transaction)
    store.snapshot(0)
    assert told.of("fgpu_database_seconds_count") == {("read",): 1}
    store.hold_waiting(now_s=0)
    assert told.of("fgpu_database_seconds_count")["write",] == 1
    store.close()
    with pytest.raises(StoreUnavailable):
        store.snapshot(0)
    assert told.of("fgpu_database_seconds_count") == {("read",): 1, ("write",): 1}


async def test_metrics_name_no_user_and_no_image(told: Told) -> None:
    await told.metrics.read()
    told.metrics.started(RUNS, way="cold", took_s=1)
    text = told.text()
    assert not any(name in text for name in ("ann", "bob", "python"))
