"""The API as a whole: who asks, the queues, and whether the service works."""

from __future__ import annotations

import asyncio

from tornado.web import RequestHandler

from fgpu_scheduler import (
    StoreUnavailable,
)
from fgpuspawner.service.api.base import Api
from fgpuspawner.service.api.session_objects import me_object, queue_object
from fgpuspawner.service.handler import Service
from fgpuspawner.service.problems import Problem


class Me(Api):
    needs_scope = None

    async def get(self) -> None:
        self.answer(me_object(self.viewer, await self.service.reader.world()))


class Queue(Api):
    async def get(self) -> None:
        world = await self.service.reader.world()
        known = world.groups if self.viewer.admin else self.viewer.groups
        group = self.get_query_argument("group", known[0] if known else "")
        if group not in known:
            message = f"group: there is no such group; choose one of {', '.join(known) or 'none'}"
            raise Problem(404, "no_such_group", message, field="group")
        self.answer(queue_object(group, world, self.viewer))


class Health(RequestHandler):
    """For the Hub and for monitoring; needs no login and tells nothing else."""

    def initialize(self, service: Service) -> None:
        self.service = service

    async def get(self) -> None:
        self.set_header("Cache-Control", "no-store")
        try:
            async with asyncio.timeout(5.0):
                await self.service.reader.last_event_id()
        except (StoreUnavailable, TimeoutError):
            self.set_status(503)
            self.finish({"status": "unavailable"})
        else:
            # Nobody who asks here is known: that something is wrong, and not what.
            images = self.service.reader.images
            wrong = images.problem or images.trouble
            self.finish({"status": "ok"} | ({"catalogue": "last good"} if wrong else {}))
