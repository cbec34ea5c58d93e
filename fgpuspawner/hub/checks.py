"""What is checked of the Hub's final configuration before anything is started."""

from __future__ import annotations

import ipaddress
import json
import logging
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlparse

from fgpu_scheduler import BadSettings
from fgpuspawner.scopes import SERVICE
from fgpuspawner.settings import FGPU

log = logging.getLogger("fgpu")


def check_hub(app: Any, settings: FGPU) -> None:
    """Refuse what cannot work, or is not safe, in the Hub's final configuration.

    Raises:
        BadSettings: one line that names the setting and what would work.
    """
    public = urlparse(app.bind_url)
    able = app.spawner_class.capabilities
    engines = [spec["name"] for spec in settings.nodes if spec.get("engine")]
    if engines and not able.machines:
        raise BadSettings(
            f"c.FGPU.nodes: node {engines[0]!r} has a Docker engine, and sessions are {able.kind}; use runtime='docker'"
        )
    if settings.warm_pool and not able.warm_pool:
        raise BadSettings(
            f"c.FGPU.warm_pool: sessions are {able.kind}, of which none can be kept ready; leave it empty, or use "
            "runtime='docker'"
        )
    beyond = not is_loopback(public.hostname or "")
    if beyond and not able.apart and not settings.local_sessions_beyond_loopback:
        raise BadSettings(
            f"c.JupyterHub.bind_url is {app.bind_url}: sessions are {able.kind}, so the Hub binds to 127.0.0.1 only; use "
            "runtime='docker', or set c.FGPU.local_sessions_beyond_loopback = True"
        )
    ports = {
        "c.JupyterHub.bind_url": public.port,
        "c.JupyterHub.hub_port": urlparse(app.hub.url).port if app.hub else app.hub_port,
        "the proxy's API": urlparse(getattr(app.proxy, "api_url", "")).port,
    }
    for service in app.services:
        if service["name"] != SERVICE and service.get("url"):
            ports[f"service {service['name']!r}"] = urlparse(service["url"]).port
    for name, port in ports.items():
        if port == settings.service_port:
            raise BadSettings(
                f"c.FGPU.service_port is {port}, which {name} uses too; give one of them another port"
            )

    for service in app.services:
        if service["name"] == SERVICE and "FGPU_SETTINGS" in service.get("environment", {}):
            _check_given(json.loads(service["environment"]["FGPU_SETTINGS"]), settings)
    if able.apart and not app.subdomain_host:
        log.warning(
            "All users' servers share the Hub's origin: a page of one user's server can act as whoever visits it, an "
            "administrator too. Set c.JupyterHub.subdomain_host, such as 'https://hub.example'"
        )


def _check_given(given: Mapping[str, object], settings: FGPU) -> None:
    """Refuse settings that the service does not have: it was given all that there were when `configure` was called."""
    final = json.loads(settings.to_json())
    late = [f"c.FGPU.{name}" for name, value in final.items() if given.get(name) != value]
    if late:
        raise BadSettings(
            f"{', '.join(late)}: set after configure(c), so the service does not know it; set it before, or give it to "
            "configure"
        )


def use_subdomains(app: Any, settings: FGPU) -> None:
    """Route the service at the Hub's own host too, where links and the launch form look for it.

    It sends people on to its own subdomain; there, and nowhere else, it knows who they are.
    """
    if app.subdomain_host:
        route = f"{app.domain}{app.base_url}services/{SERVICE}/"
        own = {route: f"http://{settings.service_ip}:{settings.service_port}"}
        app.proxy.extra_routes = {**app.proxy.extra_routes, **own}


def is_loopback(host: str) -> bool:
    """Return whether nobody beyond this machine reaches what listens there."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
