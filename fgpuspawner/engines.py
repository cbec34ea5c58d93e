"""The Docker engines that sessions run on: this machine's own, and those of other machines.

Each engine is one machine. One that does not answer delays nothing on the others: it is asked again in the
background, and of what it runs nothing is concluded until it answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import docker
import requests
from docker.errors import DockerException
from docker.tls import TLSConfig

from fgpu_scheduler import BadSettings, Observed, Seen, Session
from fgpuspawner import shipping
from fgpuspawner.containers import GONE, Containers, EngineSilent
from fgpuspawner.events import Events, call_soon_and_again
from fgpuspawner.isolation.backend import Mount
from fgpuspawner.isolation.nvml_reader import NvmlReader, NvmlUnknown
from fgpuspawner.keepalive import keep_alive
from fgpuspawner.network import NETWORK, connect, ensure_network
from fgpuspawner.nodes import Machine, address_of, are_found_by_driver
from fgpuspawner.outpost import Outpost, OutpostReader
from fgpuspawner.tunnel import Tunnel, TunnelFailed
from fgpuspawner.waiting import in_a_thread_of_its_own

log = logging.getLogger("fgpu.docker")

CALL_TIMEOUT_S = 60
LOOK_TIMEOUT_S = 8
"""An engine that has not said what it runs by then does not answer."""
LATE_AFTER_S = 1.0
"""What the other engines say of their containers does not wait longer for one of them."""
TOLD_WITHIN_S = 1.0
ASK_EVERY_S = 1.0


@dataclass(frozen=True, slots=True)
class EngineAddress:
    """Where an engine is, and the nodes that are its machine (or parts of it).

    ``url`` is empty for this machine's own. ``tls`` has the paths ``ca``, ``cert`` and ``key``. ``address`` is where
    the Hub reaches the ports that containers publish; None where it reaches the containers themselves.
    """

    url: str
    node_ids: tuple[str, ...]
    tls: Mapping[str, str] = field(default_factory=dict)
    address: str | None = None
    has_gpus_to_find: bool = False

    def __str__(self) -> str:
        return f"the Docker engine of {' and '.join(self.node_ids) or 'this machine'}"

    @property
    def is_elsewhere(self) -> bool:
        """Whether it is another machine's."""
        return self.address is not None


def addresses(nodes: Sequence[Mapping[str, Any]]) -> tuple[EngineAddress, ...]:
    """Return the engines of the configured nodes, this machine's own first.

    Raises:
        BadSettings: two nodes name one engine differently.
    """
    found: dict[str, EngineAddress] = {"": EngineAddress("", ())}
    for spec in nodes or [{"name": "local"}]:
        url = str(spec.get("engine", ""))
        own = EngineAddress(
            url,
            (str(spec["name"]),),
            dict(spec.get("tls") or {}),
            address_of(spec),
            has_gpus_to_find=bool(url) and are_found_by_driver(spec),
        )
        other = found.get(url, own)
        if other.node_ids and (other.tls, other.address) != (own.tls, own.address):
            raise BadSettings(
                f"c.FGPU.nodes: {other.node_ids[0]!r} and {own.node_ids[0]!r} are on one engine; give both the same "
                "tls and address"
            )
        others = other.node_ids if other is not own else ()
        to_find = own.has_gpus_to_find or other.has_gpus_to_find
        found[url] = replace(own, node_ids=(*others, *own.node_ids), has_gpus_to_find=to_find)
    return tuple(engine for engine in found.values() if engine.node_ids)


class OwnTrust(TLSConfig):
    """Trusts the authority that is configured, and no other that the environment names (REQUESTS_CA_BUNDLE)."""

    def configure_client(self, client: docker.APIClient) -> None:
        """Set up a client before its first request."""
        super().configure_client(client)
        client.trust_env = False


class _Silent:
    """Stands for the client of an engine that never answered: whatever is asked of it fails as if it had gone."""

    def __init__(self, address: EngineAddress) -> None:
        self._address = address

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise requests.exceptions.ConnectionError(f"{self._address} has not answered yet")


class Engine:
    """One engine: whether it answers, its containers, and the events that say when to look at them."""

    def __init__(
        self,
        address: EngineAddress,
        *,
        installation: str,
        network: str = NETWORK,
        images: Callable[[], Sequence[str]] = tuple,
        client_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self.address = address
        self.network = network
        self.images = images
        self._client_kwargs = dict(client_kwargs or {})
        self._tunnel = Tunnel(address.url) if address.url.startswith("ssh://") else None
        self.installation = installation
        silent: Any = _Silent(address)
        self.containers = Containers(
            silent, looker=silent, installation=installation, elsewhere=address.is_elsewhere
        )
        self._clients: tuple[docker.APIClient, ...] = ()
        self.answers = False
        self.changed: Callable[[], None] = lambda: None
        self._shipping = threading.Lock()
        self._asking: asyncio.Task[None] | None = None
        self._asked_at = -ASK_EVERY_S
        self._events: Events | None = None

    def connect(self) -> None:
        """Connect. Blocks.

        Raises:
            BadSettings: it does not answer, or a file of its ``tls`` cannot be read.
        """
        long, short = {"timeout": CALL_TIMEOUT_S}, {"timeout": LOOK_TIMEOUT_S}
        with contextlib.ExitStack() as opened:
            # The short one first: an engine that does not answer is found out by it.
            looker = opened.enter_context(contextlib.closing(self._connected(short)))
            client = opened.enter_context(contextlib.closing(self._connected(long)))
            if self.address.is_elsewhere:
                ensure_network(client, self.network)
            opened.pop_all()
        before = self._clients
        self.containers.looker, self.containers.client = self._clients = looker, client
        self.answers = True
        # What is under way on them goes on; what is kept open for later is not needed any more.
        for old in before:
            old.close()

    def another_client(self, *, timeout_s: int) -> docker.APIClient:
        """Return a client of its own, for calls that take longer than others; to be closed. Blocks.

        A machine that is gone without a word is found out within a minute, whatever ``timeout_s`` is.

        Raises:
            EngineSilent: the engine does not answer.
        """
        try:
            client = self._connected({"timeout": CALL_TIMEOUT_S})
        except BadSettings as e:
            raise EngineSilent(str(e)) from e
        keep_alive(client)
        client.timeout = timeout_s
        return client

    def _connected(self, more: dict[str, Any]) -> docker.APIClient:
        own = self.address
        if not own.url:
            return connect({**self._client_kwargs, **more})
        given: dict[str, Any] = {"version": "auto", "max_pool_size": 32, "base_url": own.url, **more}
        if own.tls:
            try:
                given["tls"] = OwnTrust(
                    client_cert=(own.tls["cert"], own.tls["key"]), ca_cert=own.tls["ca"], verify=True
                )
            except (DockerException, OSError) as e:
                raise BadSettings(f"c.FGPU.nodes: tls of {own.node_ids[0]!r}: {e}") from e
        try:
            if self._tunnel is not None:
                given["base_url"] = self._tunnel.open()
            return docker.APIClient(**given)
        except (DockerException, OSError, TunnelFailed, *GONE) as e:
            raise BadSettings(f"{own} ({own.url}) does not answer: {e}") from e

    async def ship(
        self, *, container: str, image: str, node: str, mounts: Sequence[Mount], shared: Path
    ) -> tuple[Mount, ...]:
        """Carry a session's files to this engine's machine; see `shipping.ship`."""

        def carry() -> tuple[Mount, ...]:
            # One at a time: the first session of a node makes what all of them share.
            with self._shipping:
                return shipping.ship(
                    self.containers.client,
                    container=container,
                    image=image,
                    installation=self.installation,
                    node=node,
                    mounts=mounts,
                    shared=shared,
                )

        return await self.containers.call(carry)

    def machine(self) -> Machine | None:
        """Return what the engine says of its machine, None if it does not answer. Blocks."""
        try:
            info = self.containers.looker.info()
        except (DockerException, *GONE) as e:
            log.warning("%s does not answer: %s", self.address, e)
            return None
        found = Machine(1000 * int(info["NCPU"]), int(info["MemTotal"]) // 2**20)
        if not self.address.has_gpus_to_find:
            return found
        try:
            return replace(found, devices=self.outpost(self.address.node_ids[0]).devices())
        except NvmlUnknown as e:
            return replace(found, trouble=str(e))

    def outpost(self, node_id: str, machine: Path | None = None) -> Outpost:
        """Return what asks the driver there; ``machine`` is the folder of a node's simulated machine."""
        return Outpost(
            lambda: self.containers.client,
            installation=self.installation,
            node_id=node_id,
            images=self.images,
            machine=machine,
        )

    # -- in the event loop ----------------------------------------------------------------------------

    def watch(self, changed: Callable[[], None]) -> None:
        """Have ``changed`` called in the running loop when a container ends, or the engine answers again."""
        self.changed = changed
        if self.answers:
            self._listen()

    def _listen(self) -> None:
        loop = asyncio.get_running_loop()
        if self._events is not None:
            self._events.close()
        self._events = Events(
            self.containers, str(self.address), lambda: call_soon_and_again(loop, self.changed)
        )

    async def observe(self) -> Seen:
        """Return the engine's containers and its nodes; nothing and no nodes while it does not answer."""
        if not self.answers:
            self._ask_again()
            return Seen((), ())
        try:
            found = await self.containers.look()
            left = await self.containers.left_files(found)
        except Exception as e:
            # Whatever it was, it is of this engine alone: the others' rounds go on.
            unforeseen = None if isinstance(e, EngineSilent) else e
            log.warning(
                "%s does not answer: %s. What it runs keeps its shares", self.address, e, exc_info=unforeseen
            )
            self.answers = False
            self._ask_again()
            return Seen((), ())
        events = self._events
        if events is not None:
            untold = events.missed(found)
            if untold:
                loop = asyncio.get_running_loop()
                loop.call_later(TOLD_WITHIN_S, self._listen_anew_unless_told, events, untold)
        return Seen([*found, *left], self.address.node_ids)

    def _listen_anew_unless_told(self, events: Events, names: Collection[str]) -> None:
        """Open the stream again if these have ended and it has not said so: its other end may not be there any more."""
        if self._events is events and self.answers and not all(events.has_told(name) for name in names):
            log.warning("%s: the events do not tell what happens; they are asked for anew", self.address)
            self._listen()

    def _ask_again(self) -> None:
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._asked())

    async def _asked(self) -> None:
        """Ask once whether it is there again. In a thread of its own: it may take long to say nothing."""
        # One that answers this and nothing else is not asked in a circle.
        await asyncio.sleep(self._asked_at + ASK_EVERY_S - time.monotonic())
        self._asked_at = time.monotonic()
        try:
            await in_a_thread_of_its_own(self.connect)
        except BadSettings as e:
            log.debug("%s", e)
            return
        log.warning("%s answers again", self.address)
        self._listen()
        self.changed()

    def close(self) -> None:
        """Stop listening, and let go of the engine."""
        if self._events is not None:
            self._events.close()
        for client in self._clients:
            client.close()
        if self._tunnel is not None:
            self._tunnel.close()


class Engines:
    """A `Launcher` for the containers of several engines."""

    def __init__(self, engines: Sequence[Engine], *, machines: Mapping[str, Path] | None = None) -> None:
        self.engines = tuple(engines)
        self.machines = machines or {}
        """The folders of simulated machines, by nodes on other machines."""
        self._by_node = {node_id: e for e in self.engines for node_id in e.address.node_ids}
        self._late: dict[Engine, asyncio.Task[Seen]] = {}
        self._slow: set[Engine] = set()

    def connect(self) -> None:
        """Connect to all of them, side by side. Blocks. Those of other machines may stay silent.

        Raises:
            BadSettings: this machine's own does not answer.
        """

        def try_to(engine: Engine) -> BadSettings | None:
            try:
                engine.connect()
            except BadSettings as e:
                return e
            return None

        with ThreadPoolExecutor(max(1, len(self.engines))) as threads:
            troubles = list(threads.map(try_to, self.engines))
        for engine, trouble in zip(self.engines, troubles, strict=True):
            if trouble is not None and not engine.address.url:
                raise trouble
            if trouble is not None:
                log.error("%s; its nodes take no sessions until it does", trouble)

    def survey(self, nodes: Collection[str] | None = None) -> dict[str, Machine | None]:
        """Return what other machines say of themselves, by node; None for one that does not answer. Blocks.

        All are asked, or those of these nodes.
        """
        elsewhere = [
            engine
            for engine in self.engines
            if engine.address.url and (nodes is None or not set(nodes).isdisjoint(engine.address.node_ids))
        ]
        with ThreadPoolExecutor(max(1, len(elsewhere))) as threads:
            machines = list(threads.map(Engine.machine, elsewhere))
        return {
            node_id: machine
            for engine, machine in zip(elsewhere, machines, strict=True)
            for node_id in engine.address.node_ids
        }

    def has_node(self, node_id: str) -> bool:
        """Return whether a node is configured."""
        return node_id in self._by_node

    def of_node(self, node_id: str) -> Engine:
        """Return a node's engine.

        Raises:
            EngineSilent: no such node is configured any more.
        """
        engine = self._by_node.get(node_id)
        if engine is None:
            raise EngineSilent(f"node {node_id} is not configured any more")
        return engine

    def of(self, session: Session) -> Engine:
        """Return the engine of a session that has its place.

        Raises:
            EngineSilent: its node is not configured any more.
        """
        assert session.placement is not None
        return self.of_node(session.placement.node_id)

    def watch(self, changed: Callable[[], None]) -> None:
        """Have ``changed`` called in the running loop when it is time to look again."""
        for engine in self.engines:
            engine.watch(changed)

    async def observe(self) -> Seen:
        """Return all containers, and the nodes whose engines answered or are late."""
        looks: dict[Engine, asyncio.Task[Seen]] = {}
        for engine in self.engines:
            # What began before this call may know less than who asks now: only whether it answers is of use.
            if engine not in self._late:
                looks[engine] = asyncio.create_task(engine.observe())
        patiently = [look for engine, look in looks.items() if engine in self._slow or len(self.engines) == 1]
        if looks:
            await asyncio.wait(looks.values(), timeout=None if patiently else LATE_AFTER_S)
        self._slow = set()
        for engine, look in looks.items():
            if not look.done():
                self._late[engine] = look
                look.add_done_callback(functools.partial(self._has_answered, engine))
        seen = [look.result() for look in looks.values() if look.done()]
        return Seen(
            [thing for one in seen for thing in one.things],
            [node_id for one in seen for node_id in one.nodes],
            [node_id for engine in self._late for node_id in engine.address.node_ids],
        )

    def _has_answered(self, engine: Engine, look: asyncio.Task[Seen]) -> None:
        """Have a late engine looked at again, and waited for then: it may always take that long."""
        del self._late[engine]
        if look.cancelled() or look.exception() is not None:
            return
        self._slow.add(engine)
        engine.changed()

    async def remove(self, observed: Observed) -> bool:
        """Stop and remove one container, on whichever engine it was seen; return whether it is known to be gone."""
        engine = next((e for e in self.engines if e.containers.has_seen(observed)), None)
        return await engine.containers.remove(observed) if engine is not None else False

    def sessions_of(self, pids: Sequence[int]) -> dict[int, int]:
        """Return the sessions of this machine's processes. Blocks.

        Raises:
            EngineSilent: this machine's engine does not say.
        """
        found: dict[int, int] = {}
        for engine in self.engines:
            if not engine.address.is_elsewhere:
                found.update(engine.containers.sessions_of(pids))
        return found

    def reader(self, node_id: str) -> NvmlReader:
        """Return what reads the GPUs of another machine's node.

        Raises:
            EngineSilent: no such node is configured any more.
        """
        machine = self.machines.get(node_id)
        return OutpostReader(self.of_node(node_id).outpost(node_id, machine))

    def sessions_there(self, node_id: str, pids: Sequence[int]) -> dict[int, int]:
        """Return the sessions of processes of a node's machine. Blocks.

        Raises:
            EngineSilent: its engine does not say.
        """
        return self.of_node(node_id).containers.sessions_of(pids)

    def close(self) -> None:
        """Stop listening to any."""
        for engine in self.engines:
            engine.close()


def engines_for(
    nodes: Sequence[Mapping[str, Any]],
    *,
    installation: str,
    network: str,
    images: Callable[[], Sequence[str]],
    machines: Mapping[str, Path],
    client_kwargs: Mapping[str, Any],
) -> Engines:
    """Return the engines of the configured nodes, connected as far as they answer.

    Raises:
        BadSettings: this machine's own is needed and does not answer.
    """
    engines = Engines(
        [
            Engine(
                address,
                installation=installation,
                network=network,
                images=images,
                client_kwargs=client_kwargs,
            )
            for address in addresses(nodes)
        ],
        machines=machines,
    )
    engines.connect()
    return engines
