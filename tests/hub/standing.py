"""The real service on a database that a test fills itself, with a stand-in for the Hub that only knows its users.

For states that real sessions cannot reach at will: hundreds of sessions, lost machines, planted texts.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import requests

import quickstart
from fgpu_scheduler import Device, EndCause, Node, Policy, Request, Session, SessionState, Store, plan
from fgpuspawner.config import ACCESS, ADMIN, IMAGES, KEEP, QUEUE_READ
from fgpuspawner.engines.base import Capabilities
from fgpuspawner.meter.model import METERS, Live, Meter, MeterState
from fgpuspawner.settings import FGPU
from hubprocess import free_ports, until

S = SessionState
PREFIX = "/services/fgpu/"
GIB = 1024


def gpus(count: int, *, node: str = "local", group: str = "default", capacity_milli: int = 2000) -> Node:
    """Return a node with ``count`` simulated GPUs of 8 GiB."""
    devices = tuple(
        Device(f"GPU-simulated-{node}-{n}", node, n, "Simulated GPU", 8 * GIB, capacity_milli, True)
        for n in range(count)
    )
    return Node(node, group, 64_000 * max(1, count), 64 * GIB * max(1, count), devices)


def asked(user: str, server: str = "", fgpu_milli: int = 500, **more: Any) -> Request:
    """Return a request with little beside the GPU."""
    own: dict[str, Any] = {
        "image": "python",
        "resource_group": "default",
        "cpu_milli": 500,
        "memory_mib": 512,
    }
    return Request(user, server, fgpu_milli=fgpu_milli, **(own | more))


class Standing:
    """One service, one database, and a stand-in for the Hub: the token of a user is ``token-NAME``.

    ``root`` is an administrator; ``scopes`` are what others have beside everybody's.
    """

    engine = Capabilities("containers", own_root=True, saves_images=True)

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.data = folder / "data"
        self.data.mkdir(parents=True)
        self.log = folder / "service.log"
        self.port = free_ports(2)
        self.url = f"http://127.0.0.1:{self.port}{PREFIX}"
        self.settings = FGPU(data_dir=str(self.data), service_port=self.port, **settings)
        self.store = Store(self.settings.database_url())
        self.store.open()
        self.ended: list[str] = []
        self.scopes: dict[str, list[str]] = {"root": [ADMIN]}
        self.ending_answer = 202
        self._hub = ThreadingHTTPServer(("127.0.0.1", self.port + 1), _handler(self))
        threading.Thread(target=self._hub.serve_forever, daemon=True).start()
        self.process: quickstart.Started | None = None

    def start(self) -> Standing:
        """Start the service and wait until it answers."""
        env = {k: v for k, v in os.environ.items() if not k.startswith(("JUPYTERHUB", "FGPU_"))} | {
            "JUPYTERHUB_API_TOKEN": "service-token",
            "FGPU_FORECAST_KEY": "00" * 32,
            "JUPYTERHUB_API_URL": f"http://127.0.0.1:{self.port + 1}/hub/api",
            "JUPYTERHUB_BASE_URL": "/",
            "JUPYTERHUB_SERVICE_NAME": "fgpu",
            "JUPYTERHUB_SERVICE_PREFIX": PREFIX,
            "JUPYTERHUB_SERVICE_URL": f"http://127.0.0.1:{self.port}",
            "JUPYTERHUB_OAUTH_SCOPES": json.dumps([ACCESS]),
            "JUPYTERHUB_OAUTH_ACCESS_SCOPES": json.dumps([ACCESS]),
            "FGPU_SETTINGS": self.settings.to_json(),
            "FGPU_ENGINE": self.engine.to_json(),
            "FGPU_HUB_PID": str(quickstart.starter().pid),
        }
        self.process = quickstart.starter().start(
            quickstart.SERVICE, folder=Path.cwd(), env=env, log=self.log
        )
        until(self._answers, what="the service answers")
        return self

    def _answers(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, self.log.read_text()
        try:
            return requests.get(f"{self.url}health", timeout=10).status_code == 200
        except (requests.ConnectionError, requests.Timeout):
            return False

    def kill(self) -> None:
        """SIGKILL the service."""
        assert self.process is not None
        self.process.kill()
        self.process.wait(30)

    def close(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.kill()
        self._hub.shutdown()
        self._hub.server_close()
        self.store.close()

    def get(self, path: str, user: str, **kwargs: Any) -> requests.Response:
        """Ask the service as a user."""
        headers = {"Authorization": f"token token-{user}"}
        return requests.get(self.url + path, headers=headers, timeout=30, **kwargs)

    # -- the world ------------------------------------------------------------------------------------

    def run(self, requests: Sequence[Request], *, started_at_s: int | None = None) -> tuple[Session, ...]:
        """Submit these and have those run that are given a place; the others wait. Returns them as they are then."""
        now_s = int(time.time()) if started_at_s is None else started_at_s
        found = self.store.submit(requests, now_s=now_s)
        self.place(now_s=now_s)
        return tuple(session for s in found if (session := self.store.session(s.id)) is not None)

    def place(self, *, now_s: int | None = None) -> None:
        """Have everybody run who is given a place now."""
        at_s = int(time.time()) if now_s is None else now_s
        for placed in self.store.commit(plan(self.store.snapshot(at_s), Policy()), now_s=at_s):
            self.move(placed.id, S.PREPARING, now_s=at_s)
            self.move(placed.id, S.RUNNING, now_s=at_s)

    def move(self, session_id: int, to: SessionState, *, now_s: int | None = None, **kwargs: Any) -> Session:
        """Move a session on."""
        at_s = int(time.time()) if now_s is None else now_s
        return self.store.move(session_id, to, now_s=at_s, **kwargs)

    def measure(
        self,
        used_mib: dict[int, int | None],
        *,
        trouble: str | None = None,
        lent: tuple[float, float] | None = None,
        context_mib: int | None = None,
    ) -> None:
        """Tell of running sessions, as the Hub would, how much GPU memory they hold; they compute with 12.5 %."""
        at_s = int(time.time())
        found = {}
        for session_id, used in used_mib.items():
            session = self.store.session(session_id)
            assert session is not None
            assert session.placement is not None
            share = session.placement.shares[0]
            sm = None if used is None else 12.5
            own = (at_s, used, share.memory_mib, sm, share.compute_percent, sm, trouble)
            meter = Meter(*own, *(lent or (None, None)), context_mib)
            found[session_id] = Live(meter, (), ())
        METERS.write(self.data, MeterState(10, found))

    def end(self, session_id: int) -> None:
        """End a session that runs."""
        self.move(session_id, S.TERMINATING, cause=EndCause.USER)
        self.move(session_id, S.TERMINATED)

    def end_all(self) -> None:
        """End all that live."""
        for session in self.store.snapshot(int(time.time())).sessions:
            if session.state is S.PENDING:
                self.move(session.id, S.CANCELLED, cause=EndCause.USER)
            else:
                self.end(session.id)


def _handler(standing: Standing) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            name = self.headers.get("Authorization", "").removeprefix("token ").removeprefix("token-")
            if self.path.partition("?")[0] != "/hub/api/user" or not name:
                self._answer(404, {"message": "no"})
                return
            scopes = [ACCESS, QUEUE_READ, KEEP, IMAGES, *standing.scopes.get(name, [])]
            model = {"kind": "user", "name": name, "admin": name == "root", "groups": [], "scopes": scopes}
            self._answer(200, model)

        def do_DELETE(self) -> None:
            standing.ended.append(self.path)
            self._answer(standing.ending_answer, {"message": "no"})

        def do_POST(self) -> None:
            self._answer(202, {})

        def _answer(self, status: int, body: dict[str, Any]) -> None:
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *args: Any) -> None:
            pass

    return Handler


@contextmanager
def standing(folder: Path, **settings: Any) -> Iterator[Standing]:
    """A service for the time of a test or a module; fill its database, then start it."""
    found = Standing(folder, **settings)
    try:
        yield found
    finally:
        found.close()
