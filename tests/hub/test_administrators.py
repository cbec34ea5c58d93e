"""Administrators with a real Hub and its scheduler: who becomes one, and what their writes do to sessions."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import requests

from hubprocess import MINI, HubProcess, module_world, until

CLASS = """
c.JupyterHub.load_groups = {"class": {"users": ["alice"]}}
c.JupyterHub.load_roles.append({
    "name": "teacher", "users": ["teacher"],
    "scopes": ["list:users!group=class", "admin:servers!group=class", "access:servers!group=class"],
})
"""
JSON = dict[str, Any]


class World:
    """A Hub with one simulated GPU of 2 fGPU, and its service."""

    def __init__(self, folder: Path) -> None:
        self.hub = HubProcess(folder, after=MINI + CLASS).start()
        self.admin = self.hub.add_user("admin")
        until(lambda: self.ask("GET", "me", self.admin).status_code == 200, what="the service answers")

    def ask(self, method: str, path: str, token: str, body: Any = None) -> requests.Response:
        url = f"{self.hub.url}/services/fgpu/api/v1/{path}"
        return requests.request(
            method, url, headers={"Authorization": f"token {token}"}, json=body, timeout=60
        )

    def get(self, path: str, token: str) -> JSON:
        # That its database was busy for a moment is no answer yet.
        (answer,) = until(
            lambda: [a] if (a := self.ask("GET", path, token)).status_code != 503 else [], what="an answer"
        )
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    def start(self, user: str, server: str, **options: object) -> requests.Response:
        return self.hub.api("POST", f"users/{user}/servers/{server}", json=options)

    def sessions(self) -> list[JSON]:
        return list(self.get("sessions?all=1", self.admin)["sessions"])

    def one(self, user: str, server: str) -> JSON | None:
        found = [s for s in self.sessions() if (s["user"], s["server_name"]) == (user, server)]
        return found[0] if found else None

    def has(self, user: str, server: str, state: str) -> JSON:
        """Wait until a server's session is in this state, and return it."""

        def there() -> JSON | None:
            found = self.one(user, server)
            return found if found is not None and found["state"] == state else None

        found = until(there, within_s=90, what=f"{user}/{server} is {state}")
        assert found is not None
        return found

    def last(self, user_token: str, session_id: int) -> JSON:
        """Wait until a session has ended, and return it as its owner sees it."""

        def ended() -> JSON | None:
            found: JSON = self.get(f"sessions/{session_id}", user_token)["session"]
            return found if found["ended_at_s"] is not None else None

        found = until(ended, within_s=90, what=f"session {session_id} has ended")
        assert found is not None
        return found

    def clear(self) -> None:
        for session in self.sessions():
            self.ask("DELETE", f"sessions/{session['id']}", self.admin)
        until(lambda: not self.sessions(), within_s=90, what="every session has ended")


shared = module_world(World, "administrators")


@pytest.fixture
def world(shared: World) -> Iterator[World]:
    yield shared
    shared.clear()


def test_administrators_of_the_hub_administer_sessions(
    world: World,
) -> None:
    made = world.hub.api("POST", "users", json={"usernames": ["mia"], "admin": True}, token=world.admin)
    assert made.status_code == 201, made.text

    def admin() -> bool:
        # A new token each time: what is known of one is kept for a while.
        token = world.hub.api("POST", "users/mia/tokens", json={}).json()["token"]
        return bool(world.get("me", token)["admin"])

    assert admin()
    assert world.hub.api("PATCH", "users/mia", json={"admin": False}, token=world.admin).status_code == 200
    assert not admin()
    assert world.hub.api("PATCH", "users/mia", json={"admin": True}, token=world.admin).status_code == 200
    assert admin()


def test_a_waiting_session_that_is_given_a_higher_priority_starts_first_also_after_a_restart(
    world: World,
) -> None:
    for user in ("alice", "bob", "carol"):
        world.hub.add_user(user)
        world.start(user, "one", fgpu=2)
        world.has(user, "one", "RUNNING" if user == "alice" else "PENDING")
    carol = world.has("carol", "one", "PENDING")
    assert carol["position"] == 2
    where = f"admin/sessions/{carol['id']}/priority"
    assert world.ask("PUT", where, world.admin, {"priority": 9}).status_code == 200
    world.hub.terminate()
    world.hub.start()

    def resumed() -> bool:
        answer = world.ask("GET", "admin/queue", world.admin)
        if answer.status_code != 200:
            return False
        entries = answer.json()["queues"][0]["entries"]
        return len(entries) == 2 and not any(entry["held"] for entry in entries)

    until(resumed, within_s=60, what="both are taken up again")
    first, second = world.get("admin/queue", world.admin)["queues"][0]["entries"]
    assert (first["id"], first["priority"], second["user"]) == (carol["id"], 9, "bob")
    alice = world.has("alice", "one", "RUNNING")
    world.ask("DELETE", f"sessions/{alice['id']}", world.admin)
    assert world.has("carol", "one", "RUNNING")["id"] == carol["id"]
    assert world.has("bob", "one", "PENDING")["position"] == 1


def test_a_drained_node_takes_nothing_more_and_its_sessions_owners_are_told(world: World) -> None:
    token = world.hub.add_user("erin")
    ids = []
    for server in ("one", "two"):
        world.start("erin", server, fgpu=0.5)
        ids.append(world.has("erin", server, "RUNNING")["id"])
    said = "repair <b>at 15:00</b>"
    answer = world.ask("POST", "admin/nodes/local", world.admin, {"action": "drain", "message": said})
    try:
        assert answer.status_code == 200, answer.text
        assert answer.json()["failed"] == []
        for session_id in ids:
            ended = world.last(token, session_id)
            assert (ended["end_cause"], ended["message"]) == (
                "USER",
                f"ended by the administrator admin: {said}",
            )
        world.start("erin", "three", fgpu=0.5)
        assert world.has("erin", "three", "PENDING")["wait_reason"] == "RESOURCES"
    finally:
        world.ask("POST", "admin/nodes/local", world.admin, {"action": "uncordon"})
    world.has("erin", "three", "RUNNING")
    lines = world.get("admin/audit", world.admin)["lines"]
    assert [line["action"] for line in lines[:5]] == [
        "node.uncordon",
        "session.end",
        "session.end",
        "node.drain",
        "node.cordon",
    ]
    assert [line["details"] for line in lines[1:4]] == [said, said, f"2 sessions: {said}"]


class Ended(NamedTuple):
    """The texts about an end: for the owner, and in the audit log (actor and details)."""

    message: str | None
    audited: tuple[str, str] | None


NOBODY_ELSE = Ended(None, None)
BY_TEACHER = Ended("ended by teacher", ("teacher", ""))


@pytest.mark.parametrize(
    ("by", "way", "expected"),
    [
        ("alice", "service", NOBODY_ELSE),
        ("alice", "hub", NOBODY_ELSE),
        ("admin", "service", Ended("ended by the administrator admin", ("admin", ""))),
        ("admin", "hub", Ended("ended by admin", ("admin", ""))),
        ("admin", "admin page", Ended("ended by admin", ("admin", ""))),
        ("teacher", "service", BY_TEACHER),
        ("teacher", "hub", BY_TEACHER),
        ("teacher", "while it waits", BY_TEACHER),
        ("service", "hub", Ended("ended by service test", ("service test", ""))),
    ],
)
def test_administrator_who_ends_a_session_is_named(world: World, by: str, way: str, expected: Ended) -> None:
    alice, teacher = world.hub.add_user("alice"), world.hub.add_user("teacher")
    token = {"alice": alice, "teacher": teacher, "admin": world.admin, "service": world.hub.token}[by]
    if way == "while it waits":
        world.hub.add_user("bob")
        world.start("bob", "one", fgpu=2)
        world.has("bob", "one", "RUNNING")
    world.start("alice", "one", fgpu=1)
    session_id = world.has("alice", "one", "PENDING" if way == "while it waits" else "RUNNING")["id"]
    match way:
        case "service":
            assert world.ask("DELETE", f"sessions/{session_id}", token).status_code < 300
        case "admin page":
            browser = Browser(world.hub, "admin")
            page = browser.get("admin")
            assert page.status_code == 200
            assert browser.send("DELETE", "api/users/alice/servers/one").status_code < 300
        case _:
            assert world.hub.api("DELETE", "users/alice/servers/one", token=token).status_code < 300
    ended = world.last(alice, session_id)
    assert (ended["end_cause"], ended["message"]) == ("USER", expected.message)

    def audited() -> list[tuple[str, str]]:
        lines = world.get("admin/audit?action=session.end&limit=500", world.admin)["lines"]
        target = f"session {session_id} (one) of alice"
        return [(line["actor"], line["details"]) for line in lines if line["target"] == target]

    if expected.audited is not None:
        until(audited, what="it is in the audit log")
    assert audited() == ([] if expected.audited is None else [expected.audited])


class Browser:
    """A user with a log-in to the Hub by its page."""

    def __init__(self, hub: HubProcess, user: str) -> None:
        self.http, self.root = hub.browser(user), f"{hub.url}/hub"

    def get(self, path: str, **params: str) -> requests.Response:
        return self.http.get(f"{self.root}/{path}", params=params, timeout=60)

    def send(self, method: str, path: str, **more: Any) -> requests.Response:
        xsrf = next(c.value for c in self.http.cookies if c.name == "_xsrf" and c.path == "/hub/")
        return self.http.request(
            method,
            f"{self.root}/{path}",
            headers={"X-XSRFToken": str(xsrf), "Referer": f"{self.root}/admin"},
            timeout=60,
            **more,
        )


@pytest.mark.parametrize(("by", "named"), [("teacher", True), ("alice", False)])
def test_opening_of_another_users_server_is_audited(world: World, by: str, named: bool) -> None:
    for user in ("alice", "teacher"):
        world.hub.add_user(user)
    world.start("alice", "one", fgpu=1)
    session_id = world.has("alice", "one", "RUNNING")["id"]
    browser = Browser(world.hub, by)
    asked = {
        "client_id": "jupyterhub-user-alice-one",
        "redirect_uri": "/user/alice/one/oauth_callback",
        "response_type": "code",
        "state": "x",
    }
    page = browser.http.get(
        f"{browser.root}/api/oauth2/authorize", params=asked, timeout=60, allow_redirects=False
    )
    if page.status_code == 200:
        page = browser.send(
            "POST", "api/oauth2/authorize", params=asked, data={"scopes": []}, allow_redirects=False
        )
    assert page.status_code == 302
    assert "code=" in page.headers["Location"]

    def audited() -> list[str]:
        lines = world.get("admin/audit?action=session.open&limit=500", world.admin)["lines"]
        return [line["actor"] for line in lines if line["target"] == f"session {session_id} (one) of alice"]

    if named:
        until(audited, what="it is in the audit log")
    assert audited() == ([by] if named else [])
