"""The API's queue of a resource group."""

from __future__ import annotations

from fgpu_scheduler import Forecast, Session
from fgpuspawner.service import objects
from fgpuspawner.service.api.base import Api
from fgpuspawner.service.model import Viewer, World, is_mine, is_visible
from fgpuspawner.service.problems import Problem
from fgpuspawner.text.sessions import amount_words, fgpu_of


def queue_object(group: str, world: World, viewer: Viewer) -> objects.Queue:
    """Return a resource group's queue, next one first; ordinary users see others without names."""
    entries = [_entry(*waiting, viewer) for waiting in world.queues.get(group, ())]
    simulated = world.simulated([group])
    return objects.Queue(group=group, length=len(entries), entries=entries, simulated=simulated)


def _entry(found: Forecast, session: Session, viewer: Viewer) -> objects.QueueEntry:
    known = is_visible(session, viewer)
    return objects.QueueEntry.of(
        found,
        session,
        mine=is_mine(session, viewer),
        id=session.id if known else None,
        user=session.request.user if known else None,
        amount=amount_words(session.request),
        fgpu=fgpu_of(session),
        wait_reason=found.reason,
        early_start_at_s=found.early_at_s,
        late_start_at_s=found.late_at_s,
    )


class Queue(Api):
    async def get(self) -> None:
        world = await self.service.reader.world()
        viewer = self.viewer
        known = world.groups if viewer.admin else tuple(dict.fromkeys((*viewer.groups, *viewer.administers)))
        group = self.get_query_argument("group", known[0] if known else "")
        if group not in known:
            message = f"group: there is no such group; choose one of {', '.join(known) or 'none'}"
            raise Problem(404, "no_such_group", message, field="group")
        self.answer(queue_object(group, world, self.viewer))
