"""Checks of the Hub's final configuration before anything starts."""

from __future__ import annotations

import ipaddress
import json
import logging
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlparse

from fgpu_scheduler import BadSettings
from fgpuspawner.hub.inherited import overruled
from fgpuspawner.scopes import SERVICE
from fgpuspawner.settings import FGPU

CULLERS = ("jupyterhub_idle_culler", "jupyterhub-idle-culler", "cull_idle_servers")
"""Words in the command of a service that ends idle servers."""
SLACK_S = 60
"""Slack for the Hub's own work, so that our deadlines end a start before the Hub's does."""

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
    _check_sessions(app, settings)
    for line in overruled(app.spawner_class, app.config):
        log.warning(line)
    app.spawner_class.check_settings(app.config, settings)
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
            "All users' servers share the Hub's origin: a page of one user's server can act as its "
            "visitors, administrators too. Set c.JupyterHub.subdomain_host, such as 'https://hub.example'"
        )


def _check_sessions(app: Any, settings: FGPU) -> None:
    """Refuse settings that work for plain servers but not for queued sessions."""
    if app.internal_ssl:
        raise BadSettings("c.JupyterHub.internal_ssl is True, and sessions are reached by HTTP; take it out")
    count = settings.max_sessions
    if count > 1 and not app.allow_named_servers:
        raise BadSettings(
            f"c.JupyterHub.allow_named_servers is False, and c.FGPU.max_sessions is {count}: others than the first "
            "are named servers; set c.JupyterHub.allow_named_servers = True, or c.FGPU.max_sessions = 1"
        )
    for service in app.services:
        command = service.get("command") or ()
        said = command if isinstance(command, str) else " ".join(map(str, command))
        if any(culler in said for culler in CULLERS):
            raise BadSettings(
                f"service {service['name']!r} ends idle sessions without a warning; take it out of c.JupyterHub.services "
                'and set c.FGPU.reclaim = {"*": {"idle_after_s": 3600}}'
            )


def _check_given(given: Mapping[str, object], settings: FGPU) -> None:
    """Refuse settings that changed after `configure` gave them to the service."""
    final = json.loads(settings.to_json())
    late = [f"c.FGPU.{name}" for name, value in final.items() if given.get(name) != value]
    if late:
        raise BadSettings(
            f"{', '.join(late)}: set after configure(c), so the service does not know it; set it before, or give it to "
            "configure"
        )


def use_start_timeout(app: Any, settings: FGPU) -> None:
    """Make the Hub's limit on a start longer than ours on queue and launch, which have better messages."""
    limit_s = settings.queue_timeout_s + settings.launch_timeout_s + SLACK_S
    app.config[app.spawner_class.__name__].start_timeout = limit_s


def use_subdomains(app: Any, settings: FGPU) -> None:
    """Route the service at the Hub's own host too, where links and the launch form look for it.

    It redirects people to its own subdomain, the only place where it knows who they are.
    """
    if app.subdomain_host:
        route = f"{app.domain}{app.base_url}services/{SERVICE}/"
        own = {route: f"http://{settings.service_ip}:{settings.service_port}"}
        app.proxy.extra_routes = {**app.proxy.extra_routes, **own}


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach the host."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
