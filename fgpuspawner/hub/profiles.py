"""How far the people of a Hub may distrust each other: what each profile demands, and which one a configuration reaches.

docs/security.md is for those who set them. Its table is written from `DEMANDS`.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any
from urllib.parse import urlparse

from fgpu_scheduler import Node
from fgpuspawner.engines.base import Capabilities, Held, Safeguard
from fgpuspawner.hub.checks import is_loopback
from fgpuspawner.images.model import Catalogue
from fgpuspawner.settings import FGPU, configured

Network = ipaddress.IPv4Network | ipaddress.IPv6Network
FOR_ALL = {"DummyAuthenticator", "SharedPasswordAuthenticator"}
"""The Hub's authenticators with which anybody who may log in can do so in everybody's name."""


class Profile(StrEnum):
    """Whom a Hub is for, from the most trusting to the least."""

    LAB = "lab"
    """People who would give each other a shell."""
    DEPARTMENT = "department"
    """People who do not know each other."""
    CLASS = "class"
    """A public class: nobody trusts anybody."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What the profiles are judged by: the Hub's final configuration, and what the engine sees to.

    ``bound`` is what the Hub's proxy listens at, ``public`` the URL at which browsers are to find it, where that is said;
    ``outer_proxy``: the administrator runs it. ``simulated`` are the nodes with simulated GPUs, ``held`` the isolation of
    each node with real ones; None where it is not known. ``sudo_images`` are offered, and let their users become root.
    """

    settings: FGPU
    able: Capabilities
    bound: str
    public: str
    outer_proxy: bool
    own_domains: bool
    own_cookies: bool
    own_accounts: bool
    users_config_off: bool
    simulated: Collection[str]
    sudo_images: Collection[str]
    held: Mapping[str, str | None]
    safeguards: Mapping[Safeguard, Held]


@dataclass(frozen=True, slots=True)
class Demand:
    """What a profile demands, and those after it: judged by the facts, or seen to by the engine.

    ``judge`` returns None where it cannot be told, which is never taken as met. ``line`` is what to set; an engine's
    safeguard has the engine's own.
    """

    since: Profile
    what: str
    judge: Safeguard | Callable[[Facts], bool | None]
    line: str = ""


def facts_of(
    app: Any, settings: FGPU, *, catalogue: Catalogue, nodes: Collection[Node], backends: Mapping[str, str]
) -> Facts:
    """Return the facts of a Hub's application. Asks the engine, so it blocks.

    ``nodes`` are those that are known, and ``backends`` what holds their sessions.
    """
    spawner_class = app.spawner_class
    outer = not app.proxy.should_start
    known = {node.id: node for node in nodes}
    named = {spec["name"] for spec in settings.nodes} | known.keys()
    return Facts(
        settings=settings,
        able=spawner_class.capabilities,
        bound=app.bind_url,
        # The Hub takes "https:" away where it has no certificate itself. What its proxy has it does not know.
        public=app.public_url
        or app.subdomain_host
        or (app.config.JupyterHub.get("bind_url", "") if outer else ""),
        outer_proxy=outer,
        own_domains=bool(app.subdomain_host),
        own_cookies=bool(app.cookie_host_prefix_enabled),
        own_accounts=FOR_ALL.isdisjoint(kind.__name__ for kind in app.authenticator_class.mro()),
        users_config_off=bool(configured(spawner_class, app.config).get("disable_user_config", False)),
        simulated=[node.id for node in nodes if any(d.simulated for d in node.devices)],
        sudo_images=[image.slug for image in catalogue.images if image.enabled and image.sudo],
        held={
            name: backends[name] if name in known else None
            for name in sorted(named)
            if name not in known or any(not d.simulated for d in known[name].devices)
        },
        safeguards=spawner_class.safeguards(settings, app.config),
    )


# --- How each is judged ---


def _encrypted(facts: Facts) -> bool | None:
    said = facts.public.startswith("https:")
    if facts.bound.startswith("https:") or (facts.outer_proxy and said):
        return True
    if is_loopback(urlparse(facts.bound).hostname or ""):
        return said or is_loopback(urlparse(facts.public or facts.bound).hostname or "")
    # Another proxy may stand before the Hub's, and a firewall around that.
    return None if said else False


def _clouds_closed(facts: Facts) -> bool:
    closed = [ipaddress.ip_network(name) for name in facts.settings.blocked_networks]
    kept = [ipaddress.ip_network(name) for name in FGPU().blocked_networks]
    return facts.settings.egress == "closed" or all(any(_within(a, b) for b in closed) for a in kept)


def _within(part: Network, whole: Network) -> bool:
    if isinstance(part, ipaddress.IPv4Network):
        return isinstance(whole, ipaddress.IPv4Network) and part.subnet_of(whole)
    return isinstance(whole, ipaddress.IPv6Network) and part.subnet_of(whole)


def _nobody_hoards(facts: Facts) -> bool:
    each = [q for q in facts.settings.quotas if q.get("user") == "*" and "resource_group" not in q]
    held = any("max_fgpu" in q or "max_sessions" in q for q in each)
    ends = any("max_lifetime_s" in q for q in each)
    return held and (ends or facts.settings.max_time_limit_s > 0)


def _by_all(allowed: Collection[str]) -> Callable[[Facts], bool | None]:
    """Return whether what holds the sessions of every node with real GPUs is one of these."""

    def judge(facts: Facts) -> bool | None:
        found = [None if name is None else name in allowed for name in facts.held.values()]
        return False if False in found else None if None in found else True

    return judge


HOLDS = ("mig", "driver-cgroup", "interposer", "mps")
DEMANDS: tuple[Demand, ...] = (
    Demand(
        Profile.LAB, "Sessions run as users of their own", lambda facts: facts.able.apart, 'runtime="docker"'
    ),
    Demand(
        Profile.LAB,
        "GPUs are real, or there are none",
        lambda facts: not facts.simulated,
        'c.FGPU.simulated_gpus = "0"',
    ),
    Demand(Profile.LAB, "CPU and memory of a session are held to what it asked for", Safeguard.LIMITS),
    Demand(
        Profile.LAB, "What browsers send is encrypted", _encrypted, 'c.JupyterHub.bind_url = "https://:443"'
    ),
    Demand(Profile.LAB, "Nobody but the Hub commands the engine from the network", Safeguard.COMMANDS),
    Demand(
        Profile.LAB, "Something holds sessions to their slices", _by_all(HOLDS), 'c.FGPU.isolation = "auto"'
    ),
    Demand(
        Profile.DEPARTMENT,
        "Everybody has an account of their own",
        lambda facts: facts.own_accounts,
        'c.JupyterHub.authenticator_class = "pam"',
    ),
    Demand(
        Profile.DEPARTMENT,
        "Each user's servers have a domain of their own",
        lambda facts: facts.own_domains,
        'c.JupyterHub.subdomain_host = "https://hub.example"',
    ),
    Demand(
        Profile.DEPARTMENT,
        "No page of a user's domain logs its visitor in as somebody else",
        lambda facts: facts.own_cookies,
        "c.JupyterHub.cookie_host_prefix_enabled = True",
    ),
    Demand(
        Profile.DEPARTMENT,
        "What lies in a home sets up no server",
        lambda facts: facts.users_config_off,
        "c.Spawner.disable_user_config = True",
    ),
    Demand(Profile.DEPARTMENT, "The machine's ports are closed to sessions", Safeguard.PORTS),
    Demand(
        Profile.DEPARTMENT,
        "Clouds' metadata is closed to sessions",
        _clouds_closed,
        "c.FGPU.blocked_networks left out, or with all of its default",
    ),
    Demand(Profile.DEPARTMENT, "Sessions have no privileges, and gain none", Safeguard.UNPRIVILEGED),
    Demand(Profile.DEPARTMENT, "The engine refuses needless system calls", Safeguard.FILTERED),
    Demand(Profile.DEPARTMENT, "A session has so many processes at most", Safeguard.PROCESSES),
    Demand(
        Profile.DEPARTMENT,
        "Sessions and homes that take too much of the disk are ended",
        lambda facts: (
            min(facts.settings.session_disk_mib, facts.settings.home_disk_mib) > 0
            and facts.settings.disk_over == "end"
        ),
        'c.FGPU.session_disk_mib = 20480; c.FGPU.home_disk_mib = 51200; c.FGPU.disk_over = "end"',
    ),
    Demand(
        Profile.DEPARTMENT,
        "Nobody becomes root in a session",
        lambda facts: not facts.settings.sudo_groups and not facts.sudo_images,
        "c.FGPU.sudo_groups = [], and no sudo = true in the catalogue",
    ),
    Demand(
        Profile.DEPARTMENT,
        "Sessions cannot end their neighbours on a GPU, or change their own limits",
        _by_all(("mig", "driver-cgroup", "interposer")),
        'c.FGPU.isolation = "auto"',
    ),
    Demand(Profile.CLASS, "Root in a session is nobody on the machine", Safeguard.REMAPPED),
    Demand(Profile.CLASS, "A session's root file system is read-only", Safeguard.READ_ONLY),
    Demand(
        Profile.CLASS,
        "Sessions reach nothing but the Hub and the service",
        lambda facts: facts.settings.egress == "closed",
        'c.FGPU.egress = "closed"',
    ),
    Demand(
        Profile.CLASS,
        "Nobody runs what somebody else has saved",
        lambda facts: not facts.settings.owners_may_commit,
        "c.FGPU.owners_may_commit = False",
    ),
    Demand(
        Profile.CLASS,
        "Nobody holds more than their part, or without end",
        _nobody_hoards,
        'c.FGPU.quotas = [{"user": "*", "max_sessions": 2, "max_lifetime_s": 14400}]',
    ),
    Demand(
        Profile.CLASS,
        "Hardware or driver hold GPU memory, not a library in the session",
        _by_all(("mig", "driver-cgroup")),
        'MIG, or a driver r615 or newer, and c.FGPU.isolation = "auto"',
    ),
)
"""All of them, in the order in which they are shown. A profile's are its own, and those of the profiles before it."""


@dataclass(frozen=True, slots=True)
class Judged:
    """A demand, whether it is met, None where that cannot be told, and the line that meets it."""

    demand: Demand
    met: bool | None
    line: str


def judged(facts: Facts) -> tuple[Judged, ...]:
    """Return every demand with what came of it."""
    return tuple(_judged(demand, facts) for demand in DEMANDS)


def _judged(demand: Demand, facts: Facts) -> Judged:
    if not isinstance(demand.judge, Safeguard):
        return Judged(demand, demand.judge(facts), demand.line)
    held = facts.safeguards.get(demand.judge)
    if held is None:
        return Judged(demand, None, f"cannot be told of {facts.able.kind}")
    return Judged(demand, held.met, held.line)


def reached(found: Collection[Judged]) -> Profile | None:
    """Return the least trusting profile of which all is met; None where the first is not."""
    best: Profile | None = None
    for profile in Profile:
        if any(not own.met for own in found if own.demand.since is profile):
            break
        best = profile
    return best


def words(found: Collection[Judged]) -> list[str]:
    """Return the profile that is reached, and what the next one lacks, as lines for people."""
    best = reached(found)
    profiles = list(Profile)
    after = profiles if best is None else profiles[profiles.index(best) + 1 :]
    lines = [f"security: {best or 'for trying only'} (docs/security.md)"]
    if after:
        lines[0] += f"; for {after[0]} it lacks:"
        own = [j for j in found if j.demand.since is after[0] and not j.met]
        lines += [f"  {'missing' if j.met is False else 'unknown'}: {j.demand.what}: {j.line}" for j in own]
    return lines
