"""The service is killed: the Hub starts it again within seconds, and streams go on where they were."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path

import requests

from hubprocess import HubProcess, running, until
from servers import MINI, server_lines
from soaking import service_of

SILENT_S = 12
WHOLE = {"fgpu": "2", "cpu": "0.1", "memory_mib": 256}


class Listener(threading.Thread):
    """Listens to the service's events as a page does: when the stream ends, again, from where it was."""

    def __init__(self, hub: HubProcess) -> None:
        super().__init__(daemon=True)
        self._hub = hub
        self._last = ""
        self.streams = 0
        self.states: list[tuple[int, str]] = []
        self.closed = False

    def run(self) -> None:
        while not self.closed:
            try:
                self._listen()
            except requests.RequestException:
                continue

    def _listen(self) -> None:
        headers = {"Authorization": f"token {self._hub.token}"}
        if self._last:
            headers["Last-Event-ID"] = self._last
        url = f"{self._hub.url}/services/fgpu/api/v1/events"
        # As the page does: when nothing was heard for a while, though the proxy keeps the stream open.
        with requests.get(url, headers=headers, stream=True, timeout=SILENT_S) as stream:
            if stream.status_code != 200:
                return
            self.streams += 1
            for line in stream.iter_lines(chunk_size=1, decode_unicode=True):
                if self.closed:
                    return
                field, _, value = line.partition(": ")
                if field == "id":
                    self._last = value
                if field == "data" and "session" in (told := json.loads(value)):
                    self.states.append((told["session"]["id"], told["session"]["state"]))


def test_a_service_that_is_killed_is_back_in_seconds_and_misses_nothing_and_without_its_hub_ends(
    tmp_path: Path,
) -> None:
    with running(tmp_path, after=server_lines("local", MINI)) as hub:
        health = f"{hub.url}/services/fgpu/health"
        until(lambda: requests.get(health, timeout=30).status_code == 200, what="the service answers")
        for user in ("alice", "bob"):
            hub.add_user(user)
            hub.spawn(user, options=WHOLE)
        hub.reach({"alice/": "RUNNING", "bob/": "PENDING"})
        alice, bob = (hub.sessions()[f"{user}/"].id for user in ("alice", "bob"))
        listener = Listener(hub)
        listener.start()
        until(lambda: listener.streams == 1, what="the stream is open")
        hub.spawn("alice", "more", options=WHOLE)
        until(lambda: (hub.sessions()["alice/more"].id, "PENDING") in listener.states, what="it tells")

        killed = until(lambda: service_of(hub))
        killed.kill()
        hub.stop("alice")
        hub.reach({"bob/": "RUNNING", "alice/more": "PENDING"})
        again = until(
            lambda: (p := service_of(hub)) is not None and p.pid != killed.pid and p, what="another service"
        )
        until(lambda: requests.get(health, timeout=30).status_code == 200, what="it answers again")
        assert again.is_running()
        until(lambda: listener.streams >= 2, what="the stream is open again")
        until(lambda: (bob, "RUNNING") in listener.states, what="what happened meanwhile is told")
        assert (alice, "TERMINATED") in listener.states
        listener.closed = True

        env = again.environ()
        hub.kill()
        until(lambda: not again.is_running(), what="its service has ended")
        # One that had not begun when its Hub died.
        late = subprocess.Popen([sys.executable, "-m", "fgpuspawner.service"], env=env, cwd=tmp_path)
        try:
            assert late.wait(60) == 0
        finally:
            late.kill()
