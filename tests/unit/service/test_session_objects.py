"""The API's objects of sessions and queues, from worlds built here."""

from __future__ import annotations

from dataclasses import replace

import pytest
from simulator import lasting
from worlds import ADMIN, ALICE, SITE, Build, S, asked, gpu, node, shown

from fgpu_scheduler import (
    AllRules,
    EndCause,
    Placement,
    Policy,
    Quota,
    QuotaScope,
    Rules,
    Session,
    Share,
    WaitReason,
    forecast,
)
from fgpuspawner.images.pull_state import Phase, Progress, PullState
from fgpuspawner.service.api.capacity import capacity_object, queue_object
from fgpuspawner.service.api.me import me_object
from fgpuspawner.service.api.session_objects import session_object, sessions_object
from fgpuspawner.service.model import Site, Viewer
from fgpuspawner.service.objects import SessionMeter
from fgpuspawner.service.pages.session_rows import row


def test_exact_amount_session_shows_free_memory() -> None:
    built = Build().running("alice", 500, server="gpu-1").running("bob", 1000).world()
    snapshot = built.snapshot
    exact = replace(snapshot.sessions[0].request, fgpu_milli=0, gpu_memory_mib=2048, compute_percent=25)
    own = replace(snapshot.sessions[0], request=exact)
    world = replace(built, snapshot=snapshot.with_sessions([own, *snapshot.sessions[1:]]))
    found = session_object(own, world, ALICE, SITE)["resize"]
    assert (found["amounts"], found["most_memory_mib"]) == ([], 4096)


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
    found = {s.id: session_object(s, world, ADMIN, SITE) for s in world.snapshot.sessions}
    assert [(found[i]["position"], found[i]["ahead"]) for i in (3, 4, 5)] == [(1, 0), (1, 0), (2, 1)]
    assert found[3]["expected_start_at_s"] is not None
    assert found[3]["forecast_basis"] == "how long sessions usually run"
    assert queue_object("class", world, ADMIN)["length"] == 1


def test_parked_session_that_wants_its_gpu_has_a_position() -> None:
    build = Build().running("alice", 500, state=S.PARKED).running("bob", 2000)
    build.sessions[0] = replace(build.sessions[0], parked_at_s=900, wanted_at_s=950)
    world = build.world(typical_length_s=600)
    found = session_object(world.snapshot.sessions[0], world, ALICE, SITE)
    assert (found["position"], found["expected_start_at_s"] is not None) == (1, True)


def test_meter_of_a_session_that_does_not_run_is_empty() -> None:
    found = SessionMeter.of(None, every_s=10)
    assert (found.now, found.points, found.processes) == (None, [], [])


def test_sessions_ahead_are_named_only_to_allowed_viewers() -> None:
    world = (
        Build(node(), node("n2"))
        .running("bob", 1500)
        .running("alice", 500, server="mine")
        .running("carol", 2000, at="n2")
        .pending("alice", 2000, server="next")
        .world(typical_length_s=600)
    )

    def told(viewer: Viewer) -> tuple[object, ...]:
        found = session_object(world.snapshot.sessions[3], world, viewer, SITE)["waits_for"]
        return found["text"], found["count"], found["fgpu"], [s["user"] for s in found["sessions"]]

    first = "starts when 2 sessions end (2 fGPU: "
    assert told(ALICE) == (f"{first}your mine and others)", 2, "2", ["alice"])
    assert told(ADMIN) == (f"{first}Python 1 of bob, mine of alice)", 2, "2", ["bob", "alice"])


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
def test_running_session_ends_at_its_shortest_limit(
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
    told = session_object(session, world, ALICE, SITE)
    assert (told["ends_at_s"], told["ends_cause"]) == (ends_at_s, "TIME_LIMIT" if ends_at_s else None)


@pytest.mark.parametrize(
    ("rules", "from_s"),
    [
        (Rules(min_runtime_s=3600), None),
        (Rules(preempt=True), 110),
        (Rules(preempt=True, min_runtime_s=3600), 110 + 3600),
    ],
    ids=["off", "at once", "later"],
)
def test_preemptible_time_is_shown(rules: Rules, from_s: int | None) -> None:
    world = replace(Build().running("alice", 500).world(), rules=AllRules(rules))
    (session,) = world.snapshot.sessions
    told = session_object(session, world, ALICE, SITE)
    assert told["preemptible_from_s"] == from_s
    assert row(told).interrupted_from_s == (from_s if rules.min_runtime_s else None)
    warned = replace(session, ends_at_s=4000, ends_cause=EndCause.PREEMPTED)
    assert row(session_object(warned, world, ALICE, SITE)).interrupted_from_s is None


def test_quota_wait_names_no_session_of_others() -> None:
    build = (
        Build(node(), node("n2")).running("bob", 2000).running("alice", 500, at="n2").pending("alice", 2000)
    )
    quotas = (Quota(QuotaScope.USER, "*", max_fgpu_milli=2000),)
    snapshot = replace(build.world().snapshot, quotas=quotas)
    (found,) = forecast(snapshot, Policy(), lasting(600))
    assert (found.reason, found.ahead) == (WaitReason.QUOTA, None)
    assert found.expected_start_at_s is not None


def test_held_request_mentions_the_hub_restart() -> None:
    world = Build().pending("alice", 500, held=True).world()
    found = session_object(world.snapshot.sessions[0], world, ALICE, SITE)
    assert (found["wait_reason"], "restarted" in found["wait_text"]) == (WaitReason.HELD, True)


def test_urls_are_escaped_below_the_base_url() -> None:
    world = Build().pending("a b/c@x", 500, server="ü?").world()
    found = session_object(world.snapshot.sessions[0], world, ALICE, Site("/hub-one/"))
    assert found["url"] == "/hub-one/user/a%20b%2Fc@x/%C3%BC%3F/"
    assert found["pending_url"] == "/hub-one/hub/spawn-pending/a%20b%2Fc@x/%C3%BC%3F"


def test_simulated_follows_the_sessions_gpus() -> None:
    real, fake = node("n1", "default", gpu("n1", simulated=False)), node("n2", "class")
    world = Build(real, fake).running("alice", 500).running("bob", 500, at="n2").world()
    first, second = (session_object(s, world, ADMIN, SITE) for s in world.snapshot.sessions)
    assert (first["simulated"], second["simulated"]) == (False, True)
    assert me_object(ALICE, world)["simulated"] is False
    assert capacity_object(world, ADMIN)["simulated"] is True
    gone = Build(real)
    share = Share("GPU-simulated-old-0", 500, 2048, 25)
    gone.sessions = [
        Session(1, asked("alice", "", 500), S.TERMINATED, 1, placement=Placement("old", (share,)))
    ]
    shown_gone = session_object(gone.sessions[0], gone.world(), ALICE, SITE)
    assert (shown_gone["simulated"], shown_gone["gpus"][0]["model"]) == (True, None)


def test_pull_progress_is_shown_until_the_session_runs() -> None:
    build = Build(node("n1", "default", gpu("n1", milli=500)))
    world = build.running("alice", 500, server="up").pending("alice", 500, server="waits").world()
    state = PullState(Phase.FETCHING, Progress(1, 2, 45 << 20, 200 << 20, 12))
    world = replace(world, pulls={1: state, 2: state})
    text = "fetching the image: 1 of 2 layers, 45 of 200 MiB, about 12 s left"
    up, waits = sessions_object(world.snapshot.sessions, world, ALICE, SITE)["sessions"]
    assert up["pull"] is None
    assert waits.model_dump(mode="json")["pull"] == {
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
