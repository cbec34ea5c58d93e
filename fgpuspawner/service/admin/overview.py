"""The administrators' overview: use, queues, idle sessions, and problems with links to where they are fixed."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Sequence
from typing import Literal
from urllib.parse import quote

from fgpu_scheduler import (
    UP,
    Audit,
    AuditLine,
    Device,
    FirstForecasts,
    ForecastAccuracy,
    Node,
    NodeState,
    Session,
    SessionState,
    Store,
    StoreUnavailable,
    SystemClock,
    forecast_accuracy,
    format_milli,
    parked_mib,
)
from fgpuspawner.isolation.choice import VERDICTS, Verdict
from fgpuspawner.meter.usage_report import DAY_S, HOUR_S, HOURS, WEEK_S, RecentUse
from fgpuspawner.service.admin import objects
from fgpuspawner.service.admin.base import AdminApi, AdminPage
from fgpuspawner.service.admin.charts import Chart, Series
from fgpuspawner.service.admin.nodes import state_words
from fgpuspawner.service.admin.objects import Overview, Trouble
from fgpuspawner.service.admin.queue import queues_object
from fgpuspawner.service.handler import Handler
from fgpuspawner.service.model import Site, Viewer, World, meter_of
from fgpuspawner.service.problems import bad_argument
from fgpuspawner.text.sessions import session_name

IDLE_S = 300
"""Seconds without work after which a session is listed as idle, where no rule of its group says otherwise."""


def overview_object(
    world: World,
    viewer: Viewer,
    site: Site,
    *,
    lately: RecentUse | None,
    foretold: ForecastAccuracy | None = None,
    verdicts: Iterable[Verdict] = (),
    strikes: Sequence[AuditLine] = (),
    others: Iterable[Trouble] = (),
) -> objects.Overview:
    """Return the overview. ``lately`` is None if it takes too long to compute; ``others`` are more problems.

    ``foretold`` is the accuracy of recent forecasts, or None.
    """
    unused = idle(world)
    return objects.Overview(
        gpus=gpus_now(world, {one["id"] for one in unused}),
        use=None if lately is None else _use(lately, world),
        queues=_queues(world, viewer, site),
        forecasts=None if foretold is None else _forecasts(foretold),
        running=sum(s.state in UP for s in world.snapshot.sessions),
        parked=sum(s.state is SessionState.PARKED for s in world.snapshot.sessions),
        parked_mib=sum(parked_mib(world.snapshot).values()),
        idle=unused,
        problems=[*others, *problems(world, verdicts, strikes)],
        simulated=world.simulated(),
    )


def _use(lately: RecentUse, world: World) -> objects.Use:
    gpus = len(world.devices)

    def percent(held: float | None) -> int | None:
        # More than the total: GPUs have been removed since.
        return min(100, round(100 * held / gpus)) if gpus and held is not None else None

    return objects.Use(
        gpus=gpus,
        day=objects.Span.of(lately.day, percent=percent(lately.day.gpus)),
        week=objects.Span.of(lately.week, percent=percent(lately.week.gpus)),
        hours=list(lately.hours),
    )


def gpus_now(world: World, idle_ids: Collection[int]) -> list[objects.GpuNow]:
    """Return each GPU as it is now; ``idle_ids`` are the idle sessions."""
    return [
        _gpu_now(world, node, device, idle_ids) for node in world.snapshot.nodes for device in node.devices
    ]


def _gpu_now(world: World, node: Node, device: Device, idle_ids: Collection[int]) -> objects.GpuNow:
    held = world.held.get(device.uuid, ())
    health = world.gpus.of(device.uuid, world.snapshot.now_s)
    meters = [
        (live.now, len(s.placement.shares)) for s, _ in held if (live := meter_of(s, world)) and s.placement
    ]

    def total(name: str) -> float | None:
        """Return the sum over the sessions; a session's use is spread evenly over its GPUs. None if one is unknown."""
        known = [(value, gpus) for now, gpus in meters if (value := getattr(now, name)) is not None]
        return sum(value / gpus for value, gpus in known) if len(known) == len(held) else None

    used: float | None = None if health is None else health.use_percent
    if used is None and (held or device.simulated):
        used = total("sm_percent")
    lent = total("compute_lent_percent") if held else None
    return objects.GpuNow(
        node=node.id,
        index=device.index,
        uuid=device.uuid,
        fgpu_total=format_milli(device.capacity_milli),
        fgpu_held=format_milli(sum(share.fgpu_milli for _, share in held)),
        fgpu_idle=format_milli(sum(share.fgpu_milli for s, share in held if s.id in idle_ids)),
        used_percent=None if used is None else round(min(100.0, used), 1),
        lent_percent=None if lent is None else round(min(100.0, lent), 1),
        in_use=node.state is NodeState.READY and not device.cordoned,
    )


def _forecasts(foretold: ForecastAccuracy) -> objects.PastForecasts:
    return objects.PastForecasts(
        starts=foretold.starts,
        inside_percent=round(100 * foretold.inside),
        late_percent=round(100 * foretold.late),
        told_wait_s=round(foretold.told_wait_s),
        true_wait_s=round(foretold.true_wait_s),
    )


def _queues(world: World, viewer: Viewer, site: Site) -> list[objects.QueueSummary]:
    found = []
    for queue in queues_object(world, viewer, site, most=0).queues:
        starts = [f.expected_start_at_s for f, _ in world.queues.get(queue.group, ())]
        known = [at_s for at_s in starts if at_s is not None]
        last, unknown = max(known, default=None), len(starts) - len(known)
        found.append(objects.QueueSummary.of(queue, last_start_at_s=last, without_estimate=unknown))
    return found


def idle(world: World) -> list[objects.Idle]:
    """Return the idle running sessions, the longest idle first."""
    found = [
        (since_s, s)
        for s in world.snapshot.sessions
        if s.state is SessionState.RUNNING and (since_s := _idle_since_s(s, world)) is not None
    ]
    return [
        objects.Idle.of(
            s,
            user=s.request.user,
            display_name=session_name(s.request),
            fgpu=format_milli(s.placement.fgpu_milli if s.placement else 0),
            idle_since_s=since_s,
        )
        for since_s, s in sorted(found, key=lambda one: (one[0], one[1].id))
    ]


def _idle_since_s(session: Session, world: World) -> int | None:
    since_s = session.idle_since_s
    live = meter_of(session, world)
    holds_gpu = session.placement is not None and session.placement.shares
    if since_s is None and holds_gpu and live is not None and live.now.sm_percent is not None:
        for point in reversed(live.points):
            # An unknown state is not idle.
            if point.sm_percent != 0:
                break
            since_s = point.at_s
    return since_s if since_s is not None and world.snapshot.now_s - since_s >= IDLE_S else None


Level = Literal["bad", "warn", "off"]


def problem(text: str, link: str | None = None, to: str = "", *, level: Level = "bad") -> Trouble:
    """Return a problem: its text, and the address of the page where it is fixed."""
    return Trouble(level=level, text=text, link=link, to=to)


def problems(world: World, verdicts: Iterable[Verdict], strikes: Sequence[AuditLine]) -> list[Trouble]:
    """Return the problems, the worst first; then what administrators took out of use."""
    bad: list[Trouble] = []
    off: list[Trouble] = []
    unknown = 0
    for node in world.snapshot.nodes:
        at = f"admin/nodes#node-{node.id}"
        words = f"Machine {node.id} {state_words(node)}"
        if node.state in (NodeState.LOST, NodeState.GONE):
            bad.append(problem(words, at, "Machines"))
        elif node.state is NodeState.CORDONED:
            off.append(problem(words, at, "Machines", level="off"))
        for device in node.devices:
            health = world.gpus.of(device.uuid, world.snapshot.now_s)
            name = f"GPU {device.index} of {node.id}"
            unknown += health is None and not device.simulated and node.state is NodeState.READY
            if health is not None and health.problem:
                bad.append(problem(f"{name}: {health.problem}", at, "Machines"))
            if device.cordoned:
                why = f": {device.cordon_reason}" if device.cordon_reason else ""
                off.append(problem(f"{name} takes no new sessions{why}", at, "Machines", level="off"))
    if unknown:
        gpus = "1 GPU" if unknown == 1 else f"{unknown} GPUs"
        bad.append(problem(f"The state of {gpus} is not known", "admin/nodes", "Machines", level="warn"))
    nodes = {node.id for node in world.snapshot.nodes}
    bad += [
        problem(
            f"On machine {one.node_id} the GPU limits were not in force in session {one.session_id}",
            f"admin/nodes#node-{one.node_id}",
            "Machines",
        )
        for one in verdicts
        if one.problems and one.node_id in nodes
    ]
    if strikes:
        some = "1 time" if len(strikes) == 1 else f"{len(strikes)} times"
        text = f"The watchdog found sessions above their limits {some} in the last day"
        bad.append(problem(text, "admin/audit?action=watchdog", "Audit log"))
    warned = [s for s in world.snapshot.sessions if s.message and s.state in UP]
    bad += [
        problem(f"Session {s.id} of {s.request.user}: {s.message}", f"end/{s.id}", "End it", level="warn")
        for s in warned[:MOST_WARNED]
    ]
    if len(warned) > MOST_WARNED:
        more = f"{len(warned) - MOST_WARNED} more running sessions are warned"
        bad.append(problem(more, "admin/nodes", "Machines", level="warn"))
    return bad + off


MOST_WARNED = 5


def charts(use: objects.Use, hours: int) -> list[Chart]:
    """Return the charts of the last hours: held and used GPUs, waiting requests, and waits."""
    shown = use.hours[-hours:]

    def chart(title: str, unit: Literal["", "s"], *series: Series, top: float = 0) -> Chart:
        kind: Literal["steps", "bars"] = "bars" if unit else "steps"
        return Chart(title, kind, unit, [hour.from_s for hour in shown], HOUR_S, series, top)

    def line(name: str, colour: Literal["accent", "second", "warn"], field: str) -> Series:
        return Series(name, colour, [getattr(hour, field) for hour in shown])

    gpus = line("Held", "accent", "held"), line("Used", "second", "used")
    return [
        chart("GPUs", "", *gpus, top=use["gpus"]),
        chart("Waiting requests", "", line("Waiting", "accent", "waiting"), top=1),
        chart("Mean wait before a start", "s", line("Wait", "accent", "wait_mean_s")),
    ]


def gpu_parts(gpu: objects.GpuNow) -> list[list[tuple[str, float, float]]]:
    """Return the parts of a GPU's two bars, each with its kind, begin and width in percent: its slices, and its use."""
    whole, held, idle = (float(gpu[f"fgpu_{name}"]) for name in ("total", "held", "idle"))
    whole = max(whole, held)
    used = gpu["used_percent"] or 0
    lent = min(used, gpu["lent_percent"] or 0)
    slices = [("held", held - idle), ("idle", idle), ("free" if gpu["in_use"] else "off", whole - held)]
    use = [("used", used - lent), ("lent", lent)]
    return [_placed(slices, whole), _placed(use, 100)]


def _placed(parts: Sequence[tuple[str, float]], whole: float) -> list[tuple[str, float, float]]:
    found, at = [], 0.0
    for kind, width in parts:
        found.append((kind, round(100 * at / whole, 2), round(100 * width / whole, 2)))
        at += width
    return [part for part in found if part[2]]


HOURS_OF = {"day": HOURS, "week": WEEK_S // HOUR_S}
"""The spans of the charts, in hours."""
SHOWN_GPUS = 32
SHOWN_IDLE = 5
MOST_STRIKES = 100


async def overview(handler: Handler) -> Overview:
    """Return the current overview, from the last good reading if the database cannot be read.

    Raises:
        StoreUnavailable: the database cannot be read, and there is no earlier reading.
    """
    service, now_s = handler.service, SystemClock().now_s()
    reader, settings = service.reader, service.settings
    others: list[Trouble] = []
    strikes: tuple[AuditLine, ...] = ()
    lately: RecentUse | None = None
    foretold: ForecastAccuracy | None = None
    try:
        world = await reader.world()
        strikes = await reader.read_store(lambda store: _strikes(store, now_s))
        foretold = await reader.read_store(lambda store: forecast_accuracy(FirstForecasts(store).newest()))
        lately = await reader.recent_use()
    except TimeoutError:
        pass
    except StoreUnavailable:
        last = reader.last_world
        if last is None:
            raise
        world = last
        others.append(problem("The scheduler's database cannot be read: all here is as it was last"))
    others += [problem(words) for words in await asyncio.to_thread(service.alarms)]
    if reader.images.problem:
        others.append(problem(f"The image catalogue: {reader.images.problem}", "admin/images", "Images"))
    return overview_object(
        world,
        handler.viewer,
        service.site,
        lately=lately,
        foretold=foretold,
        verdicts=await asyncio.to_thread(VERDICTS.read, settings.data_path()),
        strikes=strikes,
        others=others,
    )


def _strikes(store: Store, now_s: int) -> tuple[AuditLine, ...]:
    lines = Audit(store).lines(limit=MOST_STRIKES, action="watchdog")
    return tuple(line for line in lines if line.at_s >= now_s - DAY_S)


class OverviewPage(AdminPage):
    """The overview. Its list of problems includes the alarms at the top of every other administrators' page."""

    shows_alarms = False

    async def get(self) -> None:
        span = self.get_query_argument("span", "day")
        if span not in HOURS_OF:
            raise bad_argument("span", f"use one of {', '.join(HOURS_OF)}")
        found = await overview(self)
        use = found["use"]
        self.render(
            "admin_overview.html",
            found=found,
            span=span,
            charts=[] if use is None else charts(use, HOURS_OF[span]),
            parts=gpu_parts,
            shown_gpus=SHOWN_GPUS,
            shown_idle=SHOWN_IDLE,
            quote=quote,
        )


class OverviewApi(AdminApi):
    async def get(self) -> None:
        self.answer(await overview(self))
