"""The administrators' overview: use, queues, idle sessions, and problems with links to where they are fixed."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Literal
from urllib.parse import quote

from fgpu_scheduler import (
    UP,
    Audit,
    AuditLine,
    FirstForecasts,
    ForecastAccuracy,
    NodeState,
    Session,
    SessionState,
    Store,
    StoreUnavailable,
    SystemClock,
    forecast_accuracy,
    format_milli,
)
from fgpuspawner.isolation.choice import VERDICTS, Verdict
from fgpuspawner.meter.usage_report import DAY_S, RecentUse
from fgpuspawner.service.admin import objects
from fgpuspawner.service.admin.base import AdminApi, AdminPage
from fgpuspawner.service.admin.nodes import state_words
from fgpuspawner.service.admin.objects import Overview, Trouble
from fgpuspawner.service.admin.queue import queues_object
from fgpuspawner.service.handler import Handler
from fgpuspawner.service.model import Site, Viewer, World, meter_of
from fgpuspawner.text.sessions import session_name

IDLE_S = 300
"""Seconds without work after which a session is listed as idle, where no rule of its group says otherwise."""


def overview_object(
    world: World,
    viewer: Viewer,
    site: Site,
    *,
    now_s: int,
    lately: RecentUse | None,
    foretold: ForecastAccuracy | None = None,
    verdicts: Iterable[Verdict] = (),
    strikes: Sequence[AuditLine] = (),
    others: Iterable[Trouble] = (),
) -> objects.Overview:
    """Return the overview. ``lately`` is None if it takes too long to compute; ``others`` are more problems.

    ``foretold`` is the accuracy of recent forecasts, or None.
    """
    return objects.Overview(
        use=None if lately is None else _use(lately, world),
        queues=_queues(world, viewer, site, now_s),
        forecasts=None if foretold is None else _forecasts(foretold),
        running=sum(s.state in UP for s in world.snapshot.sessions),
        idle=idle(world),
        problems=[*others, *problems(world, verdicts, strikes)],
        simulated=world.simulated(),
    )


def _use(lately: RecentUse, world: World) -> objects.Use:
    gpus = len(world.devices)

    def percent(held: float) -> int | None:
        # More than the total: GPUs have been removed since.
        return min(100, round(100 * held / gpus)) if gpus else None

    return objects.Use(
        gpus=gpus,
        day=objects.Span.of(lately.day, percent=percent(lately.day.gpus)),
        week=objects.Span.of(lately.week, percent=percent(lately.week.gpus)),
        hours_percent=[percent(held) for held in lately.hours],
        days_percent=[percent(held) for held in lately.days],
    )


def _forecasts(foretold: ForecastAccuracy) -> objects.PastForecasts:
    return objects.PastForecasts(
        starts=foretold.starts,
        inside_percent=round(100 * foretold.inside),
        late_percent=round(100 * foretold.late),
        told_wait_s=round(foretold.told_wait_s),
        true_wait_s=round(foretold.true_wait_s),
    )


def _queues(world: World, viewer: Viewer, site: Site, now_s: int) -> list[objects.QueueSummary]:
    found = []
    for queue in queues_object(world, viewer, site, now_s=now_s, most=0).queues:
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
            fgpu=format_milli(sum(share.fgpu_milli for share in s.placement.shares) if s.placement else 0),
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
    room = await asyncio.to_thread(reader.room)
    danger = settings.danger_of_sharing(
        saves_images=reader.engine.saves_images, subdomain_host=service.site.hub_host
    )
    found = None if room is None else room.words(settings.data_path())
    others += [problem(words) for words in (found, danger) if words]
    if reader.images.problem:
        others.append(problem(f"The image catalogue: {reader.images.problem}", "admin/images", "Images"))
    return overview_object(
        world,
        handler.viewer,
        service.site,
        now_s=now_s,
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

    address = "admin/overview"

    async def get(self) -> None:
        found = await overview(self)
        self.render("admin_overview.html", found=found, shown_idle=SHOWN_IDLE, quote=quote)

    def _alarms(self) -> list[str]:
        return []


class OverviewApi(AdminApi):
    async def get(self) -> None:
        self.answer(await overview(self))
