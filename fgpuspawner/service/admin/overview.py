"""The administrators' first page: use, queues, idle sessions and problems, with links to where they are fixed."""

from __future__ import annotations

import asyncio
from urllib.parse import quote

from fgpu_scheduler import (
    Audit,
    AuditLine,
    FirstForecasts,
    Hindsight,
    Store,
    StoreUnavailable,
    SystemClock,
    hindsight,
)
from fgpuspawner.isolation.verified import read_verdicts
from fgpuspawner.meter.lately import Lately
from fgpuspawner.meter.usage_report import DAY_S
from fgpuspawner.service.admin.base import AdminApi, AdminPage
from fgpuspawner.service.admin.objects import Overview, Trouble
from fgpuspawner.service.admin.overview_view import overview_object, problem
from fgpuspawner.service.handler import Handler

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
    lately: Lately | None = None
    foretold: Hindsight | None = None
    try:
        world = await reader.world()
        strikes = await reader.read(lambda store: _strikes(store, now_s))
        foretold = await reader.read(lambda store: hindsight(FirstForecasts(store).newest()))
        lately = await reader.lately()
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
        verdicts=await asyncio.to_thread(read_verdicts, settings.data_path()),
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
