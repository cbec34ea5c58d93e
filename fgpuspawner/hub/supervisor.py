"""Restarts the service and restores the proxy's routes sooner than JupyterHub would.

JupyterHub checks a managed service every 30 s, and the routes of an external proxy every 5 minutes. Until then a killed
service would be away, and sessions behind a restarted proxy unreachable.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from fgpuspawner.concurrency.background import Background

log = logging.getLogger("fgpu")

EVERY_S = 2.0
SERVICE_AGAIN_S = 20.0
"""A service that ends again sooner is left to the Hub's own, slower check."""


class Supervisor:
    def __init__(self, app: Any, service_name: str) -> None:
        self._app = app
        self._service_name = service_name
        self._hastened_at = -SERVICE_AGAIN_S

    def begin(self, background: Background) -> None:
        """Begin once the Hub has set its routes and started the service."""
        background.every(
            EVERY_S,
            self.look,
            failed="The processes beside the Hub could not be looked after",
            first_after_s=EVERY_S,
            # The Hub's own checks go on. Without a proxy there is nothing to route.
            foreseen=(Exception,),
        )

    async def look(self) -> None:
        await asyncio.shield(self._app._start_future)
        now = asyncio.get_running_loop().time()
        if now - self._hastened_at >= SERVICE_AGAIN_S and await self._started_again():
            self._hastened_at = now
        if not self._app.proxy.should_start:
            await self._keep_routes()

    async def _started_again(self) -> bool:
        """Let the Hub restart its service if it has ended; return whether it had."""
        service = self._app._service_map.get(self._service_name)
        process = service.proc if service is not None else None
        # An ending Hub has stopped its service and removed its address.
        if process is None or process.poll() is None or service.server is None:
            return False
        await service.spawner.poll_and_notify()
        return True

    async def _keep_routes(self) -> None:
        app = self._app
        routes = await app.proxy.get_all_routes()
        if app.hub.routespec not in routes:
            log.warning("The proxy has no route to the Hub: it is a new one, and gets its routes again")
            await app.proxy.check_routes(app.users, app._service_map, routes)
