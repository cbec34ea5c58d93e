"""The process: settings from the Hub, background tasks, start and end."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
import sys
from typing import Any
from urllib.parse import urlparse

from tornado.httpserver import HTTPServer
from tornado.netutil import bind_sockets
from traitlets import TraitError

from fgpu_scheduler import BadSettings, FGPUError, Store, SystemClock
from fgpuspawner.bodies import bound_bodies
from fgpuspawner.concurrency.background import Background
from fgpuspawner.engines.base import Capabilities
from fgpuspawner.images.frameworks import INSTALLING
from fgpuspawner.images.live import REFRESH_EVERY_S, Images
from fgpuspawner.service.app import make_app
from fgpuspawner.service.handler import LogIns, Service
from fgpuspawner.service.hub import Hub
from fgpuspawner.service.model import Site
from fgpuspawner.service.reader import Reader
from fgpuspawner.service.resume import Resumer
from fgpuspawner.service.stream import Watcher
from fgpuspawner.settings import FGPU

log = logging.getLogger(__name__)

AUTH_CACHE_S = 30
"""Seconds for which a token, scope or group that the Hub revoked may still count here."""
BIND_FOR_S = 15.0
"""Seconds for which the port may still be taken, by the service of a Hub that has just died."""
LOG_FORMAT = "[%(levelname)1.1s %(asctime)s %(name)s] %(message)s"


def settings_from(environment: dict[str, str]) -> FGPU:
    """Return the settings that the Hub passed on.

    Raises:
        BadSettings: they are missing or invalid. The text never repeats them: they hold a password.
    """
    text = environment.get("FGPU_SETTINGS")
    if text is None:
        raise BadSettings("FGPU_SETTINGS is not set; JupyterHub starts this service, with fgpuspawner.config")
    try:
        return FGPU.from_json(text).checked()
    except json.JSONDecodeError:
        raise BadSettings("FGPU_SETTINGS is not JSON; it must be what FGPU.to_json wrote") from None
    except (TraitError, TypeError, AttributeError):
        raise BadSettings(
            "FGPU_SETTINGS does not fit; the Hub and this service must be of one version"
        ) from None


def engine_from(environment: dict[str, str]) -> Capabilities:
    """Return the capabilities of the Hub's engine."""
    try:
        return Capabilities.from_json(environment["FGPU_ENGINE"])
    except (KeyError, ValueError, TypeError):
        raise BadSettings(
            "FGPU_ENGINE does not fit; the Hub and this service must be of one version"
        ) from None


def address_from(environment: dict[str, str], settings: FGPU) -> tuple[str, int]:
    """Return the address to listen on: where the Hub looks for the service, else as set."""
    parsed = urlparse(environment.get("JUPYTERHUB_SERVICE_URL", ""))
    return parsed.hostname or settings.service_ip, parsed.port or settings.service_port


def hosts_from(environment: dict[str, str]) -> tuple[str, str]:
    """Return the hosts of Hub and service if they differ, as with ``subdomain_host``; else two empty texts."""
    hub, own = environment.get("JUPYTERHUB_HOST", ""), urlparse(environment.get("JUPYTERHUB_PUBLIC_URL", ""))
    own_host = f"{own.scheme}://{own.netloc}" if own.netloc else ""
    return (hub, own_host) if hub and own_host and hub != own_host else ("", "")


async def bind(ip: str, port: int) -> list[socket.socket]:
    """Return the sockets to listen on; wait for a predecessor that is still ending."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + BIND_FOR_S
    while True:
        try:
            return bind_sockets(port, ip)
        except OSError as e:
            if loop.time() >= deadline:
                raise BadSettings(
                    f"cannot listen on {ip}:{port}: {e.strerror}; see c.FGPU.service_port"
                ) from None
        await asyncio.sleep(0.5)


async def until_stopped(parent: int) -> None:
    """Return at SIGTERM or SIGINT, or when the Hub that started this process is gone.

    A Hub that was killed starts another service on the same port when it is back.
    """
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ended.set)
    while os.getppid() == parent:
        try:
            async with asyncio.timeout(1.0):
                await ended.wait()
        except TimeoutError:
            continue
        return
    log.warning("The Hub that started this service is gone")


async def serve(environment: dict[str, str], settings: FGPU, images: Images, store: Store) -> None:
    """Serve until told to end."""
    # The parent given at the start, not the current one: the Hub may have died already.
    parent = int(environment.get("FGPU_HUB_PID") or os.getppid())
    hub_host, own_host = hosts_from(environment)
    # A ``__Host-`` cookie cannot be set by another domain. JupyterHub does not pass its setting on to services.
    only_own = own_host.startswith("https:")
    auth = LogIns.instance(cache_max_age=AUTH_CACHE_S, cookie_host_prefix_enabled=only_own)
    base_url = environment.get("JUPYTERHUB_BASE_URL", "/")
    site = Site(
        base_url,
        images.names,
        hub_host,
        own_host,
        is_offered=lambda request: images.catalogue.of(request) is not None,
        folders_of=lambda asked: settings.folders_of(asked.user, asked.groups, asked.folders),
    )
    reader = Reader(store, settings, images, SystemClock(), engine_from(environment))
    watcher, hub = Watcher(reader), Hub(auth.api_url)
    resumer = Resumer(reader, hub, auth.api_token)
    ip, port = address_from(environment, settings)
    background = Background(log)
    key = environment["FGPU_FORECAST_KEY"]
    # What an earlier process was installing is not being installed any longer.
    INSTALLING.write(settings.data_path(), {})
    app = make_app(Service(settings, reader, watcher, hub, site, auth.base_url, key, background))
    bound_bodies(app)
    server = HTTPServer(app, xheaders=True)
    server.add_sockets(await bind(ip, port))
    log.info("Serving %s on %s:%d", auth.base_url, ip, port)
    background.run(reader.connect(), failed="The scheduler's database cannot be connected to")
    resumer.begin(background)
    background.every(
        REFRESH_EVERY_S,
        lambda: asyncio.to_thread(images.refresh),
        failed="The catalogue could not be read again",
        first_after_s=REFRESH_EVERY_S,
    )
    try:
        await until_stopped(parent)
    finally:
        server.stop()
        await watcher.close()
        await background.close()
        await resumer.close()
        hub.close()
        await server.close_all_connections()
        await reader.close()
        log.info("Ended")


def main() -> int:
    """Run the service; return the process's exit status."""
    # JupyterHub's authentication logs cookies' contents at lower levels.
    logging.getLogger("tornado.application").setLevel(logging.WARNING)
    environment: dict[str, Any] = dict(os.environ)
    try:
        settings = settings_from(environment)
        logging.basicConfig(level=logging.INFO, format=LOG_FORMAT, datefmt="%Y-%m-%d %H:%M:%S")
        if not environment.get("JUPYTERHUB_API_TOKEN"):
            raise BadSettings("JUPYTERHUB_API_TOKEN is not set; JupyterHub starts this service")
        if not environment.get("FGPU_FORECAST_KEY"):
            # With an empty secret anyone could sign.
            raise BadSettings(
                "FGPU_FORECAST_KEY is not set; the Hub's configure(c) makes one and starts this service"
            )
        store = Store(settings.database_url(), half_life_s=settings.half_life_s)
        # A bad catalogue does not stop this service, which shows and ends sessions; it stops a Hub that starts.
        images = Images(settings.catalogue_path(), store, must_be_good=False)
        asyncio.run(serve(environment, settings, images, store))
    except FGPUError as e:
        print(f"fgpuspawner.service: {' '.join(str(e).split())}", file=sys.stderr)
        return 1
    return 0
