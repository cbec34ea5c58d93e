"""Security demands on engine, isolation and proxy beyond the settings: `fgpu check` says what is missing.

docs/security.md has the profiles with their settings. Its table of checks is written from `DEMANDS`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any
from urllib.parse import urlparse

from fgpu_scheduler import Node
from fgpuspawner.engines.base import Capabilities, Held, Safeguard
from fgpuspawner.hub.checks import is_loopback
from fgpuspawner.settings import FGPU

FOR_ALL = {"DummyAuthenticator", "SharedPasswordAuthenticator"}
"""JupyterHub's authenticators that let everyone log in under any name."""


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
    administrator runs the proxy. ``held`` is the isolation of each node with real GPUs; None if unknown.
    """

    able: Capabilities
    bound: str
    public: str
    outer_proxy: bool
    own_accounts: bool
    held: Mapping[str, str | None]
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


def facts_of(app: Any, settings: FGPU, *, nodes: Collection[Node], backends: Mapping[str, str]) -> Facts:
    """Return the facts of a Hub's application. Asks the engine, so it blocks.

    ``nodes`` are the known nodes, ``backends`` their isolation.
    """
    spawner_class = app.spawner_class
    outer = not app.proxy.should_start
    known = {node.id: node for node in nodes}
    named = {spec["name"] for spec in settings.nodes} | known.keys()
    return Facts(
        able=spawner_class.capabilities,
        bound=app.bind_url,
        # JupyterHub removes "https:" where it has no certificate; its own proxy may have one.
        public=app.public_url
        or app.subdomain_host
        or (app.config.JupyterHub.get("bind_url", "") if outer else ""),
        outer_proxy=outer,
        own_accounts=FOR_ALL.isdisjoint(kind.__name__ for kind in app.authenticator_class.mro()),
        held={
            name: backends[name] if name in known else None
            for name in sorted(named)
            if name not in known or any(not d.simulated for d in known[name].devices)
        },
        safeguards=spawner_class.safeguards(settings, app.config),
    )


def _encrypted(facts: Facts) -> bool | None:
    said = facts.public.startswith("https:")
    if facts.bound.startswith("https:") or (facts.outer_proxy and said):
        return True
    if is_loopback(urlparse(facts.bound).hostname or ""):
        return said or is_loopback(urlparse(facts.public or facts.bound).hostname or "")
    # Another proxy may stand before the Hub's, inside a firewall.
    return None if said else False


def _by_all(*allowed: str) -> Callable[[Facts], bool | None]:
    """Return a judge that is true if every node with real GPUs has one of these isolations."""

    def judge(facts: Facts) -> bool | None:
        found = [None if name is None else name in allowed for name in facts.held.values()]
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
        _by_all("mig", "driver-cgroup", "interposer", "mps"),
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
        _by_all("mig", "driver-cgroup", "interposer"),
        AUTO,
    ),
    Demand(CLASS, "Root in a session is nobody on the machine", Safeguard.REMAPPED),
    Demand(CLASS, "A session's root file system is read-only", Safeguard.READ_ONLY),
    Demand(
        CLASS,
        "Hardware or driver hold GPU memory, not a library in the session",
        _by_all("mig", "driver-cgroup"),
        f"MIG, or a driver r615 or newer, and {AUTO}",
    ),
)
"""All demands. A profile has its own and those of the profiles before it."""


@dataclass(frozen=True, slots=True)
class Judged:
    """A demand, whether it is met (None: unknown), and the line that meets it."""

    demand: Demand
    met: bool | None
    line: str


def judged(facts: Facts) -> tuple[Judged, ...]:
    found = []
    for demand in DEMANDS:
        if isinstance(demand.judge, Safeguard):
            held = facts.safeguards.get(demand.judge) or Held(None, f"cannot be told of {facts.able.kind}")
        else:
            held = Held(demand.judge(facts), demand.line)
        found.append(Judged(demand, held.met, held.line))
    return tuple(found)


def words(found: Collection[Judged]) -> list[str]:
    """Return the missing and unknown demands as lines for people, each with its profile."""
    lines = [
        f"  {'missing' if own.met is False else 'unknown'} for {own.demand.since}: {own.demand.what}: {own.line}"
        for own in found
        if not own.met
    ]
    lacks = "and this is missing or unknown:" if lines else "and nothing else is missing"
    return [f"security: docs/security.md has the settings; {lacks}", *lines]
