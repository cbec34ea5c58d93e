"""Looks after the processes beside the Hub, sooner than the Hub itself would.

JupyterHub looks at a managed service every 30 s, and at the routes of a proxy that it did not start every 5 minutes.
So long a killed service would be away, and sessions behind a proxy that was started anew unreachable.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

log = logging.getLogger("fgpu")

EVERY_S = 2.0
SERVICE_AGAIN_S = 20.0
"""A service that ends again sooner than this is left to the Hub's own, slower look."""


async def look_after(app: Any, service_name: str) -> None:
    """Look after the service and the proxy of a Hub for as long as it runs."""
    # Until then the Hub sets the routes itself, and starts the service.
    await app._start_future
    hastened_at = -SERVICE_AGAIN_S
    loop = asyncio.get_running_loop()
    while True:
        await asyncio.sleep(EVERY_S)
        try:
            if loop.time() - hastened_at >= SERVICE_AGAIN_S and await _started_again(app, service_name):
                hastened_at = loop.time()
            if not app.proxy.should_start:
                await _keep_routes(app)
        except Exception as e:
            # The Hub's own looks go on. The proxy may be away: then there is nothing to route.
            log.warning("The processes beside the Hub could not be looked after: %s", e)


async def _started_again(app: Any, name: str) -> bool:
    """Have the Hub start its service again if it has ended; return whether it had."""
    service = app._service_map.get(name)
    process = service.proc if service is not None else None
    # A Hub that ends has ended its service, and taken its address away.
    if process is None or process.poll() is None or service.server is None:
        return False
    await service.spawner.poll_and_notify()
    return True


async def _keep_routes(app: Any) -> None:
    """Give a proxy that has lost them its routes again."""
    routes = await app.proxy.get_all_routes()
    if app.hub.routespec not in routes:
        log.warning("The proxy has no route to the Hub: it is a new one, and gets its routes again")
        await app.proxy.check_routes(app.users, app._service_map, routes)
