"""A real Hub with sessions in containers of a real engine, and the containers and images that tests make."""

from __future__ import annotations

import io
import secrets
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import docker
import requests
from docker.errors import APIError, NotFound

from fgpu_scheduler import Session, Store
from fgpuspawner.engines.docker import client as execs
from fgpuspawner.engines.docker.homes import Homes
from hubprocess import ROOT, WITHOUT_SERVICE, HubProcess, until
from leftovers import remove_leftovers

BASE = "fgpuspawner/base:0.1"
PYTHON = "/opt/fgpu/bin/python"
HERE = Path(__file__).parent
SERVER = [
    PYTHON,
    "-c",
    (HERE / "misbehave.py").read_text() + (HERE.parent / "hub" / "miniserver.py").read_text(),
]
QUICK = "c.JupyterHub.tornado_settings = {'slow_spawn_timeout': 1}\n"
"""A request that has to wait is answered after a second."""

MINI = f"c.Spawner.cmd = {SERVER!r}\n{WITHOUT_SERVICE}"
ONE = {"fgpu": "1", "cpu": "0.2", "memory_mib": 256}
"""Half of a GPU that is worth 2 fGPU."""

WHOLE_FIVE = {**ONE, "group": "five", "fgpu": "5"}
"""All of the one GPU of group ``five``, so that the next one has to wait for it."""

HALF = {"fgpu": "0.5", "cpu": "1", "memory_mib": 1024}
"""Enough for JupyterLab."""

USES_A_GPU = """
import ctypes, json, os, signal, sys, time
cuda = ctypes.CDLL("libcuda.so.1")
context, module, address = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_uint64()
for status in (cuda.cuInit(0), cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0), cuda.cuCtxSetCurrent(context)):
    assert status == 0, status
def take(mib):
    return cuda.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(mib << 20))
"""
"""The beginning of a program that uses the first GPU; ``take`` takes memory at ``address``, and gives CUDA's answer."""

NODES = [
    {"name": "two", "cpu": 16, "gpus": {"simulated": 3, "memory_mib": 8192}},
    {"name": "five", "group": "five", "cpu": 16, "gpus": {"simulated": 1, "memory_mib": 16384}},
]
SETTINGS: dict[str, Any] = {
    "nodes": NODES,
    "groups": {"default": {}, "five": {}},
    "fgpu_per_gpu": {"* 8192 MiB": 2, "* 16384 MiB": 5},
}


def build(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run images/build.sh."""
    return subprocess.run(
        [ROOT / "images/build.sh", *arguments], capture_output=True, text=True, check=False, timeout=600
    )


class Engine:
    """The engine, and what a test made on it, which `close` removes again: nothing else."""

    def __init__(self, client: docker.APIClient) -> None:
        self.client = client
        self.prefix = f"fgpu-test-{secrets.token_hex(4)}"
        self._containers: list[str] = []
        self._images: list[str] = []

    def build(self, name: str, dockerfile: str) -> str:
        """Build an image without files of its own and return its reference."""
        reference = f"{self.prefix}/{name}:1"
        self._images.append(reference)
        lines = list(
            self.client.build(fileobj=io.BytesIO(dockerfile.encode()), tag=reference, rm=True, decode=True)
        )
        assert not any("error" in line for line in lines), lines
        return reference

    def mine(self, reference: str) -> str:
        """Remember an image that was made for this run by other means."""
        self._images.append(reference)
        return reference

    def forget(self, reference: str) -> None:
        """Remove an image now."""
        self._images.remove(reference)
        self.client.remove_image(reference, force=True)

    def remove_volume(self, name: str) -> None:
        """Remove a volume, once the last container that used it is gone."""

        def removed() -> bool:
            try:
                self.client.remove_volume(name, force=True)
            except APIError as e:
                if e.status_code not in (404, 409):
                    raise
                return e.status_code == 404
            return True

        until(removed, what=f"volume {name} is removed")

    def start(
        self, name: str, *, labels: dict[str, str] | None = None, network: str = "none", code: str = ""
    ) -> str:
        """Start a container of the base image that runs ``code``, or waits, and return its id."""
        made = self.client.create_container(
            BASE,
            [PYTHON, "-c", code or "import signal; signal.pause()"],
            name=name,
            labels=labels or {},
            host_config=self.client.create_host_config(network_mode=network),
        )
        self._containers.append(made["Id"])
        self.client.start(made["Id"])
        return str(made["Id"])

    def inspect(self, name: str) -> dict[str, Any] | None:
        """Return what the engine says of a container, None if there is none."""
        try:
            return dict(self.client.inspect_container(name))
        except NotFound:
            return None

    def wait_gone(self, name: str) -> None:
        """Wait until there is no such container: one that has ended is removed in the background."""
        until(lambda: self.inspect(name) is None, what=f"container {name} is removed")

    def run_in(self, name: str, *cmd: str, user: str = "") -> tuple[int, str]:
        """Run a command in a container as its own user; return status and output."""
        both = (execs.STDOUT, execs.STDERR)
        answer = execs.run_in(self.client, name, cmd, user=user, most_bytes=1 << 26, streams=both)
        assert answer.status is not None
        return answer.status, answer.output.decode()

    def output_of(self, name: str, *cmd: str, user: str = "") -> str:
        """Return what a command prints in a container, where it has to succeed."""
        status, output = self.run_in(name, *cmd, user=user)
        assert status == 0, output
        return output.strip()

    def python_in(self, name: str, code: str, *arguments: str, user: str = "") -> str:
        """Run Python code in a container and return what it prints."""
        return self.output_of(name, PYTHON, "-c", code, *arguments, user=user)

    def server_env(self, name: str) -> dict[str, str]:
        """Return the environment of a container's server: of what is not `jupyterhub-singleuser`."""
        code = (
            "print(open(next(f'/proc/{p}/environ' for p in __import__('os').listdir('/proc') if p.isdigit()"
        )
        code += " and open(f'/proc/{p}/stat').read().rpartition(') ')[2].split()[1] == '1')).read())"
        return dict(entry.split("=", 1) for entry in self.python_in(name, code).split("\0") if "=" in entry)

    def of_installation(self, installation: str) -> dict[str, str]:
        """Return the containers that carry an installation's label: ids by name."""
        found = self.client.containers(all=True, filters={"label": f"fgpu.installation={installation}"})
        return {entry["Names"][0].removeprefix("/"): entry["Id"] for entry in found}

    def networks_of(self, installation: str) -> dict[str, str]:
        """Return the networks that carry an installation's label: ids by name."""
        found = self.client.networks(filters={"label": f"fgpu.installation={installation}"})
        return {entry["Name"]: entry["Id"] for entry in found}

    def remove(self, name: str) -> None:
        """Remove any container at once, unless it is gone or already being removed."""
        try:
            self.client.remove_container(name, force=True)
        except APIError as e:
            if e.status_code not in (404, 409):
                raise

    def close(self) -> None:
        """Remove what was made here."""
        for container in self._containers:
            self.remove(container)
        # Two modules may have given one name.
        for image in dict.fromkeys(self._images):
            until(partial(self._removed, image), what=f"image {image} is removed")
        self.client.close()

    def _removed(self, image: str) -> bool:
        try:
            self.client.remove_image(image, force=True)
        except APIError as e:
            # Gone, or its last container is just being removed.
            if e.status_code not in (404, 409):
                raise
            return e.status_code == 404
        return True


@dataclass(frozen=True)
class Running:
    """A session that runs, and its container as the engine reported it."""

    session: Session
    container: dict[str, Any]
    token: str

    @property
    def id(self) -> str:
        return str(self.container["Id"])

    @property
    def name(self) -> str:
        return str(self.container["Name"]).removeprefix("/")

    @property
    def host(self) -> dict[str, Any]:
        """What the engine was asked to limit."""
        return dict(self.container["HostConfig"])

    @property
    def labels(self) -> dict[str, str]:
        return dict(self.container["Config"]["Labels"])

    @property
    def env(self) -> dict[str, str]:
        """What the engine knows: no identity."""
        return dict(entry.split("=", 1) for entry in self.container["Config"]["Env"])

    @property
    def ip(self) -> str:
        return str(self._network["IPAddress"])

    @property
    def gateway(self) -> str:
        """The host's address on the session's own network."""
        return str(self._network["Gateway"])

    @property
    def network(self) -> str:
        """The name of the network that it is on."""
        return str(next(iter(self.container["NetworkSettings"]["Networks"])))

    @property
    def _network(self) -> dict[str, Any]:
        return dict(self.container["NetworkSettings"]["Networks"][self.network])


class DockerHub(HubProcess):
    """A Hub on an engine: what its sessions left there goes with it."""

    def __init__(self, folder: Path, engine: Engine, **kwargs: Any) -> None:
        super().__init__(folder, runtime="docker", **{"before": QUICK, "after": MINI, **SETTINGS, **kwargs})
        self.engine = engine

    @property
    def installation(self) -> str:
        """The installation's id, which marks its containers."""
        return self.store.installation_id

    def container_name(self, session: Session) -> str:
        """Return what the container of the session's current attempt has to be named."""
        return f"fgpu-{self.installation}-{session.id}-{session.attempt}"

    def running(self, user: str, server: str = "", **options: Any) -> Running:
        """Have a user ask for a server of theirs, and return it when the Hub says that it is ready."""
        token = self.add_user(user)
        self.wait_free(user, server)
        answer = self.spawn(user, server, options={**ONE, **options}, token=token)
        assert answer.status_code in (201, 202), answer.text
        self.wait_ready(user, server)
        session = self.sessions()[f"{user}/{server}"]
        container = self.engine.inspect(self.container_name(session))
        assert container is not None
        return Running(session, container, token)

    def ask(self, running: Running, path: str, method: str = "GET", **more: Any) -> requests.Response:
        """Ask a session's server through the proxy, with its user's own token."""
        asked = running.session.request
        own = f"{asked.user}/{asked.server_name}".rstrip("/")
        headers = {"Authorization": f"token {running.token}"}
        return requests.request(method, f"{self.url}/user/{own}/{path}", headers=headers, timeout=60, **more)

    @contextmanager
    def writing(self) -> Iterator[Store]:
        """Open the scheduler's database to write to it, as the service and the command line do."""
        store = Store(f"sqlite:///{self.data / 'fgpu.sqlite'}")
        store.connect()
        try:
            yield store
        finally:
            store.close()

    def wait_free(self, user: str, server: str = "") -> None:
        """Wait until the Hub has done with the one before: until then it takes no request for this server."""
        what = f"the Hub has done with the {user}/{server} of before"
        until(lambda: server not in self.servers(user), within_s=90, what=what)

    def wait_ready(self, user: str, server: str = "", *, within_s: float = 90) -> None:
        """Wait until the Hub says that this server is ready."""
        key = f"{user}/{server}"
        try:
            # The Hub says it later than the database, and is not to be kept busy with being asked until then.
            until(lambda: self.states().get(key) == "RUNNING" and self.ready(user, server), within_s=within_s)
        except AssertionError:
            raise AssertionError(
                f"{user}/{server} is not ready; the Hub says:\n{self.said()[-6000:]}"
            ) from None

    def said(self) -> str:
        """Return the Hub's log without its answers to those who waited."""
        noise = ("] 200 GET /", "Checking access to /hub/api")
        return "\n".join(line for line in self.log_text().splitlines() if not any(n in line for n in noise))

    def wait_state(self, user: str, server: str, state: str | None, *, within_s: float = 90) -> None:
        """Wait until this server's live session is in a state; None: until it has none."""
        what = f"{user}/{server} is {state}"
        until(lambda: self.states().get(f"{user}/{server}") == state, within_s=within_s, what=what)

    def last(self, user: str) -> Session:
        """Return the newest ended session of a user, as soon as there is one."""

        def newest() -> Session | None:
            # First who lives: one that ends between the two looks is then in both, and looked for once more.
            asked = [s.id for s in self.sessions().values() if s.request.user == user]
            found = self.store.ended(user=user, limit=1)
            # A test before may have had one of the same user: one that was asked for later is the one that is meant.
            return found[0] if found and max(asked, default=0) < found[0].id else None

        found = until(newest, within_s=90, what=f"a session of {user} has ended")
        assert found is not None
        return found

    def end(self, user: str, server: str = "") -> None:
        """End a server, and wait until its container has ended and its share is free."""
        assert self.stop(user, server).status_code in (202, 204)
        self.wait_state(user, server, None)

    def end_all_but(self, keep: set[str]) -> None:
        """End every server but these."""
        for key in self.states():
            if key not in keep:
                self.stop(*key.split("/", 1))
        until(lambda: set(self.states()) <= keep, within_s=120, what="all sessions of the test have ended")

    def close(self) -> None:
        """End the Hub, and remove its sessions' containers."""
        installation = self.installation if self.has_store() else None
        super().close()
        if installation is not None:
            remove_leftovers(installation)
            homes = Homes(installation)
            homes.remove(homes.names())
            homes.close()


__all__ = ["BASE", "MINI", "ONE", "PYTHON", "WHOLE_FIVE", "DockerHub", "Engine", "Running", "build", "until"]


def write_catalogue(folder: Path, images: Mapping[str, str], more: str = "") -> str:
    """Write a catalogue of references by slug, with ``more`` lines at its end, and return its path."""
    path = folder / "catalogue.toml"
    path.write_text("\n".join(entry(slug, reference) for slug, reference in images.items()) + more)
    return str(path)


def entry(slug: str, reference: str) -> str:
    """Return one image of a catalogue."""
    fields = {"slug": slug, "name": slug, "framework": "python", "version": "3.11", "python": "3.11"}
    lines = [f'{key} = "{value}"' for key, value in {**fields, "reference": reference}.items()]
    return "\n".join(["[[image]]", *lines, f"default = {'true' if slug == 'python' else 'false'}\n"])
