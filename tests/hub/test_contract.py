"""One test for each rule that the Hub imposes on a spawn that waits, against a real Hub process."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import requests

from fgpu_scheduler import EndCause, SessionState
from fgpuspawner.hub.hub_handlers import MOST_TOKENS
from hubprocess import SLOW_LAUNCH, HubProcess, until

ONE = {"fgpu": "1", "cpu": "0.1", "memory_mib": 256}
ANSWERED_AT_ITS_END = "c.JupyterHub.tornado_settings = {'slow_spawn_timeout': 50}\n"
"""A spawn request is answered only when the start has failed, even on a slow machine."""

BROKEN_LOOK = """
from fgpuspawner.engines.local.engine import LocalEngine

async def broken(self, session):
    raise RuntimeError("nobody foresaw this")
LocalEngine.ended = broken
"""


def full(hub: HubProcess) -> None:
    """Take the whole of the one simulated GPU (2 fGPU)."""
    hub.add_user("holder")
    assert hub.spawn("holder", options={**ONE, "fgpu": "2"}).status_code in (201, 202)
    hub.reach({"holder/": "RUNNING"})


def hub_row(hub: HubProcess, user: str, server: str = "") -> dict[str, Any]:
    """Return the Hub's own database row of a server."""
    with sqlite3.connect(hub.data / "jupyterhub.sqlite") as db:
        db.row_factory = sqlite3.Row
        row = db.execute(
            "select s.* from spawners s join users u on u.id = s.user_id where u.name = ? and s.name = ?",
            (user, server),
        ).fetchone()
    return dict(row)


def routes(hub: HubProcess) -> list[str]:
    """Return the paths that the proxy routes."""
    return sorted(hub.api("GET", "proxy").json())


def last(hub: HubProcess, user: str) -> Any:
    """Return the newest ended session of a user."""
    return until(lambda: hub.store.ended(user=user, limit=1), what=f"a session of {user} has ended")[0]


class Stream:
    """The Hub's progress stream of one server, read by a thread."""

    def __init__(self, hub: HubProcess, user: str, server: str = "") -> None:
        path = f"users/{user}/servers/{server}/progress"
        self.answer = requests.get(
            f"{hub.url}/hub/api/{path}",
            headers={"Authorization": f"token {hub.token}"},
            stream=True,
            timeout=60,
        )
        self.events: list[dict[str, Any]] = []
        self.ended = threading.Event()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        try:
            for line in self.answer.iter_lines():
                if line.startswith(b"data:"):
                    self.events.append(json.loads(line[5:]))
        except requests.RequestException:
            pass
        self.ended.set()


def counting_failures(limit: int) -> str:
    """Return configuration lines with a limit on consecutive failures. As a setting it is refused."""
    return f"c.Spawner.pre_spawn_hook = lambda spawner: spawner.set_trait('consecutive_failure_limit', {limit})\n"


def test_impossible_request_is_refused_and_counts_as_no_failure(make_hub: Any) -> None:
    hub = make_hub(service=False, before=ANSWERED_AT_ITS_END, after=counting_failures(2)).start()
    hub.add_user("alice")
    for _ in range(4):
        answer = hub.spawn("alice", options={**ONE, "fgpu": "7"})
        assert answer.status_code == 400
        assert answer.json()["message"] == "fgpu: 7 is more than any machine has; choose at most 2"
    assert hub.states() == {}
    assert hub.servers("alice") == {}
    assert hub.spawn("alice", options=ONE).status_code in (201, 202)
    hub.reach({"alice/": "RUNNING"})


def test_queued_spawn_answers_202_and_stays_pending(free_hub: HubProcess) -> None:
    hub = free_hub
    full(hub)
    hub.add_user("alice")
    assert hub.spawn("alice", options=ONE).status_code == 202
    hub.reach({"holder/": "RUNNING", "alice/": "PENDING"})
    server = hub.servers("alice")[""]
    assert (server["pending"], server["ready"]) == ("spawn", False)
    row = hub_row(hub, "alice")
    assert json.loads(row["state"]).keys() == {"fgpu_session"}, "the session's id, and no server"
    assert json.loads(row["user_options"])["fgpu"] == "1"
    assert hub.spawn("alice", options=ONE).status_code == 202, "asking again is not an error"
    assert list(hub.states()) == ["holder/", "alice/"]


def test_progress_events_have_position_and_reason(free_hub: HubProcess) -> None:
    hub = free_hub
    full(hub)
    for user in ("first", "second"):
        hub.add_user(user)
        hub.spawn(user, options=ONE)
    stream = Stream(hub, "second")
    until(
        lambda: any(e.get("fgpu", {}).get("position") == 2 for e in stream.events), what="position 2 is told"
    )
    assert hub.stop("first").status_code in (202, 204)
    event = until(
        lambda: next((e for e in stream.events if e.get("fgpu", {}).get("position") == 1), None),
        what="position 1 is told",
    )
    assert event["message"] == "You're next in the queue: all GPUs are busy"
    assert event["fgpu"]["simulated"] is True
    assert hub.stop("holder").status_code in (202, 204)
    assert stream.ended.wait(90)
    assert stream.events[-1]["ready"] is True


def test_cancelling_a_queued_spawn_frees_its_place_and_leaves_no_zombie(free_hub: HubProcess) -> None:
    hub = free_hub
    full(hub)
    hub.add_user("carl")
    hub.spawn("carl", "work", options=ONE)
    hub.reach({"holder/": "RUNNING", "carl/work": "PENDING"})
    stream = Stream(hub, "carl", "work")
    until(lambda: stream.events, what="the stream has begun")
    assert hub.stop("carl", "work").status_code in (202, 204)
    hub.reach({"holder/": "RUNNING"})
    ended = last(hub, "carl")
    assert (ended.state, ended.end_cause, ended.attempt) == ("CANCELLED", "USER", 0)
    assert not hub.servers("carl").get("work", {}).get("ready")
    assert "/user/carl/work/" not in routes(hub)
    assert stream.ended.wait(90)
    assert not any(e.get("ready") for e in stream.events), "a cancelled spawn never looks ready"
    assert hub.spawn("carl", "work", options=ONE).status_code == 202, "and it can be asked for again"


def test_cancelling_a_launch_that_cannot_be_interrupted_ends_it_and_leaves_no_zombie(make_hub: Any) -> None:
    hub = make_hub(service=False, after=SLOW_LAUNCH).start()
    hub.add_user("alice")
    assert hub.spawn("alice", options=ONE).status_code == 202
    hub.reach({"alice/": "PREPARING"})
    with sqlite3.connect(hub.data / "jupyterhub.sqlite", timeout=0) as db:
        db.execute("BEGIN IMMEDIATE")  # Another program may write to the Hub's database in between.
    with ThreadPoolExecutor(1) as threads:
        stopped = threads.submit(hub.stop, "alice")
        hub.reach({"alice/": "TERMINATING"})
        (hub.folder / "go").touch()
        assert stopped.result().status_code in (202, 204)
    hub.reach({})
    ended = last(hub, "alice")
    assert (ended.state, ended.end_cause) == ("TERMINATED", "USER")
    until(lambda: not hub.servers("alice"), what="the Hub has no server of alice")
    assert "/user/alice/" not in routes(hub)
    assert "500 DELETE" not in hub.log_text()


def test_a_request_that_waits_too_long_is_cancelled_with_the_limit_in_words(make_hub: Any) -> None:
    hub = make_hub(service=False, queue_timeout_s=5, after=counting_failures(1)).start()
    full(hub)
    hub.add_user("alice")
    hub.spawn("alice", options=ONE)
    hub.reach({"holder/": "RUNNING"})
    ended = last(hub, "alice")
    assert (ended.state, ended.end_cause) == ("CANCELLED", "QUEUE_TIMEOUT")
    assert ended.message == "nothing became free within the queue's limit of 5 s"
    page = hub.api("GET", "users/alice")
    assert page.status_code == 200, "and the Hub still answers"
    until(lambda: not hub.servers("alice").get("", {}).get("pending"), what="the Hub has let go of it")


def test_a_launch_that_takes_too_long_has_failed_and_frees_its_share(make_hub: Any) -> None:
    after = "c.Spawner.cmd = ['python', '-c', 'import time; time.sleep(600)']\n"
    hub = make_hub(mini=False, service=False, launch_timeout_s=2, after=after).start()
    hub.add_user("alice")
    hub.spawn("alice", options=ONE)
    ended = last(hub, "alice")
    assert (ended.state, ended.end_cause) == ("ERROR", "LAUNCH_FAILED")
    assert ended.message == "the server did not answer within the launch limit of 2 s"
    assert hub.states() == {}


def test_servers_that_end_at_once_say_their_last_words_free_everything_and_do_not_end_the_hub(
    make_hub: Any,
) -> None:
    command = "c.Spawner.cmd = ['python', '-c', 'raise SystemExit(\"no kernel here\")']\n"
    after = f"{command}c.Spawner.consecutive_failure_limit = 0\n"
    hub = make_hub(mini=False, service=False, before=ANSWERED_AT_ITS_END, after=after).start()
    hub.add_user("alice")
    expected = "the server ended with status 1; its last words: no kernel here"
    for _ in range(6):
        answer = hub.spawn("alice", options=ONE)
        assert (answer.status_code, answer.json()["message"]) == (500, expected)
    assert hub.states() == {}
    assert [s.message for s in hub.store.ended(user="alice", limit=10)] == [expected] * 6


def test_two_hundred_queued_spawns_at_once_are_all_accepted_in_order_and_none_is_throttled(
    make_hub: Any,
) -> None:
    hub = make_hub(service=False, max_pending_per_user=300).start()
    full(hub)
    hub.add_user("alice")
    with ThreadPoolExecutor(20) as threads:
        answers = list(
            threads.map(lambda n: hub.spawn("alice", f"s{n}", options=ONE).status_code, range(200))
        )
    assert set(answers) == {202}
    # An answer may come before its request is in the database.
    until(lambda: list(hub.states().values()).count("PENDING") == 200, what="all of them wait")
    assert hub.api("GET", "").status_code == 200


def test_refused_request_keeps_the_pending_one_after_a_restart(
    make_hub: Any,
) -> None:
    hub = make_hub(service=False, max_pending_per_user=2).start()
    full(hub)
    hub.add_user("alice")
    assert hub.spawn("alice", options=ONE).status_code == 202
    hub.reach({"holder/": "RUNNING", "alice/": "PENDING"})
    before = hub.sessions()["alice/"]
    hub.kill()
    hub.start()
    until(lambda: hub.sessions()["alice/"].held, what="nobody waits for it any more")
    for options, status in (({**ONE, "fgpu": "0.7", "count": 3}, 409), ({**ONE, "fgpu": "0.55"}, 400)):
        assert hub.refused("alice", options=options).status_code == status
        left = hub.sessions()["alice/"]
        assert (left.id, left.state, left.held) == (before.id, before.state, True)
    # One that is accepted takes its place, with a session of its own.
    assert hub.spawn("alice", options={**ONE, "fgpu": "0.7"}).status_code in (201, 202)
    until(lambda: hub.sessions()["alice/"].id != before.id, what="the new request waits")
    assert hub.sessions()["alice/"].state is SessionState.PENDING
    ended = hub.store.session(before.id)
    assert ended is not None
    assert (ended.state, ended.end_cause) == (SessionState.CANCELLED, EndCause.USER)


def test_pending_request_with_an_unusable_image_survives_a_restart(make_hub: Any, tmp_path: Path) -> None:
    program = tmp_path / "lab/bin/python"
    program.parent.mkdir(parents=True)
    program.symlink_to(sys.executable)
    entry = '[[image]]\nslug = "{0}"\nname = "{0}"\nframework = "python"\nversion = "3"\npython = "3"\nreference = "r"\n'
    catalogue = tmp_path / "catalogue.toml"
    catalogue.write_text(
        f'{entry.format("plain")}default = true\n{entry.format("lab")}environment = "{tmp_path}/lab"\n'
    )
    hub = make_hub(service=False, catalogue=str(catalogue)).start()
    full(hub)
    for user in ("alice", "bob"):
        hub.add_user(user)
    asked = {**ONE, "image": "lab"}
    assert hub.spawn("alice", options=asked).status_code == 202
    hub.reach({"holder/": "RUNNING", "alice/": "PENDING"})
    before = hub.sessions()["alice/"]
    hub.kill()
    program.unlink()
    hub.start()
    until(lambda: "can't start" in (hub.data / "images.json").read_text(), what="the Hub has looked")
    assert "no python" in hub.refused("bob", options=asked).json()["message"]
    assert hub.spawn("alice", options=asked).status_code in (201, 202)
    until(lambda: not hub.sessions()["alice/"].held, what="it is waited for again")
    assert hub.sessions()["alice/"].id == before.id


def test_several_sessions_in_one_submission_queue_together_as_named_servers(make_hub: Any) -> None:
    hub = make_hub(service=False).start()
    hub.add_user("alice")
    assert hub.spawn("alice", options={**ONE, "count": 3}).status_code in (201, 202)
    hub.reach({"alice/": "RUNNING", "alice/gpu-2": "RUNNING", "alice/gpu-3": "PENDING"})
    assert hub.stop("alice", "gpu-2").status_code in (202, 204)
    hub.reach({"alice/": "RUNNING", "alice/gpu-3": "RUNNING"})
    assert hub.stop("alice").status_code in (202, 204)
    # Started again with its last options it asks for itself alone.
    assert hub.spawn("alice").status_code in (201, 202)
    hub.reach({"alice/": "RUNNING", "alice/gpu-3": "RUNNING"})


def test_stale_options_are_validated_again_when_the_hub_reuses_them(make_hub: Any) -> None:
    hub = make_hub(service=False, before=ANSWERED_AT_ITS_END).start()
    hub.add_user("alice")
    assert hub.spawn("alice", options={**ONE, "fgpu": "2"}).status_code in (201, 202)
    hub.reach({"alice/": "RUNNING"})
    hub.stop("alice")
    hub.reach({})
    hub.terminate()
    hub.settings["max_fgpu"] = "1"
    hub.start()
    answer = hub.spawn("alice")
    assert answer.status_code == 400
    assert answer.json()["message"] == "fgpu: 2 is above the limit of 1 per session"


def test_a_session_that_ends_by_itself_frees_its_share_and_says_why(make_hub: Any) -> None:
    hub = make_hub(service=False).start()
    full(hub)
    hub.add_user("alice")
    hub.spawn("alice", options=ONE)
    holder = hub.sessions()["holder/"]
    note = hub.data / "run" / f"{holder.id}-{holder.attempt}@local"
    os.kill(int(note.read_text()), signal.SIGKILL)
    hub.reach({"alice/": "RUNNING"})
    ended = last(hub, "holder")
    assert (ended.state, ended.end_cause) == ("TERMINATED", "EXITED")


def test_failed_poll_at_the_hubs_start_ends_no_session(make_hub: Any) -> None:
    hub = make_hub(service=False).start()
    hub.add_user("alice")
    assert hub.spawn("alice", options=ONE).status_code in (201, 202)
    hub.reach({"alice/": "RUNNING"})
    session = hub.sessions()["alice/"]
    hub.kill()
    hub.after = BROKEN_LOOK
    hub.start()
    until(lambda: "nobody foresaw this" in hub.log_text(), what="the look has failed")
    until(lambda: hub.ready("alice"), what="the Hub has taken it up")
    assert {key: (s.id, s.state) for key, s in hub.sessions().items()} == {"alice/": (session.id, "RUNNING")}


def test_large_request_of_a_user_is_refused(
    shared_hub: HubProcess,
) -> None:
    mallory = shared_hub.add_user("mallory")
    large = {"note": "x" * 20_000}
    for path in ("users/mallory/tokens", "users/mallory/servers/x"):
        answer = shared_hub.api("POST", path, token=mallory, json=large)
        assert answer.status_code == 413, answer.text
        assert answer.json()["message"] == "the request has more than 16 KiB; send less"
    assert shared_hub.api("POST", "users/mallory/tokens", json=large).status_code == 201


def test_a_user_has_a_limit_of_tokens(shared_hub: HubProcess) -> None:
    shared_hub.add_user("collector")
    made = 1
    while (answer := shared_hub.api("POST", "users/collector/tokens")).status_code == 201:
        made += 1
        assert made <= MOST_TOKENS
    assert (made, answer.status_code) == (MOST_TOKENS, 429)
    assert "revoke tokens" in answer.json()["message"]
    # Other users are not held to that number together.
    shared_hub.add_user("other")
