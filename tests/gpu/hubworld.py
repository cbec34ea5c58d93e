"""The whole product on this machine: a Hub with local sessions, asked through its API, and code run in their kernels.

A stand-in keeps the proxy's routes, so Node is not needed; users' servers are asked at their own ports.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from realgpu import ROOT, Gpu

CONFIG = """
from fgpuspawner.config import configure

c = get_config()  # noqa: F821
c.JupyterHub.bind_url = "http://127.0.0.1:{port}"
c.JupyterHub.hub_port = {port} + 1
c.ConfigurableHTTPProxy.should_start = False
c.ConfigurableHTTPProxy.api_url = "http://127.0.0.1:{port_of_proxy}"
c.ConfigurableHTTPProxy.auth_token = "{token}"
c.JupyterHub.authenticator_class = "null"  # Only the check's own token is let in, and no one else of this machine.
c.JupyterHub.services = [{{"name": "check", "api_token": "{token}"}}]
c.JupyterHub.load_roles = [{{"name": "check", "services": ["check"], "scopes": [
    "admin:users", "admin:servers", "tokens", "access:servers", "access:services", "custom:fgpu:admin",
    "custom:fgpu:queue:read"]}}]
configure(
    c, runtime="fgpuspawner.engines.local.spawner:LocalFGPUSpawner", data_dir={data!r}, service_port={port} + 3,
    simulated_gpus={gpus!r}, fgpu_per_gpu="2", meter_every_s=1,
    accounting_dir={accounts!r},
)
c.Spawner.cmd = [{python!r}, "-m", "jupyterhub.singleuser"]
c.Spawner.args = ["--ServerApp.terminals_enabled=False"]
c.Spawner.environment = {{"JUPYTERHUB_SINGLEUSER_APP": "jupyter_server.serverapp.ServerApp", "PYTHONPATH": {path!r}}}
"""
PROGRAM = '''
import json, time
try:
    import torch
except ImportError:
    torch = None
if torch is not None:
    device = "cuda"
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 64, 3), torch.nn.ReLU(), torch.nn.Conv2d(64, 128, 3, 2), torch.nn.ReLU(),
        torch.nn.Conv2d(128, 256, 3, 2), torch.nn.ReLU(), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(),
        torch.nn.Linear(256, 10)).to(device)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.05)
    x, y = torch.randn(256, 3, 64, 64, device=device), torch.randint(0, 10, (256,), device=device)
    def work():
        for _ in range(4):
            optimiser.zero_grad()
            torch.nn.functional.cross_entropy(model(x), y).backward()
            optimiser.step()
        torch.cuda.synchronize()
        return 4
    def total_mib():
        return torch.cuda.mem_get_info()[1] / 2**20
    def take(mib):
        """Return the error of an allocation, or nothing."""
        try:
            torch.empty(mib << 20, dtype=torch.uint8, device=device)
        except torch.OutOfMemoryError as e:
            return type(e).__name__
        return ""
else:
    import ctypes
    cuda = ctypes.CDLL("libcuda.so.1")
    def call(name, *arguments):
        status = getattr(cuda, name)(*arguments)
        assert status == 0, (name, status)
    context, module, kernel, gpu = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_int()
    call("cuInit", 0)
    call("cuDeviceGet", ctypes.byref(gpu), 0)
    call("cuDevicePrimaryCtxRetain", ctypes.byref(context), gpu)
    call("cuCtxSetCurrent", context)
    call("cuMemAlloc_v2", ctypes.byref(ctypes.c_uint64()), ctypes.c_size_t(256 << 20))
    call("cuModuleLoadData", ctypes.byref(module), PTX.encode())
    call("cuModuleGetFunction", ctypes.byref(kernel), module, b"spin_1000us")
    length = ctypes.c_uint64(1_000_000)
    parameters = (ctypes.c_void_p * 1)(ctypes.addressof(length))
    def work():
        for _ in range(50):
            call("cuLaunchKernel", kernel, 1, 1, 1, 1, 1, 1, 0, None, parameters, None)
        call("cuCtxSynchronize")
        return 50
    def total_mib():
        total = ctypes.c_size_t()
        call("cuDeviceTotalMem_v2", ctypes.byref(total), gpu)
        return total.value / 2**20
    def take(mib):
        """Return the error of an allocation, or nothing."""
        address = ctypes.c_uint64()
        status = cuda.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(mib << 20))
        if status == 0:
            call("cuMemFree_v2", address)
        return {0: "", 2: "CUDA_ERROR_OUT_OF_MEMORY"}.get(status, str(status))

def train(begin, seconds):
    """Return the steps per second from a moment on; others begin at the same."""
    while time.time() < begin:
        work()
    steps, began = 0, time.monotonic()
    while (passed := time.monotonic() - began) < seconds:
        steps += work()
    return steps / passed
work()
'''
"""What every session runs: a small network in PyTorch, or where that is missing kernels of a millisecond."""

SPIN = """.version 6.0
.target sm_50
.address_size 64
.visible .entry spin_1000us(.param .u64 length)
{
.reg .u64 %r<6>;
.reg .pred %p<3>;
ld.param.u64 %r1, [length];
mov.u64 %r2, %globaltimer;
mov.u64 %r5, 0;
again:
mov.u64 %r3, %globaltimer;
sub.u64 %r4, %r3, %r2;
mov.u64 %r2, %r3;
setp.gt.u64 %p1, %r4, 100000;
@%p1 bra again;
add.u64 %r5, %r5, %r4;
setp.lt.u64 %p2, %r5, %r1;
@%p2 bra again;
ret;
}
"""
PROGRAM = f"PTX = {SPIN!r}\n{PROGRAM}"
NODE = "local"


class Routes(ThreadingHTTPServer):
    """A stand-in for the REST interface of the proxy: it keeps routes, and forwards nothing."""

    def __init__(self, token: str) -> None:
        self.table: dict[str, dict[str, Any]] = {}
        self.token = token
        super().__init__(("127.0.0.1", 0), _RouteRequest)
        threading.Thread(target=self.serve_forever, daemon=True).start()


class _RouteRequest(BaseHTTPRequestHandler):
    server: Routes

    def _answer(self, status: int, body: object = None) -> None:
        text = b"" if body is None else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def _is_allowed(self) -> bool:
        allowed = self.headers.get("Authorization") == f"token {self.server.token}"
        if not allowed:
            self._answer(403)
        return allowed

    @property
    def _route(self) -> str:
        return "/" + self.path.partition("/api/routes")[2].strip("/")

    def do_GET(self) -> None:
        if self._is_allowed():
            self._answer(200, self.server.table)

    def do_POST(self) -> None:
        length = int(self.headers.get("Content-Length", 0))
        route = json.loads(self.rfile.read(length))
        if self._is_allowed():
            self.server.table[self._route] = {**route, "last_activity": "2026-01-01T00:00:00.000Z"}
            self._answer(201)

    def do_DELETE(self) -> None:
        if self._is_allowed():
            self.server.table.pop(self._route, None)
            self._answer(204)

    def log_message(self, *args: object) -> None:
        """Say nothing."""


class HubWorld:
    """A Hub on this machine's GPU, or on one simulated GPU of its own where this is a rehearsal."""

    def __init__(self, folder: Path, gpu: Gpu) -> None:
        self.folder, self.gpu, self.data = folder, gpu, folder / "data"
        # In memory, as by default, but removed with the Hub.
        self.accounts = tempfile.mkdtemp(prefix="fgpu-check-", dir="/dev/shm")
        self.token = secrets.token_hex(16)
        self.routes = Routes(self.token)
        self.port = _free_ports(4)
        self.log = folder / "hub.log"
        self.began = time.monotonic()
        site = os.environ.get("FGPU_GPU_HUB_SITE", "")
        kept = {
            k: v
            for k, v in os.environ.items()
            if not k.startswith(("FGPU_", "JUPYTERHUB", "PYTEST"))
            and k not in ("LD_LIBRARY_PATH", "PYTHONPATH")
        }
        before = os.environ.get("PYTHONPATH", "")
        session_path = os.pathsep.join(filter(None, [before, site]))
        path = os.pathsep.join([str(ROOT), str(ROOT / "scheduler"), session_path])
        if not gpu.simulated and "LD_LIBRARY_PATH" in os.environ:
            kept["LD_LIBRARY_PATH"] = os.environ["LD_LIBRARY_PATH"]
        config = folder / "jupyterhub_config.py"
        config.write_text(
            CONFIG.format(
                port=self.port,
                port_of_proxy=self.routes.server_address[1],
                token=self.token,
                data=str(self.data),
                accounts=self.accounts,
                gpus="1" if gpu.simulated else "auto",
                python=Path(sys.executable).name,
                path=session_path,
            )
        )
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "jupyterhub", "-f", str(config)],
                cwd=folder,
                env=kept | {"PYTHONPATH": path, "PATH": f"{Path(sys.executable).parent}:{kept['PATH']}"},
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        self.until(lambda: self.ask("GET", f"{self.hub_api}/") is not None, "the Hub answers", within_s=40)
        self.until(lambda: self.fgpu("GET", "capacity"), "the service answers", within_s=20)

    def until(self, found: Callable[[], Any], what: str, *, within_s: float = 30) -> Any:
        """Return what ``found`` returns as soon as that is true.

        Raises:
            RuntimeError: it does not become so in time; with the Hub's last words.
        """
        deadline = time.monotonic() + within_s
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                break
            try:
                if value := found():
                    return value
            except (OSError, urllib.error.URLError):
                pass
            time.sleep(0.1)
        raise RuntimeError(
            f"not within {within_s:.0f} s: {what}; the Hub says: {self.log.read_text()[-3000:]}"
        )

    @property
    def hub_api(self) -> str:
        return f"http://127.0.0.1:{self.port + 1}/hub/api"

    def ask(self, method: str, url: str, body: object = None) -> Any:
        """Return the answer to a request as JSON, or None without one.

        Raises:
            OSError: it is refused or not answered.
        """
        data = None if body is None else json.dumps(body).encode()
        headers = {"Authorization": f"token {self.token}", "Content-Type": "application/json"}
        request = urllib.request.Request(url, data, headers, method=method)
        with urllib.request.urlopen(request, timeout=20) as answer:
            text = answer.read()
        return json.loads(text) if text else None

    def fgpu(self, method: str, path: str) -> Any:
        """Return an answer of the product's own API."""
        return self.ask(method, f"http://127.0.0.1:{self.port + 3}/services/fgpu/api/v1/{path}")

    def session(self, user: str) -> dict[str, Any]:
        """Return a user's live session as the API has it; empty where there is none."""
        found: list[dict[str, Any]] = self.fgpu("GET", "sessions?all=1")["sessions"]
        return next((each for each in found if each["user"] == user), {})

    def asks_for(self, user: str, fgpu: str) -> None:
        """Have a user ask for a session."""
        self.ask("POST", f"{self.hub_api}/users/{user}")
        self.ask(
            "POST", f"{self.hub_api}/users/{user}/server", {"fgpu": fgpu, "cpu": "0.5", "memory_mib": 512}
        )

    def wait_for(self, user: str) -> float:
        """Wait until a user's session runs and its server answers; return the seconds."""
        began = time.monotonic()
        self.until(lambda: self.session(user).get("state") == "RUNNING", f"{user}'s session runs")
        self.until(lambda: f"/user/{user}" in self.routes.table, f"the Hub has a route to {user}'s server")
        self.until(lambda: self.ask("GET", f"{self._server(user)}api/status"), f"{user}'s server answers")
        return time.monotonic() - began

    def _server(self, user: str) -> str:
        route = f"/user/{user}"
        return f"{self.routes.table[route]['target']}{route}/"

    def start_program(self, user: str) -> Kernel:
        """Start a kernel in a user's session, with `PROGRAM` run in it."""
        server = self._server(user)
        number = self.ask("POST", f"{server}api/kernels", {})["id"]
        kernel = Kernel(f"{server}api/kernels/{number}/channels".replace("http", "ws", 1), self.token)
        kernel.run(PROGRAM, within_s=60)
        return kernel

    @property
    def machine_environment(self) -> Mapping[str, str]:
        """The environment of a program outside of sessions that uses the same GPU."""
        if not self.gpu.simulated:
            return os.environ
        folder = next(self.data.rglob("libnvidia-ml.so.1")).parent
        return os.environ | {"LD_LIBRARY_PATH": str(folder)}

    def held_mib(self) -> dict[str, float]:
        """Return by user what the driver says that the processes of each session hold."""
        code = "import json; from realgpu import *\nn = Nvml()\n"
        code += "print(json.dumps({p: b for g in n.gpus() for p, b in n.process_bytes(g.uuid).items()}))"
        done = subprocess.run(
            [sys.executable, "-c", code],
            cwd=Path(__file__).parent,
            env=self.machine_environment,
            capture_output=True,
            text=True,
            check=True,
        )
        held: dict[str, float] = {}
        for pid, taken in json.loads(done.stdout).items():
            try:
                words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            except OSError:
                continue
            user = next(
                (w.decode().partition("=")[2] for w in words if w.startswith(b"JUPYTERHUB_USER=")), ""
            )
            held[user] = held.get(user, 0) + taken / 2**20
        return held

    def end_session(self, user: str) -> None:
        self.ask("DELETE", f"{self.hub_api}/users/{user}/server")

    def close(self) -> None:
        """End the Hub; conftest.py ends what it leaves."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        self.routes.shutdown()
        shutil.rmtree(self.accounts, ignore_errors=True)


class Kernel:
    """A kernel of a session, over its websocket."""

    def __init__(self, url: str, token: str) -> None:
        self.url, self.token = url, token

    def run(self, code: str, *, within_s: float = 30) -> str:
        """Run code; return what it printed.

        Raises:
            RuntimeError: the code failed, or did not end in time.
        """
        return asyncio.run(self._run(code, within_s))

    async def _run(self, code: str, within_s: float) -> str:
        from tornado.httpclient import HTTPRequest
        from tornado.websocket import websocket_connect

        headers = {"Authorization": f"token {self.token}"}
        connection = await websocket_connect(
            HTTPRequest(self.url, headers=headers), max_message_size=64 << 20
        )
        asked, printed = uuid.uuid4().hex, ""
        header = {
            "msg_id": asked,
            "msg_type": "execute_request",
            "session": asked,
            "username": "",
            "version": "5.3",
        }
        content = {"code": code, "silent": False, "store_history": False}
        message = {
            "header": header,
            "parent_header": {},
            "metadata": {},
            "content": content,
            "channel": "shell",
        }
        try:
            await connection.write_message(json.dumps(message))
            async with asyncio.timeout(within_s):
                while True:
                    said = json.loads(await connection.read_message() or "null")
                    if said is None:
                        raise RuntimeError(f"the kernel is gone; it had printed: {printed}")
                    if said["parent_header"].get("msg_id") != asked:
                        continue
                    if said["msg_type"] == "stream":
                        printed += said["content"]["text"]
                    elif said["msg_type"] == "error":
                        raise RuntimeError(f"{said['content']['ename']}: {said['content']['evalue']}")
                    elif said["msg_type"] == "status" and said["content"]["execution_state"] == "idle":
                        return printed  # All that it printed has come before.
        except TimeoutError:
            raise RuntimeError(f"no end within {within_s:.0f} s: {code[:100]}") from None
        finally:
            connection.close()


def _free_ports(count: int) -> int:
    while True:
        first = 20_000 + secrets.randbelow(12_000)
        taken = []
        try:
            for port in range(first, first + count):
                taken.append(socket.socket())
                taken[-1].bind(("127.0.0.1", port))
        except OSError:
            continue
        finally:
            for each in taken:
                each.close()
        return first
