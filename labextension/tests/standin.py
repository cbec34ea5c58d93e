"""A small stand-in of the service `fgpu`: a real HTTP server that answers as docs/rest-api.md says."""

from __future__ import annotations

import asyncio
import json
import time
from copy import deepcopy
from typing import Any

from tornado.httpserver import HTTPServer
from tornado.testing import bind_unused_port
from tornado.web import Application, RequestHandler

TOKEN = "server-token-0123456789abcdef"
PREFIX = "/services/fgpu/"


def gpu(**changes: Any) -> dict[str, Any]:
    """A quarter of a simulated GPU."""
    return {
        "uuid": "GPU-51a00000-0000-0000-0000-000000000001",
        "model": "Simulated 8 GiB",
        "fgpu": "0.5",
        "memory_mib": 2048,
        "compute_percent": 25,
        "simulated": True,
        **changes,
    }


def running(**changes: Any) -> dict[str, Any]:
    """The session that the token belongs to."""
    return {
        "id": 12,
        "user": "alice",
        "server_name": "gpu-1",
        "display_name": "gpu-1",
        "gpu_models": [],
        "priority": 0,
        "state": "RUNNING",
        "image": "python",
        "image_name": "Python 3.11",
        "resource_group": "default",
        "amount": "0.5 fGPU",
        "fgpu": "0.5",
        "cpu": "1",
        "memory_mib": 2048,
        "gpu_memory_mib": 2048,
        "compute_percent": 25,
        "node": "local",
        "gpus": [gpu()],
        "folders": [],
        "wait_reason": None,
        "wait_text": None,
        "position": None,
        "ahead": None,
        "expected_start_at_s": None,
        "early_start_at_s": None,
        "late_start_at_s": None,
        "forecast_basis": None,
        "pull": None,
        "submitted_at_s": 1790000000,
        "started_at_s": 1790000060,
        "ended_at_s": None,
        "end_cause": None,
        "message": None,
        "meter": meter(),
        "resize": resize(why_not="MIG does not change what a session has.", amounts=[]),
        "warning": None,
        "ends_at_s": None,
        "can_keep": False,
        "parked": None,
        "can_park": False,
        "can_save": False,
        "extend_by_s": None,
        "url": "/user/alice/gpu-1/",
        "pending_url": "/hub/spawn-pending/alice/gpu-1",
        "mine": True,
        "simulated": True,
        **changes,
    }


def resize(**changes: Any) -> dict[str, Any]:
    """What the running session's slice could become now: nothing was asked for yet."""
    return {
        "why_not": None,
        "amounts": ["0.1", "0.2", "0.3", "0.4", "0.5", "0.6", "0.7", "0.8"],
        "most_memory_mib": None,
        "asked": None,
        "state": None,
        "message": None,
        **changes,
    }


def pending(**changes: Any) -> dict[str, Any]:
    """Another session of the same user, waiting at the head of the queue."""
    return running(
        **{
            "id": 13,
            "server_name": "gpu-2",
            "display_name": "gpu-2",
            "state": "PENDING",
            "amount": "1 fGPU",
            "fgpu": "1",
            "gpu_memory_mib": None,
            "compute_percent": None,
            "node": None,
            "gpus": [],
            "wait_reason": "RESOURCES",
            "wait_text": "1 fGPU does not fit: the most free on one GPU is 0.5 fGPU",
            "position": 1,
            "ahead": 0,
            "expected_start_at_s": int(time.time()) + 1200,
            "early_start_at_s": int(time.time()) + 1200,
            "late_start_at_s": int(time.time()) + 1200,
            "forecast_basis": "how long sessions usually run",
            "pull": {
                "phase": "FETCHING",
                "text": "fetching the image: 45 of 200 MiB",
                "layers_done": 1,
                "layers": 7,
                "bytes_done": 45 << 20,
                "attempt": 1,
            },
            "started_at_s": None,
            "meter": None,
            "resize": None,
            "url": "/user/alice/gpu-2/",
            "pending_url": "/hub/spawn-pending/alice/gpu-2",
            **changes,
        }
    )


def amounts(fgpu: str, cpu: str, memory_mib: int) -> dict[str, Any]:
    """Sums, as the API has them."""
    return {"fgpu": fgpu, "cpu": cpu, "memory_mib": memory_mib}


def capacity() -> dict[str, Any]:
    """One GPU of 8 GiB that is worth 2 fGPU, a quarter of it this session's, and another group."""
    device = {
        "uuid": "GPU-51a00000-0000-0000-0000-000000000001",
        "node": "local",
        "index": 0,
        "model": "Simulated 8 GiB",
        "memory_mib": 8192,
        "fgpu_total": "2",
        "fgpu_used": "0.5",
        "simulated": True,
        "cordoned": False,
        "shares": [{"fgpu": "0.5", "mine": True, "session_id": 12}],
    }
    return {
        "groups": [
            {
                "name": "default",
                "nodes": 1,
                "nodes_lost": 0,
                "total": amounts("2", "8", 16384),
                "used": amounts("0.5", "1", 2048),
                "free": amounts("1.5", "7", 14336),
                "mine": amounts("0.5", "1", 2048),
                "allocatable": amounts("1.5", "7", 14336),
                "fgpu_step": "0.1",
                "waiting": 1,
                "devices": [device],
            }
        ],
        "mine_overall": amounts("0.5", "1", 2048),
        "allocatable_overall": amounts("3.5", "15", 30720),
        "simulated": True,
    }


def meter(**changes: Any) -> dict[str, Any]:
    """What was measured of the running session a moment ago."""
    return {
        "at_s": int(time.time()),
        "memory_used_mib": 1300,
        "memory_limit_mib": 2048,
        "memory_context_mib": None,
        "sm_percent": 20.5,
        "compute_entitled_percent": 25,
        "compute_received_percent": 21.0,
        "compute_borrowed_percent": None,
        "compute_lent_percent": None,
        "trouble": None,
        **changes,
    }


def history() -> dict[str, Any]:
    """Ten minutes of a training that fills its memory in steps."""
    now = int(time.time()) // 10 * 10
    points = [
        {
            "at_s": now - 600 + 10 * i,
            "memory_used_mib": 300 + i // 10 * 200,
            "sm_percent": 5 + i % 20,
        }
        for i in range(60)
    ]
    return {"now": meter(), "every_s": 10, "points": points, "processes": []}


class StandIn:
    """The service's state; a test changes it between calls."""

    def __init__(self) -> None:
        self.server_name: str | None = "gpu-1"
        self.sessions = [running(), pending()]
        self.queue_length = 3
        self.capacity = capacity()
        self.history = history()
        self.banner: dict[str, Any] | None = None
        self.advice: str | None = "your last five runs peaked at 1.3 GiB: 0.4 fGPU would have done"
        self.forecast = {"starts_now": True, "text": "Starts now.", "refusals": []}
        self.refusal: str | None = None
        self.sent = ""
        self.queries: list[str] = []
        self.delay_s = 0.0
        # path -> (status, body) answered instead; "*" stands for every path.
        self.instead: dict[str, tuple[int, str]] = {}
        self.calls: list[str] = []
        self.base_url = ""
        self._server: HTTPServer | None = None

    @property
    def url(self) -> str:
        """What FGPU_SERVICE_URL holds."""
        return self.base_url + PREFIX

    async def start(self) -> None:
        """Listen on a free port of loopback."""
        api = PREFIX + "api/v1/(.*)"
        self._server = HTTPServer(Application([(api, _Api, {"standin": self})], log_function=_mute))
        socket, port = bind_unused_port()
        self._server.add_socket(socket)
        self.base_url = f"http://127.0.0.1:{port}"

    async def stop(self) -> None:
        """Stop listening and drop every connection."""
        if self._server is not None:
            self._server.stop()
            await self._server.close_all_connections()
            self._server = None

    def refuse(self, path: str, status: int, message: str, code: str = "forbidden") -> None:
        """Answer `path` with the API's error object."""
        body = {"error": {"code": code, "field": None, "message": message}}
        self.instead[path] = (status, json.dumps(body))

    def promote(self) -> None:
        """Let the first waiting session run."""
        for session in self.sessions:
            if session["state"] == "PENDING":
                session.update(
                    state="RUNNING",
                    gpus=[gpu(fgpu=session["fgpu"], memory_mib=4096, compute_percent=50)],
                    gpu_memory_mib=4096,
                    compute_percent=50,
                    wait_reason=None,
                    wait_text=None,
                    position=None,
                    ahead=None,
                    expected_start_at_s=None,
                    early_start_at_s=None,
                    late_start_at_s=None,
                    forecast_basis=None,
                )
                return

    def answer(self, method: str, path: str, group: str) -> tuple[int, str]:
        """Return status and body of one call."""
        for key in (f"{method} {path}", path, "*"):
            if key in self.instead:
                return self.instead[key]
        reads = self._reads(group)
        if method == "GET" and path in reads:
            return _ok(**deepcopy(reads[path]))
        acts = {
            ("POST", "sessions/12/extend"): self._extended,
            ("PATCH", "sessions/12"): self._changed,
        }
        if (method, path) in acts:
            return acts[method, path]()
        kept = [s for s in self.sessions if (method, path) == ("POST", f"sessions/{s['id']}/keep")]
        if kept:
            kept[0].update(warning=None, ends_at_s=None, can_keep=False)
            return _ok(session=kept[0])
        if method == "DELETE" and path.startswith("sessions/"):
            for session in self.sessions:
                if path == f"sessions/{session['id']}":
                    was_waiting = session["state"] == "PENDING"
                    session["state"] = "CANCELLED" if was_waiting else "TERMINATING"
                    if was_waiting:
                        self.sessions.remove(session)
                    return 202, _ok(session=session)[1]
        error = {"code": "not_found", "field": None, "message": "There is no such session."}
        return 404, json.dumps({"error": error})

    def _extended(self) -> tuple[int, str]:
        self.sessions[0].update(ends_at_s=self.sessions[0]["ends_at_s"] + 3600)
        return _ok(session=self.sessions[0])

    def _changed(self) -> tuple[int, str]:
        """A name is given at once; an amount is decided by the time that the session is looked at again."""
        session, sent = self.sessions[0], json.loads(self.sent)
        if "name" in sent:
            session.update(display_name=sent["name"])
            return _ok(session=session)
        fgpu = sent["fgpu"]
        session["resize"].update(state="ASKED", asked=f"{fgpu} fGPU", message=None)
        answer = _ok(session=session)[1]
        if self.refusal is None:
            memory_mib = int(float(fgpu) * 4096) // 128 * 128
            session.update(fgpu=fgpu, amount=f"{fgpu} fGPU", gpu_memory_mib=memory_mib)
            session["resize"]["state"] = "DONE"
        else:
            session["resize"].update(state="REFUSED", message=self.refusal)
        return 202, answer

    def _reads(self, group: str) -> dict[str, dict[str, Any]]:
        texts = [] if self.advice is None else [{"image": "python", "text": self.advice}]
        return {
            "me": {
                "user": "alice",
                "admin": False,
                "administers": [],
                "server_name": self.server_name,
                "groups": ["default"],
                "banner": self.banner,
            },
            "sessions": {"sessions": self.sessions},
            "sessions/12": {"session": self.sessions[0]} if self.sessions else {},
            "queue": {"group": group, "length": self.queue_length, "entries": []},
            "sessions/12/meter": self.history,
            "capacity": self.capacity,
            "forecast": self.forecast,
            "advice": {"advice": texts},
        }


def _ok(**body: Any) -> tuple[int, str]:
    return 200, json.dumps({**body, "simulated": True})


def _mute(_handler: RequestHandler) -> None:
    pass


class _Api(RequestHandler):
    def initialize(self, standin: StandIn) -> None:
        self.standin = standin

    async def get(self, path: str) -> None:
        await self._serve(path)

    async def delete(self, path: str) -> None:
        await self._serve(path)

    async def post(self, path: str) -> None:
        await self._serve(path)

    async def patch(self, path: str) -> None:
        self.standin.sent = self.request.body.decode()
        await self._serve(path)

    async def _serve(self, path: str) -> None:
        standin = self.standin
        standin.calls.append(f"{self.request.method} {path}")
        standin.queries.append(self.request.query)
        if standin.delay_s:
            await asyncio.sleep(standin.delay_s)
        if self.request.headers.get("Authorization") != f"token {TOKEN}":
            error = {"code": "forbidden", "field": None, "message": "Log in first."}
            status, body = 403, json.dumps({"error": error})
        else:
            group = self.get_query_argument("group", "default")
            status, body = standin.answer(self.request.method or "", path, group)
        self.set_status(status)
        self.set_header("Content-Type", "application/json")
        self.finish(body)
