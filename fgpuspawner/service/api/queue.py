"""The API's queue of a resource group."""

from __future__ import annotations

from fgpuspawner.service.api.base import Api
from fgpuspawner.service.model import Json, Viewer, World, is_mine, is_visible
from fgpuspawner.service.problems import Problem
from fgpuspawner.text.sessions import amount_words, fgpu_of


def queue_object(group: str, world: World, viewer: Viewer) -> Json:
    """Return a resource group's queue, next one first; others are anonymous to ordinary users."""
    waiting = world.queues.get(group, ())
    return {
        "group": group,
        "length": len(waiting),
        "entries": [
            {
                "position": found.position,
                "mine": is_mine(session, viewer),
                "id": session.id if is_visible(session, viewer) else None,
                "user": session.request.user if is_visible(session, viewer) else None,
                "amount": amount_words(session.request),
                "fgpu": fgpu_of(session),
                "state": session.state.value,
                "wait_reason": found.reason.value,
                "expected_start_at_s": found.expected_start_at_s,
                "early_start_at_s": found.early_at_s,
                "late_start_at_s": found.late_at_s,
                "submitted_at_s": session.submitted_at_s,
            }
            for found, session in waiting
        ],
        "simulated": world.simulated([group]),
    }


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
