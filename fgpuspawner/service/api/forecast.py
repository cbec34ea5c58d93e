"""The API's forecast: when a request would start, why it can never run, and what quotas leave."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fgpu_scheduler import (
    Caps,
    Ledger,
    Quota,
    QuotaRemaining,
    QuotaScope,
    Refusal,
    Request,
    RequestForecast,
    SessionState,
    Snapshot,
    SystemClock,
    format_milli,
    pending_refusals,
    quota_words,
)
from fgpuspawner.form import ticket as tickets
from fgpuspawner.form.offer import RequestRefused
from fgpuspawner.form.options import parse, read_fields
from fgpuspawner.service import objects
from fgpuspawner.service.api.base import Api
from fgpuspawner.service.api.session_objects import waits_for
from fgpuspawner.service.model import Viewer, World
from fgpuspawner.service.problems import Problem, forbidden
from fgpuspawner.service.reader import NO_SERVER
from fgpuspawner.text.fields import in_gib

INSTEAD_OF = "instead_of"
MOST_DIGITS = 15


def forecast_object(
    found: RequestForecast,
    world: World,
    viewer: Viewer,
    *,
    count: int,
    simulated: bool,
    on_demand: bool = False,
    quota: objects.QuotaLeft | None = None,
) -> objects.Forecast:
    """Return the forecast of ``count`` sessions that may queue, and which amount would start now or sooner.

    A session ``on_demand`` opens now; ``found`` is when it would get its GPU.
    """
    return objects.Forecast.of(
        found,
        starts_now=on_demand or found.startable_now == count,
        count=count,
        early_start_at_s=found.early_at_s,
        late_start_at_s=found.late_at_s,
        text=_on_demand_text(found) if on_demand else _forecast_text(found, count),
        wait_reason=found.reason,
        waits_for=waits_for(found.ahead, world, viewer),
        beside_now=_beside(found.beside_now),
        beside_other=_beside(found.beside_other),
        quota=quota,
        simulated=simulated,
    )


def _beside(amounts: tuple[int, int] | None) -> objects.Beside | None:
    if amounts is None:
        return None
    cpu_milli, memory_mib = amounts
    cpu, memory_gib = format_milli(cpu_milli), in_gib(memory_mib)
    return objects.Beside(cpu=cpu, memory_mib=memory_mib, memory_gib=memory_gib)


def _forecast_text(found: RequestForecast, count: int) -> str:
    waiting = count - found.startable_now
    if not waiting:
        return "starts now" if count == 1 else f"all {count} start now"
    wait = "waits" if waiting == 1 else "wait"
    if count == 1:
        return found.text
    if not found.startable_now:
        return f"all {count} wait: {found.text}"
    start = "starts" if found.startable_now == 1 else "start"
    return f"{found.startable_now} {start} now, {waiting} {wait}. {found.text[:1].upper()}{found.text[1:]}"


def _on_demand_text(found: RequestForecast) -> str:
    gpu = "one is free now" if found.startable_now else f"none is free now: {found.text}"
    return f"opens now; a GPU when a cell needs it: {gpu}"


def refused_object(
    refusals: Sequence[Refusal], *, count: int, simulated: bool, quota: objects.QuotaLeft | None = None
) -> objects.Forecast:
    return objects.Forecast(
        count=count,
        basis="refused",
        text="; ".join(r.message for r in refusals),
        refusals=list(refusals),
        quota=quota,
        simulated=simulated,
    )


def quota_object(snapshot: Snapshot, request: Request) -> objects.QuotaLeft:
    """Return what the quotas leave the requester; waiting requests do not count yet."""
    left = Ledger(snapshot).left(request)
    fgpu_left = None if left.fgpu_milli is None else format_milli(left.fgpu_milli)
    return objects.QuotaLeft(fgpu_left=fgpu_left, sessions_left=left.sessions, text=_words(left))


def _words(left: QuotaRemaining) -> str | None:
    parts: list[tuple[str, str]] = []
    if left.fgpu_milli is not None and left.fgpu_of is not None:
        parts.append((f"{format_milli(left.fgpu_milli)} fGPU", _whose(left.fgpu_of)))
    if left.sessions is not None and left.sessions_of is not None:
        number = "1 session" if left.sessions == 1 else f"{left.sessions} sessions"
        parts.append((number, _whose(left.sessions_of)))
    if not parts:
        return None
    if len({whose for _, whose in parts}) == 1:
        return f"{' and '.join(amount for amount, _ in parts)} left of {parts[0][1]}"
    return "; ".join(f"{amount} left of {whose}" for amount, whose in parts)


def _whose(quota: Quota) -> str:
    if quota.scope is not QuotaScope.USER:
        return f"the quota of {quota_words(quota)}"
    return "your quota" + (
        "" if quota.resource_group is None else f" in resource group {quota.resource_group!r}"
    )


def without_session(world: World, user: str, session_id: str) -> World:
    """Return the world as it will be when this session has ended."""
    is_id = session_id.isascii() and session_id.isdigit() and len(session_id) <= MOST_DIGITS
    left_out = world.session(int(session_id)) if is_id else None
    if left_out is None or left_out.request.user != user:
        raise Problem(
            404, "no_such_session", "instead_of: you have no live session with this id", field=INSTEAD_OF
        )
    others = (s for s in world.snapshot.sessions if s is not left_out)
    return replace(world, snapshot=world.snapshot.with_sessions(others))


class Forecast(Api):
    """Also for the Hub's launch form, which sends a ticket instead of a log-in."""

    async def prepare(self) -> None:
        text = self.request.headers.get("X-FGPU-Ticket")
        if text is None:
            await super().prepare()
            return
        try:
            login = self.get_cookie(tickets.LOGIN_COOKIE, "") or ""
            ticket = tickets.read(self.service.forecast_key, text, login=login, now_s=SystemClock().now_s())
        except tickets.BadTicket as e:
            raise Problem(401, e.code, str(e)) from None
        groups = self.service.settings.groups_of(ticket.user, ticket.hub_groups)
        self.viewer = Viewer(ticket.user, groups=groups, hub_groups=ticket.hub_groups)
        await self.wait_for_turn()

    def answer(self, found: objects.Answer, status: int = 200) -> None:
        if isinstance(found, objects.Forecast):
            offered = self.service.reader.catalogue.visible_to(self.viewer.user or "", self.viewer.hub_groups)
            found.installing = self.service.frameworks.progress({image.slug for image in offered})
        super().answer(found, status)

    async def get(self) -> None:
        reader, viewer = self.service.reader, self.viewer
        if viewer.user is None:
            raise forbidden("only users start sessions")
        world = await reader.state()
        simulated = world.simulated(viewer.groups)
        # Decoded by tornado, which refuses what is not UTF-8; the check against forgery is no option.
        fields = {
            name: self.get_query_arguments(name) for name in self.request.query_arguments if name != "_xsrf"
        }
        if instead_of := fields.pop(INSTEAD_OF, None):
            world = without_session(world, viewer.user, instead_of[-1])
        quota = None
        try:
            offer = reader.offer(world, viewer.user, viewer.hub_groups, viewer.groups)
            group = (fields.get("group") or [""])[0]
            asker = replace(offer.default, resource_group=group) if group in offer.groups else offer.default
            quota = quota_object(world.snapshot, asker.for_server(NO_SERVER))
            wanted = parse(read_fields(fields), offer)
            _refuse_above_pending_limit(world, wanted.for_server(NO_SERVER), wanted.count, offer.caps)
        except RequestRefused as e:
            self.answer(refused_object(e.refusals, count=_count(fields), simulated=simulated, quota=quota))
            return
        found = await reader.forecast(replace(wanted, on_demand=False), offer, world)
        if found.beside_now is not None:
            # Amounts below the image's minimum are not offered.
            cpu_milli, memory_mib = found.beside_now
            if offer.unmet(replace(wanted, cpu_milli=cpu_milli, memory_mib=memory_mib)):
                found = replace(found, beside_now=None)
        simulated = world.simulated([wanted.resource_group])
        self.answer(
            forecast_object(
                found,
                world,
                viewer,
                count=wanted.count,
                simulated=simulated,
                on_demand=wanted.on_demand,
                quota=quota,
            )
        )


def _refuse_above_pending_limit(world: World, asked: Request, count: int, caps: Caps) -> None:
    waiting = [s.request for s in world.snapshot.sessions if s.state is SessionState.PENDING]
    refusals = pending_refusals(asked, count, waiting, caps, world.snapshot.quotas)
    if refusals:
        raise RequestRefused(refusals)


def _count(fields: dict[str, list[str]]) -> int:
    asked = (fields.get("count") or ["1"])[0]
    return int(asked) if asked.isascii() and asked.isdigit() and len(asked) < 10 else 1
