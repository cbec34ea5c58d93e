"""Checks of the Hub's final configuration: what stops its start, and the security demands of `fgpu check`.

docs/security.md has the security profiles with their settings. Its table of checks is written from `DEMANDS`.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any
from urllib.parse import urlparse

from fgpu_scheduler import BadSettings, Node
from fgpuspawner.bodies import is_loopback
from fgpuspawner.engines.base import Capabilities, Held, Safeguard
from fgpuspawner.hub.inherited import overruled
from fgpuspawner.scopes import SERVICE
from fgpuspawner.settings import FGPU

log = logging.getLogger("fgpu")

CULLERS = ("jupyterhub_idle_culler", "jupyterhub-idle-culler", "cull_idle_servers")
"""Words in the command of a service that ends idle servers."""
SLACK_S = 60
"""Slack for the Hub's own work, so that our deadlines end a start before the Hub's does."""
FOR_ALL = {"DummyAuthenticator", "SharedPasswordAuthenticator"}
"""JupyterHub's authenticators that let everyone log in under any name."""


def check_hub(app: Any, settings: FGPU) -> None:
    """Refuse what cannot work, or is not safe, in the Hub's final configuration.

    Raises:
        BadSettings: one line that names the setting and what would work.
    """
    public, able = urlparse(app.bind_url), app.spawner_class.capabilities
    engines = [spec["name"] for spec in settings.nodes if spec.get("engine")]
    if engines and not able.machines:
        raise BadSettings(
            f"c.FGPU.nodes: node {engines[0]!r} has a Docker engine, and sessions are {able.kind}; use runtime='docker'"
        )
    if settings.warm_pool and not able.warm_pool:
        raise BadSettings(
            f"c.FGPU.warm_pool: sessions are {able.kind}, which cannot be kept ready; leave it empty, or use "
            "runtime='docker'"
        )
    beyond = not is_loopback(public.hostname or "")
    if beyond and not able.apart and not settings.local_sessions_beyond_loopback:
        raise BadSettings(
            f"c.JupyterHub.bind_url is {app.bind_url}: sessions are {able.kind}, so the Hub binds to 127.0.0.1 only; use "
            "runtime='docker', or set c.FGPU.local_sessions_beyond_loopback = True"
        )
    if app.internal_ssl:
        raise BadSettings("c.JupyterHub.internal_ssl is True, and sessions are reached by HTTP; take it out")
    if settings.max_sessions > 1 and not app.allow_named_servers:
        raise BadSettings(
            f"c.JupyterHub.allow_named_servers is False, and c.FGPU.max_sessions is {settings.max_sessions}: others than "
            "the first are named servers; set c.JupyterHub.allow_named_servers = True, or c.FGPU.max_sessions = 1"
        )
    for service in app.services:
        _check_service(service, settings)
    for line in overruled(app.spawner_class, app.config):
        log.warning(line)
    app.spawner_class.check_settings(app.config, settings)
    ports = {
        "c.JupyterHub.bind_url": public.port,
        "c.JupyterHub.hub_port": urlparse(app.hub.url).port if app.hub else app.hub_port,
        "the proxy's API": urlparse(getattr(app.proxy, "api_url", "")).port,
    } | {
        f"service {service['name']!r}": urlparse(service["url"]).port
        for service in app.services
        if service["name"] != SERVICE and service.get("url")
    }
    for name, port in ports.items():
        if port == settings.service_port:
            raise BadSettings(
                f"c.FGPU.service_port is {port}, which {name} uses too; give one of them another port"
            )
    if able.apart and not app.subdomain_host:
        log.warning(
            "All users' servers share the Hub's origin: a page of one user's server can act as its "
            "visitors, administrators too. Set c.JupyterHub.subdomain_host, such as 'https://hub.example'"
        )


def _check_service(service: Mapping[str, Any], settings: FGPU) -> None:
    command = service.get("command") or ()
    words = command if isinstance(command, str) else " ".join(map(str, command))
    if any(culler in words for culler in CULLERS):
        raise BadSettings(
            f"service {service['name']!r} ends idle sessions without a warning; take it out of c.JupyterHub.services "
            'and set c.FGPU.reclaim = {"*": {"idle_after_s": 3600}}'
        )
    given = service.get("environment", {}).get("FGPU_SETTINGS")
    if service["name"] == SERVICE and given is not None:
        # `configure` gave them to the service.
        known, final = json.loads(given), json.loads(settings.to_json())
        late = [f"c.FGPU.{name}" for name, value in final.items() if known.get(name) != value]
        if late:
            raise BadSettings(
                f"{', '.join(late)}: set after configure(c), so the service does not know it; set it before, or give it "
                "to configure"
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


class Profile(StrEnum):
    """Kinds of users of a Hub, from the most trusting on."""

    LAB = "lab"
    """People who would give each other a shell."""
    DEPARTMENT = "department"
    """People who do not know each other."""
    CLASS = "class"
    """A public class without any trust."""


@dataclass(frozen=True, slots=True)
class Facts:
    """The Hub's final configuration, and what the engine does.

    ``bound`` is the address of the Hub's proxy, ``public`` the URL for browsers if set. ``outer_proxy``: the
    administrator runs the proxy. ``isolation`` is the backend of each node with real GPUs; None if unknown.
    """

    able: Capabilities
    bound: str
    public: str
    outer_proxy: bool
    own_accounts: bool
    isolation: Mapping[str, str | None]
    safeguards: Mapping[Safeguard, Held]


@dataclass(frozen=True, slots=True)
class Demand:
    """A demand of the profiles from ``since`` on. ``judge`` tells whether it is met, or the engine does; None: unknown.

    ``line`` is how to meet it; the engine has its own lines for its safeguards.
    """

    since: Profile
    what: str
    judge: Safeguard | Callable[[Facts], bool | None]
    line: str = ""

    def held(self, facts: Facts) -> Held:
        """Return whether it is met, and the line that meets it."""
        if not isinstance(self.judge, Safeguard):
            return Held(self.judge(facts), self.line)
        return facts.safeguards.get(self.judge) or Held(None, f"unknown for {facts.able.kind}")


def facts_of(app: Any, settings: FGPU, *, nodes: Collection[Node], backends: Mapping[str, str]) -> Facts:
    """Return the facts of a Hub's application. Asks the engine, so it blocks.

    ``nodes`` are the known nodes, ``backends`` their isolation.
    """
    outer = not app.proxy.should_start
    known = {node.id: node for node in nodes}
    named = {spec["name"] for spec in settings.nodes} | known.keys()
    return Facts(
        able=app.spawner_class.capabilities,
        bound=app.bind_url,
        # JupyterHub removes "https:" where it has no certificate; its own proxy may have one.
        public=app.public_url
        or app.subdomain_host
        or (app.config.JupyterHub.get("bind_url", "") if outer else ""),
        outer_proxy=outer,
        own_accounts=FOR_ALL.isdisjoint(kind.__name__ for kind in app.authenticator_class.mro()),
        isolation={
            name: backends[name] if name in known else None
            for name in sorted(named)
            if name not in known or any(not d.simulated for d in known[name].devices)
        },
        safeguards=app.spawner_class.safeguards(settings, app.config),
    )


def _encrypted(facts: Facts) -> bool | None:
    said = facts.public.startswith("https:")
    if facts.bound.startswith("https:") or (facts.outer_proxy and said):
        return True
    if is_loopback(urlparse(facts.bound).hostname or ""):
        return said or is_loopback(urlparse(facts.public or facts.bound).hostname or "")
    # Another proxy may stand before the Hub's, inside a firewall.
    return None if said else False


def _isolated_by(*allowed: str) -> Callable[[Facts], bool | None]:
    """Return a judge that is true if every node with real GPUs has one of these isolations."""

    def judge(facts: Facts) -> bool | None:
        found = [None if name is None else name in allowed for name in facts.isolation.values()]
        return False if False in found else None if None in found else True

    return judge


LAB, DEPARTMENT, CLASS = Profile
AUTO = 'c.FGPU.isolation = "auto"'
DEMANDS = (
    Demand(LAB, "CPU and memory of a session are held to what it asked for", Safeguard.LIMITS),
    Demand(LAB, "What browsers send is encrypted", _encrypted, 'c.JupyterHub.bind_url = "https://:443"'),
    Demand(LAB, "Nobody but the Hub commands the engine from the network", Safeguard.COMMANDS),
    Demand(
        LAB,
        "Something holds sessions to their slices",
        _isolated_by("mig", "driver-cgroup", "interposer", "mps"),
        AUTO,
    ),
    Demand(
        DEPARTMENT,
        "Everybody has an account of their own",
        lambda facts: facts.own_accounts,
        'c.JupyterHub.authenticator_class = "pam"',
    ),
    Demand(DEPARTMENT, "The machine's ports are closed to sessions", Safeguard.PORTS),
    Demand(DEPARTMENT, "Sessions have no privileges, and gain none", Safeguard.UNPRIVILEGED),
    Demand(DEPARTMENT, "The engine refuses needless system calls", Safeguard.FILTERED),
    Demand(DEPARTMENT, "The number of processes in a session is limited", Safeguard.PROCESSES),
    Demand(
        DEPARTMENT,
        "Sessions cannot end their neighbours on a GPU, or change their own limits",
        _isolated_by("mig", "driver-cgroup", "interposer"),
        AUTO,
    ),
    Demand(CLASS, "Root in a session is nobody on the machine", Safeguard.REMAPPED),
    Demand(CLASS, "A session's root file system is read-only", Safeguard.READ_ONLY),
    Demand(
        CLASS,
        "Hardware or driver hold GPU memory, not a library in the session",
        _isolated_by("mig", "driver-cgroup"),
        f"MIG, or a driver r615 or newer, and {AUTO}",
    ),
)
"""All demands. A profile has its own and those of the profiles before it."""


def security_lines(facts: Facts) -> list[str]:
    """Return the missing and unknown demands as lines for people, each with its profile."""
    found = [(demand, held) for demand in DEMANDS if not (held := demand.held(facts)).met]
    lines = [
        f"  {'missing' if held.met is False else 'unknown'} for {demand.since}: {demand.what}: {held.line}"
        for demand, held in found
    ]
    lacks = "and this is missing or unknown:" if lines else "and nothing else is missing"
    return [f"security: docs/security.md has the settings; {lacks}", *lines]
