"""The queue for administrators: waiting requests with reasons, and a form for each priority."""

from __future__ import annotations

from fgpu_scheduler import InvalidTransition, SystemClock, UnknownSession
from fgpuspawner import scopes
from fgpuspawner.engines.base import WhoseQueue
from fgpuspawner.service.admin.base import AdminApi, AdminFormPage, whole_number
from fgpuspawner.service.admin.objects import OneWaiting, Queues
from fgpuspawner.service.admin.queue_view import queues_object
from fgpuspawner.service.handler import Handler
from fgpuspawner.service.model import administered, is_mine
from fgpuspawner.service.problems import Problem, forbidden, no_such_session
from fgpuspawner.settings.queue import HIGHEST_PRIORITY

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
        now_s=SystemClock().now_s(),
        most=most,
    )


def decides(handler: Handler) -> bool:
    """Return whether our queue decides which request is next, and not the engine's."""
    return handler.service.reader.engine.queue is WhoseQueue.OURS


async def set_priority(handler: Handler, session_id: str, priority: int) -> None:
    """Set a waiting session's priority, for the scheduler's next plan.

    Raises:
        Problem: there is no such session, it does not wait, the engine's own queue decides, or a group's administrator
            asks for their own.
    """
    viewer = handler.viewer
    if not viewer.admin:
        session = await handler.visible_session(session_id)
        if is_mine(session, viewer):
            message = f"priority: an administrator sets that of your own sessions (scope {scopes.ADMIN})"
            raise forbidden(message, field="priority")
    if not decides(handler):
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
    """Every queue, with a form for each priority."""

    address = "admin/queue"
    for_groups = True

    async def show(self, trouble: Problem | None = None) -> None:
        self.render(
            "admin_queue.html",
            found=await queues(self, most=None if self._all else SHOWN),
            trouble=trouble,
            ours=decides(self),
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
