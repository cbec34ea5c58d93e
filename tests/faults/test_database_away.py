"""The scheduler's database goes away during work and comes back: nothing is lost.

Waiting users read why. Requests of that time are carried out afterwards, once.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
import requests

from fgpu_scheduler import SessionState
from hubprocess import HubProcess, until
from launched import launched, processes_of
from outages import DiskFull, Frozen, Locked, Outage, Stopped
from servers import MINI, server_lines

ONE = {"fgpu": "1", "cpu": "0.1", "memory_mib": 256}
AWAY = "The queue's database does not answer. Your place is safe; this page goes on when it is back"
LAUNCHES_CAN_BE_HELD = """
import asyncio
from pathlib import Path
from fgpuspawner.engines.local.engine import LocalEngine

start = LocalEngine.start
async def held(self, spec):
    where = await start(self, spec)
    while Path(HOLD, spec.session.request.user).exists():
        await asyncio.sleep(0.05)
    return where
LocalEngine.start = held
"""


class Reader(threading.Thread):
    """Reads a waiting page's events, as the page does: when the stream breaks, from a new one."""

    def __init__(self, hub: HubProcess, user: str) -> None:
        super().__init__(daemon=True)
        self._hub, self._user = hub, user
        self.messages: list[str] = []
        self.closed = False

    def run(self) -> None:
        while not self.closed:
            with suppress(requests.RequestException):
                self._read()
            time.sleep(0.2)

    def _read(self) -> None:
        url = f"{self._hub.url}/hub/api/users/{self._user}/server/progress"
        headers = {"Authorization": f"token {self._hub.token}"}
        with requests.get(url, headers=headers, stream=True, timeout=15) as stream:
            for line in stream.iter_lines():
                if line.startswith(b"data:"):
                    self.messages.append(json.loads(line[5:]).get("message", ""))
                if self.closed:
                    return


@pytest.fixture
def outage(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Outage]:
    """A database that can go away."""
    made: Outage = request.param(tmp_path)
    yield made
    made.close()


@pytest.fixture
def make_local_hub(tmp_path: Path) -> Iterator[Callable[..., HubProcess]]:
    """A factory of Hubs with local sessions; their launches can be held."""
    hubs: list[HubProcess] = []

    def make(hold: Path, **kwargs: str) -> HubProcess:
        own = LAUNCHES_CAN_BE_HELD.replace("HOLD", repr(str(hold)))
        after = server_lines("local", MINI) + own
        hubs.append(HubProcess(tmp_path / "hub", after=after, simulated_gpus="2", **kwargs))
        return hubs[-1]

    yield make
    for hub in hubs:
        hub.close()


def moves(hub: HubProcess, session_id: int) -> list[str]:
    """Return the states that a session came into, in order."""
    return [
        str(e.to_state) for e in hub.store.events(limit=10000) if e.session_id == session_id and e.to_state
    ]


def service_says(hub: HubProcess, path: str) -> tuple[int, str]:
    """Return the status and the words of one of the service's pages."""
    headers = {"Authorization": f"token {hub.token}"}
    answer = requests.get(f"{hub.url}/services/fgpu/{path}", headers=headers, timeout=60)
    return answer.status_code, answer.text


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("outage", "away_s"),
    [
        pytest.param(Stopped, 4, id="postgresql-stopped"),
        pytest.param(Locked, 3, id="sqlite-locked"),
        pytest.param(DiskFull, 3, id="disk-full"),
        pytest.param(Stopped, 60, id="postgresql-stopped-for-a-minute", marks=pytest.mark.slow),
        pytest.param(Frozen, 30, id="postgresql-frozen", marks=pytest.mark.slow),
        pytest.param(Locked, 30, id="sqlite-locked-for-long", marks=pytest.mark.slow),
    ],
    indirect=["outage"],
)
def test_nothing_is_lost_while_the_database_is_away(
    make_local_hub: Callable[..., HubProcess], outage: Outage, away_s: float, tmp_path: Path
) -> None:
    hold = tmp_path / "hold"
    hold.mkdir()
    hub = make_local_hub(hold, db_url=outage.url).start()
    users = ["leaver", "stayer", "dier", "launcher", "waiter", "asker"]
    for user in users:
        hub.add_user(user)
    for user in ("leaver", "stayer", "dier"):
        assert hub.spawn(user, options=ONE).status_code in (201, 202)
    until(lambda: list(hub.states().values()).count("RUNNING") == 3)
    # One launch is between its steps, and one request waits for a share.
    (hold / "launcher").touch()
    hub.spawn("launcher", options=ONE)
    until(lambda: hub.states().get("launcher/") == "PREPARING")
    hub.spawn("waiter", options=ONE)
    until(lambda: hub.states().get("waiter/") == "PENDING")
    before = {key: s.id for key, s in hub.sessions().items()}
    until(lambda: service_says(hub, "health")[0] == 200, what="the service answers")
    readers = {user: Reader(hub, user) for user in ("launcher", "waiter", "asker")}
    readers["launcher"].start()
    readers["waiter"].start()
    until(lambda: readers["launcher"].messages and readers["waiter"].messages)

    with ThreadPoolExecutor(3) as threads:
        with outage.outage():
            began = time.monotonic()
            (hold / "launcher").unlink()
            stopping = threads.submit(hub.stop, "leaver")
            asking = threads.submit(hub.spawn, "asker", options=ONE)
            for process in processes_of(hub, before["dier/"]):
                process.kill()
            readers["asker"].start()
            for user, reader in readers.items():
                until(lambda r=reader: AWAY in r.messages, within_s=40, what=f"{user} reads what is wrong")
            if not outage.reads:
                status, text = service_says(hub, "api/v1/queue")
                error = json.loads(text)["error"]
                assert (status, error["code"]) == (503, "store_unavailable")
                assert error["message"] == "the scheduler's database cannot be read; try again in a moment"
                assert service_says(hub, "health")[0] == 503
            assert not hub.ready("launcher")
            assert hub.ready("stayer")
            time.sleep(max(0.0, away_s - (time.monotonic() - began)))  # The duration of the outage.
        assert stopping.result(60).status_code in (202, 204)
        assert asking.result(60).status_code in (201, 202)

    running = {f"{u}/": "RUNNING" for u in ("stayer", "launcher", "waiter", "asker")}
    hub.reach(running, within_s=60)
    sessions = hub.sessions()
    assert {k: s.id for k, s in sessions.items() if k != "asker/"} == {
        k: before[k] for k in ("stayer/", "launcher/", "waiter/")
    }
    assert sessions["launcher/"].attempt == 1, "the launch went on where it was"
    for user in ("stayer", "launcher", "waiter", "asker"):
        until(lambda u=user: hub.ready(u), what=f"{user} is ready")
    # Each share that was given back was given back once, and the order was kept.
    for user in ("leaver", "dier"):
        ends = [m for m in moves(hub, before[f"{user}/"]) if m in ("TERMINATING", "TERMINATED", "ERROR")]
        assert ends == [SessionState.TERMINATING, SessionState.TERMINATED], user
    placed = [e.session_id for e in hub.store.events(limit=10000) if e.to_state is SessionState.SCHEDULED]
    assert placed == sorted(placed)
    until(lambda: launched(hub, "local") == {s.id: 1 for s in sessions.values()})
    until(lambda: service_says(hub, "health")[0] == 200, what="the service has recovered")
    assert service_says(hub, "api/v1/queue")[0] == 200
    for reader in readers.values():
        reader.closed = True
    assert "Traceback" not in hub.log_text(), hub.log_text()[-6000:]
