"""Quotas, lifetimes, idleness and pre-emption in a real Hub: what happens, and what the owner is told before."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import requests

from fgpu_scheduler import Audit, EndCause, Session, SessionState
from hubprocess import HubProcess, until

MakeHub = Callable[..., HubProcess]
ONE = {"fgpu": "1", "cpu": "0.1", "memory_mib": 256}
WHOLE = {**ONE, "fgpu": "2"}


def service(hub: HubProcess, method: str, path: str, token: str) -> requests.Response:
    url = f"{hub.url}/services/fgpu/api/v1/{path}"
    return requests.request(method, url, headers={"Authorization": f"token {token}"}, timeout=60)


def wait_for_service(hub: HubProcess, token: str) -> None:
    """Wait for the service, which comes after the Hub: it tells of warnings that stand for some seconds only."""
    until(lambda: service(hub, "GET", "sessions", token).status_code == 200, what="the service answers")


def own_sessions(hub: HubProcess, token: str) -> list[dict[str, Any]]:
    answer = service(hub, "GET", "sessions", token)
    return list(answer.json()["sessions"]) if answer.status_code == 200 else []


def warned(hub: HubProcess, token: str, *, within_s: float = 90) -> dict[str, Any]:
    """Return the user's one session once its owner is warned."""

    def found() -> list[dict[str, Any]]:
        return [s for s in own_sessions(hub, token) if s["warning"]]

    return until(found, within_s=within_s, what="the owner is warned")[0]


def last(hub: HubProcess, user: str) -> Session:
    return until(lambda: hub.store.ended(user=user, limit=1), what=f"a session of {user} has ended")[0]


def test_request_over_a_quota_waits_and_over_max_pending_is_refused(make_hub: MakeHub) -> None:
    quotas = [{"user": "*", "max_sessions": 1, "max_pending": 1}]
    hub = make_hub(quotas=quotas, simulated_gpus="2").start()
    token = hub.add_user("alice")
    hub.spawn("alice", options=ONE)
    hub.reach({"alice/": "RUNNING"})
    hub.spawn("alice", "second", options=ONE)
    hub.reach({"alice/": "RUNNING", "alice/second": "PENDING"})

    def reason() -> list[tuple[str, str]]:
        return [
            (s["wait_reason"], s["wait_text"]) for s in own_sessions(hub, token) if s["state"] == "PENDING"
        ]

    ((code, words),) = until(reason, what="the service tells why it waits")
    assert code == "QUOTA"
    assert "the quota of each user is used up" in words
    refused = hub.refused("alice", "third", options=ONE)
    assert refused.status_code == 409
    assert "the quota of each user is 1 requests waiting" in refused.json()["message"]
    hub.stop("alice")
    hub.reach({"alice/second": "RUNNING"})


def test_a_session_ends_with_its_lifetime_after_its_owner_was_warned_and_a_program_tells_it(
    make_hub: MakeHub, tmp_path: Path
) -> None:
    program, mails = tmp_path / "program", tmp_path / "mails"
    program.write_text(f"#!/bin/sh\ncat >>{mails}; echo >>{mails}\n")
    program.chmod(0o755)
    rules = {"*": {"max_lifetime_s": 12, "grace_s": 10}}
    hub = make_hub(reclaim=rules, notice_command=[str(program)]).start()
    token = hub.add_user("alice")
    wait_for_service(hub, token)
    hub.spawn("alice", options=ONE)
    hub.reach({"alice/": "RUNNING"})
    told = warned(hub, token)
    assert (told["state"], told["ends_cause"], told["can_keep"]) == ("RUNNING", "TIME_LIMIT", False)
    assert told["warning"] == "it reaches its time limit soon"
    assert told["ends_at_s"] == told["started_at_s"] + 12
    refused = service(hub, "POST", f"sessions/{told['id']}/keep", token)
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "nothing_to_keep")
    hub.reach({})
    ended = last(hub, "alice")
    assert (ended.state, ended.end_cause) == (SessionState.TERMINATED, EndCause.TIME_LIMIT)
    assert ended.ended_at_s is not None
    assert ended.started_at_s is not None
    assert ended.ended_at_s >= ended.started_at_s + 12
    assert ended.message == "the session's time was over, as its owner was warned"
    until(lambda: not hub.ready("alice"), what="the Hub knows that the server has ended")

    def mailed() -> list[tuple[str, str, str]]:
        lines = mails.read_text().splitlines() if mails.exists() else []
        return [(told["event"], told["user"], told["cause"]) for told in map(json.loads, lines)]

    # A Hub that is very busy may find the warning when it is over.
    until(lambda: ("ended", "alice", "TIME_LIMIT") in mailed(), what="the program has told the end")


def test_the_owner_extends_a_time_limit_as_often_as_is_allowed_and_where_nobody_waits_longer(
    make_hub: MakeHub,
) -> None:
    hub = make_hub(extend_by_s=3600, extend_times=2, max_time_limit_s=10800).start()
    token, other = hub.add_user("alice"), hub.add_user("bob")
    root = hub.add_user("admin")
    wait_for_service(hub, token)
    hub.spawn("alice", options={**WHOLE, "time_limit_s": 3600})
    hub.reach({"alice/": "RUNNING"})
    (session,) = own_sessions(hub, token)
    assert (session["time_limit_s"], session["extend_by_s"]) == (3600, 3600)
    path = f"sessions/{session['id']}/extend"
    assert service(hub, "POST", path, other).status_code == 404
    few = ["access:services!service=fgpu", "custom:fgpu:queue:read"]
    reading = hub.api("POST", "users/alice/tokens", token=token, json={"scopes": few})
    assert service(hub, "POST", path, str(reading.json()["token"])).status_code == 403

    longer = service(hub, "POST", path, token)
    assert longer.status_code == 200, longer.text
    told = longer.json()["session"]
    assert (told["time_limit_s"], told["extend_by_s"]) == (7200, 3600)
    assert told["ends_at_s"] == told["started_at_s"] + 7200

    # Another request waits for the place, with an announced start.
    hub.spawn("bob", options={**WHOLE, "time_limit_s": 600})
    hub.reach({"alice/": "RUNNING", "bob/": "PENDING"})
    until(lambda: hub.sessions()["bob/"].promised_at_s, what="bob is promised a start")
    refused = service(hub, "POST", path, token)
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "not_extended")
    assert refused.json()["error"]["message"] == "Another user was promised a start that this would delay."

    hub.stop("bob")
    hub.reach({"alice/": "RUNNING"})
    # An administrator may too, which is in the audit log.
    assert service(hub, "POST", path, root).json()["session"]["extend_by_s"] is None
    line = Audit(hub.store).lines(before_id=None, limit=1)[0]
    assert (line.actor, line.action, line.details) == ("admin", "session.extend", "by 1 h")
    refused = service(hub, "POST", path, token)
    assert (
        refused.json()["error"]["message"]
        == "You have extended this session by 2 h already. That is the most."
    )


def test_an_idle_session_is_warned_kept_and_ended_and_a_busy_one_is_left_alone(
    make_hub: MakeHub, tmp_path: Path
) -> None:
    work = tmp_path / "work"
    work.mkdir()
    server = Path(__file__).parent / "workserver.py"
    after = f"c.Spawner.cmd = ['python', {str(server)!r}]\nc.Spawner.environment = {{'WORK_DIR': {str(work)!r}}}\n"
    reclaim = {"*": {"idle_after_s": 10, "grace_s": 15, "keep_s": 10}}
    hub = make_hub(mini=False, after=after, reclaim=reclaim).start()
    token, other = hub.add_user("alice"), hub.add_user("bob")
    wait_for_service(hub, token)
    kernel = {"last_activity": "2020-01-01T00:00:00Z"}
    (work / "alice-.json").write_text(json.dumps([{**kernel, "execution_state": "idle"}]))
    (work / "bob-.json").write_text(json.dumps([{**kernel, "execution_state": "busy"}]))
    hub.spawn("bob", options=ONE)
    hub.spawn("alice", options=ONE)
    hub.reach({"alice/": "RUNNING", "bob/": "RUNNING"})

    told = warned(hub, token)
    assert (told["ends_cause"], told["can_keep"]) == ("IDLE", True)
    # What the Hub shows the server opens this server and nothing else.
    shown = (work / "alice-.token").read_text().removeprefix("token ")
    scopes = hub.api("GET", "user", token=shown).json()["scopes"]
    assert "access:servers!server=alice/" in scopes
    assert not [s for s in scopes if not s.startswith(("access:servers!server=alice/", "read:users:"))]

    path = f"sessions/{told['id']}/keep"
    assert service(hub, "POST", path, other).status_code == 404
    few = ["access:services!service=fgpu", "custom:fgpu:queue:read"]
    reading = hub.api("POST", "users/alice/tokens", token=token, json={"scopes": few})
    assert service(hub, "POST", path, str(reading.json()["token"])).status_code == 403
    kept = service(hub, "POST", path, token)
    assert kept.status_code == 200, kept.text
    assert (kept.json()["session"]["warning"], kept.json()["session"]["can_keep"]) == (None, False)

    # It is still idle when the time that it was kept for is over.
    again = warned(hub, token)
    assert again["ends_at_s"] >= told["ends_at_s"] + 10
    hub.reach({"bob/": "RUNNING"})
    ended = last(hub, "alice")
    assert (ended.state, ended.end_cause) == (SessionState.TERMINATED, EndCause.IDLE)
    assert ended.message == "the session was idle, and was not kept after the warning"
    assert (work / "bob-.token").exists(), "the busy server was never asked"
    assert [s["warning"] for s in own_sessions(hub, other)] == [None]


def test_a_session_of_higher_priority_takes_the_place_of_another_that_waits_and_comes_back(
    make_hub: MakeHub,
) -> None:
    hub = make_hub(
        after="c.JupyterHub.load_groups = {'staff': {'users': ['zoe']}}\n",
        reclaim={"*": {"preempt": True, "grace_s": 12, "min_runtime_s": 5}},
        max_priority={"staff": 5},
        resume_grace_s=1,
    ).start()
    token = hub.add_user("alice")
    hub.add_user("zoe")
    wait_for_service(hub, token)
    refused = hub.refused("alice", options={**WHOLE, "priority": 5})
    assert (refused.status_code, "priority: 5" in refused.json()["message"]) == (400, True)
    hub.spawn("alice", options=WHOLE)
    hub.reach({"alice/": "RUNNING"})
    first = hub.sessions()["alice/"]
    hub.spawn("zoe", options={**WHOLE, "priority": 5})
    told = warned(hub, token)
    assert told["preemptible_from_s"] == told["started_at_s"] + 5
    assert (told["ends_cause"], told["warning"]) == (
        "PREEMPTED",
        "a request that goes first needs its place",
    )
    hub.reach({"alice/": "PENDING", "zoe/": "RUNNING"})
    ended = last(hub, "alice")
    assert (ended.id, ended.end_cause) == (first.id, EndCause.PREEMPTED)
    waiting = hub.sessions()["alice/"]
    assert (waiting.replaces, waiting.submitted_at_s) == (first.id, first.submitted_at_s)
    until(lambda: not hub.sessions()["alice/"].held, what="the Hub waits to launch it again")
    hub.stop("zoe")
    hub.reach({"alice/": "RUNNING"})
    assert hub.sessions()["alice/"].id == waiting.id
