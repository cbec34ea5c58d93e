"""One call in jupyterhub_config.py that wires spawner, service, roles, scopes, pages and timeouts."""

from __future__ import annotations

import ipaddress
import json
import logging
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from jupyterhub.app import JupyterHub
from traitlets.config.loader import LazyConfigValue

from fgpu_scheduler import BadSettings, FGPUError
from fgpuspawner import network, ticket
from fgpuspawner.docker import FGPUSpawner
from fgpuspawner.local import LocalFGPUSpawner
from fgpuspawner.runtime import start_with_the_hub
from fgpuspawner.settings import FGPU, configured

log = logging.getLogger("fgpu")

SERVICE = "fgpu"
QUEUE_READ = "custom:fgpu:queue:read"
KEEP = "custom:fgpu:sessions:keep"
IMAGES = "custom:fgpu:images"
ADMIN = "custom:fgpu:admin"
ACCESS = f"access:services!service={SERVICE}"
SLACK_S = 60
"""Room for what the Hub does around our own deadlines, so that ours are the ones that end a spawn."""


def configure(c: Any, *, runtime: str = "local", **settings: Any) -> FGPU:
    """Set up JupyterHub's configuration ``c`` for fGPU sessions and return the settings.

    Args:
        c: the configuration object of jupyterhub_config.py.
        runtime: "local" (sessions are processes of the Hub's own user) or "docker".
        settings: any trait of `FGPU`, by name; the same as ``c.FGPU.NAME = ...``.

    What is set on ``c`` before this call stays where it can (services and roles are added to); what is set
    after it wins. A wrong setting ends the process with one line.
    """
    try:
        return _configure(c, runtime, settings)
    except FGPUError as e:
        sys.exit(f"fgpuspawner: {e}")


def _configure(c: Any, runtime: str, settings: dict[str, Any]) -> FGPU:
    if runtime not in ("local", "docker"):
        raise BadSettings(f"runtime is {runtime!r}; use 'local' or 'docker'")
    for name, value in settings.items():
        setattr(c.FGPU, name, value)
    if runtime == "docker":
        _use_docker(c)
    else:
        c.JupyterHub.spawner_class = LocalFGPUSpawner
    found = FGPU.from_config(c).checked()
    _use_hub(c, found)
    _use_service(c, found, containers=runtime == "docker")
    if JupyterHub.initialized():
        # `handlers` is the last thing that the Hub makes before it looks at its servers: by then every
        # setting has its final value, and nothing has been started that a wrong one would leave behind.
        app = JupyterHub.instance()
        app.observe(lambda change: start_with_the_hub(app), names="handlers")
    return found


def _use_docker(c: Any) -> None:
    c.JupyterHub.spawner_class = FGPUSpawner
    own = configured(FGPUSpawner, c)
    name = own.get("network_name", network.NETWORK)
    client = network.connect(dict(_given(own, "client_kwargs", {})))
    try:
        gateway = network.ensure_network(client, name)
    finally:
        client.close()
    c.FGPUSpawner.network_name = name
    # Sessions reach the Hub and the service at the host's address on their network, and nothing else is there.
    address = c.FGPU.get("hub_address") or gateway
    c.JupyterHub.setdefault("hub_ip", address)
    c.FGPU.setdefault("service_ip", address)


def _use_hub(c: Any, settings: FGPU) -> None:
    data = settings.data_path()
    try:
        data.mkdir(parents=True, exist_ok=True, mode=0o700)
        if data.stat().st_uid == os.geteuid():
            # It holds databases and secrets, also where it was there before.
            data.chmod(0o700)
    except OSError as e:
        raise BadSettings(f"c.FGPU.data_dir: {data} cannot be made: {e.strerror}") from None
    if not os.access(data, os.W_OK | os.X_OK):
        raise BadSettings(f"c.FGPU.data_dir: {data} cannot be written to by the Hub's user")
    hub = c.JupyterHub
    hub.setdefault("allow_named_servers", True)
    hub.setdefault("db_url", f"sqlite:///{data / 'jupyterhub.sqlite'}")
    hub.setdefault("cookie_secret_file", str(data / "jupyterhub_cookie_secret"))
    hub.setdefault("cleanup_servers", False)
    # Waiting requests count as pending spawns and active servers; the queue is what limits them.
    hub.concurrent_spawn_limit = 0
    hub.active_server_limit = 0
    tornado_settings = dict(_given(hub, "tornado_settings", {}))
    tornado_settings.setdefault("slow_spawn_timeout", 2)
    hub.tornado_settings = tornado_settings
    hub.template_paths = [*_given(hub, "template_paths", []), str(Path(__file__).parent / "templates")]
    c.ConfigurableHTTPProxy.setdefault("pid_file", str(data / "jupyterhub-proxy.pid"))
    # The Hub's one limit covers queue, pull and launch; ours are inside it and give better words.
    c.Spawner.start_timeout = settings.queue_timeout_s + settings.launch_timeout_s + SLACK_S
    c.Spawner.setdefault("http_timeout", 60)
    c.Spawner.setdefault("poll_interval", 10)
    # Refusals and failed launches say nothing about the Hub's health.
    c.Spawner.setdefault("consecutive_failure_limit", 0)
    scopes = [
        "users:activity!user",
        "access:servers!server",
        "read:servers!server",
        ACCESS,
        QUEUE_READ,
        KEEP,
    ]
    if settings.sessions_may_end_sessions:
        scopes.append("delete:servers!user")
    c.Spawner.setdefault("server_token_scopes", scopes)


def _use_service(c: Any, settings: FGPU, *, containers: bool = True) -> None:
    hub = c.JupyterHub
    hub.custom_scopes = {
        **_given(hub, "custom_scopes", {}),
        QUEUE_READ: {"description": "See the GPU queue, capacity and one's own sessions"},
        KEEP: {"description": "Keep one's own idle GPU sessions from being ended"},
        IMAGES: {"description": "Save one's own GPU sessions as private images, and manage these"},
        ADMIN: {
            "description": "See and manage everybody's GPU sessions and private images",
            "subscopes": [QUEUE_READ, KEEP, IMAGES],
        },
    }
    hub.extra_user_scopes = [*_given(hub, "extra_user_scopes", []), ACCESS, QUEUE_READ, KEEP, IMAGES]
    hub.services = [
        *_given(hub, "services", []),
        {
            "name": SERVICE,
            "url": f"http://{settings.service_ip}:{settings.service_port}",
            "command": [sys.executable, "-m", "fgpuspawner.service"],
            "environment": {
                "FGPU_SETTINGS": settings.to_json(),
                "FGPU_FORECAST_KEY": ticket.KEY,
                "FGPU_HUB_PID": str(os.getpid()),
                "FGPU_CONTAINERS": "1" if containers else "0",
            },
            "oauth_no_confirm": True,
            # A caller's token gets of these what the caller may do anyway.
            "oauth_client_allowed_scopes": [
                "delete:servers",
                "read:servers",
                QUEUE_READ,
                KEEP,
                IMAGES,
                ADMIN,
                ACCESS,
            ],
            "display": True,
        },
    ]
    # They may be set on any authenticator class, such as c.PAMAuthenticator.admin_users.
    sections = [c[name] for name in sorted(c) if name.endswith("Authenticator")]
    admins = sorted({user for own in sections for user in _given(own, "admin_users", set())})
    hub.load_roles = [
        *_given(hub, "load_roles", []),
        {
            "name": "fgpu-service",
            "description": "Resume waiting requests after a restart",
            "scopes": ["start:servers", "read:servers", "read:users:name", "read:users:groups"],
            "services": [SERVICE],
        },
        {
            "name": "fgpu-admin",
            "description": "See and manage everybody's GPU sessions",
            "scopes": [ADMIN, QUEUE_READ, ACCESS],
            "users": admins,
        },
    ]


def _given(section: Any, name: str, empty: Any) -> Any:
    """Return what was set so far; ``c.X.name.append(...)`` on something unset leaves only a note of it."""
    value = section.get(name, empty)
    return value.get_value(empty) if isinstance(value, LazyConfigValue) else value


def check_hub(app: Any, settings: FGPU) -> None:
    """Refuse what cannot work, or is not safe, in the Hub's final configuration.

    Raises:
        BadSettings: one line that names the setting and what would work.
    """
    public = urlparse(app.bind_url)
    engines = [spec["name"] for spec in settings.nodes if spec.get("engine")]
    if engines and issubclass(app.spawner_class, LocalFGPUSpawner):
        raise BadSettings(
            f"c.FGPU.nodes: node {engines[0]!r} has a Docker engine, and sessions are local processes; use "
            "runtime='docker'"
        )
    if issubclass(app.spawner_class, LocalFGPUSpawner) and not settings.local_sessions_beyond_loopback:
        host = public.hostname or ""
        if not _is_loopback(host):
            raise BadSettings(
                f"c.JupyterHub.bind_url is {app.bind_url}: sessions as local processes all run as one system user, "
                "so the Hub binds to 127.0.0.1 only; use runtime='docker', or set "
                "c.FGPU.local_sessions_beyond_loopback = True"
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
    if issubclass(app.spawner_class, FGPUSpawner) and not app.subdomain_host:
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


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
