"""Docker networks: the one on which sessions reach the Hub, and one for each user's sessions.

On a separate bridge Docker's resolver does not tell other users' names, and its rules stop other users' packets. The
bridge interfaces share a prefix for the rules of `firewall.py`. Docker's own address pools hold only some thirty
networks, so subnets are assigned here.
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
from http import HTTPStatus
from ipaddress import IPv4Network
from pathlib import Path
from typing import Any, NamedTuple

import docker
from docker.errors import APIError, NotFound
from docker.types import IPAMConfig, IPAMPool

from fgpu_scheduler import BadSettings, FGPUError
from fgpuspawner.engines.base import EngineSilent
from fgpuspawner.engines.docker.client import FAILED

log = logging.getLogger("fgpu.network")

NETWORK = "fgpu"
ENABLE_ICC = "com.docker.network.bridge.enable_icc"
BRIDGE = "com.docker.network.bridge.name"
INTERFACES = "fgpu"
"""Common prefix of all users' bridges, of every installation."""
TRIES = 8
"""Attempts with other subnets if someone else has just taken the free one."""


def ensure_network(client: docker.APIClient, name: str = NETWORK) -> str:
    """Ensure the network on which sessions reach the Hub at its gateway; return the host's address on it.

    It is a bridge without traffic between containers. On other machines it is the sessions' first network.

    Raises:
        BadSettings: the engine refuses, or a network of that name is of another kind.
    """
    try:
        try:
            found = client.inspect_network(name)
        except NotFound:
            options = {ENABLE_ICC: "false"}
            try:
                client.create_network(name, driver="bridge", options=options, check_duplicate=True)
            except APIError as e:
                # Another Hub on this engine may have created it just now.
                if e.status_code != HTTPStatus.CONFLICT:
                    raise
            found = client.inspect_network(name)
    except FAILED as e:
        raise BadSettings(f"the Docker network {name!r} cannot be used: {e}") from e
    if found["Driver"] != "bridge" or (found.get("Options") or {}).get(ENABLE_ICC) != "false":
        raise BadSettings(
            f"the Docker network {name!r} exists and lets containers reach each other; remove it "
            f"(docker network rm {name}), and it is made again"
        )
    gateways = [config["Gateway"] for config in found["IPAM"]["Config"] if config.get("Gateway")]
    if not gateways:
        raise BadSettings(f"the Docker network {name!r} has no gateway address")
    return str(gateways[0]).split("/")[0]


class NetworkFailed(FGPUError):
    """A user's network cannot be made; the message is for the session's owner."""

    code = "network_failed"


class Route(NamedTuple):
    """A network with a specific route on this machine."""

    to: IPv4Network
    interface: str


def tag(installation: str) -> str:
    """Return a short tag for an installation's interfaces and firewall rules."""
    return hashlib.sha256(installation.encode()).hexdigest()[:5]


def interfaces(installation: str) -> str:
    """Return the prefix of an installation's bridges; six characters are left for the rest."""
    return INTERFACES + tag(installation)


def host_routes(table: str | None = None) -> list[Route]:
    """Return this machine's IPv4 routes without the default; ``table`` is the text of /proc/net/route."""
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
        # In the machine's byte order, which is little-endian wherever CUDA runs.
        to, mask = (int.from_bytes(bytes.fromhex(fields[n]), "little") for n in (1, 7))
        if mask:
            network = IPv4Network((to, mask.bit_count()), strict=False)
            found.append(Route(network, fields[0]))
    return found


class UserNetworks:
    """The users' networks on one engine. Calls block; any number may run concurrently. They raise DockerException.

    Args:
        client: returns the engine's client, which changes after the engine was away.
        installation: the id of the installation.
        pool: the address range for subnets.
        prefix_length: of each subnet; 28 has room for 13 sessions of one user.
        routes: the routes of the engine's machine, if the Hub can see them.
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
        #: Guards the fields below; never held during a call to the engine.
        self._guard = threading.Lock()
        #: One for each network.
        self._locks: dict[str, threading.Lock] = {}
        #: Launches that need a network, by its name.
        self._launches: Counter[str] = Counter()
        #: Numbers of subnets for networks that are being made.
        self._taken: set[int] = set()
        #: Where the search for a free subnet begins; random, as a restarted Hub does not know the last one.
        self._next = secrets.randbelow(self._room)
        #: Monotonic time at which a network was first seen unused.
        self._unused_since_s: dict[str, float] = {}

    def name(self, user: str) -> str:
        return f"{self._prefix}{hashlib.sha256(user.encode()).hexdigest()[:16]}"

    @property
    def _prefix(self) -> str:
        return f"fgpu-{self.installation}-u-"

    @property
    def _room(self) -> int:
        return int(2 ** (self._prefix_length - self._pool.prefixlen))

    def check_pool(self) -> None:
        """Refuse a pool of addresses that is in use.

        Raises:
            BadSettings: it overlaps a route of this machine, or another network of the engine.
            EngineSilent: the engine does not list its networks.
        """
        try:
            networks = self._networks()
        except FAILED as e:
            raise EngineSilent(f"the Docker engine does not say which networks it has: {e}") from e
        used = [
            (route.to, f"this machine's route to {route.to} ({route.interface})")
            for route in self._routes()
            if not route.interface.startswith(INTERFACES)
        ]
        used += [
            (subnet, f"{subnet} of the Docker network {network['Name']!r}")
            for network in networks
            if not str((network.get("Options") or {}).get(BRIDGE, "")).startswith(INTERFACES)
            for subnet in _subnets(network)
        ]
        for addresses, what in used:
            if addresses.overlaps(self._pool):
                raise BadSettings(
                    f"c.FGPU.network_pool {self._pool} overlaps {what}; name a pool of unused addresses"
                )

    @contextmanager
    def held(self, user: str) -> Iterator[None]:
        """Keep the user's network until a container is on it, or the launch has failed."""
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
        """Make the user's network if it is missing; return its name. Call within `held`.

        Raises:
            NetworkFailed: it cannot be made; with words for the user.
            DockerException: the engine refuses, or does not answer.
        """
        name = self.name(user)
        with self._lock(name):
            self._ensure(name, user)
        return name

    def count(self) -> int:
        """Return the number of networks."""
        return len(self._own_networks())

    def remove_unused(self, *, after_s: float = 0.0) -> int:
        """Remove the networks that have been unused for ``after_s``, and that no launch is about to use.

        Returns how many unused ones are left.
        """
        used = {
            name
            for entry in self._client().containers(all=True)
            for name in (entry.get("NetworkSettings") or {}).get("Networks") or {}
        }
        unused = {
            str(network["Name"]): str(network["Id"])
            for network in self._own_networks()
            if network["Name"] not in used
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
        # This also lists created containers that were not started; the network's own description does not.
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

    def _lock(self, name: str) -> threading.Lock:
        """Return the lock of one network: it is made once, and never removed while a container joins it."""
        with self._guard:
            return self._locks.setdefault(name, threading.Lock())

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
            and options.get(ENABLE_ICC) == "false"
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
                    options={ENABLE_ICC: "false", BRIDGE: f"{interfaces(self.installation)}{number:x}"},
                    ipam=IPAMConfig(
                        driver="default",
                        pool_configs=[IPAMPool(subnet=str(subnet), gateway=str(subnet[1]))],
                    ),
                )
                return
            except APIError as e:
                # Another installation may have taken the subnet just now, and the engine keeps a removed network's
                # subnet for a moment.
                if not _is_about_addresses(e):
                    raise
                refused.add(number)
                log.info("Subnet %s is taken: %s", subnet, e.explanation)
            finally:
                with self._guard:
                    self._taken.discard(number)
        raise NetworkFailed("no network could be made for your session; try again, or ask an administrator")

    def _take(self, user: str, refused: Collection[int]) -> int:
        """Return the number of a free subnet, and reserve it against concurrent calls."""
        used = [s for n in self._networks() for s in _subnets(n)]
        used += [r.to for r in self._routes()]
        busy = {number for network in used for number in self._numbers(network)}
        room = self._room
        with self._guard:
            out = {*busy, *self._taken, *refused}
            # Round robin: a proxy or the connection tracker may still remember the address of a session that just
            # ended, so it must not become another user's soon.
            ahead = ((self._next + n) % room for n in range(room))
            number = next((n for n in ahead if n not in out), None)
            if number is not None:
                self._taken.add(number)
                self._next = number + 1
                return number
        words = (
            "No network for %s: c.FGPU.network_pool %s has room for %d networks of /%d, and all are in use"
        )
        log.error(words, user, self._pool, room, self._prefix_length)
        raise NetworkFailed(
            f"no network is free for your session: all {room} are in use; try later, or ask an administrator "
            "for a larger c.FGPU.network_pool"
        )

    def _numbers(self, network: IPv4Network) -> range:
        # A route to more than the whole pool, added since the start, does not occupy single subnets.
        if not network.overlaps(self._pool) or (
            network.supernet_of(self._pool) and network.prefixlen < self._pool.prefixlen
        ):
            return range(0)
        first, size = int(self._pool.network_address), 2 ** (32 - self._prefix_length)
        begin, end = int(network.network_address) - first, int(network.broadcast_address) - first
        return range(begin // size, end // size + 1)

    def _networks(self, **filters: Any) -> list[dict[str, Any]]:
        return list(self._client().networks(filters=filters or None))

    def _own_networks(self) -> list[dict[str, Any]]:
        found = self._networks(label=f"fgpu.installation={self.installation}")
        return [network for network in found if str(network["Name"]).startswith(self._prefix)]


def _subnets(network: dict[str, Any]) -> list[IPv4Network]:
    configs = (network.get("IPAM") or {}).get("Config") or []
    found = [ipaddress.ip_network(c["Subnet"], strict=False) for c in configs if c.get("Subnet")]
    return [n for n in found if isinstance(n, IPv4Network)]


def _is_about_addresses(error: APIError) -> bool:
    text = str(error.explanation or error).lower()
    return "overlaps" in text or "conflicts with network" in text or "already allocated" in text
