"""The engines under the contract tests, each with its surroundings, and a server that behaves as a test tells it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import socket
import socketserver
import subprocess
import sys
import threading
from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

from dockerhub import BASE
from dockerhub import Engine as Docker
from kubeapi import ApiError, KubeApi, wait_for
from kubernetes_asyncio.client import Configuration
from kubernetes_asyncio.config import load_kube_config
from machines import PORT, Machine
from memory_engine import WORLDS, MemoryEngine, Room
from traitlets.config import Config

from fgpu_scheduler import (
    EndCause,
    Observed,
    Placement,
    Policy,
    Request,
    Session,
    SessionState,
    Share,
    Snapshot,
    plan,
)
from fgpuspawner.concurrency.background import Background
from fgpuspawner.engines import marks
from fgpuspawner.engines.base import Ended, Engine, HubSide, Installation, LaunchSpec
from fgpuspawner.engines.docker.create import ContainerOptions
from fgpuspawner.engines.docker.engine import DockerEngine
from fgpuspawner.engines.kubernetes.api import run_blocking
from fgpuspawner.engines.kubernetes.dialects.lease import Lease
from fgpuspawner.engines.kubernetes.engine import KubernetesEngine
from fgpuspawner.engines.kubernetes.pods import PodOptions
from fgpuspawner.engines.local.engine import LocalEngine
from fgpuspawner.form.offer import make_offer
from fgpuspawner.form.options import parse, read_fields
from fgpuspawner.hub.inventory import nodes_at_start
from fgpuspawner.images.model import Catalogue, Image
from fgpuspawner.isolation import limits
from fgpuspawner.isolation.base import IN_CONTAINER
from fgpuspawner.isolation.manager import Isolation
from fgpuspawner.settings import FGPU

log = logging.getLogger("fgpu")

NAMESPACE = "default"

SERVER = """
import os, signal, subprocess, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

mode, ip, port = sys.argv[1], sys.argv[2], int(sys.argv[3])
if mode == "exits":
    print("no luck", flush=True)
    sys.exit(3)
if mode == "eats":
    hog = []
    while True:
        hog.append(b"x" * 2**24)
signal.signal(signal.SIGTERM, signal.SIG_IGN if mode == "deaf" else lambda *_: os._exit(0))

class Answer(BaseHTTPRequestHandler):
    def do_GET(self):
        said = os.environ["FGPU_SESSION_ID"].encode()
        if self.path == "/nvidia-smi":
            command = ["nvidia-smi", "--query-gpu=count,memory.total", "--format=csv,noheader,nounits"]
            said = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT).stdout
        self.send_response(200)
        self.end_headers()
        self.wfile.write(said)
    def log_message(self, *args):
        pass

print("up", flush=True)
ThreadingHTTPServer((ip, port), Answer).serve_forever()
"""
"""A server that ``serves``, ``exits`` with status 3, ``eats`` all memory, or is ``deaf`` to SIGTERM.

At /nvidia-smi it answers with the number of GPUs and the memory of each, as nvidia-smi prints them."""


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


class Lab:
    """One engine under test. Each call of `engine` gives a new object, as in a restarted Hub."""

    name: ClassVar[str]
    can_be_silent: ClassVar[bool] = True
    listens_on: ClassVar[str] = "127.0.0.1"
    knows_processes: ClassVar[bool] = True
    """Whether the engine can attribute a process to its session."""

    def __init__(self, folder: Path) -> None:
        self.id = secrets.token_hex(6)
        self.folder = folder
        self.settings = FGPU(
            data_dir=str(folder / "data"),
            accounting_dir=str(folder / "accounts"),
            nodes=self.nodes(),
            firewall="managed-elsewhere",
            hub_address="127.0.0.1",
        )
        (folder / "data").mkdir()
        self.image = Image("python", "Python", "python", "3", "3", self.reference, enabled=True)
        self.engines: list[Engine] = []
        self.background: Background | None = None
        self._sessions = 0

    reference = ""

    def nodes(self) -> list[dict[str, Any]]:
        return [{"name": "one", "cpu": 8, "memory_mib": 8192, "gpus": {"simulated": 2}}]

    @abstractmethod
    def make(self, installation: Installation) -> Engine:
        """Return a connected engine."""

    def engine(self) -> Engine:
        """Return a new open engine object, as in a Hub that has just started."""
        catalogue = Catalogue((self.image,))
        made = self.make(Installation(self.id, self.settings, Config(), lambda: catalogue))
        self.engines.append(made)
        self.settings.finds_nodes = made.capabilities.finds_nodes
        nodes = nodes_at_start(self.settings, made.survey, ())
        self.isolation = Isolation(self.settings, nodes)
        self.isolation.open(own_root=made.capabilities.own_root, installation=self.id)
        self.placed = nodes
        self.background = self.background or Background(log)
        queue: Any = EmptyQueue()
        made.open(
            HubSide(
                isolation=self.isolation,
                queue=queue,
                background=self.background,
                urls=("http://127.0.0.1:9/hub/api",),
                nodes_changed=lambda: None,
                ended=lambda limit: (),
                kept_images=lambda: set[str](),
            )
        )
        made.watch(lambda: None)
        made.begin()
        return made

    def session(self, node_id: str | None = None, *, memory_mib: int = 512) -> Session:
        """Return a placed session before its first launch."""
        node = next(n for n in self.placed if node_id in (None, n.id))
        device = node.devices[0]
        share = Share(device.uuid, 500, device.memory_mib // 4, 25)
        asked = Request("alice", "s", "python", node.resource_group, 500, 1000, memory_mib)
        return self._placed(asked, Placement(node.id, (share,)))

    def asked_for(self, fields: dict[str, str]) -> Session:
        """Return the session that the scheduler makes from the launch form's fields."""
        offer = make_offer(self.settings, self.placed, (self.image,), ("default",), user="alice")
        given = {"cpu": "0.5", "memory_mib": "512", **fields}
        wanted = parse(read_fields({name: [text] for name, text in given.items()}), offer)
        waiting = Session(1, wanted.for_server("s"), SessionState.PENDING, 0)
        (decision,) = plan(Snapshot(0, 0, self.placed, (waiting,)), Policy()).placed
        return self._placed(waiting.request, decision.placement)

    def _placed(self, asked: Request, placement: Placement) -> Session:
        self._sessions += 1
        asked = replace(asked, server_name=f"s{self._sessions}")
        return Session(self._sessions, asked, SessionState.PREPARING, 0, attempt=1, placement=placement)

    def again(self, session: Session) -> Session:
        """Return the session in its next attempt."""
        return replace(session, attempt=session.attempt + 1)

    def spec(self, engine: Engine, session: Session, mode: str = "serves") -> LaunchSpec:
        """Return the launch spec of a server in this mode; writes the session's isolation files."""
        prepared = self.isolation.prepare(session, range(1, self._sessions + 1))
        folder = self.isolation.folder(session.id)
        inside = IN_CONTAINER if engine.capabilities.own_root else str(folder)
        described = limits.environment(session, limits_path=f"{inside}/{limits.NAME}", simulated=True)
        port = 8888 if engine.capabilities.own_root else free_port()
        # An image has its own PATH.
        own = {} if engine.capabilities.own_root else {"HOME": str(self.folder), "PATH": os.environ["PATH"]}
        return LaunchSpec(
            session,
            self.image,
            command=("python", "-c", SERVER),
            arguments=(mode, self.listens_on, str(port)),
            environment={**own, "SECRET": "s3cret"},
            slice_environment=described,
            prepared=prepared,
            devices=(),
            folder=folder,
            port=port,
            simulated=True,
            options=self.options(),
        )

    def options(self) -> object:
        return None

    @abstractmethod
    def foreign(self) -> contextlib.AbstractContextManager[Callable[[], bool]]:
        """Make a session of another installation; the yielded function returns whether it is untouched."""

    @contextlib.contextmanager
    def silence(self) -> Iterator[None]:
        """Keep the engine from answering."""
        raise NotImplementedError
        yield

    @contextlib.contextmanager
    def nonsense(self, body: bytes) -> Iterator[None]:
        """Answer every request in the engine's place with this body."""
        raise NotImplementedError
        yield

    @abstractmethod
    def pid_of(self, engine: Engine, session: Session) -> int | None:
        """Return the process id of the session's server on this machine, or None."""

    async def end_all(self) -> None:
        """End what a test has left running."""
        if self.engines:
            engine = self.engines[-1]
            for thing in (await engine.observe()).things:
                await engine.remove(thing)

    def close(self) -> None:
        for engine in self.engines:
            engine.close()


class EmptyQueue:
    """An empty queue."""

    def nudge(self) -> None:
        pass

    async def live(self) -> tuple[Session, ...]:
        return ()

    async def changes(self, *, at_least_every_s: float) -> Any:
        while True:
            yield
            await asyncio.sleep(at_least_every_s)


# --- Local processes ---


class LocalLab(Lab):
    name = "local"
    can_be_silent = False

    def make(self, installation: Installation) -> Engine:
        return LocalEngine(installation, stop_timeout_s=1)

    @contextlib.contextmanager
    def foreign(self) -> Iterator[Callable[[], bool]]:
        marks = {"FGPU_INSTALLATION": "somebody", "FGPU_SESSION_ID": "1", "FGPU_ATTEMPT": "1-1@one"}
        child = subprocess.Popen(
            [sys.executable, "-c", "import signal; signal.pause()"], env=os.environ | marks
        )
        try:
            yield lambda: child.poll() is None
        finally:
            child.kill()
            child.wait()

    def close(self) -> None:
        super().close()
        for engine in self.engines:
            assert isinstance(engine, LocalEngine)
            for child in engine._processes._children.values():
                child.wait(10)

    def pid_of(self, engine: Engine, session: Session) -> int | None:
        assert isinstance(engine, LocalEngine)
        server = engine._processes._server(engine._processes.handle(session))
        return server.pid if server is not None else None


# --- Docker ---


class DockerLab(Lab):
    name = "docker"
    can_be_silent = False
    listens_on = "0.0.0.0"
    reference = BASE

    def __init__(self, folder: Path, docker: Docker, machine: Machine) -> None:
        self.docker = docker
        self.machine = machine
        super().__init__(folder)

    def make(self, installation: Installation) -> Engine:
        return DockerEngine(installation, {"stop_timeout_s": 1})

    def options(self) -> object:
        return ContainerOptions()

    @contextlib.contextmanager
    def foreign(self) -> Iterator[Callable[[], bool]]:
        name = f"{self.docker.prefix}-foreign"
        labels = {"fgpu.installation": "somebody", "fgpu.session": "1", "fgpu.attempt": "1"}
        container = self.docker.start(name, labels=labels)
        try:
            yield lambda: bool((self.docker.inspect(container) or {"State": {}})["State"].get("Running"))
        finally:
            self.docker.remove(name)

    def pid_of(self, engine: Engine, session: Session) -> int | None:
        assert isinstance(engine, DockerEngine)
        daemon = engine.fleet.of(session)
        found = daemon.client.inspect_container(daemon.containers.name(session))
        return int(found["State"]["Pid"])

    def close(self) -> None:
        label = {"label": f"fgpu.installation={self.id}"}
        for client in (self.docker.client, self.machine.client):
            for found in client.containers(all=True, filters=label):
                with contextlib.suppress(Exception):
                    client.remove_container(found["Id"], force=True)
        super().close()


class Relay(socketserver.ThreadingTCPServer):
    """A relay between an engine and its daemon, which can answer in the daemon's place."""

    daemon_threads = True

    def __init__(self, host: str, port: int) -> None:
        super().__init__(("127.0.0.1", 0), Relayed)
        self.target = host, port
        self.nonsense: bytes | None = None
        self.open: set[socket.socket] = set()
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return "tcp://{}:{}".format(*self.server_address)

    def say(self, nonsense: bytes | None) -> None:
        """Answer with this from now on, or relay again if None; open connections are closed."""
        self.nonsense = nonsense
        for connection in tuple(self.open):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


class Relayed(socketserver.BaseRequestHandler):
    server: Relay

    def handle(self) -> None:
        nonsense = self.server.nonsense
        if nonsense is not None:
            self.request.recv(1 << 16)
            self.request.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(nonsense) + nonsense)
            return
        with socket.create_connection(self.server.target) as there:
            ends = {self.request, there}
            self.server.open |= ends
            back = threading.Thread(target=self._pass_on, args=(there, self.request), daemon=True)
            back.start()
            self._pass_on(self.request, there)
            back.join()
            self.server.open -= ends

    @staticmethod
    def _pass_on(source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while piece := source.recv(1 << 16):
                target.sendall(piece)
            target.shutdown(socket.SHUT_WR)


class MachineLab(DockerLab):
    """A daemon on another machine, which a test can stop at any moment or replace by another answer."""

    name = "docker elsewhere"
    can_be_silent = True

    def __init__(self, folder: Path, docker: Docker, machine: Machine) -> None:
        self.relay = Relay(machine.address, PORT)
        super().__init__(folder, docker, machine)

    def nodes(self) -> list[dict[str, Any]]:
        own = self.machine.node("far", gpus={"simulated": 2})
        return [{**own, "engine": self.relay.url, "address": self.machine.address}]

    @contextlib.contextmanager
    def nonsense(self, body: bytes) -> Iterator[None]:
        self.relay.say(body)
        try:
            yield
        finally:
            self.relay.say(None)

    def close(self) -> None:
        super().close()
        self.relay.say(None)
        self.relay.shutdown()
        self.relay.server_close()

    @contextlib.contextmanager
    def silence(self) -> Iterator[None]:
        self.machine.freeze()
        try:
            yield
        finally:
            self.machine.thaw()

    @contextlib.contextmanager
    def foreign(self) -> Iterator[Callable[[], bool]]:
        client, name = self.machine.client, "fgpu-somebody-1-1"
        labels = {"fgpu.installation": "somebody", "fgpu.session": "1", "fgpu.attempt": "1"}
        made = client.create_container(BASE, ["sleep", "600"], name=name, labels=labels)["Id"]
        client.start(made)
        try:
            yield lambda: bool(client.inspect_container(made)["State"]["Running"])
        finally:
            client.remove_container(made, force=True)


class FleetLab(MachineLab):
    """Two daemons: one on this machine, and one elsewhere, which can be stopped."""

    name = "docker engines"

    def nodes(self) -> list[dict[str, Any]]:
        return [*Lab.nodes(self), *MachineLab.nodes(self)]


# --- Kubernetes ---


class KubeLab(Lab):
    """A cluster of one node that really runs its pods."""

    name = "kubernetes"
    can_be_silent = False
    knows_processes = False
    listens_on = "0.0.0.0"
    reference = f"docker.io/{BASE}"

    def __init__(self, folder: Path) -> None:
        self.configuration = Configuration()
        kubeconfig = os.environ["FGPU_TEST_KUBECONFIG"]
        run_blocking(lambda: load_kube_config(kubeconfig, client_configuration=self.configuration))
        self.api = KubeApi.of(Path(kubeconfig))
        found = self.ask("GET", "/api/v1/nodes")
        self.node = found["items"][0]["metadata"]["name"]
        # Pods that end still hold CPU, also those of a Hub's tests.
        wait_for("no pod that ends", lambda: not self.leaving() or None, timeout_s=120)
        super().__init__(folder)

    def leaving(self) -> list[str]:
        """Return the pods that are being removed."""
        found = self.ask("GET", "/api/v1/pods")["items"]
        return [p["metadata"]["name"] for p in found if "deletionTimestamp" in p["metadata"]]

    def ask(self, method: str, path: str, **more: Any) -> dict[str, Any]:
        """Send a request to the cluster as its administrator."""
        found: dict[str, Any] = self.api.call(method, path, **more)
        return found

    def nodes(self) -> list[dict[str, Any]]:
        return [{"name": self.node, "gpus": {"simulated": 2}}]

    def make(self, installation: Installation) -> Engine:
        dialect = Lease(installation.id)
        return KubernetesEngine(
            installation, self.configuration, namespace=NAMESPACE, stop_timeout_s=1, dialect=dialect
        )

    def options(self) -> object:
        return PodOptions(stop_timeout_s=1)

    @contextlib.contextmanager
    def foreign(self) -> Iterator[Callable[[], bool]]:
        labels = {"fgpu.installation": "somebody", "fgpu.session": "1", "fgpu.attempt": "1"}
        path = f"/api/v1/namespaces/{NAMESPACE}/pods"
        made = {"name": "server", "image": self.reference, "command": ["sleep", "600"]}
        body = {"metadata": {"name": "fgpu-somebody-1-1", "labels": labels}, "spec": {"containers": [made]}}
        self.ask("POST", path, body=body)
        own = f"{path}/fgpu-somebody-1-1"

        def is_untouched() -> bool:
            found = self.ask("GET", own)
            return found["status"]["phase"] == "Running" and "deletionTimestamp" not in found["metadata"]

        try:
            yield is_untouched
        finally:
            self.ask("DELETE", own, body={"gracePeriodSeconds": 1})
            while True:
                try:
                    self.ask("GET", own)
                except ApiError:
                    break

    def close(self) -> None:
        """End the pods that a test left, and wait for it: the next test needs their CPU."""
        super().close()
        own = f"/api/v1/namespaces/{NAMESPACE}/pods?labelSelector={marks.INSTALLATION}%3D{self.id}"
        self.ask("DELETE", own, body={"gracePeriodSeconds": 0})
        wait_for("no pod of this test", lambda: not self.ask("GET", own)["items"] or None, timeout_s=60)

    def pid_of(self, engine: Engine, session: Session) -> int | None:
        return None


# --- In memory ---


class Answer(BaseHTTPRequestHandler):
    said = b""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(self.said)

    def log_message(self, *args: object) -> None:
        pass


def run_mode(spec: LaunchSpec, room: Room) -> None:
    """Behave in a thread as `SERVER` does in a process."""
    mode = spec.arguments[0]
    if mode == "exits":
        room.end(Ended(3, EndCause.EXITED, "it ended with status 3; its last words: no luck"))
        return
    said = type("Said", (Answer,), {"said": spec.slice_environment["FGPU_SESSION_ID"].encode()})
    room.server = ThreadingHTTPServer(("127.0.0.1", spec.port), said)
    threading.Thread(target=room.server.serve_forever, args=(0.02,), daemon=True).start()


class MemoryLab(Lab):
    name = "memory"

    def make(self, installation: Installation) -> Engine:
        return MemoryEngine(installation, serve=run_mode)

    @contextlib.contextmanager
    def foreign(self) -> Iterator[Callable[[], bool]]:
        settings = FGPU(data_dir=str(self.folder), nodes=self.nodes())
        other = MemoryEngine(
            Installation("somebody", settings, Config(), lambda: Catalogue(())), serve=run_mode
        )
        room = Room(Observed("one", 1, 1, "1-1", alive=True))
        other.world.rooms["1-1"] = room
        try:
            yield lambda: room.ended is None
        finally:
            room.end(Ended(0, EndCause.EXITED, "over"))
            WORLDS.pop("somebody")

    @contextlib.contextmanager
    def silence(self) -> Iterator[None]:
        WORLDS[self.id].silent = True
        try:
            yield
        finally:
            WORLDS[self.id].silent = False

    def pid_of(self, engine: Engine, session: Session) -> int | None:
        return None

    def close(self) -> None:
        super().close()
        for room in WORLDS.pop(self.id).rooms.values():
            room.end(Ended(0, EndCause.EXITED, "over"))
