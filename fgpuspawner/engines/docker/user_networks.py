"""Docker networks: one for each user's sessions.

A user's sessions are on a bridge of their own, so that Docker's resolver tells them nobody else's name and its rules
let nobody else's packets through. The bridges' interfaces share a prefix, which the rules of `firewall.py`
match. Docker's own address pools hold some thirty networks; subnets are therefore given out here.
"""

from __future__ import annotations

import hashlib
import ipaddress
import logging
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from ipaddress import IPv4Network
from pathlib import Path
from typing import Any

import docker
from docker.errors import APIError, NotFound
from docker.types import IPAMConfig, IPAMPool

from fgpu_scheduler import BadSettings, FGPUError
from fgpuspawner.engines.base import EngineSilent
from fgpuspawner.engines.docker.errors import FAILED
from fgpuspawner.engines.docker.shared_network import NO_TALK

log = logging.getLogger("fgpu.network")

BRIDGE = "com.docker.network.bridge.name"
INTERFACES = "fgpu"
"""How the names of all users' bridges begin, whichever installation they are of."""
TRIES = 8
"""So often another subnet is tried when somebody else has just taken the one that was free."""


class NetworkFailed(FGPUError):
    """A user's network cannot be made; the message is for the owner of the session."""

    code = "network_failed"


@dataclass(frozen=True, slots=True)
class Route:
    """A network that this machine has a way to, other than the way to everything."""

    to: IPv4Network
    interface: str


def tag(installation: str) -> str:
    """Return the few characters by which an installation's interfaces and firewall rules are known."""
    return hashlib.sha256(installation.encode()).hexdigest()[:5]


def interfaces(installation: str) -> str:
    """Return how the names of an installation's bridges begin; six characters are left for the rest."""
    return INTERFACES + tag(installation)


def host_routes(table: str | None = None) -> list[Route]:
    """Return this machine's routes (IPv4), without the default one; ``table`` is /proc/net/route's text."""
    if table is None:
        try:
            table = Path("/proc/net/route").read_text()
        except OSError:
            return []
    found = []
    for line in table.splitlines()[1:]:
        fields = line.split()
        if len(fields) < 8:
            continue
        # In the byte order of the machine, which is little-endian wherever CUDA runs.
        to, mask = (int.from_bytes(bytes.fromhex(fields[n]), "little") for n in (1, 7))
        if mask:
            network = IPv4Network((to, mask.bit_count()), strict=False)
            found.append(Route(network, fields[0]))
    return found


class UserNetworks:
    """The users' networks on one engine. Calls block; they are for threads, as many as there are at once.

    Args:
        client: returns the engine's client, which may become another when the engine has been away.
        installation: whose networks these are.
        pool: what subnets are cut from.
        prefix_length: of each of them; 28 has room for 13 sessions of one user.
        routes: the routes of the engine's machine, where the Hub can see them.
    """

    def __init__(
        self,
        client: Callable[[], docker.APIClient],
        *,
        installation: str,
        pool: IPv4Network,
        prefix_length: int = 28,
        routes: Callable[[], Sequence[Route]] = host_routes,
    ) -> None:
        self._client = client
        self.installation = installation
        self._pool = pool
        self._prefix_length = prefix_length
        self._routes = routes
        self._guard = threading.Lock()
        """Held for what is below, never while the engine is asked."""
        self._locks: dict[str, threading.Lock] = {}
        self._launches: Counter[str] = Counter()
        self._taken: set[int] = set()
        self._next = secrets.randbelow(self._room)
        """Where the next free subnet is looked for; a restarted Hub does not know which it gave out last."""
        self._unused_since_s: dict[str, float] = {}

    def name(self, user: str) -> str:
        """Return the name of a user's network."""
        return f"{self._prefix}{hashlib.sha256(user.encode()).hexdigest()[:16]}"

    @property
    def _prefix(self) -> str:
        return f"fgpu-{self.installation}-u-"

    @property
    def _room(self) -> int:
        return int(2 ** (self._prefix_length - self._pool.prefixlen))

    def check_pool(self) -> None:
        """Refuse a pool of addresses that somebody else uses.

        Raises:
            BadSettings: it overlaps a route of this machine, or another network of the engine.
            EngineSilent: the engine does not say which networks it has.
        """
        try:
            others = [n for n in self._networks() if not _is_a_users(n)]
        except FAILED as e:
            raise EngineSilent(f"the Docker engine does not say which networks it has: {e}") from e
        for route in self._routes():
            if route.to.overlaps(self._pool) and not route.interface.startswith(INTERFACES):
                raise BadSettings(
                    f"c.FGPU.network_pool {self._pool} overlaps this machine's route to {route.to} "
                    f"({route.interface}); name a pool of unused addresses"
                )
        for network in others:
            for subnet in _subnets(network):
                if subnet.overlaps(self._pool):
                    raise BadSettings(
                        f"c.FGPU.network_pool {self._pool} overlaps {subnet} of the Docker network "
                        f"{network['Name']!r}; name a pool of unused addresses"
                    )

    @contextmanager
    def held(self, user: str) -> Iterator[None]:
        """Keep the user's network from being removed, until a container is on it or there will be none."""
        name = self.name(user)
        with self._guard:
            self._launches[name] += 1
            self._unused_since_s.pop(name, None)
        try:
            yield
        finally:
            with self._guard:
                self._launches[name] -= 1
                if not self._launches[name]:
                    del self._launches[name]

    def ensure(self, user: str) -> str:
        """Make the user's network if it is not there; return its name. For within `held`.

        Raises:
            NetworkFailed: it cannot be made; with words for the user.
            DockerException: the engine refuses, or does not answer.
        """
        name = self.name(user)
        with self._lock(name):
            self._ensure(name, user)
        return name

    def count(self) -> int:
        """Return how many networks there are.

        Raises:
            DockerException: the engine does not answer.
        """
        return sum(str(n["Name"]).startswith(self._prefix) for n in self._networks(self.installation))

    def remove_unused(self, *, after_s: float = 0.0) -> int:
        """Remove the networks that no container is on, nor has been since a look ``after_s`` ago, and none is about to.

        Returns how many are left that no container is on.

        Raises:
            DockerException: the engine does not answer.
        """
        used = {
            name
            for entry in self._client().containers(all=True)
            for name in (entry.get("NetworkSettings") or {}).get("Networks") or {}
        }
        unused = {
            str(network["Name"]): str(network["Id"])
            for network in self._networks(self.installation)
            if str(network["Name"]).startswith(self._prefix) and network["Name"] not in used
        }
        now_s = time.monotonic()
        with self._guard:
            self._unused_since_s = {name: self._unused_since_s.get(name, now_s) for name in unused}
            old = [name for name, since_s in self._unused_since_s.items() if now_s - since_s >= after_s]
        removed = 0
        for name in old:
            with self._lock(name):
                if self._remove_if_unused(name, unused[name]):
                    removed += 1
                    log.debug("Removed network %s, which nobody uses", name)
        return len(unused) - removed

    def _remove_if_unused(self, name: str, network_id: str) -> bool:
        with self._guard:
            if self._launches[name]:
                return False
        # Containers that were made and not started yet are listed too; the network itself does not know them.
        if self._client().containers(all=True, filters={"network": network_id}):
            return False
        try:
            self._client().remove_network(network_id)
        except NotFound:
            return False
        except APIError as e:
            log.warning("Network %s cannot be removed yet: %s", name, e.explanation)
            with self._guard:
                self._unused_since_s.pop(name, None)
            return False
        return True

    @contextmanager
    def _lock(self, name: str) -> Iterator[None]:
        """Hold this network to oneself: it is made once, and never removed while it is being joined."""
        with self._guard:
            lock = self._locks.setdefault(name, threading.Lock())
        with lock:
            yield

    def _ensure(self, name: str, user: str) -> None:
        try:
            found = self._client().inspect_network(name)
        except NotFound:
            self._create(name, user)
            return
        options = found.get("Options") or {}
        ours = (
            (found.get("Labels") or {}).get("fgpu.installation") == self.installation
            and found["Driver"] == "bridge"
            and options.get(NO_TALK) == "false"
            and str(options.get(BRIDGE, "")).startswith(interfaces(self.installation))
        )
        if not ours:
            log.error("The Docker network %s is not as we make them; remove it (docker network rm)", name)
            raise NetworkFailed("your sessions' network is not as it must be; ask an administrator")

    def _create(self, name: str, user: str) -> None:
        refused: set[int] = set()
        for _ in range(TRIES):
            number = self._take(user, refused)
            size = 2 ** (32 - self._prefix_length)
            subnet = IPv4Network((int(self._pool.network_address) + number * size, self._prefix_length))
            try:
                self._client().create_network(
                    name,
                    driver="bridge",
                    check_duplicate=True,
                    enable_ipv6=False,
                    labels={"fgpu.installation": self.installation, "fgpu.user": user},
                    options={NO_TALK: "false", BRIDGE: f"{interfaces(self.installation)}{number:x}"},
                    ipam=IPAMConfig(
                        driver="default",
                        pool_configs=[IPAMPool(subnet=str(subnet), gateway=str(subnet[1]))],
                    ),
                )
                return
            except APIError as e:
                # Another installation on this engine may have taken the same subnet meanwhile; and the engine keeps
                # one for a moment when its network is not listed any more.
                if not _is_about_addresses(e):
                    raise
                refused.add(number)
                log.info("Subnet %s is taken: %s", subnet, e.explanation)
            finally:
                with self._guard:
                    self._taken.discard(number)
        raise NetworkFailed("no network could be made for your session; try again, or ask an administrator")

    def _take(self, user: str, refused: Collection[int]) -> int:
        """Return the number of a subnet that nobody has, and keep it from those who look at the same time."""
        used = [s for n in self._networks() for s in _subnets(n)]
        used += [r.to for r in self._routes()]
        busy = {number for network in used for number in self._numbers(network)}
        room = self._room
        with self._guard:
            out = {*busy, *self._taken, *refused}
            # One after the other: an address that had a session a moment ago may still be known to a proxy or to the
            # connection tracker, and must not be another user's meanwhile.
            ahead = ((self._next + n) % room for n in range(room))
            number = next((n for n in ahead if n not in out), None)
            if number is not None:
                self._taken.add(number)
                self._next = number + 1
                return number
        log.error(
            "No network for %s: c.FGPU.network_pool %s has room for %d networks of /%d, and all are in use",
            user,
            self._pool,
            room,
            self._prefix_length,
        )
        raise NetworkFailed(
            f"no network is free for your session: all {room} are in use; try later, or ask an administrator "
            "for a larger c.FGPU.network_pool"
        )

    def _numbers(self, network: IPv4Network) -> range:
        """Return the numbers of the pool's subnets that this network has addresses of."""
        # A way to all of the pool and more, which has come since the start, says nothing about any of them.
        if not network.overlaps(self._pool) or (
            network.supernet_of(self._pool) and network.prefixlen < self._pool.prefixlen
        ):
            return range(0)
        first, size = int(self._pool.network_address), 2 ** (32 - self._prefix_length)
        begin, end = int(network.network_address) - first, int(network.broadcast_address) - first
        return range(begin // size, end // size + 1)

    def _networks(self, installation: str | None = None) -> list[dict[str, Any]]:
        filters = {"label": f"fgpu.installation={installation}"} if installation else None
        return list(self._client().networks(filters=filters))


def _is_a_users(network: dict[str, Any]) -> bool:
    return str((network.get("Options") or {}).get(BRIDGE, "")).startswith(INTERFACES)


def _subnets(network: dict[str, Any]) -> list[IPv4Network]:
    """Return the IPv4 subnets of a network as the engine lists it."""
    configs = (network.get("IPAM") or {}).get("Config") or []
    found = [ipaddress.ip_network(c["Subnet"], strict=False) for c in configs if c.get("Subnet")]
    return [n for n in found if isinstance(n, IPv4Network)]


def _is_about_addresses(error: APIError) -> bool:
    text = str(error.explanation or error).lower()
    return "overlaps" in text or "conflicts with network" in text or "already allocated" in text
