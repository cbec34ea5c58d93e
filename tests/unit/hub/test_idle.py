"""Who is idle: only who is known to be, by the driver, by the server itself and by the Hub."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any, ClassVar
from urllib.parse import urlparse

import pytest
from sessions import Clock, session

from fgpu_scheduler import Session
from fgpuspawner.hub.idle import ServerIdle, SessionActivity, ask_server_idle, instant_s


class Now(Clock):
    now = 10_000


class Gpus:
    def __init__(self, since_s: int | None) -> None:
        self.since_s = since_s

    def idle_since_s(self, session_id: int) -> int | None:
        return self.since_s


class Servers:
    heard_s: ClassVar[int | None] = 0
    found: ClassVar[ServerIdle | None] = None
    asked: ClassVar[int] = 0

    @classmethod
    def last_activity_s(cls, session: Session) -> int | None:
        return cls.heard_s

    @classmethod
    async def server_idle(cls, session: Session) -> ServerIdle | None:
        cls.asked += 1
        return cls.found


@pytest.mark.parametrize(
    ("gpu_s", "heard_s", "quiet_s", "since_s", "asked"),
    [
        (1000, 1100, 1200, 1200, 1),
        (1200, 1100, 1000, 1200, 1),
        # Not for long enough, each by itself.
        (9900, 0, 0, None, 0),
        (0, 9900, 0, None, 1),
        (0, 0, 9900, None, 1),
        # Not known.
        (None, 0, 0, None, 0),
        (0, None, 0, None, 1),
        (0, 0, None, None, 1),
        # Never since before it ran.
        (0, 0, 0, 100, 1),
    ],
)
@pytest.mark.parametrize("notes_input", [False, True])
def test_session_is_idle_since_its_last_activity_of_any_kind(
    gpu_s: int | None,
    heard_s: int | None,
    quiet_s: int | None,
    since_s: int | None,
    asked: int,
    notes_input: bool,
) -> None:
    class Own(Servers):
        pass

    Own.heard_s = heard_s
    Own.found = None if quiet_s is None else ServerIdle(quiet_s, notes_input)
    if notes_input and heard_s == 9900:
        # An open tab sends requests without a user.
        since_s = 100
    gpus: Any = Gpus(gpu_s)
    activity = SessionActivity(Own, gpus, Now(), idle_after_s=lambda _: 3600)
    assert asyncio.run(activity.idle_since([session(started_at_s=100)])) == {1: since_s}
    assert Own.asked == asked


@contextmanager
def server(answers: dict[str, Any]) -> Iterator[str]:
    """A Jupyter server that answers with these, by path, to the one token that it knows."""

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            allowed = self.headers.get("Authorization") == "token sesame"
            found = answers.get(urlparse(self.path).path.removeprefix("/base/"))
            self.send_response(403 if not allowed else 404 if found is None else 200)
            self.end_headers()
            self.wfile.write(found if isinstance(found, bytes) else json.dumps(found).encode())

        def log_message(self, *args: Any) -> None:
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    Thread(target=http.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{http.server_port}/base/"
    finally:
        http.shutdown()
        http.server_close()


def kernel(state: str = "idle", at: str = "1970-01-01T00:05:00.5Z") -> dict[str, str]:
    return {"execution_state": state, "last_activity": at}


STATUS = {"last_activity": "1970-01-01T00:01:00Z"}


@pytest.mark.parametrize(
    ("answers", "token", "since_s"),
    [
        ({"api/status": STATUS, "api/kernels": []}, "sesame", 60),
        ({"api/status": STATUS, "api/kernels": [kernel()]}, "sesame", 300),
        # One that computes without a word was last heard of long ago, and is busy.
        ({"api/status": STATUS, "api/kernels": [kernel(), kernel("busy")]}, "sesame", None),
        ({"api/status": STATUS, "api/kernels": [kernel("starting")]}, "sesame", None),
        ({"api/status": STATUS, "api/kernels": [{"execution_state": "idle"}]}, "sesame", None),
        ({"api/status": STATUS}, "sesame", None),
        ({"api/status": STATUS, "api/kernels": b"no JSON"}, "sesame", None),
        ({"api/status": STATUS, "api/kernels": b"[" * 60_000}, "sesame", None),
        ({"api/status": STATUS, "api/kernels": []}, "wrong", None),
    ],
)
def test_idle_time_of_servers_that_do_not_record_input(
    answers: dict[str, Any], token: str, since_s: int | None
) -> None:
    with server(answers) as url:
        found = asyncio.run(ask_server_idle(url, token))
    assert found == (None if since_s is None else ServerIdle(since_s, notes_input=False))


TERMINAL = {"name": "1", "last_activity": "1970-01-01T00:06:40Z"}


@pytest.mark.parametrize(
    ("answers", "since_s"),
    [
        ({"fgpu/api/input": {"input_at_s": 60}, "api/terminals": [], "api/kernels": []}, 60),
        ({"fgpu/api/input": {"input_at_s": 60}, "api/terminals": [], "api/kernels": [kernel()]}, 300),
        ({"fgpu/api/input": {"input_at_s": 60}, "api/terminals": [TERMINAL], "api/kernels": [kernel()]}, 400),
        (
            {"fgpu/api/input": {"input_at_s": 500}, "api/terminals": [TERMINAL], "api/kernels": [kernel()]},
            500,
        ),
        ({"fgpu/api/input": {"input_at_s": 60}, "api/terminals": [], "api/kernels": [kernel("busy")]}, None),
        # Not known.
        ({"fgpu/api/input": {}, "api/terminals": [], "api/kernels": []}, None),
        ({"fgpu/api/input": {"input_at_s": 60}, "api/terminals": 7, "api/kernels": []}, None),
        ({"fgpu/api/input": {"input_at_s": 60}, "api/kernels": []}, None),
    ],
)
def test_idle_time_of_servers_that_record_input(answers: dict[str, Any], since_s: int | None) -> None:
    with server(answers) as url:
        found = asyncio.run(ask_server_idle(url, "sesame"))
    assert found == (None if since_s is None else ServerIdle(since_s, notes_input=True))


def test_a_server_that_is_gone_is_not_idle() -> None:
    with server({}) as url:
        pass
    assert asyncio.run(ask_server_idle(url, "sesame")) is None


@pytest.mark.parametrize(
    "text",
    ["1970-01-01T00:05:00Z", "1970-01-01T00:05:00", "1970-01-01T01:05:00+01:00", "1970-01-01T00:05:00.9Z"],
)
def test_an_instant_is_of_utc_unless_it_says_otherwise(text: str) -> None:
    assert instant_s(text) == 300
