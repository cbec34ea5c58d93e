"""The service's objects and the page's words, from worlds built here."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from fgpu_scheduler import (
    Device,
    EndCause,
    Node,
    NodeState,
    Placement,
    Policy,
    Quota,
    QuotaScope,
    Refusal,
    Request,
    RequestForecast,
    Session,
    SessionState,
    Share,
    Snapshot,
    WaitReason,
    forecast,
)
from fgpu_scheduler.core.forecast import Ahead
from fgpu_scheduler.core.reclaim import AllRules, Rules
from fgpuspawner.images.pull_state import Phase, Progress, PullState
from fgpuspawner.isolation.choice import Chosen, read_choices
from fgpuspawner.service import figures, rows, view
from fgpuspawner.service import page as words
from fgpuspawner.service.base import server_of
from fgpuspawner.service.figures import ordinal, percent
from fgpuspawner.service.page import Page, new_session_url
from fgpuspawner.service.reader import Changes
from fgpuspawner.service.rows import position_words
from fgpuspawner.service.stream import MAX_BEHIND, Listener
from fgpuspawner.service.view import Amounts, Site, Viewer, World

S = SessionState
ALICE = Viewer("alice", groups=("default",))
BOB = Viewer("bob", groups=("default", "class"))
ADMIN = Viewer("root", admin=True, groups=("default",))
SITE = Site("/", {"python": "Python 3.11"})


def gpu(node: str, index: int = 0, *, milli: int = 2000, simulated: bool = True) -> Device:
    return Device(f"GPU-{node}-{index}", node, index, "Model", 8192, milli, simulated)


def node(
    name: str = "n1", group: str = "default", *devices: Device, state: NodeState = NodeState.READY
) -> Node:
    return Node(name, group, 8000, 16384, devices or (gpu(name),), state)


def asked(user: str, server: str, milli: int, group: str = "default") -> Request:
    return Request(user, server, "python", group, milli, cpu_milli=1500, memory_mib=1024)


class Build:
    """A world, session by session."""

    def __init__(self, *nodes: Node) -> None:
        self.nodes = nodes or (node(),)
        self.sessions: list[Session] = []

    def running(
        self, user: str, milli: int, *, server: str = "", at: str = "n1", state: S = S.RUNNING
    ) -> Build:
        where = next(n for n in self.nodes if n.id == at)
        share = Share.of(where.devices[0], milli)
        number = len(self.sessions) + 1
        request = asked(user, server, milli, where.resource_group)
        self.sessions.append(
            Session(number, request, state, 100, placement=Placement(at, (share,)), started_at_s=110)
        )
        return self

    def pending(
        self, user: str, milli: int, *, server: str = "", group: str = "default", held: bool = False
    ) -> Build:
        number = len(self.sessions) + 1
        self.sessions.append(
            Session(number, asked(user, server, milli, group), S.PENDING, 200 + number, held=held)
        )
        return self

    def world(self, *, typical_length_s: int | None = None) -> World:
        snapshot = Snapshot(1000, 7, self.nodes, tuple(self.sessions))
        found = forecast(snapshot, Policy(), typical_length_s=typical_length_s)
        return World(snapshot, {f.session_id: f for f in found}, {"default": 500})


def shown(world: World, viewer: Viewer, *, group: str | None = None, everybody: bool = False) -> Page:
    live = view.live_sessions(world, viewer, everybody=everybody)
    return words.page(
        sessions=view.sessions_object(live, world, viewer, SITE)["sessions"],
        ended=[],
        capacity=view.capacity_object(world, viewer, fgpu_step_milli=100),
        group=group,
        viewer=viewer,
        everybody=everybody,
        base_url="/",
        read_at_s=1000,
    )


# --- Capacity and bars ---


def test_bars_are_mine_of_mine_and_allocatable_in_the_group_and_overall() -> None:
    world = Build(node(), node("n2", "class")).running("bob", 500).running("alice", 1000).world()
    upper = [g.upper for g in shown(world, BOB, group="default").gauges]
    lower = [g.lower for g in shown(world, BOB, group="default").gauges]
    assert [(b.text, b.percent) for b in upper] == [
        ("0.5 of 1 fGPU", "50.0"),
        ("1.5 of 6.5 cores", "23.0"),
        ("1 of 15 GiB", "6.6"),
    ]
    assert [(b.text, b.percent) for b in lower] == [
        ("0.5 of 3 fGPU", "16.6"),
        ("1.5 of 14.5 cores", "10.3"),
        ("1 of 31 GiB", "3.2"),
    ]
    assert [g.everybody for g in shown(world, BOB, group="default").gauges] == [
        "1.5 of 2 fGPU",
        "3 of 8 cores",
        "2 of 16 GiB",
    ]


def test_bars_rise_by_the_exact_amount_and_fall_back_after_the_end() -> None:
    before = Build().running("alice", 300).world()
    during = (
        Build()
        .running("alice", 300)
        .running("alice", 300, server="b")
        .running("alice", 300, server="c")
        .world()
    )
    assert view.mine_in(before, ALICE, "default") == Amounts(300, 1500, 1024)
    assert view.mine_in(during, ALICE, "default").as_json()["fgpu"] == "0.9"
    assert view.allocatable_in(during, ALICE, "default").as_json()["fgpu"] == "1.1"
    assert view.used_of(during, "default") == Amounts(900, 4500, 3072)
    assert view.used_of(before, "default") == Amounts(300, 1500, 1024)


def test_what_waits_or_has_ended_holds_nothing() -> None:
    world = Build().pending("alice", 1000).running("alice", 500, server="b", state=S.TERMINATED).world()
    assert view.mine_in(world, ALICE, "default") == Amounts()
    ending = Build().running("alice", 500, state=S.TERMINATING).world()
    assert view.mine_in(ending, ALICE, "default").fgpu_milli == 500


def test_no_more_is_allocatable_than_ones_quotas_leave() -> None:
    world = Build(node(), node("n2", "class")).running("bob", 500).running("alice", 300).world()
    quotas = (
        Quota(QuotaScope.USER, "*", max_fgpu_milli=2500),
        Quota(QuotaScope.USER, "bob", "default", max_fgpu_milli=1500),
        Quota(QuotaScope.GROUP, "ml101", "class", max_sessions=0),
    )
    limited = replace(world, snapshot=replace(world.snapshot, quotas=quotas))
    assert view.allocatable_in(limited, BOB, "default").fgpu_milli == 1000
    assert view.allocatable_in(limited, BOB, "class").fgpu_milli == 2000
    # Both together are still not more than the quota of all groups.
    assert view.capacity_object(limited, BOB, fgpu_step_milli=100)["allocatable_overall"]["fgpu"] == "2"
    member = replace(BOB, hub_groups=("ml101",))
    assert view.allocatable_in(limited, member, "class").fgpu_milli == 0


def test_nothing_is_allocatable_where_nothing_may_or_can_start() -> None:
    world = Build(node(state=NodeState.CORDONED), node("n2", "class")).world()
    assert view.allocatable_in(world, ALICE, "default") == Amounts()
    assert view.allocatable_in(world, ALICE, "class") == Amounts()
    assert view.allocatable_in(world, BOB, "class") == Amounts(2000, 8000, 16384)
    assert view.total_of(world, "default") == Amounts(2000, 8000, 16384)


def test_a_node_that_was_made_smaller_than_what_runs_never_gives_negative_amounts() -> None:
    big = Build(node("n1", "default", gpu("n1", milli=2000))).running("alice", 1500)
    small = Build(Node("n1", "default", 1000, 512, (gpu("n1", milli=1000),)))
    small.sessions = big.sessions
    world = small.world()
    assert view.allocatable_in(world, ALICE, "default") == Amounts(0, 0, 0)
    assert view.used_of(world, "default") == Amounts(1500, 1500, 1024)
    assert shown(world, ALICE).gauges[0].upper.percent == "100.0"


def test_a_gpu_shared_by_as_many_as_may_share_it_has_nothing_to_give() -> None:
    build = Build()
    for number in range(20):
        build.running("bob", 10, server=str(number))
    assert view.allocatable_in(build.world(), ALICE, "default").fgpu_milli == 0


def test_an_administrator_sees_every_group_and_a_user_their_own() -> None:
    world = Build(node(), node("n2", "class")).world()
    names = [g["name"] for g in view.capacity_object(world, ADMIN, fgpu_step_milli=100)["groups"]]
    assert names == ["default", "class"]
    assert [g["name"] for g in view.capacity_object(world, ALICE, fgpu_step_milli=100)["groups"]] == [
        "default"
    ]
    assert view.capacity_object(world, ADMIN, fgpu_step_milli=100)["allocatable_overall"]["fgpu"] == "2"


def test_a_session_in_a_group_that_its_owner_lost_is_still_counted() -> None:
    world = Build(node(), node("n2", "class")).running("alice", 500, at="n2").world()
    found = view.capacity_object(world, ALICE, fgpu_step_milli=100)
    assert [g["name"] for g in found["groups"]] == ["default", "class"]
    assert found["mine_overall"]["fgpu"] == "0.5"
    assert found["groups"][1]["allocatable"]["fgpu"] == "0"


def test_a_bar_without_anything_is_empty_and_not_an_error() -> None:
    assert percent(0, 0) == "0"
    assert percent(1, 3) == "33.3"
    assert percent(2, 2) == "100.0"
    assert shown(Build().world(), Viewer("eve")).gauges == ()


# --- Who sees what ---


def test_an_ordinary_user_never_gets_names_or_ids_of_others() -> None:
    world = Build().running("alice", 500).running("bob", 500).pending("bob", 2000, server="x").world()
    queue = view.queue_object("default", world, ALICE)
    assert [(e["mine"], e["id"], e["user"]) for e in queue["entries"]] == [(False, None, None)]
    capacity = view.capacity_object(world, ALICE, fgpu_step_milli=100)
    assert capacity["groups"][0]["devices"][0]["shares"] == [
        {"fgpu": "0.5", "mine": True, "session_id": 1},
        {"fgpu": "0.5", "mine": False, "session_id": None},
    ]
    assert "bob" not in str((queue, capacity))
    assert [e["user"] for e in view.queue_object("default", world, ADMIN)["entries"]] == ["bob"]


def test_everybodys_sessions_are_for_administrators() -> None:
    world = Build().running("alice", 500).running("bob", 500).world()
    assert [s.id for s in view.live_sessions(world, ALICE, everybody=True)] == [1]
    assert [s.id for s in view.live_sessions(world, ADMIN, everybody=True)] == [1, 2]
    assert view.live_sessions(world, ADMIN, everybody=False) == ()


def test_another_service_owns_no_session() -> None:
    world = Build().running("alice", 500).world()
    assert view.live_sessions(world, Viewer(None), everybody=False) == ()
    assert view.mine_in(world, Viewer(None, admin=True), "default") == Amounts()


@pytest.mark.parametrize(
    ("scopes", "server"),
    [
        (["access:servers!server=alice/", "read:servers!server=alice/"], ""),
        (["access:servers!server=alice/gpu-1"], "gpu-1"),
        (["access:servers!server=alice/with%20space"], "with space"),
        (["access:servers!user=alice"], None),
        (["access:servers!user=alice", "access:servers!server=bob/x"], None),
        (["access:servers!server=bob/x"], None),
        (["access:servers"], None),
        ([], None),
    ],
)
def test_the_calling_server_is_told_by_the_one_server_that_its_token_opens(
    scopes: list[str], server: str | None
) -> None:
    assert server_of("alice", scopes) == server


# --- Sessions ---


def test_a_session_object_has_exactly_the_documented_fields() -> None:
    world = Build().running("alice", 500, server="gpu-1").world()
    found = view.session_object(world.snapshot.sessions[0], world, ALICE, SITE)
    assert found == {
        "id": 1,
        "user": "alice",
        "server_name": "gpu-1",
        "display_name": "gpu-1",
        "state": "RUNNING",
        "image": "python",
        "image_name": "Python 3.11",
        "resource_group": "default",
        "amount": "0.5 fGPU",
        "fgpu": "0.5",
        "gpu_model": None,
        "cpu": "1.5",
        "memory_mib": 1024,
        "gpu_memory_mib": 2048,
        "compute_percent": 25,
        "node": "n1",
        "gpus": [
            {
                "uuid": "GPU-n1-0",
                "model": "Model",
                "fgpu": "0.5",
                "memory_mib": 2048,
                "compute_percent": 25,
                "simulated": True,
            }
        ],
        "wait_reason": None,
        "wait_text": None,
        "position": None,
        "ahead": None,
        "expected_start_at_s": None,
        "forecast_basis": None,
        "waits_for": None,
        "pull": None,
        "submitted_at_s": 100,
        "started_at_s": 110,
        "time_limit_s": None,
        "priority": 0,
        "ends_at_s": None,
        "ends_cause": None,
        "warning": None,
        "can_keep": False,
        "saving": None,
        "can_save": False,
        "ended_at_s": None,
        "end_cause": None,
        "message": None,
        "url": "/user/alice/gpu-1/",
        "pending_url": "/hub/spawn-pending/alice/gpu-1",
        "meter": None,
        "mine": True,
        "simulated": True,
    }


def test_positions_count_from_one_in_each_group() -> None:
    world = (
        Build(node(), node("n2", "class"))
        .running("bob", 2000)
        .running("bob", 2000, server="c", at="n2")
        .pending("alice", 500)
        .pending("bob", 500, server="d", group="class")
        .pending("alice", 500, server="e")
        .world(typical_length_s=600)
    )
    found = {s.id: view.session_object(s, world, ADMIN, SITE) for s in world.snapshot.sessions}
    assert [(found[i]["position"], found[i]["ahead"]) for i in (3, 4, 5)] == [(1, 0), (1, 0), (2, 1)]
    assert found[3]["expected_start_at_s"] is not None
    assert found[3]["forecast_basis"] == "typical length of your group's sessions"
    assert view.queue_object("class", world, ADMIN)["length"] == 1


def test_who_has_to_end_first_is_named_only_to_those_who_may_know() -> None:
    world = (
        Build(node(), node("n2"))
        .running("bob", 1500)
        .running("alice", 500, server="mine")
        .running("carol", 2000, at="n2")
        .pending("alice", 1500, server="next")
        .world(typical_length_s=600)
    )

    def told(viewer: Viewer) -> tuple[object, ...]:
        found = view.session_object(world.snapshot.sessions[3], world, viewer, SITE)["waits_for"]
        return found["text"], found["count"], found["fgpu"], [s["user"] for s in found["sessions"]]

    first = "2 sessions that hold 2 fGPU have to end first"
    assert told(ALICE) == (f"{first} (among them your mine)", 2, "2", ["alice"])
    assert told(ADMIN) == (f"{first} (default server of bob, mine of alice)", 2, "2", ["bob", "alice"])


@pytest.mark.parametrize(
    ("time_limit_s", "lifetime_s", "quota_s", "ends_at_s"),
    [
        (None, None, None, None),
        (3600, None, None, 110 + 3600),
        (3600, 1800, None, 110 + 1800),
        (3600, 1800, 600, 110 + 600),
        (None, None, 600, 110 + 600),
    ],
)
def test_a_running_session_ends_at_the_shortest_of_its_limits(
    time_limit_s: int | None, lifetime_s: int | None, quota_s: int | None, ends_at_s: int | None
) -> None:
    world = Build().running("alice", 500).world()
    (session,) = world.snapshot.sessions
    session = replace(session, request=replace(session.request, time_limit_s=time_limit_s))
    quotas = (Quota(QuotaScope.USER, "*", max_lifetime_s=quota_s),)
    world = replace(
        world,
        snapshot=replace(world.snapshot, quotas=quotas),
        rules=AllRules(Rules(max_lifetime_s=lifetime_s)),
    )
    told = view.session_object(session, world, ALICE, SITE)
    assert (told["ends_at_s"], told["ends_cause"]) == (ends_at_s, "TIME_LIMIT" if ends_at_s else None)


def test_over_a_quota_nobody_elses_session_is_ahead() -> None:
    build = (
        Build(node(), node("n2")).running("bob", 2000).running("alice", 500, at="n2").pending("alice", 2000)
    )
    quotas = (Quota(QuotaScope.USER, "*", max_fgpu_milli=2000),)
    snapshot = replace(build.world().snapshot, quotas=quotas)
    (found,) = forecast(snapshot, Policy(), typical_length_s=600)
    assert (found.reason, found.ahead) == (WaitReason.QUOTA, None)
    assert found.expected_start_at_s is not None


def test_a_forecast_offers_what_would_start_soonest_and_says_who_is_ahead() -> None:
    world = Build().running("bob", 2000).world()
    found = RequestForecast(
        0,
        1,
        900,
        "time limits",
        "why",
        None,
        reason=WaitReason.RESOURCES,
        ahead=Ahead(1, 2000, (1,)),
        soonest_milli=300,
        soonest_at_s=700,
    )
    told = view.forecast_object(found, world, ALICE, count=1, simulated=False)
    assert (told["wait_reason"], told["soonest"], told["soonest_at_s"]) == ("RESOURCES", "0.3", 700)
    assert told["waits_for"] == {
        "count": 1,
        "fgpu": "2",
        "sessions": [],
        "text": "1 session that holds 2 fGPU has to end first",
    }
    refused = view.refused_object([], count=1, simulated=False)
    assert refused.keys() == told.keys()


def test_a_held_request_says_that_the_hub_restarted() -> None:
    world = Build().pending("alice", 500, held=True).world()
    found = view.session_object(world.snapshot.sessions[0], world, ALICE, SITE)
    assert (found["wait_reason"], "restarted" in found["wait_text"]) == (WaitReason.HELD, True)


def test_addresses_are_escaped_as_the_hub_does_and_below_its_base_url() -> None:
    world = Build().pending("a b/c@x", 500, server="ü?").world()
    found = view.session_object(world.snapshot.sessions[0], world, ALICE, Site("/hub-one/"))
    assert found["url"] == "/hub-one/user/a%20b%2Fc@x/%C3%BC%3F/"
    assert found["pending_url"] == "/hub-one/hub/spawn-pending/a%20b%2Fc@x/%C3%BC%3F"


def test_simulated_is_told_of_the_gpus_that_a_session_speaks_of() -> None:
    real, fake = node("n1", "default", gpu("n1", simulated=False)), node("n2", "class")
    world = Build(real, fake).running("alice", 500).running("bob", 500, at="n2").world()
    first, second = (view.session_object(s, world, ADMIN, SITE) for s in world.snapshot.sessions)
    assert (first["simulated"], second["simulated"]) == (False, True)
    assert view.me_object(ALICE, world)["simulated"] is False
    assert view.capacity_object(world, ADMIN, fgpu_step_milli=100)["simulated"] is True
    gone = Build(real)
    share = Share("GPU-simulated-old-0", 500, 2048, 25)
    gone.sessions = [
        Session(1, asked("alice", "", 500), S.TERMINATED, 1, placement=Placement("old", (share,)))
    ]
    shown_gone = view.session_object(gone.sessions[0], gone.world(), ALICE, SITE)
    assert (shown_gone["simulated"], shown_gone["gpus"][0]["model"]) == (True, None)


# --- Isolation ---


def test_only_administrators_are_told_of_each_machine() -> None:
    chosen = (Chosen("n1", "interposer", "libfgpu holds memory and compute"),)
    world = replace(Build().world(), isolation=chosen)
    (told,) = view.capacity_object(world, ADMIN, fgpu_step_milli=100)["nodes"]
    assert told == {
        "name": "n1",
        "group": "default",
        "state": "READY",
        "isolation": "interposer",
        "reason": "libfgpu holds memory and compute",
    }
    assert "nodes" not in view.capacity_object(world, ALICE, fgpu_step_milli=100)
    (own,) = shown(world, ADMIN).machines
    assert (own.name, own.words) == ("n1", "takes sessions")
    assert own.isolation == "isolation interposer: libfgpu holds memory and compute"
    assert shown(world, ALICE).machines == ()


@pytest.mark.parametrize(
    ("states", "words"),
    [
        (["READY", "READY"], ""),
        (["READY", "CORDONED"], ""),
        (
            ["LOST"],
            "The machine of this group does not answer. What runs there keeps its share; what waits starts elsewhere, or "
            "when it is back.",
        ),
        (
            ["READY", "LOST", "READY"],
            "1 of the 3 machines of this group does not answer. What runs there keeps its share; what waits starts "
            "elsewhere, or when it is back.",
        ),
        (
            ["GONE", "LOST", "READY"],
            "2 of the 3 machines of this group do not answer. What runs there keeps its share; what waits starts "
            "elsewhere, or when it is back.",
        ),
    ],
)
def test_everybody_is_told_of_machines_that_do_not_answer(states: list[str], words: str) -> None:
    nodes = [replace(node(f"n{i}"), state=NodeState(state)) for i, state in enumerate(states)]
    world = Build(*nodes).world()
    assert shown(world, ALICE).lost == words
    (group,) = view.capacity_object(world, ALICE, fgpu_step_milli=100)["groups"]
    assert group["nodes_lost"] == sum(state in ("LOST", "GONE") for state in states)


@pytest.mark.parametrize("text", [None, "", "[]", "{", '{"n1": {}}', '{"n1": "mig"}'])
def test_where_the_hub_has_not_said_it_nothing_is_told(text: str | None, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "isolation.json").write_text(text)
    assert read_choices(tmp_path) == ()


def test_a_running_sessions_warning_is_shown_where_it_stands() -> None:
    build = Build().running("alice", 500)
    build.sessions = [replace(build.sessions[0], message="this session holds 3000 MiB")]
    assert shown(build.world(), ALICE).rows[0].why == "this session holds 3000 MiB"


# --- Forecasts ---


@pytest.mark.parametrize(
    ("count", "startable", "text"),
    [
        (1, 1, "starts now"),
        (3, 3, "all 3 start now"),
        (1, 0, "waits: why"),
        (3, 2, "2 start now, 1 waits: after those, why"),
        (3, 1, "1 starts now, 2 wait: after those, why"),
        (3, 0, "all 3 wait: why"),
    ],
)
def test_a_forecast_is_one_sentence(count: int, startable: int, text: str) -> None:
    found = RequestForecast(startable, None if count == startable else 2, None, "basis", "why", 300)
    told = view.forecast_object(found, Build().world(), ALICE, count=count, simulated=False)
    assert (told["text"], told["starts_now"], told["largest_now"]) == (text, count == startable, "0.3")


def test_a_refused_request_carries_every_reason() -> None:
    reasons = [
        Refusal("fgpu", "above_cap", "fgpu: too much", "2", "2"),
        Refusal("cpu", "too_small", "cpu: none"),
    ]
    told = view.refused_object(reasons, count=2, simulated=True)
    assert told["text"] == "fgpu: too much; cpu: none"
    assert told["refusals"][1] == {
        "field": "cpu",
        "code": "too_small",
        "message": "cpu: none",
        "limit": None,
        "nearest": None,
    }


# --- The page's words ---


def test_every_state_and_every_end_has_words() -> None:
    assert set(rows.STATE_WORDS) == {s.value for s in S}
    assert set(rows.END_WORDS) == {c.value for c in EndCause}


def test_a_place_in_the_queue_is_said_in_words() -> None:
    assert position_words(1, 0) == "1st in the queue, nobody is ahead"
    assert position_words(2, 1) == "2nd in the queue, 1 is ahead"
    assert position_words(13, 12) == "13th in the queue, 12 are ahead"
    assert [ordinal(n) for n in (3, 4, 11, 21, 112)] == ["3rd", "4th", "11th", "21st", "112th"]


def test_memory_is_shown_exactly() -> None:
    assert [figures.mib(n) for n in (128, 512, 2048, 1152, 16160)] == [
        "128 MiB",
        "0.5 GiB",
        "2 GiB",
        "1.125 GiB",
        "16160 MiB",
    ]


def test_a_new_session_takes_the_first_server_that_is_free() -> None:
    def url(*servers: str) -> str | None:
        build = Build()
        for server in servers:
            build.pending("alice", 100, server=server)
        world = build.world()
        live = view.sessions_object(world.snapshot.sessions, world, ALICE, SITE)["sessions"]
        return new_session_url(live, ALICE, "/")

    assert url() == "/hub/spawn"
    assert url("gpu-1") == "/hub/spawn"
    assert url("") == "/hub/spawn/alice/gpu-1"
    assert url("", "gpu-1", "gpu-3") == "/hub/spawn/alice/gpu-2"
    assert new_session_url([], Viewer(None), "/") is None


def test_a_row_offers_what_can_be_done_now() -> None:
    build = Build(node("n1", "default", gpu("n1", milli=9000)))
    for number, state in enumerate((S.RUNNING, S.SCHEDULED, S.PULLING, S.TERMINATING)):
        build.running("alice", 100, server=f"s{number}", state=state)
    build.running("bob", 100).pending("alice", 9000, server="p")
    rows = {r.name: r for r in shown(build.world(), ADMIN, everybody=True).rows}
    assert [(r.open_url, r.wait_url) for r in rows.values()] == [(None, None)] * 6
    rows = {r.name: r for r in shown(build.world(), ALICE).rows}
    assert [(n, bool(r.open_url), bool(r.wait_url), r.power) for n, r in rows.items()] == [
        ("s0", True, False, "End"),
        ("s1", False, True, "End"),
        ("s2", False, True, "End"),
        ("s3", False, False, None),
        ("p", False, True, "Cancel"),
    ]
    assert rows["p"].position == "1st in the queue, nobody is ahead"
    assert rows["p"].unexpected == "unknown: too few sessions have ended to tell"


def test_how_far_its_image_is_is_told_until_a_session_runs() -> None:
    build = Build(node("n1", "default", gpu("n1", milli=500)))
    world = build.running("alice", 500, server="up").pending("alice", 500, server="waits").world()
    state = PullState(Phase.FETCHING, Progress(1, 2, 45 << 20, 200 << 20, 12))
    world = replace(world, pulls={1: state, 2: state})
    text = "fetching the image: 1 of 2 layers, 45 of 200 MiB, about 12 s left"
    up, waits = view.sessions_object(world.snapshot.sessions, world, ALICE, SITE)["sessions"]
    assert up["pull"] is None
    assert waits["pull"] == {
        "phase": "FETCHING",
        "text": text,
        "layers_done": 1,
        "layers": 2,
        "bytes_done": 45 << 20,
        "bytes_total": 200 << 20,
        "seconds_left": 12,
        "attempt": 1,
        "trouble": None,
    }
    assert [row.pull for row in shown(world, ALICE).rows] == ["", text]


# --- Event streams ---


async def test_a_listener_that_is_too_far_behind_gets_what_it_has_and_then_the_end() -> None:
    listener = Listener("alice")
    for number in range(MAX_BEHIND + 1):
        listener.tell(Changes(number, ()))
    told = [await listener.next(1) for _ in range(MAX_BEHIND)]
    assert [changes.last_event_id for changes in told if changes] == list(range(MAX_BEHIND))
    assert await listener.next(1) is None
