"""What is had and what could be had: bars and sums over worlds built here."""

from __future__ import annotations

from dataclasses import replace

from worlds import ALICE, BOB, Build, S, gpu, node, shown

from fgpu_scheduler import (
    Node,
    NodeState,
    Quota,
    QuotaScope,
)
from fgpuspawner.service.api.capacity import capacity_object
from fgpuspawner.service.capacity import Amounts, allocatable_in, mine_in, total_of, used_of


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
    assert mine_in(before, ALICE, "default") == Amounts(300, 1500, 1024)
    assert mine_in(during, ALICE, "default").as_json()["fgpu"] == "0.9"
    assert allocatable_in(during, ALICE, "default").as_json()["fgpu"] == "1.1"
    assert used_of(during, "default") == Amounts(900, 4500, 3072)
    assert used_of(before, "default") == Amounts(300, 1500, 1024)


def test_what_waits_or_has_ended_holds_nothing() -> None:
    world = Build().pending("alice", 1000).running("alice", 500, server="b", state=S.TERMINATED).world()
    assert mine_in(world, ALICE, "default") == Amounts()
    ending = Build().running("alice", 500, state=S.TERMINATING).world()
    assert mine_in(ending, ALICE, "default").fgpu_milli == 500


def test_no_more_is_allocatable_than_ones_quotas_leave() -> None:
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
    assert capacity_object(limited, BOB, fgpu_step_milli=100)["allocatable_overall"]["fgpu"] == "2"
    member = replace(BOB, hub_groups=("ml101",))
    assert allocatable_in(limited, member, "class").fgpu_milli == 0


def test_nothing_is_allocatable_where_nothing_may_or_can_start() -> None:
    world = Build(node(state=NodeState.CORDONED), node("n2", "class")).world()
    assert allocatable_in(world, ALICE, "default") == Amounts()
    assert allocatable_in(world, ALICE, "class") == Amounts()
    assert allocatable_in(world, BOB, "class") == Amounts(2000, 8000, 16384)
    assert total_of(world, "default") == Amounts(2000, 8000, 16384)


def test_a_node_that_was_made_smaller_than_what_runs_never_gives_negative_amounts() -> None:
    big = Build(node("n1", "default", gpu("n1", milli=2000))).running("alice", 1500)
    small = Build(Node("n1", "default", 1000, 512, (gpu("n1", milli=1000),)))
    small.sessions = big.sessions
    world = small.world()
    assert allocatable_in(world, ALICE, "default") == Amounts(0, 0, 0)
    assert used_of(world, "default") == Amounts(1500, 1500, 1024)
    assert shown(world, ALICE).gauges[0].upper.percent == "100.0"


def test_a_gpu_shared_by_as_many_as_may_share_it_has_nothing_to_give() -> None:
    build = Build()
    for number in range(20):
        build.running("bob", 10, server=str(number))
    assert allocatable_in(build.world(), ALICE, "default").fgpu_milli == 0


def test_a_session_in_a_group_that_its_owner_lost_is_still_counted() -> None:
    world = Build(node(), node("n2", "class")).running("alice", 500, at="n2").world()
    found = capacity_object(world, ALICE, fgpu_step_milli=100)
    assert [g["name"] for g in found["groups"]] == ["default", "class"]
    assert found["mine_overall"]["fgpu"] == "0.5"
    assert found["groups"][1]["allocatable"]["fgpu"] == "0"
