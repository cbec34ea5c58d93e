"""Capacity: gauges, sums and each node's state."""

from __future__ import annotations

from dataclasses import replace

from worlds import ADMIN, ALICE, BOB, Build, S, gpu, node, shown

from fgpu_scheduler import Node, NodeState, Quota, QuotaScope
from fgpuspawner.isolation.choice import StoredChoice
from fgpuspawner.service.api.capacity import (
    ResourceAmounts,
    allocatable_in,
    capacity_object,
    mine_in,
    total_of,
    used_of,
)
from fgpuspawner.service.pages.sessions_view import SessionsView


def test_only_administrators_see_the_state_of_each_node() -> None:
    choices = (StoredChoice("n1", "interposer", "libfgpu holds memory and compute"),)
    world = replace(Build().world(), isolation=choices)
    (told,) = capacity_object(world, ADMIN)["nodes"]
    assert told.model_dump() == {
        "name": "n1",
        "group": "default",
        "state": "READY",
        "isolation": "interposer",
        "reason": "libfgpu holds memory and compute",
    }
    assert "nodes" not in capacity_object(world, ALICE).model_dump()
    assert shown(world, ADMIN).machines == ((told, "takes sessions"),)
    assert shown(world, ALICE).machines == ()


def levels(found: SessionsView) -> list[tuple[str, str, list[str], str | None]]:
    """Return each gauge level's label, use, parts and own part."""
    return [
        (level.label, level.text, [part.words for part in level.parts], level.own)
        for gauge in found.gauges
        for level in gauge.levels
    ]


def test_gauges_show_own_others_and_free_parts_per_group_and_overall() -> None:
    world = Build(node(), node("n2", "class")).running("bob", 500).running("alice", 1000).world()
    assert levels(shown(world, BOB, group="default")) == [
        ("In default", "1.5 of 2 fGPU", ["0.5 yours", "1 others'", "0.5 free"], "0.5 of 1 fGPU"),
        ("In all groups", "1.5 of 4 fGPU", ["0.5 yours", "1 others'", "2.5 free"], "0.5 of 3 fGPU"),
        ("In default", "3 of 8 cores", ["1.5 yours", "1.5 others'", "5 free"], "1.5 of 6.5 cores"),
        ("In all groups", "3 of 16 cores", ["1.5 yours", "1.5 others'", "13 free"], "1.5 of 14.5 cores"),
        ("In default", "2 of 16 GiB", ["1 yours", "1 others'", "14 free"], "1 of 15 GiB"),
        ("In all groups", "2 of 32 GiB", ["1 yours", "1 others'", "30 free"], "1 of 31 GiB"),
    ]
    (gpu_here, *_), *_ = (gauge.levels for gauge in shown(world, BOB, group="default").gauges)
    assert [(part.kind, part.x, part.width) for part in gpu_here.parts] == [
        ("mine", "0", "25.0"),
        ("others", "25.0", "50.0"),
        ("free", "75.0", "25.0"),
    ]


def test_administrators_see_use_and_free_capacity() -> None:
    world = Build().running("alice", 500).world()
    assert levels(shown(world, ADMIN, everybody=True))[0] == (
        "",
        "0.5 of 2 fGPU",
        ["0.5 in use", "1.5 free"],
        None,
    )
    own = levels(shown(world, ADMIN))[0]
    assert own == ("", "0.5 of 2 fGPU", ["0.5 others'", "1.5 free"], "0 of 1.5 fGPU")


def test_capacity_of_cordoned_nodes_is_unavailable() -> None:
    world = Build(node(state=NodeState.CORDONED)).running("alice", 500).world()
    assert levels(shown(world, ALICE))[0][2] == ["0.5 yours", "0 free", "1.5 unavailable"]


def test_waiting_and_ended_sessions_hold_nothing() -> None:
    world = Build().pending("alice", 1000).running("alice", 500, server="b", state=S.TERMINATED).world()
    assert mine_in(world, ALICE, "default") == ResourceAmounts()
    ending = Build().running("alice", 500, state=S.TERMINATING).world()
    assert mine_in(ending, ALICE, "default").fgpu_milli == 500


def test_parked_session_that_wants_its_gpu_is_not_in_use() -> None:
    build = Build().running("alice", 500, state=S.PARKED).running("bob", 2000)
    build.sessions[0] = replace(build.sessions[0], parked_at_s=900, wanted_at_s=950)
    build.pending("carol", 500)
    assert used_of(build.world(), "default").fgpu_milli == 2000
    assert shown(build.world(), ALICE).waiting == 2


def test_allocatable_capacity_stays_within_quotas() -> None:
    world = Build(node(), node("n2", "class")).running("bob", 500).running("alice", 300).world()
    quotas = (
        Quota(QuotaScope.USER, "*", max_fgpu_milli=2500),
        Quota(QuotaScope.USER, "bob", "default", max_fgpu_milli=1500),
        Quota(QuotaScope.GROUP, "ml101", "class", max_sessions=0),
    )
    limited = replace(world, snapshot=replace(world.snapshot, quotas=quotas))
    assert allocatable_in(limited, BOB, "default").fgpu_milli == 1000
    assert allocatable_in(limited, BOB, "class").fgpu_milli == 2000
    # Both together are still not more than the quota of all groups.
    assert capacity_object(limited, BOB)["allocatable_overall"]["fgpu"] == "2"
    member = replace(BOB, hub_groups=("ml101",))
    assert allocatable_in(limited, member, "class").fgpu_milli == 0


def test_nothing_is_allocatable_in_closed_groups_and_nodes() -> None:
    world = Build(node(state=NodeState.CORDONED), node("n2", "class")).world()
    assert allocatable_in(world, ALICE, "default") == ResourceAmounts()
    assert allocatable_in(world, ALICE, "class") == ResourceAmounts()
    assert allocatable_in(world, BOB, "class") == ResourceAmounts(2000, 8000, 16384)
    assert total_of(world, "default") == ResourceAmounts(2000, 8000, 16384)


def test_shrunk_node_never_gives_negative_amounts() -> None:
    big = Build(node("n1", "default", gpu("n1", milli=2000))).running("alice", 1500)
    small = Build(Node("n1", "default", 1000, 512, (gpu("n1", milli=1000),)))
    small.sessions = big.sessions
    world = small.world()
    assert allocatable_in(world, ALICE, "default") == ResourceAmounts(0, 0, 0)
    assert used_of(world, "default") == ResourceAmounts(1500, 1500, 1024)
    assert [part.width for part in shown(world, ALICE).gauges[0].levels[0].parts] == ["100.0", "0"]


def test_gpu_at_its_share_limit_has_no_allocatable_capacity() -> None:
    build = Build()
    for number in range(20):
        build.running("bob", 10, server=str(number))
    assert allocatable_in(build.world(), ALICE, "default").fgpu_milli == 0


def test_session_in_a_group_its_owner_left_still_counts() -> None:
    world = Build(node(), node("n2", "class")).running("alice", 500, at="n2").world()
    found = capacity_object(world, ALICE)
    assert [g["name"] for g in found["groups"]] == ["default", "class"]
    assert found["mine_overall"]["fgpu"] == "0.5"
    assert found["groups"][1]["allocatable"]["fgpu"] == "0"
