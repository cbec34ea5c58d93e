"""The REST API of ended sessions: receipts, the history in pages and as CSV, and advice from it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from fgpu_scheduler import PastSession, Request, Size, format_milli
from fgpuspawner.form.advice import LOOKED_THROUGH, advice_by_image
from fgpuspawner.meter.tally import mean_lent
from fgpuspawner.service import objects
from fgpuspawner.service.api.base import Api
from fgpuspawner.service.api.session_objects import asked_fields
from fgpuspawner.service.csv_file import Cell
from fgpuspawner.service.handler import Handler, Service
from fgpuspawner.service.model import Site, Viewer, World, is_visible
from fgpuspawner.service.objects import Receipt
from fgpuspawner.service.problems import forbidden, no_such_session
from fgpuspawner.text.sessions import amount_words
from fgpuspawner.text.times import cell, duration

COLUMNS = [
    "session_id",
    "user",
    "server_name",
    "display_name",
    "image",
    "image_name",
    "resource_group",
    "amount",
    "fgpu",
    "submitted",
    "started",
    "ended",
    "end_cause",
    "message",
    "wait_s",
    "run_s",
    "gpu_hours",
    "gpu_memory_mib",
    "memory_peak_mib",
    "memory_p95_mib",
    "sm_p95_percent",
    "energy_wh",
    "energy_estimated",
    "samples",
    "simulated",
    "compute_entitled_percent",
    "compute_received_percent",
    "compute_borrowed_percent",
    "compute_lent_percent",
]
"""Columns of the CSV file, in order."""
INSTANTS = ("submitted", "started", "ended")
"""Columns with instants, in UTC, as in the file of live sessions."""


def receipt(past: PastSession, world: World, viewer: Viewer, site: Site) -> Receipt:
    """Return a session's receipt, of a running one up to now. The viewer must be allowed to see it."""
    session, measured = past.session, past.measured
    until_s = world.snapshot.now_s if session.ended_at_s is None else session.ended_at_s
    known = measured if measured is not None and measured.samples else None
    lent = mean_lent(measured) if measured is not None else None
    held = _held(past, world, until_s)
    asked = asked_fields(session, world, viewer, site) | _sizes_fields(held, session.request)
    return Receipt.of(
        session,
        session.request,
        **asked,
        session_id=session.id,
        wait_s=max(0, (session.scheduled_at_s or until_s) - session.waits_since_s),
        run_s=max(0, until_s - session.started_at_s) if session.started_at_s is not None else 0,
        gpu_hours=round(sum(s * size.gpu_millionths for s, size in held) / 1_000_000 / 3600, 4),
        memory_peak_mib=known.peak_mib if known else None,
        memory_p95_mib=known.p95_mib if known else None,
        sm_p95_percent=measured.sm_p95_percent if measured else None,
        energy_wh=_wh(measured.energy_mj if measured else None),
        energy_estimated=bool(measured and measured.energy_mj is not None and measured.energy_estimated),
        samples=measured.samples if measured else 0,
        compute_entitled_percent=round(_mean(held, lambda size: size.compute_percent)) or None,
        compute_received_percent=lent.received if lent else None,
        compute_borrowed_percent=lent.borrowed if lent else None,
        compute_lent_percent=lent.lent if lent else None,
    )


def cells(receipt: Receipt) -> list[Cell]:
    """Return a receipt's line of the CSV file, in the order of `COLUMNS`."""
    return [cell(receipt[f"{name}_at_s"]) if name in INSTANTS else receipt[name] for name in COLUMNS]


MOST_AMOUNTS = 4
"""Amounts of a resized session that are listed one by one."""

Held = Sequence[tuple[int, Size]]
"""Seconds for which a session held each amount, in order."""


def _held(past: PastSession, world: World, until_s: int) -> Held:
    """Return the amounts that a session held, from its placement to its end; empty if it never had a share."""
    session = past.session
    if session.placement is None or session.scheduled_at_s is None:
        return []
    # It held nothing from when it was parked.
    shares = session.placement.shares if session.parked_at_s is None else ()
    last = Size(
        until_s,
        sum(share.fgpu_milli for share in shares),
        round(1_000_000 * gpus_of(past, world)) if shares else 0,
        sum(share.memory_mib for share in shares),
        sum(share.compute_percent for share in shares),
    )
    found, since_s = [], session.scheduled_at_s
    for size in (*session.sizes, last):
        to_s = max(since_s, min(size.until_s, until_s))
        found.append((to_s - since_s, size))
        since_s = to_s
    return found


def _mean(held: Held, of: Callable[[Size], int]) -> float:
    total_s = sum(seconds for seconds, _ in held)
    return sum(seconds * of(size) for seconds, size in held) / total_s if total_s else 0


def _sizes_fields(held: Held, asked: Request) -> dict[str, object]:
    if len(held) < 2:
        return {}
    told = [f"{amount_words(_of_size(asked, size))} for {duration(s)}" for s, size in held[:MOST_AMOUNTS]]
    if more := held[MOST_AMOUNTS:]:
        told.append(f"{len(more)} more for {duration(sum(s for s, _ in more))}")
    return {
        "amount": ", then ".join(told),
        "fgpu": format_milli(round(_mean(held, lambda size: size.fgpu_milli))),
        "gpu_memory_mib": max(size.memory_mib for _, size in held),
    }


def _of_size(asked: Request, size: Size) -> Request:
    if asked.gpu_memory_mib is None:
        return replace(asked, fgpu_milli=size.fgpu_milli)
    return replace(asked, gpu_memory_mib=size.memory_mib, compute_percent=size.compute_percent or None)


def gpus_of(past: PastSession, world: World) -> float:
    """Return the number of GPUs that a session's shares come to.

    As measured while it ran; if unmeasured, by its GPUs' current worth, or else by its compute.
    """
    if past.measured is not None and past.measured.gpu_millionths:
        return past.measured.gpu_millionths / 1_000_000
    found = 0.0
    for share in past.session.placement.shares if past.session.placement else ():
        device = world.devices.get(share.device_uuid)
        found += share.fgpu_milli / device.capacity_milli if device else share.compute_percent / 100
    return found


def _wh(energy_mj: int | None) -> float | None:
    return None if energy_mj is None else round(energy_mj / 3_600_000, 3)


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
    found = await reader.read_queue(lambda queue: queue.history(user=user, before_id=before, limit=limit + 1))
    shown = [receipt(past, world, handler.viewer, site) for past in found[:limit]]
    return shown, found[limit - 1].session.id if len(found) > limit else None


def send_receipts(handler: Handler, receipts: list[objects.Receipt], following: int | None) -> None:
    handler.link_next_page(following)
    handler.send_csv("gpu-sessions.csv", COLUMNS, map(cells, receipts))


class HistoryApi(Api):
    """Answers with receipts that the caller may see."""

    async def receipts(self, *, default: int, most: int) -> tuple[list[objects.Receipt], int | None]:
        """Return the requested page, and where the next begins; None after the last."""
        limit = self.number("limit", default=default, least=1, most=most)
        before = self.number("before", default=None, least=1, most=LARGEST_ID)
        return await receipts_of(self, self._whose(), before=before, limit=limit)

    def _whose(self) -> str | None:
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


class History(HistoryApi):
    async def get(self) -> None:
        shown, following = await self.receipts(default=PAGE, most=LARGEST_PAGE)
        simulated = any(one.simulated for one in shown)
        self.answer(objects.History.of(receipts=shown, next=following, simulated=simulated))


class HistoryFile(HistoryApi):
    async def get(self) -> None:
        send_receipts(self, *await self.receipts(default=LARGEST_FILE, most=LARGEST_FILE))


class OneReceipt(Api):
    async def get(self, session_id: str) -> None:
        past = await self.service.reader.read_queue(lambda queue: queue.past(int(session_id)))
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
        await reader.read_queue(lambda queue: queue.measured_runs(user, limit=LOOKED_THROUGH)),
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
