"""One Docker daemon: whether it answers, its containers, and the events that trigger an observation.

A daemon is one machine. A silent one is asked again in the background; until it answers, nothing is concluded about
what it runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import docker
import requests
from docker.errors import DockerException
from docker.tls import TLSConfig
from docker.utils import kwargs_from_env

from fgpu_scheduler import BadSettings, Seen
from fgpuspawner.concurrency.waiting import in_a_thread_of_its_own
from fgpuspawner.engines.base import EngineSilent
from fgpuspawner.engines.docker import remote_machine
from fgpuspawner.engines.docker.address import Address, Tunnel, TunnelFailed
from fgpuspawner.engines.docker.client import FAILED, Client, system_message
from fgpuspawner.engines.docker.containers import LABEL, Containers
from fgpuspawner.engines.docker.networks import NETWORK, ensure_network
from fgpuspawner.isolation.nvml_reader import NvmlUnknown
from fgpuspawner.settings.nodes import MachineFacts

log = logging.getLogger("fgpu.docker")

CALL_TIMEOUT_S = 60
LOOK_TIMEOUT_S = 8
"""A daemon that has not listed its containers by then counts as silent."""
ASK_EVERY_S = 1.0
CLIENT = {"version": "auto", "max_pool_size": 32}
EVENTS = ("die", "oom", "destroy")
EVENTS_AGAIN_S = 1.0
LISTED_AFTER_S = (0.2, 0.6, 1.5)


def call_soon_and_again(loop: asyncio.AbstractEventLoop, function: Callable[[], None]) -> None:
    """Call a function in the loop at once, and again a little later. For other threads."""
    # The engine reports an end a little before its list of containers shows it: on a busy machine, half a second.
    loop.call_soon_threadsafe(function)
    for delay_s in LISTED_AFTER_S:
        loop.call_soon_threadsafe(loop.call_later, delay_s, function)


class Events:
    """Reads an engine's events in a thread, and reopens the stream when it ends."""

    def __init__(self, containers: Containers, name: str, happened: Callable[[], None]) -> None:
        self._containers = containers
        self._name = name
        self._happened = happened
        self._closed = threading.Event()
        self._stream: Any = None
        threading.Thread(target=self._run, name="fgpu-events", daemon=True).start()

    def close(self) -> None:
        """Stop; the thread ends soon after."""
        self._closed.set()
        stream = self._stream
        if stream is not None:
            # On a cut connection closing takes a while.
            threading.Thread(target=_closed_quietly, args=(stream,), daemon=True).start()

    def _run(self) -> None:
        filters = {
            "type": "container",
            "event": list(EVENTS),
            "label": f"{LABEL}.installation={self._containers.installation}",
        }
        while not self._closed.is_set():
            try:
                self._stream = self._containers.client.events(decode=True, filters=filters)
                # One observation finds what happened before the stream was open.
                self._tell()
                for _ in self._stream:
                    if self._closed.is_set():
                        return
                    self._tell()
            except (*FAILED, OSError, ValueError) as e:
                log.debug("%s: the events end: %s", self._name, e)
            finally:
                if self._stream is not None:
                    _closed_quietly(self._stream)
            self._tell()
            time.sleep(EVENTS_AGAIN_S)

    def _tell(self) -> None:
        try:
            self._happened()
        except RuntimeError:
            # The event loop has ended, and the Hub with it.
            self._closed.set()


def _closed_quietly(stream: Any) -> None:
    try:
        stream.close()
    except Exception as e:
        log.debug("Closing the events: %s", e)


class OwnTrust(TLSConfig):
    """Trusts only the configured authority, not one from the environment (REQUESTS_CA_BUNDLE)."""

    def configure_client(self, client: docker.APIClient) -> None:
        super().configure_client(client)
        client.trust_env = False


class _Silent:
    """The client of a daemon that never answered: every call fails as if the daemon had gone."""

    def __init__(self, address: Address) -> None:
        self._address = address

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise requests.exceptions.ConnectionError(f"{self._address} has not answered yet")


def connect_here(client_kwargs: Mapping[str, Any], **more: Any) -> docker.APIClient:
    """Return a client of the daemon that the environment (DOCKER_HOST) or ``client_kwargs`` name.

    Raises:
        BadSettings: it does not answer.
    """
    try:
        return Client(**{**CLIENT, "timeout": CALL_TIMEOUT_S, **kwargs_from_env(), **client_kwargs, **more})
    except DockerException as e:
        raise BadSettings(
            f"the Docker engine does not answer; is it running, and may the Hub use it? ({system_message(e)})"
        ) from e


class Daemon:
    """One daemon. Methods that block say so; the others belong in the Hub's event loop."""

    def __init__(
        self,
        address: Address,
        *,
        installation: str,
        network: str = NETWORK,
        images: Callable[[], Sequence[str]] = tuple,
        client_kwargs: Mapping[str, Any] | None = None,
        stop_timeout_s: int = 10,
    ) -> None:
        self.address = address
        self.installation = installation
        self._network = network
        self._images = images
        self._client_kwargs = dict(client_kwargs or {})
        self._tunnel = Tunnel(address.url) if address.url.startswith("ssh://") else None
        silent: Any = _Silent(address)
        self.containers = Containers(
            silent,
            installation=installation,
            elsewhere=address.is_elsewhere,
            stop_timeout_s=stop_timeout_s,
        )
        #: The clients that are closed when new ones are connected.
        self._clients: tuple[docker.APIClient, ...] = ()
        self.answers = False
        #: Called in the event loop when it is time to observe again.
        self.changed: Callable[[], None] = lambda: None
        #: Held while images are made, named or removed here: one at a time.
        self.image_lock = asyncio.Lock()
        #: Held while a session's files are copied there: the first of a node makes the files that all share.
        self.copying = threading.Lock()
        self._asking: asyncio.Task[None] | None = None
        self._asked_at = -ASK_EVERY_S
        self._events: Events | None = None

    @property
    def client(self) -> docker.APIClient:
        """The client for calls; replaced after the daemon was away."""
        return self.containers.client

    def connect(self) -> None:
        """Connect. Blocks. Raises BadSettings if it does not answer, or a file of its ``tls`` cannot be read."""
        with contextlib.ExitStack() as opened:
            # The client with the short timeout first: it finds out that a daemon is silent.
            looker = opened.enter_context(contextlib.closing(self._connected(LOOK_TIMEOUT_S)))
            client = opened.enter_context(contextlib.closing(self._connected(CALL_TIMEOUT_S)))
            if self.address.is_elsewhere:
                ensure_network(client, self._network)
            opened.pop_all()
        before = self._clients
        self.containers.looker, self.containers.client = self._clients = looker, client
        self.answers = True
        # Closing drops idle connections; running calls go on.
        for old in before:
            old.close()

    def another_client(self, *, timeout_s: int) -> docker.APIClient:
        """Return a separate client for calls that take long; close it afterwards. Blocks.

        A machine that vanishes is noticed within a minute, whatever ``timeout_s`` is.

        Raises:
            EngineSilent: the daemon does not answer.
        """
        try:
            client = self._connected(CALL_TIMEOUT_S)
        except BadSettings as e:
            raise EngineSilent(str(e)) from e
        client.timeout = timeout_s
        return client

    def _connected(self, timeout_s: int) -> docker.APIClient:
        own = self.address
        if not own.url:
            return connect_here(self._client_kwargs, timeout=timeout_s)
        given: dict[str, Any] = {**CLIENT, "base_url": own.url, "timeout": timeout_s}
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
            return Client(**given)
        except (OSError, TunnelFailed, *FAILED) as e:
            raise BadSettings(f"{own} ({own.url}) does not answer: {e}") from e

    def machine(self) -> MachineFacts | None:
        """Return the daemon's description of its machine; None if it does not answer. Blocks."""
        try:
            info = self.containers.looker.info()
        except FAILED as e:
            log.warning("%s does not answer: %s", self.address, e)
            return None
        try:
            found = MachineFacts(1000 * int(info["NCPU"]), int(info["MemTotal"]) // 2**20)
        except (KeyError, TypeError, ValueError, OverflowError) as e:
            log.warning("%s says nothing that makes sense of its machine (%r)", self.address, e)
            return None
        if not self.address.has_gpus_to_find:
            return found
        try:
            return replace(found, devices=self.driver(self.address.node_ids[0]).devices())
        except NvmlUnknown as e:
            return replace(found, trouble=str(e))

    def driver(self, node_id: str, machine: Path | None = None) -> remote_machine.RemoteDriver:
        """Return what asks the GPU driver there; ``machine`` is the folder of a simulated machine."""
        return remote_machine.RemoteDriver(
            lambda: self.client,
            installation=self.installation,
            node_id=node_id,
            images=self._images,
            machine=machine,
        )

    # -- in the event loop ----------------------------------------------------------------------------

    def watch(self, changed: Callable[[], None]) -> None:
        """Have ``changed`` called in the running loop when a container ends or the daemon answers again."""
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
        """Return the daemon's containers and nodes; nothing while it is silent."""
        if not self.answers:
            self._ask_again()
            return Seen((), ())
        try:
            found = await self.containers.look()
        except Exception as e:
            # Any failure concerns this daemon alone: the others are still observed.
            words = "%s does not answer: %s. What it runs keeps its shares"
            log.warning(words, self.address, e, exc_info=None if isinstance(e, EngineSilent) else e)
            self.answers = False
            self._ask_again()
            return Seen((), ())
        return Seen(found, self.address.node_ids)

    def _ask_again(self) -> None:
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._asked())

    async def _asked(self) -> None:
        """Try to connect once, in a separate thread, as silence may take long."""
        # Limit the rate for a daemon that answers this call and no other.
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
        if self._events is not None:
            self._events.close()
        for client in self._clients:
            client.close()
        if self._tunnel is not None:
            self._tunnel.close()
