"""The REST API of ended sessions: receipts, the history in pages and as CSV, and advice from it."""

from __future__ import annotations

from fgpu_scheduler import format_milli
from fgpuspawner.form.advice import LOOKED_THROUGH, advice_by_image
from fgpuspawner.service import objects
from fgpuspawner.service.api.base import Api
from fgpuspawner.service.api.receipts import COLUMNS, cells, receipt
from fgpuspawner.service.handler import Handler, Service
from fgpuspawner.service.model import Viewer, is_visible
from fgpuspawner.service.problems import forbidden, no_such_session

PAGE = 50
LARGEST_PAGE = 200
LARGEST_FILE = 10_000
LARGEST_ID = 10**15


async def receipts_of(
    handler: Handler, user: str | None, *, before: int | None, limit: int
) -> tuple[list[objects.Receipt], int | None]:
    """Return the newest receipts of a user (all users, if None), and the id before which the rest begins, or None."""
    reader, site = handler.service.reader, handler.service.site
    world = await reader.world()
    # One more than is shown tells whether there is a next page.
    found = await reader.ask(lambda queue: queue.history(user=user, before_id=before, limit=limit + 1))
    shown = [receipt(past, world, handler.viewer, site) for past in found[:limit]]
    return shown, found[limit - 1].session.id if len(found) > limit else None


def send_receipts(handler: Handler, receipts: list[objects.Receipt], following: int | None) -> None:
    handler.link_to_rest(following)
    handler.send_csv("gpu-sessions.csv", COLUMNS, map(cells, receipts))


class Past(Api):
    """Answers with receipts that the caller may see."""

    async def receipts(self, *, default: int, most: int) -> tuple[list[objects.Receipt], int | None]:
        """Return the requested page, and where the next begins; None after the last."""
        limit = self.number("limit", default=default, least=1, most=most)
        before = self.number("before", default=None, least=1, most=LARGEST_ID)
        return await receipts_of(self, self._whose(), before=before, limit=limit)

    def _whose(self) -> str | None:
        """Return the user of the requested history; None: all users."""
        everybody, user = self.flag("all"), self.get_query_argument("user", None)
        if self.viewer.admin:
            if user is not None or everybody:
                return user
        elif everybody:
            raise forbidden("all: only administrators see everybody's history", field="all")
        elif user is not None and user != self.viewer.user:
            raise forbidden("user: only administrators see others' history", field="user")
        if self.viewer.user is None:
            raise forbidden("only users have a history; all=1 is everybody's, for administrators")
        return self.viewer.user


class History(Past):
    async def get(self) -> None:
        shown, following = await self.receipts(default=PAGE, most=LARGEST_PAGE)
        simulated = any(one.simulated for one in shown)
        self.answer(objects.History.of(receipts=shown, next=following, simulated=simulated))


class HistoryFile(Past):
    async def get(self) -> None:
        send_receipts(self, *await self.receipts(default=LARGEST_FILE, most=LARGEST_FILE))


class OneReceipt(Api):
    async def get(self, session_id: str) -> None:
        past = await self.service.reader.ask(lambda queue: queue.past(int(session_id)))
        if past is None or not is_visible(past.session, self.viewer):
            raise no_such_session(session_id)
        shown = receipt(past, await self.service.reader.world(), self.viewer, self.service.site)
        self.answer(objects.OneReceipt.of(receipt=shown, simulated=shown.simulated))


class Advice(Api):
    """Enough amounts for the caller's last runs of each image, or of one."""

    async def get(self) -> None:
        wanted = self.get_query_argument("image", None)
        world = await self.service.reader.world()
        found = [one for one in await advice_for(self.service, self.viewer) if wanted in (None, one.image)]
        self.answer(objects.AllAdvice.of(advice=found, simulated=world.simulated(self.viewer.groups)))


async def advice_for(service: Service, viewer: Viewer) -> list[objects.Advice]:
    """Return the advice on a user's last runs, by image."""
    user, reader = viewer.user, service.reader
    if user is None:
        return []
    world = await reader.world()
    nodes = [n for n in world.snapshot.nodes if n.resource_group in viewer.groups]
    found = advice_by_image(
        await reader.ask(lambda queue: queue.measured_runs(user, limit=LOOKED_THROUGH)),
        step_milli=service.settings.caps().fgpu_step_milli,
        images=reader.catalogue.images,
        devices=[device for node in nodes for device in node.devices],
    )
    return [
        objects.Advice.of(
            one,
            image_name=service.site.image_names.get(one.image, one.image),
            asked_fgpu=format_milli(one.asked_milli),
            enough_fgpu=format_milli(one.enough_milli),
            memory_peak_mib=one.peak_mib,
        )
        for one in found.values()
    ]
