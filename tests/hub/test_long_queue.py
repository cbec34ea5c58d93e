"""Ten thousand requests wait and eight hundred clients are slow: the Hub answers everybody else, and nothing is lost.

``FGPU_FIGURES=FILE`` has the seconds that answers took written there; `bench/README.md` says what they mean.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import requests
from slowclients import BODY, HEADERS, USUAL, slow_clients

from fgpu_scheduler import Request, Session, SessionState, Store
from hubprocess import MINI, HubProcess, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

REQUESTS = 10_000
EACH = 50
AT_ONCE = 500
"""Of one submission by the Hub's API."""
WITHIN_S = 45.0
"""Longest time for one answer, on a busy machine."""
RESUMED = 400
"""This number is back in the queue before the Hub is restarted again."""
NAMES = "c.JupyterHub.named_server_limit_per_user = 0\nc.JupyterHub.log_level = 'INFO'\n"
WAITS = {"fgpu": "2", "cpu": "0.1", "memory_mib": 256}
"""More than is left beside the session that runs."""
STARTS = {"fgpu": "0.5", "cpu": "0.1", "memory_mib": 256}


@pytest.fixture(params=["sqlite", "postgresql"])
def database(request: pytest.FixtureRequest) -> Iterator[str]:
    """The URL of an empty database; empty for the Hub's own file."""
    if request.param == "sqlite":
        yield ""
        return
    yield request.getfixturevalue("postgresql")


class Site:
    """A Hub with a long queue, and how long it took to answer what, by phase."""

    def __init__(self, hub: HubProcess) -> None:
        self.hub = hub
        self.took_s: defaultdict[str, list[float]] = defaultdict(list)
        self.visitors = ""
        self.memory_mib: dict[str, int] = {}
        self.phase = ""
        self.browser = requests.Session()

    def timed(self, what: str, began: float) -> None:
        took_s = time.monotonic() - began
        self.took_s[f"{self.phase}: {what}"].append(took_s)
        assert took_s < WITHIN_S, f"{self.phase}: {what} took {took_s:.1f} s"

    def get(self, path: str, *, token: str | None = None) -> None:
        """Ask for something as a browser that is logged in, or with a token."""
        began = time.monotonic()
        headers = {} if token is None else {"Authorization": f"token {token}"}
        ask = self.browser.get if token is None else requests.get
        answer = ask(f"{self.hub.url}/{path}", headers=headers, timeout=120)
        while answer.status_code == 503 and time.monotonic() - began < WITHIN_S:
            # On a machine that is very busy the service says so: try again in a moment.
            answer = ask(f"{self.hub.url}/{path}", headers=headers, timeout=120)
        assert answer.status_code == 200, f"{path}: {answer.status_code} {answer.text[:300]}"
        assert "hub/login" not in answer.url, path
        self.timed(path.partition("?")[0] or "/", began)

    def ask_all(self) -> None:
        """Ask for what people and programs look at."""
        for path in ("hub/health", "hub/home", "hub/spawn/visitor/other", "services/fgpu/"):
            self.get(path)
        for path in ("hub/api/users/visitor", "services/fgpu/health", "services/fgpu/api/v1/me"):
            self.get(path, token=self.hub.token)
        for path in ("queue", "capacity", "sessions?all=1", "admin/queue"):
            self.get(f"services/fgpu/api/v1/{path}", token=self.hub.token)
        self.get("services/fgpu/api/v1/sessions", token=self.visitors)

    def start_and_end(self, user: str) -> None:
        """Start a session of the last user that fits, and end it."""
        began = time.monotonic()
        assert self.hub.spawn(user, options=STARTS).status_code in (201, 202)
        until(lambda: self.hub.ready(user), within_s=3 * WITHIN_S, what=f"{user}'s session runs")
        self.took_s[f"{self.phase}: a start"].append(time.monotonic() - began)
        began = time.monotonic()
        assert self.hub.stop(user).status_code in (202, 204)
        until(
            lambda: f"{user}/" not in self.hub.states(), within_s=3 * WITHIN_S, what=f"{user}'s session ended"
        )
        self.took_s[f"{self.phase}: an end"].append(time.monotonic() - began)

    def waiting(self) -> list[Session]:
        found = self.hub.store.snapshot(int(time.time())).sessions
        return sorted((s for s in found if s.state is SessionState.PENDING), key=lambda s: s.place)

    def figures(self) -> dict[str, Any]:
        return {
            "memory_mib": self.memory_mib,
            **{
                what: {
                    "count": len(took),
                    "median_s": round(statistics.median(took), 3),
                    "worst_s": round(max(took), 3),
                }
                for what, took in self.took_s.items()
            },
        }


def submit(url: str) -> None:
    """Queue what is still missing, as the Hub does it, for many users."""
    store = Store(url)
    store.connect()
    requested = [
        Request(f"user-{n // EACH}", f"s-{n % EACH}", "python", "default", 2000, 100, 256)
        for n in range(REQUESTS - AT_ONCE)
    ]
    for first in range(0, len(requested), AT_ONCE):
        store.submit(requested[first : first + AT_ONCE], now_s=int(time.time()))
    store.close()


def users(hub: HubProcess) -> None:
    names = [f"user-{n}" for n in range((REQUESTS - AT_ONCE + EACH - 1) // EACH)]
    for first in range(0, len(names), 200):
        answer = hub.api("POST", "users", json={"usernames": names[first : first + 200]})
        assert answer.status_code == 201, answer.text


def test_ten_thousand_wait_and_eight_hundred_are_slow(
    tmp_path: Path, database: str, many_files: None
) -> None:
    settings = {"db_url": database} if database else {}
    hub = HubProcess(
        tmp_path,
        before=USUAL + NAMES,
        after=MINI,
        max_pending_per_user=AT_ONCE,
        max_sessions=AT_ONCE,
        abandoned_after_s=3600,
        **settings,
    )
    site = Site(hub)
    try:
        hub.start()
        for name in ("holder", "eager", "visitor", "late"):
            hub.add_user(name)
        site.visitors = hub.add_user("visitor")
        users(hub)
        assert hub.spawn("holder", options={**STARTS, "fgpu": "1"}).status_code in (201, 202)
        until(lambda: hub.ready("holder"), what="the session runs that they wait for")

        site.phase = "500 in one submission"
        began = time.monotonic()
        answer = hub.spawn("eager", options={**WAITS, "count": AT_ONCE})
        assert answer.status_code in (201, 202), answer.text
        site.timed("its answer", began)
        until(lambda: len(site.waiting()) == AT_ONCE, what="all of one submission wait")
        site.browser = site.hub.browser("visitor", leads_to="/hub/home")
        site.ask_all()
        until(
            lambda: sum(bool(s["pending"]) for s in hub.servers("eager").values()) == AT_ONCE,
            within_s=900,
            what="the Hub has asked for all of one submission",
        )
        site.took_s[f"{site.phase}: all are asked for"].append(time.monotonic() - began)

        site.phase = "10,000 wait"
        began = time.monotonic()
        submit(database or f"sqlite:///{hub.data / 'fgpu.sqlite'}")
        site.took_s["10,000 wait: submitted"].append(time.monotonic() - began)
        before = [s.id for s in site.waiting()]
        assert len(before) == REQUESTS
        site.ask_all()
        site.start_and_end("late")

        for site.phase, kill in (("restarted", False), ("killed and restarted", True)):
            began = time.monotonic()
            hub.kill() if kill else hub.terminate()
            hub.start()
            site.took_s[f"{site.phase}: it answers again"].append(time.monotonic() - began)
            until(lambda: len(site.waiting()) == REQUESTS, what="the store answers")
            began, held = time.monotonic(), REQUESTS
            site.browser = site.hub.browser("visitor", leads_to="/hub/home")
            while held > REQUESTS - RESUMED:
                # The Hub lets them go after a minute.
                with contextlib.ExitStack() as stack:
                    slow_clients(stack, hub.port, BODY.format(path="/hub/api/users"))
                    slow_clients(stack, hub.port + 1, HEADERS.format(path="/hub/api/users"))
                    slow_clients(stack, hub.port + 3, HEADERS.format(path="/services/fgpu/health"))
                    site.ask_all()
                held = sum(s.held for s in site.waiting())
                assert time.monotonic() - began < 900, f"only {REQUESTS - held} are back"
            site.took_s[f"{site.phase}: each 100 that are resumed"].append(
                100 * (time.monotonic() - began) / (REQUESTS - held)
            )
            site.start_and_end("late")
            assert [s.id for s in site.waiting()] == before
            assert hub.ready("holder")
            assert hub.process is not None
            rss = psutil.Process(hub.process.pid).memory_info().rss
            site.memory_mib[f"{site.phase}: of the Hub"] = rss >> 20
    finally:
        figures = site.figures()
        print(json.dumps(figures, indent=1))
        if path := os.environ.get("FGPU_FIGURES"):
            known = json.loads(Path(path).read_text()) if Path(path).exists() else {}
            name = "postgresql" if database else "sqlite"
            Path(path).write_text(json.dumps({**known, name: figures}, indent=1) + "\n")
        hub.close()
