"""The queue for administrators: waiting requests with reasons, marks for long waits, and a form for each priority."""

from __future__ import annotations

from fgpu_scheduler import (
    Accounts,
    Forecast,
    InvalidTransition,
    NodeState,
    Session,
    UnknownSession,
    account_shares,
    format_milli,
)
from fgpuspawner import scopes
from fgpuspawner.engines.base import WhoseQueue
from fgpuspawner.service.admin.base import AdminApi, AdminFormPage
from fgpuspawner.service.admin.objects import OneWaiting, Queues, WaitingEntry, WaitingQueue
from fgpuspawner.service.api.capacity import allocatable_in, used_of
from fgpuspawner.service.api.session_objects import session_object
from fgpuspawner.service.handler import Handler, whole_number
from fgpuspawner.service.model import Site, Viewer, World, administered, is_mine
from fgpuspawner.service.problems import Problem, forbidden, no_such_session
from fgpuspawner.settings.queue import HIGHEST_PRIORITY

LONG_WAIT_S = 3600
"""A longer wait is marked, in seconds."""
STUCK_AFTER_S = 600
"""A longer wait without a forecast is marked, in seconds."""


def queues_object(
    world: World, viewer: Viewer, site: Site, *, most: int | None = None, accounts: Accounts | None = None
) -> Queues:
    """Return each resource group's queue, next one first, with a limited number of entries. For administrators only.

    Marks are counted over all waiting requests.
    """
    groups = sorted({*world.groups, *world.queues})
    queues = [_queue(group, world, viewer, site, most, accounts or Accounts()) for group in groups]
    return Queues(queues=queues, simulated=world.simulated())


def _queue(
    group: str, world: World, viewer: Viewer, site: Site, most: int | None, accounts: Accounts
) -> WaitingQueue:
    own = world.queues.get(group, ())
    nodes = [n for n in world.snapshot.nodes if n.resource_group == group]
    ready = [n for n in nodes if n.state is NodeState.READY]
    waits_s = [_waited_s(session, world) for _, session in own]
    marks = [_mark(forecast, waited_s) for (forecast, _), waited_s in zip(own, waits_s, strict=True)]
    return WaitingQueue(
        group=group,
        length=len(own),
        marked=sum(mark is not None for mark in marks),
        longest_wait_s=max(waits_s, default=0),
        nodes=len(nodes),
        nodes_ready=len(ready),
        fgpu_used=format_milli(max(0, used_of(world, group).fgpu_milli)),
        fgpu_free=format_milli(max(0, _free(world, group))),
        entries=[_entry(forecast, session, world, viewer, site) for forecast, session in own[:most]],
        accounts=list(account_shares(world.snapshot, group, accounts).values()),
    )


def _free(world: World, group: str) -> int:
    # As for a user without quotas.
    return allocatable_in(world, Viewer(None, groups=(group,)), group).fgpu_milli


def _entry(forecast: Forecast, session: Session, world: World, viewer: Viewer, site: Site) -> WaitingEntry:
    waited_s = _waited_s(session, world)
    return WaitingEntry.of(
        session_object(session, world, viewer, site),
        session,
        asked_priority=session.own_request.priority,
        waited_s=waited_s,
        mark=_mark(forecast, waited_s),
    )


def _waited_s(session: Session, world: World) -> int:
    return max(0, world.snapshot.now_s - session.waits_since_s)


def _mark(forecast: Forecast, waited_s: int) -> str | None:
    if forecast.expected_start_at_s is None and waited_s >= STUCK_AFTER_S:
        return "stuck"
    return "long" if waited_s >= LONG_WAIT_S else None


SHOWN = 100
"""Requests of each queue on the page, unless all are asked for."""


async def queues(handler: Handler, *, most: int | None = None) -> Queues:
    """Return every queue, with at most this number of entries each."""
    service = handler.service
    world = await service.reader.world()
    return queues_object(
        administered(world, handler.viewer),
        handler.viewer,
        service.site,
        most=most,
        accounts=service.settings.account_tree(),
    )


def our_queue_decides(handler: Handler) -> bool:
    """Return whether our queue decides which request is next, and not the engine's."""
    return handler.service.reader.engine.queue is WhoseQueue.OURS


async def set_priority(handler: Handler, session_id: str, priority: int) -> None:
    """Set a waiting session's priority, for the scheduler's next plan."""
    viewer = handler.viewer
    if not viewer.admin:
        session = await handler.visible_session(session_id)
        if is_mine(session, viewer):
            message = f"priority: an administrator sets that of your own sessions (scope {scopes.ADMIN})"
            raise forbidden(message, field="priority")
    if not our_queue_decides(handler):
        raise Problem(
            409,
            "engines_queue",
            "the engine's own queue decides which request is next; set the priority there",
        )
    try:
        await handler.change(
            lambda store, by, now_s: store.set_priority(int(session_id), priority, by=by, now_s=now_s)
        )
    except UnknownSession:
        raise no_such_session(session_id) from None
    except InvalidTransition:
        raise Problem(409, "not_waiting", f"session {session_id} no longer waits") from None


class QueuePage(AdminFormPage):
    for_groups = True

    async def show(self, trouble: Problem | None = None) -> None:
        self.render(
            "admin_queue.html",
            found=await queues(self, most=None if self._all else SHOWN),
            trouble=trouble,
            ours=our_queue_decides(self),
            highest=HIGHEST_PRIORITY,
            everybody=self._all,
        )

    async def submit(self) -> None:
        session_id = whole_number("session", self.field("session"), least=0, most=10**15)
        priority = whole_number("priority", self.field("priority"), least=0, most=HIGHEST_PRIORITY)
        await set_priority(self, str(session_id), priority)
        self.back(f"session-{session_id}", all="1" if self._all else "")

    @property
    def _all(self) -> bool:
        return self.get_argument("all", "") == "1"


class QueueApi(AdminApi):
    for_groups = True

    async def get(self) -> None:
        self.answer(await queues(self))


class PriorityApi(AdminApi):
    for_groups = True

    async def put(self, session_id: str) -> None:
        given = self.body(("priority",))
        await set_priority(
            self, session_id, whole_number("priority", given.get("priority"), least=0, most=HIGHEST_PRIORITY)
        )
        found = await queues(self)
        entries = [entry for queue in found.queues for entry in queue.entries]
        own = next((entry for entry in entries if entry.id == int(session_id)), None)
        self.answer(OneWaiting.of(session=own, simulated=found.simulated))
