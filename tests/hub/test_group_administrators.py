"""Who administers a resource group, with a real Hub and its scheduler: all of theirs, and nothing of another's."""

from __future__ import annotations

import contextlib
import io
import json
import os
import unittest.mock
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
from bs4 import BeautifulSoup
from servedroutes import methods_of, served
from standing import asked, gpus, standing
from test_administrators import Browser, World

from fgpu_scheduler import MOST_EDITS, Quota, QuotaEdits, QuotaScope
from fgpuspawner.cli import main as cli
from hubprocess import MINI, HubProcess, module_world, until

JSON = dict[str, Any]
ASSISTANTS = """
c.JupyterHub.load_groups = {
    "ml101": {"users": ["alice", "dave"]}, "robots": {"users": ["alice", "bob"]},
    "ml101-assistants": {"users": ["tina"]}, "robots-assistants": {"users": ["rob"]},
}
for group, helpers in (("class", "ml101-assistants"), ("s3cret", "robots-assistants")):
    c.JupyterHub.load_roles.append({
        "name": f"{group}-assistants", "groups": [helpers], "scopes": [f"custom:fgpu:group:{group}:admin"],
    })
c.JupyterHub.services.append({"name": "bot", "api_token": "a-token-of-a-bot-that-marks-exercises"})
c.JupyterHub.load_roles.append({
    "name": "bot", "services": ["bot"], "scopes": ["custom:fgpu:group:class:admin", "access:services!service=fgpu"],
})
"""
ASSISTANTS_PAGES = ["Queue", "Machines", "Quotas", "Audit log"]
BOT = "a-token-of-a-bot-that-marks-exercises"
SECRET = ("s3cret", "robots", "bob")
"""In the names of the other group, its machine, its sessions and its quotas: tina reads none of them."""
GROUPS = {
    "default": {},
    "class": {"hub_groups": ["ml101", "ml101-assistants"]},
    "s3cret": {"hub_groups": ["robots"]},
}
QUOTAS = [
    {"resource_group": "class", "max_fgpu": 3, "max_sessions": 6},
    {"user": "*", "resource_group": "class", "max_fgpu": 2},
    {"user": "bob", "resource_group": "s3cret", "max_fgpu": 2},
    {"hub_group": "robots", "max_pending": 7},
]
ROLES = ("admin", "tina", "rob", "dave", "carol")
"""An administrator; the group's administrator; that of another group; a member, who owns the session; another user."""

TABLE = """
GET    admin/overview                        200 403 403 403 403
GET    admin/queue                           200 200 200 403 403
POST   admin/queue                           303 303 404 403 403
GET    admin/nodes                           200 200 200 403 403
POST   admin/nodes                           303 303 404 403 403
GET    admin/nodes/{id}                      200 200 404 403 403
GET    admin/images                          200 403 403 403 403
POST   admin/images                          400 403 403 403 403
GET    admin/images/{id}                     200 403 403 403 403
POST   admin/images/{id}                     400 403 403 403 403
GET    admin/new-image                       200 403 403 403 403
POST   admin/new-image                       400 403 403 403 403
GET    admin/quotas                          200 200 200 403 403
POST   admin/quotas                          303 303 403 403 403
GET    admin/usage                           200 403 403 403 403
GET    admin/banner                          200 403 403 403 403
POST   admin/banner                          400 403 403 403 403
GET    admin/audit                           200 200 200 403 403
GET    api/v1/admin/overview                 200 403 403 403 403
GET    api/v1/admin/queue                    200 200 200 403 403
PUT    api/v1/admin/sessions/{id}/priority   200 200 404 403 403
GET    api/v1/admin/nodes                    200 200 200 403 403
POST   api/v1/admin/nodes/{id}               200 200 404 403 403
GET    api/v1/admin/quotas                   200 200 200 403 403
PUT    api/v1/admin/quotas                   200 200 403 403 403
DELETE api/v1/admin/quotas                   200 200 403 403 403
GET    api/v1/admin/banner                   200 403 403 403 403
PUT    api/v1/admin/banner                   400 403 403 403 403
DELETE api/v1/admin/banner                   200 403 403 403 403
GET    api/v1/admin/usage                    200 403 403 403 403
GET    api/v1/admin/usage.csv                200 403 403 403 403
GET    api/v1/admin/audit                    200 200 200 403 403
GET    api/v1/admin/audit.csv                200 200 200 403 403
GET    api/v1/sessions/{id}                  200 200 404 200 404
GET    api/v1/sessions/{id}/meter            200 200 404 200 404
GET    api/v1/sessions/{id}/receipt          200 200 404 200 404
POST   api/v1/sessions/{id}/keep             409 409 404 409 404
POST   api/v1/sessions/{id}/extend           409 409 404 409 404
GET    api/v1/sessions?all=1                 200 200 200 403 403
GET    api/v1/meters?all=1                   200 200 200 403 403
GET    api/v1/history?all=1                  200 403 403 403 403
GET    api/v1/history?user=dave              200 403 403 200 403
GET    api/v1/private-images?all=1           200 403 403 403 403
GET    api/v1/queue?group=class              200 200 404 200 404
GET    api/v1/events                         200 200 200 200 200
GET    api/v1/me                             200 200 200 200 200
GET                                          200 200 200 200 200
GET    map                                   200 200 200 200 200
GET    map?group=class                       200 200 200 200 200
GET    sessions.csv                          200 200 200 200 200
GET    end/{id}                              200 200 404 200 404
GET    api/v1/capacity                       200 200 200 200 200
"""
"""By method and path the statuses for each of `ROLES`, of what is dave's and of the group's. All below admin/ is here."""

DAVES_QUOTA = {"user": "dave", "resource_group": "class", "max_fgpu": 1}
SENT: dict[tuple[str, str], JSON] = {
    ("PUT", "api/v1/admin/quotas"): {"json": DAVES_QUOTA},
    ("PUT", "api/v1/admin/sessions/{id}/priority"): {"json": {"priority": 3}},
    ("POST", "api/v1/admin/nodes/{id}"): {"json": {"action": "cordon"}},
    ("POST", "admin/nodes"): {"data": {"action": "cordon", "node": "teach"}},
    ("POST", "admin/quotas"): {
        "data": {"action": "set", "who": "user", "name": "dave", "resource_group": "class", "max_fgpu": "1"}
    },
}


def expected() -> dict[tuple[str, str], list[int]]:
    found = {}
    for line in TABLE.strip().splitlines():
        method, *path = (words := line.split())[: -len(ROLES)]
        found[method, path[0] if path else ""] = [int(word) for word in words[-len(ROLES) :]]
    return found


EXPECTED = expected()


class Course(World):
    """A class and another group, each with one machine of one simulated GPU: on each one session runs, and one waits."""

    def __init__(self, folder: Path) -> None:
        gpu = {"cpu": 8, "memory_mib": 16384, "gpus": {"simulated": 1, "memory_mib": 8192}}
        nodes = [
            {"name": name, "group": group, **gpu}
            for name, group in (("lab", "default"), ("teach", "class"), ("s3cret-machine", "s3cret"))
        ]
        self.hub = HubProcess(
            folder, after=MINI + ASSISTANTS, nodes=nodes, groups=GROUPS, quotas=QUOTAS
        ).start()
        self.admin = self.hub.add_user("admin")
        self.tokens = {"admin": self.admin, "bot": BOT}
        for name in ("tina", "rob", "alice", "bob", "carol", "dave"):
            self.tokens[name] = self.hub.add_user(name)
        until(lambda: self.ask("GET", "me", self.admin).status_code == 200, what="the service answers")
        self.start("bob", "s3cret-past", fgpu=2, group="s3cret", image="python")
        self.secret_past = self.has("bob", "s3cret-past", "RUNNING")
        self.ask("DELETE", f"sessions/{self.secret_past['id']}", self.admin)
        self.last(self.tokens["bob"], self.secret_past["id"])
        for user, server, group in (("dave", "one", "class"), ("bob", "s3cret-one", "s3cret")):
            self.start(user, server, fgpu=2, group=group, image="python")
            self.has(user, server, "RUNNING")
        for server, group in (("two", "class"), ("s3cret-two", "s3cret")):
            self.start("alice", server, fgpu=1, group=group, image="python")
            self.has("alice", server, "PENDING")
        self.runs, self.waits = self.has("dave", "one", "RUNNING"), self.has("alice", "two", "PENDING")
        self.secret_runs = self.has("bob", "s3cret-one", "RUNNING")
        self.secret_waits = self.has("alice", "s3cret-two", "PENDING")

    def send(self, method: str, path: str, user: str, **more: Any) -> requests.Response:
        return requests.request(
            method,
            f"{self.hub.url}/services/fgpu/{path}",
            headers={"Authorization": f"token {self.tokens[user]}"},
            allow_redirects=False,
            timeout=60,
            **more,
        )

    def refusal(self, method: str, path: str, user: str = "tina", **more: Any) -> tuple[int, str]:
        """Return the status and the message of a refusal, which is one line without names of other users."""
        answer = self.send(method, f"api/v1/{path}", user, **more)
        message: str = answer.json()["error"]["message"]
        assert "\n" not in message
        return answer.status_code, message

    def store_now(self) -> tuple[Any, ...]:
        """Return the state that unpermitted requests must not change: sessions, machines and quotas."""
        snapshot = self.hub.store.snapshot(0)
        requests_of = [(s.id, s.state, s.request) for s in snapshot.sessions]
        nodes = [(n.id, n.state, [d.cordoned for d in n.devices]) for n in snapshot.nodes]
        return requests_of, nodes, self.get("admin/quotas", self.admin)["quotas"]


course = module_world(Course, "group-administrators")


@pytest.fixture
def world(course: Course) -> Iterator[Course]:
    """The course, with machines and quotas as they were after each test."""
    yield course
    course.ask("POST", "admin/nodes/teach", course.admin, {"action": "uncordon"})
    for quota in course.get("admin/quotas", course.admin)["quotas"]:
        if quota["source"] != "file":
            course.send("DELETE", "api/v1/admin/quotas", "admin", params={**quota["for"], "back": "1"})
    course.ask("DELETE", "admin/banner", course.admin)


def target_of(world: Course, path: str) -> str:
    if path == "admin/nodes/{id}":
        return "admin/nodes/drain?node=teach"
    if path == "api/v1/admin/nodes/{id}":
        return path.replace("{id}", "teach")
    if path == "admin/images/{id}":
        return path.replace("{id}", "python")
    return path.replace("{id}", str(world.waits["id"] if "priority" in path else world.runs["id"]))


def test_everything_below_admin_is_in_the_table() -> None:
    found = {
        (method.upper(), path)
        for path, handler in served()
        for method in methods_of(handler)
        if path.startswith(("admin/", "api/v1/admin/"))
    }
    assert found == {key for key in EXPECTED if key[1].startswith(("admin/", "api/v1/admin/"))}


@pytest.mark.parametrize(("method", "path"), EXPECTED, ids=[" ".join(key) for key in EXPECTED])
def test_each_role_gets_the_status_of_the_groups_table(world: Course, method: str, path: str) -> None:
    found = []
    more = dict(SENT.get((method, path), {}))
    if (method, path) == ("POST", "admin/queue"):
        more["data"] = {"session": world.waits["id"], "priority": "4"}
    for role in ROLES:
        # What one may do is done: the next one's target is there again.
        world.ask("POST", "admin/nodes/teach", world.admin, {"action": "uncordon"})
        if method == "DELETE" and path.endswith("quotas"):
            assert world.ask("PUT", "admin/quotas", world.admin, DAVES_QUOTA).status_code == 200
            more = {"params": {"user": "dave", "resource_group": "class"}}
        with world.send(method, target_of(world, path), role, stream=True, **more) as answer:
            found.append(answer.status_code)
            if role in ("tina", "carol") and path != "api/v1/events":
                assert not [name for name in SECRET if name in answer.text], (
                    f"{role} learns of the other group"
                )
    assert dict(zip(ROLES, found, strict=True)) == dict(zip(ROLES, EXPECTED[method, path], strict=True))


def test_names_of_the_other_group_are_visible_to_its_readers(world: Course) -> None:
    """Else the test above would show nothing."""
    for user in ("admin", "rob"):
        paths = (
            "admin/queue",
            "admin/nodes",
            "admin/quotas",
            "admin/audit",
            "sessions?all=1",
            "queue?group=s3cret",
        )
        for path in paths:
            assert "s3cret" in world.send("GET", f"api/v1/{path}", user).text, (user, path)


def test_group_administrator_reads_names_of_the_group_only(world: Course) -> None:
    me = world.get("me", world.tokens["tina"])
    assert (me["admin"], me["administers"], me["groups"]) == (False, ["class"], ["default", "class"])
    assert world.get("me", world.admin)["administers"] == ["default", "class", "s3cret"]
    sessions = world.get("sessions?all=1", world.tokens["tina"])["sessions"]
    assert [(s["user"], s["server_name"]) for s in sessions] == [("dave", "one"), ("alice", "two")]
    assert world.get("sessions?all=1&ended=1", world.tokens["tina"])["sessions"] == sessions
    (queue,) = world.get("admin/queue", world.tokens["tina"])["queues"]
    assert (queue["group"], [e["user"] for e in queue["entries"]]) == ("class", ["alice"])
    (node,) = world.get("admin/nodes", world.tokens["tina"])["nodes"]
    assert (node["name"], node["actions"]) == ("teach", ["cordon"])
    quotas = world.get("admin/quotas", world.tokens["tina"])["quotas"]
    assert {q["for"]["resource_group"] for q in quotas} == {"class"}
    assert world.get("sessions", world.tokens["tina"])["sessions"] == []


def test_events_of_another_group_have_no_sessions(world: Course) -> None:
    lines = []
    token = world.tokens["tina"]
    url = f"{world.hub.url}/services/fgpu/api/v1/events"
    headers = {"Authorization": f"token {token}", "Last-Event-ID": "1"}
    with requests.get(url, headers=headers, stream=True, timeout=60) as answer:
        for line in answer.iter_lines(chunk_size=1, decode_unicode=True):
            lines.append(line)
            if line == "event: queue":
                break
    said = "\n".join(lines)
    assert '"user": "dave"' in said
    assert not [name for name in SECRET if name in said]


def test_another_group_is_not_found_and_not_changed(world: Course) -> None:
    before = world.store_now()
    for number in (world.secret_runs["id"], world.secret_waits["id"], world.secret_past["id"], 999_999):
        for method, path, more in (
            ("GET", f"sessions/{number}", {}),
            ("GET", f"sessions/{number}/meter", {}),
            ("GET", f"sessions/{number}/receipt", {}),
            ("DELETE", f"sessions/{number}", {}),
            ("POST", f"sessions/{number}/keep", {}),
            ("POST", f"sessions/{number}/extend", {}),
            ("POST", f"sessions/{number}/image", {"json": {"name": "x"}}),
            ("PUT", f"admin/sessions/{number}/priority", {"json": {"priority": 9}}),
        ):
            assert world.refusal(method, path, **more) == (404, f"there is no session {number}"), path
    for name in ("s3cret-machine", "lab", "nothing"):
        for action in ("cordon", "uncordon", "drain"):
            found = world.refusal("POST", f"admin/nodes/{name}", json={"action": action})
            assert found == (404, f"there is no node {name!r}")
        found = world.refusal("POST", f"admin/nodes/{name}", json={"action": "cordon", "gpu": "0"})
        assert found == (404, f"there is no node {name!r}")
        page = world.send("GET", f"admin/nodes/drain?node={name}", "tina")
        assert page.status_code == 404
    for group in ("s3cret", "nothing"):
        said = "group: there is no such group; choose one of default, class"
        assert world.refusal("GET", f"queue?group={group}") == (404, said)
    assert world.store_now() == before


NOT_THEIRS = "resource_group: must be one that you administer: class (scope custom:fgpu:admin)"


@pytest.mark.parametrize(
    ("quota", "said"),
    [
        ({"user": "dave", "max_fgpu": 1}, NOT_THEIRS),
        ({"user": "*", "max_fgpu": 1}, NOT_THEIRS),
        ({"hub_group": "robots", "max_pending": 99}, NOT_THEIRS),
        ({"user": "bob", "resource_group": "s3cret", "max_fgpu": 1}, NOT_THEIRS),
        ({"user": "bob", "resource_group": "nothing", "max_fgpu": 1}, NOT_THEIRS),
        ({"user": "dave", "resource_group": "default", "max_fgpu": 1}, NOT_THEIRS),
        (
            {"resource_group": "class", "max_fgpu": 99},
            "user: name a user, or each user (*); for everybody together you must not set it "
            "(scope custom:fgpu:admin)",
        ),
        (
            {"hub_group": "ml101", "resource_group": "class", "max_fgpu": 1},
            "hub_group: set it for a user, or for each user (*); for a whole group you must not "
            "(scope custom:fgpu:admin)",
        ),
        (
            {"user": "tina", "resource_group": "class", "max_fgpu": 1},
            "user: you can't set your own quota; ask an administrator (scope custom:fgpu:admin)",
        ),
        (
            {"user": "dave", "resource_group": "class", "max_fgpu": "3.1"},
            "max_fgpu: at most 3, the quota of resource group 'class' (scope custom:fgpu:admin)",
        ),
        (
            {"user": "*", "resource_group": "class", "max_fgpu": 3, "max_sessions": 7},
            "max_sessions: at most 6, the quota of resource group 'class' (scope custom:fgpu:admin)",
        ),
    ],
    ids=lambda value: " ".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else "",
)
def test_group_administrator_cannot_set_other_quotas(world: Course, quota: JSON, said: str) -> None:
    before = world.store_now()
    assert world.refusal("PUT", "admin/quotas", json=quota) == (403, said)
    key = {name: value for name, value in quota.items() if not name.startswith("max_")}
    if not said.startswith("max_"):
        for back in ("0", "1"):
            assert world.refusal("DELETE", "admin/quotas", params={**key, "back": back}) == (403, said)
    who = next((name for name in ("user", "hub_group") if name in quota), "all")
    form = {"resource_group": "", **quota, "action": "set", "who": who, "name": quota.get(who, "")}
    page = world.send("POST", "admin/quotas", "tina", data=form)
    assert page.status_code == 403
    assert world.store_now() == before


def test_group_administrator_sets_a_members_quota_up_to_the_groups(world: Course) -> None:
    for quota in (
        {"user": "dave", "resource_group": "class", "max_fgpu": "3", "max_sessions": 6},
        {"user": "*", "resource_group": "class", "max_fgpu": "0.5"},
    ):
        answer = world.send("PUT", "api/v1/admin/quotas", "tina", json=quota)
        assert answer.status_code == 200, answer.text
        assert answer.json()["quota"]["changed_by"] == "tina"
    line = world.get("admin/audit?limit=1", world.admin)["lines"][0]
    assert (line["actor"], line["action"]) == ("tina", "quota.set")
    # Who may not set it for everybody may not loosen that either: the group's quota stays in force beside it.
    quotas = world.get("admin/quotas", world.admin)["quotas"]
    assert [q["text"] for q in quotas if q["for"] == {"resource_group": "class"}] == ["3 fGPU, 6 sessions"]


def test_group_administrator_reads_the_audit_log_of_the_group_only(world: Course, tmp_path: Path) -> None:
    """Of each kind of line one in the group, one in another, and one that is no group's."""
    for node in ("teach", "s3cret-machine"):
        for more in ({}, {"gpu": "0"}):
            for action in ("cordon", "uncordon"):
                assert world.ask("POST", f"admin/nodes/{node}", world.admin, {"action": action} | more).ok
    for user, group in (("dave", "class"), ("bob", "s3cret"), ("robots-bob", None)):
        quota = {"user": user, "max_fgpu": 1} | ({"resource_group": group} if group else {})
        assert world.ask("PUT", "admin/quotas", world.admin, quota).ok
    for waits in (world.waits, world.secret_waits):
        assert world.ask("PUT", f"admin/sessions/{waits['id']}/priority", world.admin, {"priority": 5}).ok
        assert world.ask("PUT", f"admin/sessions/{waits['id']}/priority", world.admin, {"priority": 0}).ok
    assert world.ask("PUT", "admin/banner", world.admin, {"text": "robots rest"}).ok
    whole = world.get("admin/audit?limit=500", world.admin)["lines"]
    actions = {line["action"] for line in whole if line["resource_group"] == "s3cret"}
    assert actions >= {"node.cordon", "gpu.cordon", "quota.set", "session.priority", "session.end"}
    assert {line["action"] for line in whole if line["resource_group"] is None} >= {"quota.set", "banner.set"}
    for user, group, other in (
        ("tina", "class", "s3cret"),
        ("rob", "s3cret", "class"),
        ("bot", "class", "s3cret"),
    ):
        theirs = [line for line in whole if line["resource_group"] == group]
        assert {line["action"] for line in theirs} >= actions - {"session.end"}
        for query in ("", f"&group={group}"):
            assert world.get(f"admin/audit?limit=500{query}", world.tokens[user])["lines"] == theirs
        assert world.get(f"admin/audit?limit=500&group={group}", world.admin)["lines"] == theirs
        for path in ("admin/audit", "admin/audit.csv"):
            said = f"group: there is no such group; choose one of {group}"
            assert world.refusal("GET", f"{path}?group={other}", user) == (404, said)
    assert world.get("admin/audit?text=robots", world.tokens["tina"])["lines"] == []
    answer = world.send("GET", "api/v1/admin/audit.csv", "tina")
    assert [name for name in SECRET if name in answer.text] == []
    assert {line.rpartition(",")[2] for line in answer.text.splitlines()[1:]} == {"class"}
    page = BeautifulSoup(world.send("GET", "admin/audit", "tina").text, "html.parser")
    assert {cell.get_text(strip=True) for cell in page.select('td[data-label="Resource group"]')} == {"class"}
    assert [option["value"] for option in page.select("select[name=group] option")] == ["", "class"]
    page = BeautifulSoup(world.send("GET", "admin/audit?group=s3cret", "admin").text, "html.parser")
    assert {cell.get_text(strip=True) for cell in page.select('td[data-label="Resource group"]')} == {
        "s3cret"
    }
    lines = fgpu(world, tmp_path, "tina", "audit", "--action", "quota", "--limit", "1")[1].splitlines()
    assert (lines[1].split()[3:6], lines[2][:16]) == (["admin", "quota.set", "class"], "older: --before ")
    status, said = fgpu(world, tmp_path, "admin", "audit", "--group", "s3cret", "--limit", "500", "--json")
    shown = [line for line in whole if line["resource_group"] == "s3cret"]
    assert (status, json.loads(said)["lines"]) == (0, shown)
    status, said = fgpu(world, tmp_path, "tina", "audit", "--group", "s3cret")
    assert (status, said) == (1, "fgpu: group: there is no such group; choose one of class\n")


def test_group_administrator_cannot_raise_own_priority_or_remove_machines(
    world: Course,
) -> None:
    world.start("tina", "mine", fgpu=1, group="class", image="python")
    mine = world.has("tina", "mine", "PENDING")
    try:
        said = "priority: an administrator sets that of your own sessions (scope custom:fgpu:admin)"
        where = f"admin/sessions/{mine['id']}/priority"
        assert world.refusal("PUT", where, json={"priority": 9}) == (403, said)
        page = BeautifulSoup(world.send("GET", "admin/queue", "tina").text, "html.parser")
        assert page.find(id=f"priority-{world.waits['id']}") is not None
        assert page.find(id=f"priority-{mine['id']}") is None
    finally:
        world.ask("DELETE", f"sessions/{mine['id']}", world.tokens["tina"])
    said = "action: only administrators may do this (scope custom:fgpu:admin)"
    assert world.refusal("POST", "admin/nodes/teach", json={"action": "gone"}) == (403, said)
    assert world.send("GET", "admin/nodes/gone?node=teach", "tina").status_code == 403


def test_what_is_missing_is_named(world: Course) -> None:
    whole = "only administrators may do this (scope custom:fgpu:admin)"
    part = "only administrators may do this (scope custom:fgpu:admin or custom:fgpu:group:GROUP:admin)"
    for user in ("tina", "dave"):
        assert world.refusal("GET", "admin/usage", user) == (403, whole)
    assert world.refusal("GET", "admin/nodes", "dave") == (403, part)
    assert world.refusal("GET", "sessions?all=1", "dave")[0] == 403


def test_member_cannot_obtain_the_group_scope(world: Course) -> None:
    wanted = ["access:services!service=fgpu", "custom:fgpu:group:class:admin"]
    made = world.hub.api("POST", "users/dave/tokens", json={"scopes": wanted}, token=world.tokens["dave"])
    assert made.status_code == 400, made.text
    other = ["access:services!service=fgpu", "custom:fgpu:group:s3cret:admin"]
    made = world.hub.api("POST", "users/tina/tokens", json={"scopes": other}, token=world.tokens["tina"])
    assert made.status_code == 400, made.text
    # Administrators of a group may make a token with their scope or less.
    made = world.hub.api("POST", "users/admin/tokens", json={"scopes": wanted}, token=world.admin)
    me = world.get("me", made.json()["token"])
    assert (me["admin"], me["administers"]) == (False, ["class"])


def test_pages_show_permitted_actions_only(world: Course) -> None:
    browser = Browser(world.hub, "tina")
    url = f"{world.hub.url}/services/fgpu/"

    def page(path: str) -> BeautifulSoup:
        answer = browser.http.get(url + path, timeout=60)
        assert answer.status_code == 200, answer.text
        assert not [name for name in SECRET if name in answer.text]
        return BeautifulSoup(answer.text, "html.parser")

    for found in (page(""), page("admin/queue")):
        (links,) = found.select("ul.of-admin")
        assert [a.get_text() for a in links.select("a")] == ASSISTANTS_PAGES
    home = BeautifulSoup(browser.get("token").text, "html.parser")
    assert [a.get_text() for a in home.select("ul.of-admin a")] == ASSISTANTS_PAGES
    rows = page("").select("#rows tr")
    assert [row["id"] for row in rows] == [f"session-{world.runs['id']}", f"session-{world.waits['id']}"]
    assert len(page("?show=mine").select("#rows tr")) == 0
    machines = page("admin/nodes")
    actions = {button.get("value") for button in machines.select("button[name=action]")}
    assert actions == {"cordon"}
    assert "It is gone" not in machines.get_text()
    quotas = page("admin/quotas")
    assert [option.get("value") for option in quotas.select("select[name=who] option")] == ["user"]
    options = [option.get("value") for option in quotas.select("select[name=resource_group] option")]
    assert options == ["class"]
    assert len(quotas.select("button[value=remove]")) == 1
    assert page(f"end/{world.runs['id']}").find("textarea") is not None


def fgpu(world: Course, home: Path, user: str, *words: str) -> tuple[int, str]:
    """Run the command as a user does; return its status and all that it says."""
    out = io.StringIO()
    own = {"HOME": str(home), "PATH": os.environ["PATH"], "FGPU_HUB_URL": world.hub.url}
    token = {"JUPYTERHUB_API_TOKEN": world.tokens[user]}
    with (
        unittest.mock.patch.dict(os.environ, own | token, clear=True),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(out),
    ):
        return cli.main(words), out.getvalue()


def test_a_services_token_with_the_scope_reads_and_ends_of_the_group_only(world: Course) -> None:
    found = world.get("sessions?all=1&ended=1", BOT)["sessions"]
    assert {s["resource_group"] for s in found} == {"class"}
    assert world.refusal("GET", "history?all=1", "bot")[0] == 403
    number = world.secret_runs["id"]
    assert world.refusal("DELETE", f"sessions/{number}", "bot") == (404, f"there is no session {number}")
    for path in ("", "map?group=class", "admin/queue", "admin/nodes", "admin/quotas"):
        text = world.send("GET", path, "bot").text
        assert not [name for name in SECRET if name in text], path
    world.start("dave", "extra", fgpu=1, group="class", image="python")
    extra = world.has("dave", "extra", "PENDING")
    assert world.send("DELETE", f"api/v1/sessions/{extra['id']}", "bot").status_code == 202
    ended = world.last(world.tokens["dave"], extra["id"])
    assert ended["message"] == "ended by the administrator service bot"


def test_an_assistant_ends_the_groups_sessions_and_the_owner_reads_by_whom(world: Course) -> None:
    world.start("dave", "extra", fgpu=1, group="class", image="python")
    extra = world.has("dave", "extra", "PENDING")
    found = world.send("DELETE", f"api/v1/sessions/{extra['id']}", "tina", json={"message": "too late"})
    assert found.status_code == 202, found.text
    ended = world.last(world.tokens["dave"], extra["id"])
    assert (ended["end_cause"], ended["message"]) == ("USER", "ended by the administrator tina: too late")
    lines = world.get("admin/audit?action=session.end", world.admin)["lines"]
    target = f"session {extra['id']} (extra) of dave"
    assert [(x["actor"], x["details"]) for x in lines if x["target"] == target] == [("tina", "too late")]
    # The header names the session: a later session of the server goes on, and other users learn nothing of it.
    where = f"{world.hub.url}/hub/api/users/dave/servers/one"
    for user, status in (("admin", 409), ("tina", 404)):
        headers = {"Authorization": f"token {world.tokens[user]}", "X-FGPU-Session": str(extra["id"])}
        answer = requests.delete(where, headers=headers, timeout=60)
        assert answer.status_code == status, answer.text
        assert ("by now" in answer.json()["message"]) == (status == 409)
    assert world.has("dave", "one", "RUNNING")["id"] == world.runs["id"]
    # Through the Hub itself she may end nothing: its rights are by user, not by resource group.
    for user, server in (("dave", "one"), ("bob", "s3cret-one")):
        answer = world.hub.api("DELETE", f"users/{user}/servers/{server}", token=world.tokens["tina"])
        assert answer.status_code in (403, 404)


def test_an_assistant_drains_the_groups_machine_and_nothing_of_another_ends(world: Course) -> None:
    answer = world.send(
        "POST", "api/v1/admin/nodes/teach", "tina", json={"action": "drain", "message": "exam"}
    )
    assert (answer.status_code, answer.json()["failed"]) == (200, []), answer.text
    ended = world.last(world.tokens["dave"], world.runs["id"])
    assert ended["message"] == "ended by the administrator tina: exam"
    assert world.has("bob", "s3cret-one", "RUNNING")["id"] == world.secret_runs["id"]
    world.ask("POST", "admin/nodes/teach", world.tokens["tina"], {"action": "uncordon"})
    world.has("alice", "two", "RUNNING")


def test_a_machine_that_was_moved_is_not_drained_while_sessions_of_its_old_group_are_there(
    tmp_path: Path,
) -> None:
    groups = {"default": {}, "class": {}}
    nodes = [{"name": name, "group": name} for name in groups]
    with standing(tmp_path, groups=groups, nodes=nodes) as service:
        service.scopes["tina"] = ["custom:fgpu:group:class:admin"]
        service.store.set_nodes([gpus(1, node="moved")], now_s=1)
        (runs,) = service.run([asked("s3cret", "s3cret-server")])
        service.store.set_nodes([gpus(1, node="moved", group="class")], now_s=2)
        service.start()
        where, headers = f"{service.url}api/v1/admin/nodes/moved", {"Authorization": "token token-tina"}
        refused = requests.post(where, headers=headers, json={"action": "drain"}, timeout=60)
        assert refused.status_code == 403
        assert refused.json()["error"]["message"] == (
            "node 'moved' still has sessions of another resource group; cordon it, or ask an administrator "
            "(scope custom:fgpu:admin)"
        )
        assert requests.post(where, headers=headers, json={"action": "cordon"}, timeout=60).status_code == 200
        for path in ("admin/nodes", "api/v1/admin/nodes", "admin/nodes/drain?node=moved", "map", ""):
            answer = service.get(path, "tina")
            assert (answer.status_code, "s3cret" in answer.text) == (200, False), path
        assert service.ended == []
        assert service.store.session(runs.id) == runs


def test_an_assistant_saves_no_members_session_as_an_image(tmp_path: Path) -> None:
    with standing(tmp_path, owners_may_commit=True) as service:
        service.scopes["tina"] = ["custom:fgpu:group:default:admin"]
        service.store.set_nodes([gpus(1)], now_s=1)
        (runs,) = service.run([asked("dave")])
        service.start()
        answer = requests.post(
            f"{service.url}api/v1/sessions/{runs.id}/image",
            headers={"Authorization": "token token-tina"},
            json={"name": "mine"},
            timeout=60,
        )
        assert answer.status_code == 403
        assert answer.json()["error"]["message"] == "only administrators save others' sessions as images"
        assert service.get(f"save/{runs.id}", "tina").status_code == 409
        assert service.get("api/v1/sessions?all=1", "tina").json()["sessions"][0]["can_save"] is False


def test_an_assistant_leaves_room_for_the_quotas_of_others(tmp_path: Path) -> None:
    """All that are changed are counted together: one group's must not be all of them."""
    groups = {"default": {}, "class": {}}
    nodes = [{"name": name, "group": name} for name in groups]
    with standing(tmp_path, groups=groups, nodes=nodes) as service:
        service.scopes["tina"] = ["custom:fgpu:group:class:admin"]
        full = MOST_EDITS // 3
        of_class = [Quota(QuotaScope.USER, f"u{n}", "class", max_sessions=1) for n in range(full)]
        QuotaEdits(service.store).put_all(of_class, file=(), by="tina", now_s=1)
        service.start()

        def sets(user: str, whose: str) -> requests.Response:
            return requests.put(
                f"{service.url}api/v1/admin/quotas",
                headers={"Authorization": f"token token-{user}"},
                json={"user": whose, "resource_group": "class", "max_sessions": 2},
                timeout=60,
            )

        refused = sets("tina", "another")
        assert (refused.status_code, refused.json()["error"]["message"]) == (
            409,
            f"{full} quotas of resource group 'class' were changed already; put some back to the file",
        )
        assert sets("tina", "u1").status_code == 200
        assert sets("root", "another").status_code == 200
