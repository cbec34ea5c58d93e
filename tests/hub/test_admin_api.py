"""The administrators' part of the API and its pages, with a real Hub: who may, what is written, and the audit log."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

import pytest
from test_service import MARKUP, ServiceHub, end, now_s, place, run, submit

from fgpu_scheduler import (
    Audit,
    Device,
    EndCause,
    Node,
    NodeState,
    Policy,
    Quota,
    QuotaEdits,
    QuotaScope,
    SessionState,
    plan,
)
from hubprocess import module_world, until

JSON = dict[str, Any]
S = SessionState


class World:
    """A Hub with one quota in its file. Of one GPU with 2 fGPU alice holds 0.5 and bob 1.5; both wait for 1 more."""

    def __init__(self, folder: Path) -> None:
        self.hub = ServiceHub(folder, quotas=[{"user": "*", "max_fgpu": 3}])
        self.store = self.hub.writable
        self.store.set_quotas(self.hub.fgpu.quotas_given(), now_s=now_s())
        gpu = Device("GPU-simulated-local-0", "local", 0, "Simulated GPU", 8192, 2000, simulated=True)
        old = Device("GPU-simulated-past-0", "past", 0, "Simulated GPU", 8192, 2000, simulated=True)
        nodes = [Node("local", "default", 8000, 16384, (gpu,)), Node("past", "old", 8000, 16384, (old,))]
        self.store.set_nodes(nodes, now_s=now_s())
        self.alice_runs = run(self.store, "alice", "", 500)
        self.bob_runs = run(self.store, "bob", "", 1500)
        self.alice_waits = submit(self.store, "alice", "a2", 1000)
        self.bob_waits = submit(self.store, "bob", "b2", 1000)
        place(self.store)
        self.hub.start()
        self.alice = self.hub.add_user("alice")
        self.hub.add_user("bob")
        self.admin = self.hub.add_user("admin")
        # Beyond its health: the first reading of everything takes longest.
        until(
            lambda: self.hub.ask("GET", "api/v1/capacity", self.admin).status_code == 200,
            what="the service reads the store",
        )

    def ask(self, method: str, path: str, body: Any = None, *, status: int = 200, token: str = "") -> JSON:
        answer = self.hub.ask(method, f"api/v1/{path}", token or self.admin, json=body)
        assert answer.status_code == status, answer.text
        return dict(answer.json())

    def get(self, path: str) -> JSON:
        return dict(self.hub.get(path, self.admin))

    def last(self) -> tuple[str, str, str, str]:
        (line,) = self.get("admin/audit?limit=1")["lines"]
        return line["actor"], line["action"], line["target"], line["details"]


world = module_world(World, "admin")


# --- Who may ---


def test_overview_has_use_queues_and_problems(world: World) -> None:
    found = world.get("admin/overview")
    assert found["use"]["gpus"] == 2
    assert found["use"]["day"]["starts"] == 2
    assert [(q["group"], q["length"]) for q in found["queues"]] == [("default", 2), ("old", 0)]
    world.store.set_node_state("past", NodeState.LOST, now_s=now_s())
    try:
        (problem,) = world.get("admin/overview")["problems"]
        assert (problem["text"], problem["link"]) == (
            "Machine past does not answer; what it runs keeps its shares",
            "admin/nodes#node-past",
        )
        page = world.hub.page(world.hub.browser("admin"), "admin/overview")
        (link,) = page.select(".problems a")
        assert link["href"] == "/services/fgpu/admin/nodes#node-past"
    finally:
        world.store.set_node_state("past", NodeState.READY, now_s=now_s())


# --- The queue ---


def test_another_priority_makes_a_waiting_session_first_and_is_refused_beyond_its_bounds(
    world: World,
) -> None:
    where = f"admin/sessions/{world.bob_waits.id}/priority"
    try:
        entry = world.ask("PUT", where, {"priority": 7})["session"]
        assert (entry["position"], entry["priority"], entry["asked_priority"]) == (1, 7, 0)
        assert world.last() == ("admin", "session.priority", f"session {world.bob_waits.id} of bob", "0 -> 7")
        for wrong in (-1, 1001, "many", None, 1.5, True):
            found = world.ask("PUT", where, {"priority": wrong}, status=400)
            assert found["error"]["field"] == "priority"
            assert "0 to 1000" in found["error"]["message"]
        assert world.ask("PUT", where, {"prio": 1}, status=400)["error"]["field"] == "prio"
        running = f"admin/sessions/{world.alice_runs.id}/priority"
        assert world.ask("PUT", running, {"priority": 1}, status=409)["error"]["code"] == "not_waiting"
        world.ask("PUT", "admin/sessions/99999/priority", {"priority": 1}, status=404)
    finally:
        world.ask("PUT", where, {"priority": 0})


# --- Sessions ---


def test_the_owner_of_an_ended_session_reads_who_ended_it_and_why(world: World) -> None:
    extra = submit(world.store, "alice", "told", 100)
    place(world.store)
    try:
        too_long = world.ask("DELETE", f"sessions/{extra.id}", {"message": "x" * 501}, status=400)
        assert too_long["error"]["field"] == "message"
        # The Hub knows of no such server, as its scheduler is not there: what was said is forgotten again.
        world.ask("DELETE", f"sessions/{extra.id}", {"message": f"repair {MARKUP}"}, status=409)
        world.store.move(extra.id, S.CANCELLED, now_s=now_s(), cause=EndCause.USER)
        assert world.hub.get(f"sessions/{extra.id}", world.alice)["session"]["message"] is None
    finally:
        end(world.store, extra)


# --- Nodes ---


def test_a_node_is_cordoned_and_uncordoned_and_says_who_is_on_it(world: World) -> None:
    node, _ = world.get("admin/nodes")["nodes"]
    (device,) = node["devices"]
    assert [(s["user"], s["fgpu"]) for s in device["sessions"]] == [("alice", "0.5"), ("bob", "1.5")]
    assert (node["state"], node["actions"], node["can_drain"]) == ("READY", ["cordon"], True)
    try:
        world.ask("POST", "admin/nodes/local", {"action": "cordon"})
        assert world.last() == ("admin", "node.cordon", "node local", "READY -> CORDONED")
        again = world.ask("POST", "admin/nodes/local", {"action": "cordon"}, status=409)
        assert again["error"]["code"] == "node_refused"
        assert world.store.snapshot(now_s()).nodes[0].state is NodeState.CORDONED
    finally:
        world.store.set_node_state("local", NodeState.READY, now_s=now_s())
    assert (
        world.ask("POST", "admin/nodes/none", {"action": "cordon"}, status=404)["error"]["code"]
        == "no_such_node"
    )
    assert (
        world.ask("POST", "admin/nodes/local", {"action": "burn"}, status=400)["error"]["field"] == "action"
    )
    assert world.ask("POST", "admin/nodes/local", {"action": "gone"}, status=409)


def test_one_gpu_is_cordoned_with_a_reason_and_shown_to_everybody_without_it(world: World) -> None:
    device = world.get("admin/nodes")["nodes"][0]["devices"][0]
    asked = {"action": "cordon", "gpu": device["uuid"], "message": "<b>the fan</b>"}
    try:
        assert world.ask("POST", "admin/nodes/local", asked)["text"] == "takes no new sessions"
        said = f"{device['uuid']}: <b>the fan</b>"
        assert world.last() == ("admin", "gpu.cordon", f"GPU {device['index']} of node local", said)
        assert world.ask("POST", "admin/nodes/local", asked, status=409)["error"]["field"] == "gpu"
        shown = world.get("admin/nodes")["nodes"][0]["devices"][0]
        assert (shown["cordoned"], shown["cordon_reason"]) == (True, "<b>the fan</b>")
        own = dict(world.hub.get("capacity", world.alice))
        assert own["groups"][0]["devices"][0]["cordoned"] is True
        assert "the fan" not in str(own)
        page = str(world.hub.page(world.hub.browser("admin"), "admin/nodes"))
        assert "&lt;b&gt;the fan" in page
    finally:
        world.store.set_cordon(device["uuid"], None, now_s=now_s())
    for wrong in ({**asked, "gpu": 7}, {**asked, "action": "drain"}):
        assert world.ask("POST", "admin/nodes/local", wrong, status=400)
    unknown = world.ask("POST", "admin/nodes/local", {**asked, "gpu": "GPU-none"}, status=409)
    assert unknown["error"]["code"] == "node_refused"


# --- Quotas ---


def test_a_quota_is_set_over_the_files_counted_and_put_back(world: World) -> None:
    (own,) = world.get("admin/quotas")["quotas"]
    assert (own["for"], own["source"], own["limits"]) == ({"user": "*"}, "file", {"max_fgpu": "3"})
    assert own["held"][0] == {"name": "bob", "fgpu": "1.5", "sessions": 1, "waiting": 1, "full": False}
    try:
        found = world.ask("PUT", "admin/quotas", {"user": "*", "max_fgpu": "1.5", "max_sessions": 2})["quota"]
        assert (found["source"], found["file"], found["changed_by"]) == ("edited", "3 fGPU", "admin")
        assert found["held"][0]["full"] is True
        assert world.store.snapshot(now_s()).quotas[0].max_fgpu_milli == 1500
        assert world.last() == ("admin", "quota.set", "each user", "1.5 fGPU, 2 sessions")
        assert world.ask("DELETE", "admin/quotas?user=*")["quota"]["in_force"] is False
        assert world.store.snapshot(now_s()).quotas == ()
    finally:
        world.ask("DELETE", "admin/quotas?user=*&back=1")
    assert world.get("admin/quotas")["quotas"] == [
        own | {"held": world.get("admin/quotas")["quotas"][0]["held"]}
    ]


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"user": "bob"}, "user"),
        ({"user": "bob", "hub_group": "lab", "max_sessions": 1}, "user"),
        ({"max_sessions": 1}, "user"),
        ({"user": "bob", "max_sessions": -1}, "max_sessions"),
        ({"user": "bob", "max_lifetime_s": 3}, "max_lifetime_s"),
        ({"user": "bob", "max_fgpu": "0.0001"}, "max_fgpu"),
        ({"user": "bob", "max_fgpu": 10**9}, "max_fgpu"),
        ({"user": "bob", "resource_group": "none", "max_sessions": 1}, "resource_group"),
        ({"user": "bob", "most": 1}, "most"),
    ],
)
def test_invalid_quota_is_refused_with_its_field(world: World, body: JSON, field: str | None) -> None:
    error = world.ask("PUT", "admin/quotas", body, status=400)["error"]
    assert error["field"] == field
    assert len(world.get("admin/quotas")["quotas"]) == 1


def test_quotas_page_is_paged(world: World) -> None:
    many = [Quota(QuotaScope.USER, f"user{n:03}", max_sessions=1) for n in range(205)]
    edits, how = (
        QuotaEdits(world.store),
        {"file": [Quota(QuotaScope.USER, "*", max_fgpu_milli=3000)], "by": "many", "now_s": 1},
    )
    browser = world.hub.browser("admin")
    try:
        edits.put_all(many, **how)
        first = world.hub.page(browser, "admin/quotas")
        assert len(first.select("main tbody tr")) == 200
        (more,) = [a["href"] for a in first.select("main a") if a.text == "More"]
        last = world.hub.page(browser, more.partition("/services/fgpu/")[2])
        assert [row.th.text for row in last.select("main tbody tr")][-1] == "user 'user204'"
        assert "201 to 206 of 206 quotas" in " ".join(last.text.split())
        world.hub.page(browser, "admin/quotas?start=9999")
    finally:
        edits.put_all([], without=many, **how)


# --- The banner ---


def test_the_latest_end_of_a_banner_can_be_shown_and_a_later_one_is_refused(world: World) -> None:
    world.ask("PUT", "admin/banner", {"text": "hello", "until_at_s": 253_402_300_799})
    assert "9999" in world.hub.ask("GET", "admin/banner", world.admin).text
    world.ask("PUT", "admin/banner", {"text": "hello", "until_at_s": 253_402_300_800}, status=400)
    world.ask("DELETE", "admin/banner")


def test_lone_surrogates_are_refused_in_stored_texts(world: World) -> None:
    half = "a \ud800 b"
    world.ask("PUT", "admin/banner", {"text": half}, status=400)
    world.ask("PUT", "admin/quotas", {"user": half, "max_sessions": 1}, status=400)
    world.ask("DELETE", f"sessions/{world.bob_runs.id}", {"message": half}, status=400)


def test_a_banner_is_on_every_page_and_in_me_as_text(world: World) -> None:
    text = f"Down at 3 {MARKUP} \u202e\"'"
    try:
        found = world.ask(
            "PUT", "admin/banner", {"text": text, "level": "warning", "until_at_s": now_s() + 600}
        )
        assert found["banner"]["set_by"] == "admin"
        told = world.hub.get("me", world.alice)["banner"]
        assert (told["text"], told["level"]) == (text, "warning")
        assert "set_by" not in told
        alice = world.hub.browser("alice")
        for path in ("", "private-images"):
            shown = world.hub.page(alice, path).select_one(".banner.is-warning")
            assert shown is not None
            assert text in shown.get_text()
            assert shown.find("img") is None
    finally:
        world.ask("DELETE", "admin/banner")
    assert world.hub.get("me", world.alice)["banner"] is None
    for body, field in (
        ({"text": " "}, "text"),
        ({"text": "x" * 501}, "text"),
        ({"text": "x", "level": "loud"}, "level"),
        ({"text": "x", "until_at_s": 5}, "until"),
        ({"text": "x", "until_at_s": "soon"}, "until_at_s"),
        ({"text": 5}, "text"),
    ):
        assert world.ask("PUT", "admin/banner", body, status=400)["error"]["field"] == field


# --- Usage ---


def test_usage_is_exact_for_known_sessions_as_json_and_csv(world: World) -> None:
    day = 1_600_000_000 - 1_600_000_000 % 86400
    for user, began_s in (("=zoe", day + 3600), ("yan", day + 82800)):
        ran = submit(world.store, user, "", 500, group="old", now_s=began_s - 60)
        world.store.commit(plan(world.store.snapshot(began_s), Policy()), now_s=began_s)
        world.store.move(ran.id, S.PREPARING, now_s=began_s)
        world.store.move(ran.id, S.RUNNING, now_s=began_s)
        world.store.move(ran.id, S.TERMINATING, now_s=began_s + 7000, cause=EndCause.USER)
        world.store.move(ran.id, S.TERMINATED, now_s=began_s + 7200)
    span = "from=2020-09-13&to=2020-09-14"
    found = world.get(f"admin/usage?{span}&by=user")
    line = {
        "sessions": 1,
        "starts": 1,
        "gpu_hours": 0.5,
        "fgpu_hours": 1.0,
        "wait_mean_s": 60,
        "wait_p95_s": 60,
    }
    assert found["lines"] == [{"name": "=zoe", **line}, {"name": "yan", **line}]
    assert found["total"] == {
        "name": "",
        **line,
        "sessions": 2,
        "starts": 2,
        "gpu_hours": 1.0,
        "fgpu_hours": 2.0,
    }
    assert found["complete_from"] is not None
    assert "older sessions were deleted" in world.hub.ask("GET", f"admin/usage?{span}", world.admin).text
    page = world.hub.ask("GET", "admin/usage?from=2020-09-01&to=2020-09-14", world.admin).text
    assert (">2020-09-13<" in page, ">2020-09-12<" in page, "12 days without use are not listed" in page) == (
        True,
        False,
        True,
    )
    assert world.get("admin/usage")["complete_from"] is None
    part = world.hub.ask("GET", "api/v1/history.csv?all=1&limit=1", world.admin)
    assert (len(part.text.splitlines()), part.links["next"]["url"].startswith("?all=1&limit=1&before=")) == (
        2,
        True,
    )
    rest = world.hub.ask("GET", f"api/v1/history.csv{part.links['next']['url']}", world.admin)
    names, one, other = *part.text.splitlines(), rest.text.splitlines()[1]
    assert one != other != names
    by_day = world.get(f"admin/usage?{span}&by=day")["lines"]
    assert [(d["name"], d["gpu_hours"], d["starts"]) for d in by_day] == [
        ("2020-09-13", 0.75, 2),
        ("2020-09-14", 0.25, 0),
    ]
    answer = world.hub.ask("GET", f"api/v1/admin/usage.csv?{span}&by=user", world.admin)
    assert "attachment" in answer.headers["Content-Disposition"]
    rows = list(csv.reader(io.StringIO(answer.text)))
    assert rows[0] == ["user", "sessions", "starts", "gpu_hours", "fgpu_hours", "wait_mean_s", "wait_p95_s"]
    assert rows[1][0] == "'=zoe", "no spreadsheet runs it"


@pytest.mark.parametrize(
    ("query", "field"),
    [
        ("by=nobody", "by"),
        ("from=yesterday", "from"),
        ("from=2020-01-01&to=2022-01-01", "from"),
        ("from=2020-01-02&to=2020-01-01", "from"),
        ("until=2020-01-01", "until"),
    ],
)
def test_invalid_report_is_refused_with_its_field(world: World, query: str, field: str) -> None:
    assert world.ask("GET", f"admin/usage?{query}", status=400)["error"]["field"] == field


# --- The audit log ---


def test_the_audit_log_is_read_by_pages_filtered_and_as_csv(world: World) -> None:
    audit = Audit(world.store)
    for n in range(3):
        audit.add(actor="eve", action="image.edit", target=f"image n{n}", details="=1+1", now_s=now_s())
    newest = world.get("admin/audit?actor=eve&limit=2")
    assert [line["target"] for line in newest["lines"]] == ["image n2", "image n1"]
    older = world.get(f"admin/audit?actor=eve&limit=2&before={newest['next']}")
    assert ([line["target"] for line in older["lines"]], older["next"]) == (["image n0"], None)
    assert world.get("admin/audit?action=image&text=N1")["lines"][0]["target"] == "image n1"
    for query, field in (
        ("limit=0", "limit"),
        ("limit=x", "limit"),
        ("before=-1", "before"),
        ("who=a", "who"),
    ):
        assert world.ask("GET", f"admin/audit?{query}", status=400)["error"]["field"] == field
    answer = world.hub.ask("GET", "api/v1/admin/audit.csv?actor=eve", world.admin)
    rows = list(csv.reader(io.StringIO(answer.text)))
    assert (len(rows), rows[1][rows[0].index("details")]) == (4, "'=1+1")
