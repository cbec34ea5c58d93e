"""A node that the cluster did not give a session: where it goes instead, what others may do, and what is told."""

from __future__ import annotations

import pytest
from simulator import World, decided, lasting, world

from fgpu_scheduler.core.forecast import forecast
from fgpu_scheduler.core.model import RefusedNode, WaitReason
from fgpu_scheduler.core.planner import plan
from fgpu_scheduler.core.policies import GroupPolicy, Policy
from fgpu_scheduler.core.preemption import victims
from fgpu_scheduler.core.quota import Ledger

EASY, STRICT = (Policy(GroupPolicy(strict=strict, longest_wait_s=3600)) for strict in (False, True))


def refused(lab: World, user: str, *node_ids: str, ago_s: int = 0, times: int = 1) -> World:
    """Let these nodes have been refused to a user's session."""
    nodes = tuple(RefusedNode(n, lab.now_s - ago_s, times, f"{n} is tainted") for n in node_ids)
    return lab.having(user, refused=nodes)


def words(lab: World, policy: Policy = STRICT) -> list[str]:
    return decided(lab, plan(lab, policy))


@pytest.mark.parametrize("policy", [EASY, STRICT], ids=["easy", "strict"])
def test_refused_session_goes_to_another_node_and_others_still_use_that_one(
    policy: Policy,
) -> None:
    two = world(devices=1).node("n2").pending("a", "1").pending("b", "1")
    assert words(two, policy) == ["a: GPU-n1-0", "b: GPU-n2-0"]
    assert words(refused(two, "a", "n1"), policy) == ["a: GPU-n2-0", "b: GPU-n1-0"]
    assert words(refused(two, "a", "n1", "n2"), policy) == ["a waits: CLUSTER", "b: GPU-n1-0"]


@pytest.mark.parametrize("policy", [EASY, STRICT], ids=["easy", "strict"])
def test_a_node_that_was_refused_is_offered_again_after_its_time(policy: Policy) -> None:
    lab = world(devices=1).pending("a", "1")
    for times, pause_s in ((1, 30), (2, 60), (9, 300)):
        early = refused(lab, "a", "n1", ago_s=pause_s - 1, times=times)
        assert words(early, policy) == ["a waits: CLUSTER"]
        assert words(refused(lab, "a", "n1", ago_s=pause_s, times=times), policy) == ["a: GPU-n1-0"]


@pytest.mark.parametrize("policy", [EASY, STRICT], ids=["easy", "strict"])
def test_refused_session_has_no_reservation_and_blocks_no_session(policy: Policy) -> None:
    full = world(devices=1).node("n2").running("x", "1", on="GPU-n2-0").pending("a", "1").pending("b", "1")
    assert words(refused(full, "a", "n1"), policy) == ["a waits: CLUSTER", "b: GPU-n1-0"]


def test_equal_request_without_refusal_blocks_sessions_behind_it() -> None:
    lab = (
        world(devices=1)
        .running("x", "0.5", on="GPU-n1-0")
        .pending("a", "1")
        .pending("b", "1")
        .pending("c", "0.5")
    )
    waits = ["a waits: CLUSTER", "b waits: RESOURCES", "c waits: PRIORITY"]
    assert words(refused(lab, "a", "n1"), STRICT) == waits


def test_refused_session_does_not_take_a_reserved_place() -> None:
    lab = world(devices=2).node("n2").running("x", "0.5", on="GPU-n1-0").pending("a", "2").pending("b", "1")
    lab = lab.having("x", time_limit_s=600)
    assert words(lab, EASY) == ["a waits: RESERVED", "b: GPU-n2-0"]
    assert words(refused(lab, "b", "n2"), EASY) == ["a waits: RESERVED", "b waits: CLUSTER"]


def test_the_owner_reads_the_clusters_words_and_when_it_is_tried_again() -> None:
    lab = refused(world(devices=1).pending("a", "1").pending("b", "1"), "a", "n1", ago_s=10)
    told = {one.session_id: one for one in forecast(lab, STRICT, lasting(600))}
    a, b = told[lab.of("a").id], told[lab.of("b").id]
    assert (b.position, b.expected_start_at_s) == (0, lab.now_s)
    assert (a.position, a.reason) == (1, WaitReason.CLUSTER)
    assert "n1 is tainted" in a.text
    # b is on the only GPU until then, and for longer than the pause.
    assert a.expected_start_at_s == lab.now_s + 600
    alone = refused(world(devices=1).pending("a", "1"), "a", "n1", ago_s=10)
    (only,) = forecast(alone, STRICT, lasting(None))
    assert only.expected_start_at_s == alone.now_s + 20


def test_no_session_is_preempted_for_a_recently_refused_one() -> None:
    lab = world(devices=1).running("x", "1").pending("a", "1").having("a", priority=1)

    def ended(one: World) -> tuple[int, ...]:
        return victims(one, plan(one, STRICT), Ledger(one), groups=["default"], ending=())

    assert ended(lab) == (lab.of("x").id,)
    assert ended(refused(lab, "a", "n1")) == ()
    assert ended(refused(lab, "a", "n1", ago_s=30)) == (lab.of("x").id,)
