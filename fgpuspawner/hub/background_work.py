"""The periodic work of a running Hub: observers of GPUs and disks, images, notices, metrics and retention."""

from __future__ import annotations

import asyncio
import atexit
import functools

from fgpu_scheduler import Meters, Retention, SystemClock
from fgpuspawner.hub.compute_watch import ComputeWatch
from fgpuspawner.hub.disks import SessionDisks, close_machine
from fgpuspawner.hub.gpu_observers import CodeMemoryWatch, GpuHealthWatch
from fgpuspawner.hub.image_worker import ImageWorker
from fgpuspawner.hub.notices import Notices
from fgpuspawner.hub.retention import begin_retention
from fgpuspawner.hub.runtime import Runtime
from fgpuspawner.hub.session_probes import slots_of
from fgpuspawner.hub.watchdog import Watchdog
from fgpuspawner.isolation.gpu_poller import GpuPoller
from fgpuspawner.meter.disk import DiskLimit, DiskLimits
from fgpuspawner.meter.sampler import Sampler


def begin_background_work(runtime: Runtime) -> None:
    """Begin all periodic work of a Hub that has started to schedule. In the Hub's event loop."""
    settings, clock, background = runtime.settings, SystemClock(), runtime.background
    data, every_s = settings.data_path(), runtime.poll_every_s
    watchdog = Watchdog(
        runtime.isolation,
        runtime.queue,
        runtime.audit,
        every_s=settings.watchdog_every_s,
        tolerance_mib=settings.watchdog_tolerance_mib,
    )
    sampler = Sampler(
        runtime.isolation,
        runtime.queue,
        Meters(runtime.store),
        clock,
        data=data,
        every_s=settings.meter_every_s,
        poll_every_s=every_s,
        parks_at_s=lambda session_id: runtime.parker.soon.get(session_id),
    )
    sampler.begin(background)
    GpuHealthWatch(runtime.drivers, clock, data=data).begin(background)
    poller = GpuPoller(runtime.drivers, runtime.queue.live, every_s=every_s)
    ask = functools.partial(slots_of, runtime.engine, runtime.isolation)
    code = CodeMemoryWatch(runtime.isolation, ask, snapshot_soon=poller.take_within)
    compute = ComputeWatch(
        runtime.queue,
        runtime.audit,
        ask,
        snapshot_soon=poller.take_within,
        ends=settings.watchdog_compute == "end",
    )
    watches = (watchdog.observe,) if runtime.engine.capabilities.sees_processes else ()
    poller.begin(
        background,
        (
            *watches,
            compute.observe,
            code.observe,
            runtime.gpu_idle_times.observe,
            sampler.observe,
            runtime.parker.observe,
        ),
    )
    atexit.register(poller.close)
    background.every(
        settings.watchdog_every_s,
        lambda: asyncio.to_thread(runtime.isolation.trim_files),
        failed="What sessions write could not be cut back",
    )
    ImageWorker(
        runtime.store,
        runtime.engine,
        catalogue=lambda: runtime.catalogue,
        refresh=runtime.images.refresh,
        quota=settings.image_quota(),
    ).begin(background)
    disk_limits = DiskLimits(
        DiskLimit(settings.session_disk_mib, settings.session_files),
        DiskLimit(settings.home_disk_mib, settings.home_files),
        settings.disk_grace_s if settings.disk_over == "end" else None,
    )
    SessionDisks(
        runtime.engine,
        runtime.queue,
        disk_limits,
        data=data,
        every_s=settings.disk_every_s,
        close=lambda why: asyncio.to_thread(close_machine, runtime.store, runtime.isolation, why),
    ).begin(background)
    runtime.metrics.begin(background)
    runtime.inventory.begin(background)
    runtime.resizer.begin(background)
    runtime.parker.begin(background)
    begin_retention(background, Retention(runtime.store), clock, days=settings.history_days)
    runtime.prefetch.begin(background)
    runtime.image_watch.begin()
    Notices(
        runtime.store,
        settings.notice_command,
        clock,
        data=data,
        site_name=settings.site_name,
    ).begin(background)
    runtime.engine.begin()
