"""`configure` sets up spawner, service, roles, scopes, pages and timeouts from jupyterhub_config.py."""

from __future__ import annotations

import logging
import os
import re
import sys
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from jupyterhub.app import JupyterHub
from jupyterhub.handlers import BaseHandler
from tornado.log import app_log
from tornado.web import authenticated
from traitlets.config.loader import LazyConfigValue

from fgpu_scheduler import BadSettings, FGPUError
from fgpuspawner import logs
from fgpuspawner.engines.base import Capabilities
from fgpuspawner.form import ticket
from fgpuspawner.hub.hub_handlers import Tokens
from fgpuspawner.hub.hub_lock import HubLock
from fgpuspawner.hub.startup import start_with_the_hub
from fgpuspawner.scopes import ACCESS, ADMIN, IMAGES, KEEP, QUEUE_READ, SERVICE, admin_of, custom
from fgpuspawner.service import STATIC, navigation
from fgpuspawner.settings import FGPU
from fgpuspawner.spawner.base import QueuedSpawner
from fgpuspawner.spawner.launch_form import without_tracebacks

log = logging.getLogger("fgpu")

ENGINES = "fgpuspawner.engines"
"""The entry point group in which packages offer their engines' spawner classes; ours are in it too."""
NAMED_SERVERS = 100
"""Limit on a user's server names, unless more sessions may wait or run at a time."""


def configure(c: Any, *, runtime: str = "local", **settings: Any) -> FGPU:
    """Set up JupyterHub's configuration ``c`` for fGPU sessions and return the settings.

    Args:
        c: the configuration object of jupyterhub_config.py.
        runtime: the engine: "local" (processes of the Hub's own user), "docker", or another package's, by its name or
        as
            "package.module:SpawnerClass".
        settings: any trait of `FGPU`, by name; the same as ``c.FGPU.NAME = ...``.

    What was set on ``c`` before this call stays where possible (services and roles are added to); what is set
    afterwards wins. A wrong setting ends the process with one line.
    """
    try:
        return _configure(c, runtime, settings)
    except FGPUError as e:
        sys.exit(f"fgpuspawner: {e}")


def _configure(c: Any, runtime: str, settings: dict[str, Any]) -> FGPU:
    spawner_class = spawner_of(runtime)
    for name, value in settings.items():
        setattr(c.FGPU, name, value)
    c.JupyterHub.spawner_class = spawner_class
    spawner_class.set_up(c)
    c.FGPU.finds_nodes = spawner_class.capabilities.finds_nodes
    found = FGPU.from_config(c).checked()
    _use_hub(c, found, spawner_class)
    _use_service(c, found, spawner_class.capabilities)
    if JupyterHub.initialized():
        # `handlers` is the last thing that the Hub makes before it looks at its servers: every setting has its final
        # value by then, and nothing has started that a wrong one would leave behind.
        app = JupyterHub.instance()
        app.log.addFilter(without_tracebacks)
        app_log.addFilter(logs.without_session_ids)
        only = HubLock(app)
        app.observe(lambda change: _start(app, only), names="handlers")
    return found


def _start(app: Any, only: HubLock) -> None:
    # Before the handlers are wrapped to record their users.
    app.handlers[:0] = [
        (f"{app.hub_prefix}home", HomeRedirect),
        (rf"{app.hub_prefix}api/users/([^/]+)/tokens", Tokens),
    ]
    header, own = _header(app), app.tornado_settings["template_vars"]
    # On pages of another user's server, `user` is that user; the header needs the viewer.
    shown = {"fgpu": lambda user: header | {"viewer": user and user.name}}
    app.tornado_settings["template_vars"] = {**own, **shown}
    start_with_the_hub(app, only)


class HomeRedirect(BaseHandler):  # type: ignore[misc]
    """The Hub's Home: redirects to the sessions page, which has everything that Home had."""

    @authenticated
    def get(self) -> None:
        self.redirect(f"{self.base_url}services/{SERVICE}/")


def _header(app: Any) -> dict[str, object]:
    """Return what the Hub's pages need for the header that they share with the service's."""
    settings = FGPU.from_config(app.config)
    return {
        "name": settings.site_name,
        "group_scopes": [admin_of(group) for group in settings.resource_groups()],
        "pages": navigation.entries(app.spawner_class.capabilities, admin=True),
        "header_css": (STATIC / "header.css").read_text(),
        "header_js": (STATIC / "header.js").read_text(),
        "times_js": (STATIC / "times.js").read_text(),
    }


def spawner_of(runtime: str) -> type[QueuedSpawner]:
    """Return the spawner class of an engine.

    Raises:
        BadSettings: there is none of that name, or it cannot be loaded.
    """
    offered = {entry.name: entry for entry in entry_points(group=ENGINES)}
    try:
        if runtime in offered:
            found = offered[runtime].load()
        else:
            module, _, name = runtime.partition(":")
            found = getattr(import_module(module), name) if name else None
    except (ImportError, AttributeError, ValueError) as e:
        raise BadSettings(f"runtime is {runtime!r}, which cannot be loaded: {e}") from e
    if not (isinstance(found, type) and issubclass(found, QueuedSpawner)):
        known = " or ".join(map(repr, sorted(offered)))
        raise BadSettings(f"runtime is {runtime!r}; use {known}")
    return found


def make_data(data: Path) -> None:
    """Make the Hub's data folder, accessible only to its owner.

    Raises:
        BadSettings: it cannot be made or written to.
    """
    try:
        data.mkdir(parents=True, exist_ok=True, mode=0o700)
        if data.stat().st_uid == os.geteuid():
            # It holds databases and secrets; tighten an existing folder too.
            data.chmod(0o700)
    except OSError as e:
        raise BadSettings(f"c.FGPU.data_dir: {data} cannot be made: {e.strerror}") from None
    if not os.access(data, os.W_OK | os.X_OK):
        raise BadSettings(f"c.FGPU.data_dir: {data} cannot be written to by the Hub's user")


def _use_hub(c: Any, settings: FGPU, spawner_class: type[QueuedSpawner]) -> None:
    data = settings.data_path()
    # Commands load this file as other users; the Hub could not write to folders that they make here.
    if JupyterHub.initialized():
        make_data(data)
    hub = c.JupyterHub
    hub.setdefault("allow_named_servers", True)
    # The Hub stores each server name without end, with its options.
    most = max(NAMED_SERVERS, settings.max_sessions + settings.max_pending_per_user)
    hub.setdefault("named_server_limit_per_user", most)
    hub.setdefault("db_url", f"sqlite:///{data / 'jupyterhub.sqlite'}")
    hub.setdefault("cookie_secret_file", str(data / "jupyterhub_cookie_secret"))
    hub.setdefault("cleanup_servers", False)
    hub.setdefault("logo_file", str(STATIC / "logo.svg"))
    # Waiting requests count as pending spawns and active servers; the queue limits them instead.
    hub.concurrent_spawn_limit = 0
    hub.active_server_limit = 0
    if str(_given(hub, "subdomain_host", "")).startswith("https:"):
        # A page on a user's domain could otherwise set a cookie for all domains and log a visitor in as another user.
        hub.setdefault("cookie_host_prefix_enabled", True)
    tornado_settings = dict(_given(hub, "tornado_settings", {}))
    tornado_settings.setdefault("slow_spawn_timeout", 2)
    hub.tornado_settings = tornado_settings
    hub.template_paths = [*_given(hub, "template_paths", []), str(Path(__file__).parent / "templates")]
    c.ConfigurableHTTPProxy.setdefault("pid_file", str(data / "jupyterhub-proxy.pid"))
    c.Spawner.setdefault("http_timeout", 60)
    c.Spawner.setdefault("poll_interval", 10)
    # Files that a session's programs write at home must not change the server of the next session.
    c.Spawner.setdefault("disable_user_config", True)
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


OF_THE_INDEX = re.compile(r"(UV|PIP|SSL_CERT)_|(?i:https?|all|no)_proxy\Z")
"""Variables that say how the package index is reached."""


def _use_service(c: Any, settings: FGPU, able: Capabilities) -> None:
    hub = c.JupyterHub
    groups = settings.resource_groups()
    hub.custom_scopes = {**_given(hub, "custom_scopes", {}), **custom(groups)}
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
                "FGPU_ENGINE": able.to_json(),
                # Where it installs frameworks for local sessions from.
                **({} if able.own_root else {n: v for n, v in os.environ.items() if OF_THE_INDEX.match(n)}),
            },
            "oauth_no_confirm": True,
            # A caller's token only gets those of these that the caller has anyway.
            "oauth_client_allowed_scopes": [
                "delete:servers",
                "read:servers",
                QUEUE_READ,
                KEEP,
                IMAGES,
                ADMIN,
                *map(admin_of, groups),
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
            "description": "Resume waiting requests, and end sessions for who administers a resource group",
            "scopes": [
                "start:servers",
                "delete:servers",
                "read:servers",
                "read:users:name",
                "read:users:groups",
            ],
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
    """Return the value set so far; ``c.X.name.append(...)`` on something unset leaves a LazyConfigValue."""
    value = section.get(name, empty)
    return value.get_value(empty) if isinstance(value, LazyConfigValue) else value
