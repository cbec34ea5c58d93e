"""What keeps users apart on the network while the Hub runs: their networks on every engine, and the firewall."""

from __future__ import annotations

import asyncio
import atexit
import ipaddress
import logging
import socket
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from ipaddress import IPv4Network
from typing import Any
from urllib.parse import urlparse

from docker.errors import DockerException

from fgpu_scheduler import BadSettings
from fgpuspawner import firewall
from fgpuspawner.containers import GONE, EngineSilent
from fgpuspawner.engines import Engine, Engines
from fgpuspawner.network import UserNetworks, host_routes
from fgpuspawner.settings import FGPU

log = logging.getLogger("fgpu.network")

KEPT_FOR_S = 20.0
"""So long a network stays when its last session has ended: its user may start another, and it costs 60 ms to make."""
SWEEP_EVERY_S = 60.0


class Tenants:
    """The users of one Hub, as the engines and the firewall know them."""

    def __init__(self, settings: FGPU, engines: Engines, *, installation: str) -> None:
        self._settings = settings
        self._engines = engines
        self.installation = installation
        self._networks = {id(engine): self._networks_on(engine) for engine in engines.engines}
        self._firewall: firewall.Firewall | None = None
        self._sweeping: asyncio.Task[None] | None = None
        self._look_again = False

    def _networks_on(self, engine: Engine) -> UserNetworks:
        return UserNetworks(
            lambda: engine.containers.client,
            installation=self.installation,
            pool=IPv4Network(self._settings.network_pool),
            prefix_length=self._settings.network_prefix_length,
            routes=list if engine.address.is_elsewhere else host_routes,
        )

    def open(self, app: Any) -> None:
        """Check the pool of addresses, and close this machine to sessions as far as that is asked for. Blocks.

        Raises:
            BadSettings: the pool is somebody else's; or what sessions may reach cannot be held to.
            EngineSilent: this machine's own engine does not answer any more.
        """
        for engine in self._engines.engines:
            try:
                if engine.answers:
                    self._networks[id(engine)].check_pool()
            except EngineSilent as e:
                if not engine.address.url:
                    raise
                log.error("%s: %s; its nodes take no sessions until it does", engine.address, e)
                engine.answers = False
        self._check_other_machines()
        self._firewall = guard(self._settings, rules_for(self._settings, app, self.installation))
        atexit.register(self.close)

    def close(self) -> None:
        """Remove what no session needs when the Hub ends. Blocks.

        Rules stay for as long as there are networks that they are about: sessions may outlive the Hub.
        """
        left = 0
        for engine in self._engines.engines:
            networks = self._networks[id(engine)]
            try:
                if engine.answers:
                    networks.remove_unused()
                left += 0 if engine.address.is_elsewhere else networks.count()
            except (DockerException, *GONE) as e:
                log.debug("Networks of %s are not looked at: %s", engine.address, e)
                left += 1
        if self._firewall is not None and not left:
            try:
                firewall.run(firewall.removal(self.installation))
            except firewall.FirewallFailed as e:
                log.debug("%s", e)

    def _check_other_machines(self) -> None:
        """Say of which machines the Hub cannot close the ports, whoever it runs as.

        Raises:
            BadSettings: egress is to be closed there, and nobody vouches for it.
        """
        there = [n for e in self._engines.engines if e.address.is_elsewhere for n in e.address.node_ids]
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
    async def network_of(self, user: str, engine: Engine) -> AsyncIterator[str]:
        """Return the name of the user's network, to make a container on it while this lasts.

        Raises:
            NetworkFailed: it cannot be made; with words for the user.
            DockerException: the engine refuses, or does not answer.
        """
        networks = self._networks[id(engine)]
        with networks.held(user):
            yield await engine.containers.call(networks.ensure, user)

    # -- in the Hub's event loop ----------------------------------------------------------------------

    async def keep(self) -> None:
        """Keep the firewall's rules in force, and remove networks that nobody uses, for as long as this runs."""
        tasks = [asyncio.ensure_future(self._sweep_always())]
        if self._firewall is not None:
            tasks.append(asyncio.ensure_future(self._firewall.keep()))
        await asyncio.gather(*tasks)

    def sweep_soon(self) -> None:
        """Remove networks that nobody uses, when they have not been used for a while: a session has ended."""
        self._look_again = True
        if self._sweeping is None or self._sweeping.done():
            self._sweeping = asyncio.ensure_future(self._sweep_until_done())

    async def _sweep_until_done(self) -> None:
        while self._look_again or await self._sweep(after_s=KEPT_FOR_S):
            self._look_again = False
            await asyncio.sleep(KEPT_FOR_S / 4)

    async def _sweep_always(self) -> None:
        await self._sweep(after_s=0)
        while True:
            await asyncio.sleep(SWEEP_EVERY_S)
            await self._sweep(after_s=KEPT_FOR_S)

    async def _sweep(self, *, after_s: float) -> int:
        """Return how many networks are left that nobody uses."""
        looks = (self._sweep_one(engine, after_s) for engine in self._engines.engines)
        return sum(await asyncio.gather(*looks))

    async def _sweep_one(self, engine: Engine, after_s: float) -> int:
        if not engine.answers:
            return 0
        try:
            return await engine.containers.call(self._networks[id(engine)].remove_unused, after_s=after_s)
        except (DockerException, *GONE) as e:
            log.debug("Networks of %s are not looked at: %s", engine.address, e)
        except Exception:
            # Nobody waits for these looks: without them networks stay until none is free.
            log.exception("Networks of %s are not looked at", engine.address)
        return 0


def rules_for(settings: FGPU, app: Any, installation: str) -> firewall.Rules:
    """Return what the sessions of an installation reach, by its settings and its Hub's."""
    services = [*_addresses(app.hub.api_url), *_addresses(settings.service_url())]
    return firewall.Rules(
        installation=installation,
        services=tuple(dict.fromkeys(services)),
        allowed_ports=tuple(settings.allowed_ports),
        name_servers=firewall.name_servers(),
        blocked=tuple(settings.blocked_networks),
        egress_open=settings.egress == "open",
        # Of a machine that is not the Hub's: there the Hub comes from elsewhere.
        callers=tuple(dict.fromkeys(address for address, _ in services)),
    )


def _addresses(url: str) -> list[tuple[str, int]]:
    """Return the addresses and the port of a URL.

    Raises:
        BadSettings: its host has no address.
    """
    parsed = urlparse(url)
    host, port = parsed.hostname or "", parsed.port or (443 if parsed.scheme == "https" else 80)
    try:
        return [(str(ipaddress.ip_address(host)), port)]
    except ValueError:
        pass
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as e:
        raise BadSettings(
            f"{url}, which sessions are told, has no address: {e.strerror or e}; set c.JupyterHub.hub_connect_ip "
            "or c.FGPU.service_url_for_sessions"
        ) from None
    return list(dict.fromkeys((str(info[4][0]).split("%")[0], port) for info in found))


def guard(settings: FGPU, rules: firewall.Rules) -> firewall.Firewall | None:
    """Apply the rules where the Hub is to and can; return what keeps them, or None.

    Raises:
        BadSettings: egress is to be closed, and nobody closes it; or the rules cannot be applied.
    """
    if settings.firewall == "managed-elsewhere":
        log.info(
            "The firewall is managed elsewhere (c.FGPU.firewall): sessions are taken to be closed in by it"
        )
        return None
    if not firewall.can_apply():
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
    found = firewall.Firewall(rules)
    try:
        found.apply()
    except firewall.FirewallFailed as e:
        raise BadSettings(
            f"{e}; set c.FGPU.firewall = 'managed-elsewhere' if sessions are closed in by other means"
        ) from None
    log.info(
        "The firewall is in force: of this machine sessions reach %s; %s", _reached(rules), _egress(rules)
    )
    return found


def _reached(rules: firewall.Rules) -> str:
    own = [f"{address}:{port}" for address, port in rules.services]
    return " and ".join([*own, *(f"port {port}" for port in rules.allowed_ports)])


def _egress(rules: firewall.Rules) -> str:
    if not rules.egress_open:
        return "nothing beyond it"
    return f"beyond it all but {_listed(rules.blocked)}" if rules.blocked else "all beyond it"


def _listed(networks: Collection[str]) -> str:
    return " and ".join(networks)
