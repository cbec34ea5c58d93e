"""The API's answers about the caller and about the service's health."""

from __future__ import annotations

import asyncio

from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from tornado.web import RequestHandler

from fgpu_scheduler import StoreUnavailable
from fgpuspawner.service import objects
from fgpuspawner.service.api.base import Api
from fgpuspawner.service.handler import Handler, Service
from fgpuspawner.service.metrics import REGISTRY
from fgpuspawner.service.model import Viewer, World, groups_of


def me_object(viewer: Viewer, world: World) -> objects.Me:
    return objects.Me.of(viewer, banner=world.banner, simulated=world.simulated(groups_of(viewer, world)))


class Me(Api):
    needs_scope = None

    async def get(self) -> None:
        self.answer(me_object(self.viewer, await self.service.reader.world()))


class Metrics(Handler):
    """For Prometheus, with the scope of the Hub's own metrics."""

    needs_scope = "read:metrics"

    async def get(self) -> None:
        self.set_header("Content-Type", CONTENT_TYPE_LATEST)
        self.finish(generate_latest(REGISTRY))


class Health(RequestHandler):
    """For the Hub and for monitoring, without a log-in; it tells nothing else."""

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
            return
        # Without a log-in: only that something is wrong, not what.
        images, room = self.service.reader.images, self.service.reader.room()
        told = {"catalogue": "last good"} if images.problem or images.trouble else {}
        if room is not None and room.short:
            told["disk"] = "full" if room.full else "short"
        if room is not None and room.full:
            self.set_status(503)
            told["status"] = "unavailable"
        self.finish({"status": "ok"} | told)
