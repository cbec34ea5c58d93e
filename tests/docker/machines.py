"""Other machines for tests: Docker engines in network namespaces of their own, which can be cut off."""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import docker
from certipy import Certipy
from docker.errors import DockerException
from dockerhub import BASE

from hubprocess import until

HUB_ADDRESS = "10.215.{0}.1"
PORT = 2375


class Machine:
    """One machine: a network namespace joined to this one's by a pair of interfaces, and an engine in it.

    Its unique number decides its addresses. The kernel, the disks and the process numbers are this
    machine's.
    """

    flags: tuple[str, ...] = ()
    """More of the engine's flags. To be set before it starts, as is the next."""
    """The size of a disk of the engine's own, which can be full."""
    daemon_json: str | None = None
    """The engine's file of settings. It then has an /etc of its own, into which it may write users."""

    def __init__(self, *, tls: bool = False) -> None:
        self._tls = tls
        number = self.number = free_number()
        self.name = f"fgput{number}-{secrets.token_hex(2)}"
        self.hub_address = HUB_ADDRESS.format(number)
        self.address = f"10.215.{number}.2"
        self.url = f"tcp://{self.address}:{PORT}"
        self._folder = Path(tempfile.mkdtemp(prefix="fgpu-machine-"))
        self._inner = f"ft{number}i"
        self._outer = outer(number)
        self._daemon: subprocess.Popen[bytes] | None = None

    def node(self, name: str, **more: object) -> dict[str, object]:
        """Return this machine as a node of a configuration."""
        return {"name": name, "engine": self.url, "tls": self.tls() if self._tls else False, **more}

    def tls(self, who: str = "client", authority: str = "ca") -> dict[str, str]:
        """Return the files of a certificate, made by an authority; the engine trusts the one that is called ca."""
        folder = self._folder / "tls"
        made = Certipy(store_dir=str(folder))
        if not (folder / authority).is_dir():
            made.create_ca(authority)
        if not (folder / who).is_dir():
            made.create_signed_pair(who, authority, alt_names=[f"IP:{self.address}"])
        return {
            "ca": str(folder / authority / f"{authority}.crt"),
            "cert": str(folder / who / f"{who}.crt"),
            "key": str(folder / who / f"{who}.key"),
        }

    def _security(self) -> list[str]:
        if not self._tls:
            return ["--tls=false"]
        files = self.tls("server")
        return [
            "--tlsverify",
            "--tlscacert",
            files["ca"],
            "--tlscert",
            files["cert"],
            "--tlskey",
            files["key"],
        ]

    @property
    def data(self) -> Path:
        """The engine's folder."""
        return self._folder / "data"

    @property
    def socket(self) -> str:
        """The engine's address for this machine, which no cut cable reaches."""
        return f"unix://{self._folder}/docker.sock"

    def start(self, loaded: Path | None = None) -> Machine:
        """Make the network and start the engine, with the images of another one's folder; return when it answers."""
        run("ip", "netns", "add", self.name)
        # It was taken as a number's mark; now it becomes one end of the cable.
        run("ip", "link", "del", self._outer)
        run("ip", "link", "add", self._outer, "type", "veth", "peer", "name", self._inner, "netns", self.name)
        run("ip", "addr", "add", f"{self.hub_address}/24", "dev", self._outer)
        run("ip", "link", "set", self._outer, "up")
        self.inside("ip", "link", "set", "lo", "up")
        self.inside("ip", "addr", "add", f"{self.address}/24", "dev", self._inner)
        self.inside("ip", "link", "set", self._inner, "up")
        self.inside("ip", "route", "add", "default", "via", self.hub_address)
        if loaded is not None:
            self.data.mkdir()
            run("cp", "--archive", str(loaded / "image"), str(self.data))
            # Layers of images are not written to.
            run("cp", "--archive", "--link", str(loaded / "overlay2"), str(self.data))
        self.start_engine()
        return self

    def start_engine(self) -> None:
        """Start the engine, with the containers that it had."""
        (self._folder / "dockerd.pid").unlink(missing_ok=True)
        with (self._folder / "dockerd.log").open("ab") as log:
            self._daemon = self._start(log)
        self.client = until(self._connected, within_s=60, what=f"the engine of {self.name} answers")

    def _start(self, log: IO[bytes]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [
                *(
                    "nsenter",
                    f"--net=/var/run/netns/{self.name}",
                    *self._with_its_file(),
                    "dockerd",
                    *self.flags,
                ),
                *("-H", self.url, "-H", f"unix://{self._folder}/docker.sock", *self._security()),
                *("--data-root", str(self._folder / "data"), "--exec-root", str(self._folder / "exec")),
                *(
                    "--pidfile",
                    str(self._folder / "dockerd.pid"),
                    "--bip",
                    f"172.{29 - self.number % 10}.250.1/24",
                ),
                *("--default-address-pool", f"base=172.{29 - self.number % 10}.0.0/17,size=24"),
            ],
            stdout=log,
            stderr=log,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )

    def _with_its_file(self) -> list[str]:
        """Return what runs the engine with its file of settings, over this machine's /etc."""
        if self.daemon_json is None:
            return []
        # Root of its containers, who is another user here, has to find its way to their files.
        self._folder.chmod(0o711)
        upper, work = self._folder / "etc", self._folder / "etc-work"
        work.mkdir(exist_ok=True)
        (upper / "docker").mkdir(parents=True, exist_ok=True)
        (upper / "docker" / "daemon.json").write_text(self.daemon_json)
        over = f"lowerdir=/etc,upperdir={upper},workdir={work}"
        return ["unshare", "--mount", "sh", "-ec", f'mount -t overlay own -o {over} /etc; exec "$@"', "sh"]

    def _connected(self) -> docker.APIClient | None:
        if self._daemon is not None and self._daemon.poll() is not None:
            raise AssertionError((self._folder / "dockerd.log").read_text()[-2000:])
        with socket.socket(socket.AF_UNIX) as asked:
            asked.settimeout(10)
            try:
                # A client that fails to connect leaves sockets behind.
                asked.connect(f"{self._folder}/docker.sock")
                asked.sendall(b"GET /_ping HTTP/1.0\r\n\r\n")
                if b" 200 " not in asked.recv(64):
                    return None
            except OSError:
                return None
        return docker.APIClient(base_url=f"unix://{self._folder}/docker.sock", version="auto", timeout=60)

    def within(self) -> str:
        """Return configuration lines that bring a Hub into the machine's network."""
        return (
            "import ctypes, os\n"
            f"_network = os.open('/var/run/netns/{self.name}', os.O_RDONLY)\n"
            "assert ctypes.CDLL(None).setns(_network, 0) == 0\n"
        )

    def inside(self, *words: str) -> None:
        """Run a command in the machine's network."""
        run("nsenter", f"--net=/var/run/netns/{self.name}", *words)

    def load(self, client: docker.APIClient, reference: str = BASE) -> None:
        """Give the engine an image of another one."""
        self.client.load_image(b"".join(client.get_image(reference)))
        # A disk without room for it says so in the answer's text only.
        self.client.inspect_image(reference)

    def cut(self) -> None:
        """Cut the cable: nothing goes in or out, without a notice."""
        self.inside("ip", "link", "set", self._inner, "down")

    def mend(self) -> None:
        """Join the machine to the network again."""
        self.inside("ip", "link", "set", self._inner, "up")
        self.inside("ip", "route", "replace", "default", "via", self.hub_address)

    def freeze(self) -> None:
        """Stop the engine's process: it takes connections, and never answers."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Let the engine go on."""
        self._signal(signal.SIGCONT)

    def _signal(self, sign: signal.Signals) -> None:
        assert self._daemon is not None
        os.kill(int((self._folder / "dockerd.pid").read_text()), sign)

    def stop_engine(self) -> None:
        """End the engine as its service manager does."""
        assert self._daemon is not None
        self._daemon.terminate()
        self._daemon.wait(60)
        self.client.close()

    def close(self) -> None:
        """Remove the containers, the engine and the network."""
        with contextlib.suppress(ProcessLookupError, FileNotFoundError, AssertionError):
            self.thaw()
        if self._daemon is not None and self._daemon.poll() is None:
            with contextlib.suppress(DockerException):
                for container in self.client.containers(all=True):
                    self.client.remove_container(container["Id"], force=True)
            self.stop_engine()
        if hasattr(self, "client"):
            self.client.close()
        run("ip", "netns", "del", self.name, check=False)
        run("ip", "link", "del", self._outer, check=False)
        for _ in range(20):
            shutil.rmtree(self._folder, ignore_errors=True)
            if not self._folder.exists():
                return
            time.sleep(0.2)


@contextlib.contextmanager
def running(
    client: docker.APIClient,
    *,
    tls: bool = False,
    flags: tuple[str, ...] = (),
    daemon_json: str | None = None,
) -> Iterator[Machine]:
    """Have another machine, with the default image of the engine of ``client``."""
    made = Machine(tls=tls)
    made.flags, made.daemon_json = flags, daemon_json
    try:
        if daemon_json is not None:
            # Other people's files may belong to others there.
            made.start().load(client)
        else:
            made.start(loaded(client))
        yield made
    finally:
        made.close()


def loaded(client: docker.APIClient) -> Path:
    """Return the folder of an engine that has the default image. It is made once for all that have temporary files here.

    To give the image to an engine takes half a minute of a processor.
    """
    image = str(client.inspect_image(BASE)["Id"]).removeprefix("sha256:")
    folder = Path(tempfile.gettempdir()) / "fgpu-machines"
    folder.mkdir(mode=0o700, exist_ok=True)
    assert folder.stat().st_uid == os.getuid(), f"{folder} belongs to somebody else"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / image).exists():
            for older in folder.glob("*/"):
                shutil.rmtree(older)
            made = Machine()
            try:
                made.start().load(client)
                made.stop_engine()
                draft = folder / "draft"
                draft.mkdir()
                for part in ("image", "overlay2"):
                    (made.data / part).rename(draft / part)
                draft.rename(folder / image)
            finally:
                made.close()
    return folder / image


def outer(number: int) -> str:
    """Return the name of a machine's interface on this side."""
    return f"ft{number}o"


def free_number() -> int:
    """Return a number that no other machine has, of whichever run, and take it."""
    numbers = list(range(1, 250))
    random.shuffle(numbers)
    for number in numbers:
        made = subprocess.run(
            ["ip", "link", "add", outer(number), "type", "bridge"],
            capture_output=True,
            text=True,
            check=False,
        )
        if made.returncode == 0:
            return number
        assert "File exists" in made.stderr, made.stderr
    raise AssertionError("every number is taken; ip link show")


def run(*words: str, check: bool = True) -> None:
    """Run a command."""
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0 or not check, f"{words}: {done.stderr}"
