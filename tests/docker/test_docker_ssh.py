"""An engine at the other end of ``ssh``. Runs where an OpenSSH server is installed; none is installed for it."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from dockerhub import PYTHON
from dockerhub import Engine as Made

from fgpu_scheduler import BadSettings
from fgpuspawner.engines.docker.address import Address, Tunnel
from fgpuspawner.engines.docker.daemon import Daemon
from fgpuspawner.engines.docker.handover import Handover, send
from hubprocess import free_ports, until

SSHD = Path("/usr/sbin/sshd")

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or not SSHD.exists(),
    reason="no OpenSSH server is installed (openssh-server), or not root",
)


@dataclass
class Server:
    """A server on the loopback, for one key."""

    port: int
    folder: Path
    process: subprocess.Popen[bytes]

    @property
    def url(self) -> str:
        return f"ssh://root@127.0.0.1:{self.port}"


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    for name in ("id", "host"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / name], check=True)
    (tmp_path / "id.pub").rename(tmp_path / "authorized")
    (port,) = [free_ports(1)]
    # What `ssh` takes from its user's configuration otherwise.
    wrapper = tmp_path / "ssh"
    wrapper.write_text(
        f'#!/bin/sh\nexec /usr/bin/ssh -F none -i "{tmp_path}/id" -o StrictHostKeyChecking=no '
        f'-o UserKnownHostsFile="{tmp_path}/known" "$@"\n'
    )
    wrapper.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
    options = {
        "ListenAddress": "127.0.0.1",
        "HostKey": tmp_path / "host",
        "AuthorizedKeysFile": tmp_path / "authorized",
        "PidFile": "none",
        "StrictModes": "no",
        "PermitRootLogin": "prohibit-password",
    }
    words = [word for name, value in options.items() for word in ("-o", f"{name}={value}")]
    with (tmp_path / "sshd.log").open("wb") as log:
        process = subprocess.Popen([SSHD, "-D", "-e", "-f", "/dev/null", "-p", str(port), *words], stderr=log)
    until(lambda: _listens(port), what="sshd listens")
    yield Server(port, tmp_path, process)
    process.kill()
    process.wait()


def _listens(port: int) -> bool:
    with socket.socket() as asked:
        return asked.connect_ex(("127.0.0.1", port)) == 0


def engine_at(url: str) -> Daemon:
    return Daemon(Address(url, ("there",), {}, "127.0.0.1"), installation="sshtest")


async def test_containers_events_and_identities_go_through_the_tunnel(
    engine: Made, image: str, server: Server
) -> None:
    there = engine_at(server.url)
    await asyncio.to_thread(there.connect)
    changed = asyncio.Event()
    there.watch(changed.set)
    assert (await there.observe())[1] == ("there",)
    await asyncio.sleep(1.5)
    name = f"{engine.prefix}-ssh"
    engine.start(name, labels={"fgpu.installation": "sshtest"})
    changed.clear()
    await asyncio.to_thread(engine.client.kill, name)
    async with asyncio.timeout(60):
        await changed.wait()
    client = there.containers.client
    read = f"{engine.prefix}-read"
    code = "import sys; print(sys.stdin.readline())"
    client.create_container(image, [code], entrypoint=[PYTHON, "-c"], name=read, stdin_open=True)
    try:
        client.start(read)
        await asyncio.to_thread(send, client, read, Handover(("a",), {"JUPYTERHUB_API_TOKEN": "secret"}))
        assert client.wait(read, timeout=60)["StatusCode"] == 0
        assert b'"JUPYTERHUB_API_TOKEN": "secret"' in client.logs(read)
    finally:
        client.remove_container(read, force=True)
    there.close()


async def test_ended_tunnel_is_opened_again(engine: Made, server: Server) -> None:
    there = engine_at(server.url)
    await asyncio.to_thread(there.connect)
    there.watch(lambda: None)
    # Not the engines of other machines, which are children of this process too.
    (ssh,) = [
        p
        for p in psutil.Process().children()
        if p.name() != "dockerd" and "docker.sock" in " ".join(p.cmdline())
    ]
    ssh.kill()
    ssh.wait(30)
    assert await there.observe() == ((), (), ())
    async with asyncio.timeout(60):
        while not there.answers:
            await asyncio.sleep(0.1)
            await there.observe()
    assert (await there.observe())[1] == ("there",)
    there.close()


def test_message_of_ssh_is_reported(server: Server) -> None:
    refused = engine_at(f"ssh://nobody@127.0.0.1:{server.port}")
    with pytest.raises(BadSettings, match=r"the Docker engine of there .*Permission denied"):
        refused.connect()
    (free,) = [free_ports(1)]
    with pytest.raises(BadSettings, match="Connection refused"):
        engine_at(f"ssh://root@127.0.0.1:{free}").connect()
    with pytest.raises(BadSettings, match=r"no engine answers at /no/such\.sock there"):
        engine_at(f"{server.url}/no/such.sock").connect()


def test_tunnel_ends_with_its_process(server: Server) -> None:
    code = (
        "import os, signal, sys; from fgpuspawner.engines.docker.address import Tunnel; "
        "t = Tunnel(sys.argv[1]); t.open(); "
        "print(t._child.pid, t._folder, flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, server.url], capture_output=True, text=True, check=False
    )
    pid = int(done.stdout.split()[0])
    until(lambda: not psutil.pid_exists(pid), what="ssh has ended")
    tunnel = Tunnel(server.url)
    tunnel.open()
    folder = tunnel._folder
    assert folder is not None
    assert folder.stat().st_mode & 0o777 == 0o700
    tunnel.close()
    assert not folder.exists()
