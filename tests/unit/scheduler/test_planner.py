"""Whole plans for whole worlds."""

from __future__ import annotations

from dataclasses import replace

from simulator import World, decided, world

from fgpu_scheduler.core.model import SessionState
from fgpu_scheduler.core.planner import Plan, Reservation, plan
from fgpu_scheduler.core.policies import GroupPolicy, Policy


def plan_of(lab: World) -> list[str]:
    return decided(lab, plan(lab, Policy()))


def test_an_empty_queue_has_an_empty_plan_of_the_snapshots_version() -> None:
    lab = replace(world().running("a", "1"), version=41)
    assert plan(lab, Policy()) == Plan(41, ())


def test_capacity_two_runs_two_of_three_sessions_of_one() -> None:
    """Product B3, first form: one GPU of 2 fGPU."""
    lab = world(fgpu_per_gpu=2).pending("a", "1").pending("b", "1").pending("c", "1")
    assert plan_of(lab) == ["a: GPU-n1-0", "b: GPU-n1-0", "c waits: RESOURCES"]


def test_capacity_one_runs_two_of_three_sessions_of_0_4() -> None:
    """Product B3, second form: 0.2 stays free, and no session gets a part of it."""
    lab = world().pending("a", "0.4").pending("b", "0.4").pending("c", "0.4")
    assert plan_of(lab) == ["a: GPU-n1-0", "b: GPU-n1-0", "c waits: RESOURCES"]


def test_ending_one_that_runs_starts_the_one_that_waits() -> None:
    lab = world().running("a", "0.4").running("b", "0.4").pending("c", "0.4")
    assert plan_of(lab) == ["c waits: RESOURCES"]
    assert plan_of(lab.ended("a")) == ["c: GPU-n1-0"]


def test_a_terminating_session_keeps_others_waiting_until_it_is_gone() -> None:
    lab = world().running("a", "1", state=SessionState.TERMINATING).pending("b", "1")
    assert plan_of(lab) == ["b waits: RESERVED"]


def test_a_held_session_keeps_its_place_and_is_not_placed() -> None:
    lab = world().pending("a", "0.6", held=True).pending("b", "0.6").pending("c", "0.6")
    assert plan_of(lab) == ["a waits: HELD", "b: GPU-n1-0", "c waits: RESOURCES"]
    resumed = replace(lab, sessions=(replace(lab.of("a"), held=False), *lab.sessions[1:]))
    assert plan_of(resumed) == ["a: GPU-n1-0", "b waits: RESOURCES", "c waits: RESOURCES"]


def test_a_world_without_nodes_lets_everybody_wait() -> None:
    assert plan_of(world(devices=0).pending("a", "1")) == ["a waits: RESOURCES"]


def test_a_start_is_promised_to_an_aged_session_unless_one_of_higher_priority_may_take_its_place() -> None:
    lab = (
        world(devices=4)
        .running("a", "2", state=SessionState.TERMINATING)
        .running("b", "2")
        .pending("first", "4")
        .pending("old", "2")
    )
    policy = Policy(GroupPolicy(longest_wait_s=600))

    def asked_for(priority: int) -> World:
        """The old one has waited for long enough to be kept a place, the first has not."""
        first, old = lab.of("first"), lab.of("old")
        first = replace(first, place_of=old.id + 1, request=replace(first.request, priority=priority))
        old = replace(old, submitted_at_s=lab.now_s - 700)
        return replace(lab, sessions=(lab.of("a"), lab.of("b"), first, old))

    def promised(world: World) -> list[int | None]:
        return [d.until_s for d in plan(world, policy).decisions if isinstance(d, Reservation)]

    assert promised(asked_for(0)) == [lab.now_s + 60]
    assert promised(asked_for(1)) == [None]
