"""Keeps users apart on the network: their networks on every daemon, and the firewall."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from ipaddress import IPv4Network
from urllib.parse import urlparse

from fgpu_scheduler import BadSettings
from fgpuspawner.concurrency.background import Background
from fgpuspawner.engines.base import EngineSilent
from fgpuspawner.engines.docker import firewall
from fgpuspawner.engines.docker.client import FAILED
from fgpuspawner.engines.docker.daemon import Daemon
from fgpuspawner.engines.docker.fleet import Fleet
from fgpuspawner.engines.docker.networks import UserNetworks, host_routes
from fgpuspawner.settings import FGPU

log = logging.getLogger("fgpu.network")

KEPT_FOR_S = 20.0
"""How long a network stays after its last session: its user may start another, and making one takes 60 ms."""
SWEEP_EVERY_S = 60.0
ELSEWHERE = "set c.FGPU.firewall = 'managed-elsewhere' if another program closes the machine to sessions"


class NetworkGuard:
    """The user networks of one Hub on all daemons, and its firewall."""

    def __init__(self, settings: FGPU, fleet: Fleet, *, installation: str) -> None:
        self._settings = settings
        self._fleet = fleet
        self.installation = installation
        self._networks = {daemon: self._networks_on(daemon) for daemon in fleet.daemons}
        self._firewall: firewall.FirewallKeeper | None = None
        self._opened = False
        #: Set when a session has ended and its network may be unused.
        self._used = asyncio.Event()

    def _networks_on(self, daemon: Daemon) -> UserNetworks:
        return UserNetworks(
            lambda: daemon.client,
            installation=self.installation,
            pool=IPv4Network(self._settings.network_pool),
            prefix_length=self._settings.network_prefix_length,
            routes=list if daemon.address.is_elsewhere else host_routes,
        )

    def open(self, urls: Sequence[str], background: Background) -> None:
        """Check the pool of addresses, and close this machine to sessions as set. Blocks.

        ``urls`` must stay reachable for sessions.

        Raises:
            BadSettings: the pool is in use, or the settings cannot be enforced.
            EngineSilent: this machine's own daemon does not answer.
        """
        for daemon in self._fleet.answering:
            try:
                self._networks[daemon].check_pool()
            except EngineSilent as e:
                if not daemon.address.url:
                    raise
                log.error("%s: %s; its nodes take no sessions until it does", daemon.address, e)
                daemon.answers = False
        self._check_other_machines()
        wall = self._firewall = guard(self._settings, rules_for(self._settings, urls, self.installation))
        self._opened = True
        background.every(
            SWEEP_EVERY_S, self._sweep, failed="Unused networks could not be removed", wake=self._used
        )
        if wall is not None:
            background.every(
                firewall.LOOK_EVERY_S,
                lambda: asyncio.to_thread(wall.keep),
                failed="Sessions may reach this machine's ports",
                first_after_s=firewall.LOOK_EVERY_S,
                level=logging.ERROR,
            )

    def close(self) -> None:
        """Remove what no session needs when the Hub ends. Blocks.

        The rules stay while there are networks for them: sessions may outlive the Hub.
        """
        if not self._opened:
            return
        left = 0
        for daemon in self._fleet.daemons:
            networks = self._networks[daemon]
            try:
                if daemon.answers:
                    networks.remove_unused()
                left += 0 if daemon.address.is_elsewhere else networks.count()
            except FAILED as e:
                log.debug("Networks of %s could not be checked: %s", daemon.address, e)
                left += 1
        if self._firewall is not None and not left:
            try:
                firewall.run(firewall.removal(self.installation))
            except firewall.FirewallFailed as e:
                log.debug("%s", e)

    def _check_other_machines(self) -> None:
        """Warn about machines on which the Hub cannot close the ports.

        Raises:
            BadSettings: egress must be closed there, and the administrator has not taken that over.
        """
        there = [n for d in self._fleet.daemons if d.address.is_elsewhere for n in d.address.node_ids]
        if not there or self._settings.firewall == "managed-elsewhere":
            return
        names = " and ".join(there)
        if self._settings.egress == "closed":
            raise BadSettings(
                f"c.FGPU.egress is 'closed', and the Hub cannot close it on other machines (node {names}); run what "
                "'fgpu firewall' prints as root at every boot there and here, and set "
                "c.FGPU.firewall = 'managed-elsewhere'"
            )
        log.warning(
            "Sessions on node %s can reach every port that its machine opens on all its addresses, unless rules there "
            "close them: run what 'fgpu firewall' prints as root there, at every boot",
            names,
        )

    @asynccontextmanager
    async def of(self, user: str, daemon: Daemon) -> AsyncIterator[str]:
        """Yield the name of the user's network, which is not removed until a container is on it.

        Raises:
            NetworkFailed: it cannot be made; with words for the user.
            DockerException: the daemon refuses, or does not answer.
        """
        networks = self._networks[daemon]
        with networks.held(user):
            yield await daemon.containers.call(networks.ensure, user)

    # -- in the Hub's event loop ----------------------------------------------------------------------

    def sweep_soon(self) -> None:
        """Remove unused networks after a while: a session has ended."""
        self._used.set()

    async def _sweep(self) -> None:
        """Remove unused networks until none is left."""
        left = True
        while left:
            # A container that is being removed is on its network for another moment.
            await asyncio.sleep(KEPT_FOR_S / 4)
            left = any(await asyncio.gather(*map(self._sweep_one, self._fleet.answering)))

    async def _sweep_one(self, daemon: Daemon) -> int:
        try:
            return await daemon.containers.call(self._networks[daemon].remove_unused, after_s=KEPT_FOR_S)
        except FAILED as e:
            log.debug("Networks of %s could not be checked: %s", daemon.address, e)
            return 0


def rules_for(settings: FGPU, urls: Sequence[str], installation: str) -> firewall.FirewallRules:
    """Return the rules of an installation: its URLs, and what its settings allow."""
    services = [address for url in urls for address in _addresses(url)]
    return firewall.FirewallRules(
        installation=installation,
        services=tuple(dict.fromkeys(services)),
        allowed_ports=tuple(settings.allowed_ports),
        name_servers=firewall.name_servers(),
        blocked=tuple(settings.blocked_networks),
        egress_open=settings.egress == "open",
        # For rules on another machine, where the Hub connects from outside.
        callers=tuple(dict.fromkeys(address for address, _ in services)),
    )


def _addresses(url: str) -> list[tuple[str, int]]:
    """Return the addresses and the port of a URL; raises BadSettings if its host has no address."""
    parsed = urlparse(url)
    host, port = parsed.hostname or "", parsed.port or (443 if parsed.scheme == "https" else 80)
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as e:
        raise BadSettings(
            f"{url}, which sessions are told, has no address: {e.strerror or e}; set c.JupyterHub.hub_connect_ip "
            "or c.FGPU.service_url_for_sessions"
        ) from None
    return list(dict.fromkeys((str(info[4][0]).split("%")[0], port) for info in found))


def guard(settings: FGPU, rules: firewall.FirewallRules) -> firewall.FirewallKeeper | None:
    """Apply the rules if the Hub must and can; return the object that keeps them, or None.

    Raises:
        BadSettings: egress must be closed and is not, or the rules cannot be applied.
    """
    if settings.firewall == "managed-elsewhere":
        log.info("The firewall is managed elsewhere (c.FGPU.firewall): the Hub applies no rules")
        return None
    try:
        can_apply = firewall.can_apply()
    except firewall.FirewallFailed as e:
        raise BadSettings(f"{e}; {ELSEWHERE}") from None
    if not can_apply:
        if settings.egress == "closed":
            raise BadSettings(
                "c.FGPU.egress is 'closed', and the Hub cannot close it: it does not run as root, or there is no "
                "iptables; run 'fgpu firewall --apply' as root at every boot, and set "
                "c.FGPU.firewall = 'managed-elsewhere'"
            )
        log.warning(
            "Sessions can reach every port that this machine opens on all its addresses, unless rules that the Hub "
            "does not know of close them: it does not run as root, or there is no iptables. Run 'fgpu firewall "
            "--apply' as root at every boot, and set c.FGPU.firewall = 'managed-elsewhere'"
        )
        return None
    found = firewall.FirewallKeeper(rules)
    try:
        found.apply()
    except firewall.FirewallFailed as e:
        raise BadSettings(f"{e}; {ELSEWHERE}") from None
    reached = [f"{address}:{port}" for address, port in rules.services]
    reached += [f"port {port}" for port in rules.allowed_ports]
    beyond = f"all beyond it{' but ' if rules.blocked else ''}{' and '.join(rules.blocked)}"
    log.info(
        "The firewall is in force: of this machine sessions reach %s; %s",
        " and ".join(reached),
        beyond if rules.egress_open else "nothing beyond it",
    )
    return found
