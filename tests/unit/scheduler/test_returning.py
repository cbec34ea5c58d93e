"""Parked sessions get their shares back before anything new starts, and sessions on demand pass the queue."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from simulator import World, world
from simulator.world import NOW_S

from fgpu_scheduler.core import lifecycle
from fgpu_scheduler.core.model import (
    NodeState,
    Quota,
    QuotaScope,
    SessionState,
    Size,
    WaitReason,
)
from fgpu_scheduler.core.parking import ParkingPlan, plan_parking
from fgpu_scheduler.core.placement import free
from fgpu_scheduler.core.planner import Plan, Policy, applied, committed, plan
from fgpu_scheduler.core.reclaim import FOR_GOOD_S, AllRules, Rules
from fgpu_scheduler.core.returning import ReturnDecision
from fgpu_scheduler.core.usage import fgpu_seconds
from fgpu_scheduler.errors import StaleVersion

S = SessionState
GPU = "GPU-n1-0"
RESOURCES, QUOTA = WaitReason.RESOURCES, WaitReason.QUOTA
SIZE = Size(0, 1000, 1_000_000, 8192, 100)


def parked(lab: World, user: str, wanted_ago_s: int | None = None) -> World:
    """Return the world in which the session of ``user`` is parked, and wants its shares back since then."""
    wanted_at_s = None if wanted_ago_s is None else NOW_S - wanted_ago_s
    return lab.having(user, state=S.PARKED, parked_at_s=NOW_S - 900, wanted_at_s=wanted_at_s)


def decided(lab: World) -> tuple[dict[str, WaitReason | None], list[str]]:
    """Return, by user, why each wanted session waits (None: it resumes), and the users of the sessions that start."""
    found = plan(lab, Policy())
    committed(found, lab, now_s=NOW_S)
    users = {s.id: s.request.user for s in lab.sessions}
    return {users[d.session_id]: d.waits for d in found.returns}, [users[d.session_id] for d in found.placed]


def test_a_parked_session_leaves_its_share_to_others_and_keeps_its_cpu_and_memory() -> None:
    full = world().running("away", "1")
    (before,), (after,) = free(full), free(parked(full, "away"))
    assert (before.devices[0].fgpu_milli, after.devices[0].fgpu_milli) == (0, 1000)
    assert (after.cpu_milli, after.memory_mib) == (before.cpu_milli, before.memory_mib)
    assert decided(parked(full, "away").pending("new", "1")) == ({}, ["new"])


def test_a_wanted_session_resumes_where_its_share_is_free_and_nothing_new_starts_in_its_place() -> None:
    lab = parked(world().running("away", "1"), "away", 5).pending("new", "1")
    assert decided(lab) == ({"away": None}, [])
    (back,) = [s for s in applied(lab, plan(lab, Policy())).sessions if s.request.user == "away"]
    assert (back.state, back.parked_at_s) == (S.RESUMING, None)


def test_a_wanted_session_keeps_free_what_others_give_back_until_all_of_it_is_free() -> None:
    lab = parked(world().running("away", "1"), "away", 5).running("half", "0.5", on=GPU).pending("new", "0.5")
    assert decided(lab) == ({"away": RESOURCES}, [])
    assert decided(lab.ended("half")) == ({"away": None}, [])


def test_sessions_get_their_shares_back_in_the_order_in_which_they_want_them() -> None:
    lab = world().running("first", "0.5")
    lab = parked(lab, "first", 3).running("other", "0.5", on=GPU)
    lab = parked(lab, "other", 9).running("holds", "0.5", on=GPU)
    assert decided(lab) == ({"other": None, "first": RESOURCES}, [])


def test_a_smaller_session_does_not_overtake_a_larger_one_that_has_waited_longer() -> None:
    lab = parked(world().running("large", "1"), "large", 9)
    lab = parked(lab.running("small", "0.2", on=GPU), "small", 5).running("holds", "0.5", on=GPU)
    assert decided(lab) == ({"large": RESOURCES, "small": RESOURCES}, [])


def test_a_session_over_its_quota_claims_nothing() -> None:
    own = Quota(QuotaScope.USER, "away", max_fgpu_milli=500)
    lab = parked(world().running("away", "1"), "away", 5).pending("new", "1")
    assert decided(replace(lab, quotas=(own,))) == ({"away": QUOTA}, ["new"])


def test_a_parked_session_counts_as_a_session_of_a_quota_and_not_as_fgpu() -> None:
    lab = parked(world(devices=2).running("away", "1"), "away").pending("away", "1")
    for quota, starts in (
        (Quota(QuotaScope.USER, "away", max_fgpu_milli=1000), ["away"]),
        (Quota(QuotaScope.USER, "away", max_sessions=1), []),
    ):
        assert decided(replace(lab, quotas=(quota,))) == ({}, starts)


def test_a_claim_counts_against_the_quota_of_its_own_user() -> None:
    """Else a new request of the same user could take what the waiting cell needs."""
    lab = world(devices=2).running("me", "1")
    lab = parked(lab, "me", 5).running("holds", "0.5", on=GPU).pending("me", "1")
    assert decided(lab) == ({"me": RESOURCES}, ["me"])
    own = Quota(QuotaScope.USER, "me", max_fgpu_milli=1000)
    assert decided(replace(lab, quotas=(own,))) == ({"me": RESOURCES}, [])


@pytest.mark.parametrize(
    ("state", "waits"),
    [(NodeState.CORDONED, None), (NodeState.LOST, RESOURCES), (NodeState.GONE, RESOURCES)],
)
def test_a_parked_session_returns_to_a_cordoned_node_and_not_to_a_lost_one(
    state: NodeState, waits: WaitReason | None
) -> None:
    lab = parked(world().running("away", "1"), "away", 5)
    lab = replace(lab, nodes=tuple(replace(n, state=state) for n in lab.nodes))
    assert decided(lab) == ({"away": waits}, [])


def test_a_return_that_does_not_hold_is_refused() -> None:
    lab = parked(world().running("away", "1"), "away", 5)
    away = lab.of("away")
    taken = lab.running("holds", "0.5", on=GPU)
    unwanted = lab.having("away", wanted_at_s=None)
    for there, words in ((taken, "cannot have its shares back now"), (unwanted, "does not want")):
        with pytest.raises(StaleVersion, match=words):
            committed(Plan(there.version, (), (ReturnDecision(away.id, None),)), there, now_s=NOW_S)


def test_usage_does_not_count_the_time_while_parked() -> None:
    away = world().running("away", "1").of("away")
    away = replace(away, scheduled_at_s=NOW_S - 100)
    assert fgpu_seconds(away, NOW_S) == 100_000
    held = replace(away, sizes=lifecycle.with_size(away, replace(SIZE, until_s=NOW_S - 60)))
    gone = lifecycle.moved(held, S.PARKED, now_s=NOW_S - 60)
    assert fgpu_seconds(gone, NOW_S) == 40_000
    back = lifecycle.moved(gone, S.RESUMING, now_s=NOW_S - 10)
    assert fgpu_seconds(back, NOW_S) == 50_000


def test_a_new_session_is_placed_where_no_parked_one_returns_while_there_is_room() -> None:
    """Else new sessions are packed onto the GPUs of parked ones beside GPUs that nothing uses."""
    lab = (
        parked(world(devices=2).running("away", "1", on=GPU), "away")
        .pending("new", "0.5")
        .pending("other", "0.5")
    )
    found = plan(lab, Policy())
    assert [d.placement.shares[0].device_uuid for d in found.placed] == ["GPU-n1-1", "GPU-n1-1"]
    third = plan(lab.pending("third", "0.5"), Policy())
    assert [d.placement.shares[0].device_uuid for d in third.placed] == ["GPU-n1-1", "GPU-n1-1", GPU]


# --- On demand ---


def on_demand(lab: World, user: str, amount: str = "1", **more: Any) -> World:
    return lab.pending(user, amount).having(user, on_demand=True, **more)


def test_a_session_on_demand_starts_parked_whatever_the_queue() -> None:
    lab = on_demand(world().running("holds", "1", on=GPU).pending("waits", "1"), "me")
    assert decided(lab) == ({}, ["me"])
    (me,) = [s for s in applied(lab, plan(lab, Policy())).sessions if s.request.user == "me"]
    assert (me.state, me.parked_at_s) == (S.SCHEDULED, NOW_S)
    assert not lifecycle.holds_shares(me)


@pytest.mark.parametrize("amount", ["0.5", "1", "2"])
def test_sessions_on_demand_are_spread_over_the_gpus_by_their_number_of_sessions(amount: str) -> None:
    lab = world(devices=4)
    for user in "abcd":
        lab = on_demand(lab, user, amount)
        lab = replace(lab, sessions=applied(lab, plan(lab, Policy())).sessions)
    bound = [share.device_uuid for s in lab.sessions if s.placement for share in s.placement.shares]
    counts = {uuid: bound.count(uuid) for uuid in bound}
    assert len(counts) == 4
    assert len(set(counts.values())) == 1


@pytest.mark.parametrize("amount", ["0.5", "1", "2"])
def test_a_session_on_demand_is_placed_on_gpus_that_are_free_now(amount: str) -> None:
    """As many sessions are parked on all of them, and a busy GPU may be busy for days."""
    lab = world(devices=4)
    for user in "abcd":
        lab = on_demand(lab, user, "2")
        lab = replace(lab, sessions=applied(lab, plan(lab, Policy())).sessions)
    first = lab.of("a").placement
    assert first is not None
    busy = {share.device_uuid for share in first.shares}
    for uuid in busy:
        lab = lab.running(f"on {uuid}", "1", on=uuid)
    lab = on_demand(lab.ended("a"), "me", amount)
    (me,) = [s for s in applied(lab, plan(lab, Policy())).sessions if s.request.user == "me"]
    assert me.placement is not None
    assert busy.isdisjoint(share.device_uuid for share in me.placement.shares)


def test_a_session_on_demand_waits_for_cpu_memory_and_the_number_of_sessions_alone() -> None:
    lab = on_demand(world(), "me", cpu_milli=10**6)
    found = plan(lab, Policy())
    assert [d.reason for d in found.decisions] == [RESOURCES]
    own = Quota(QuotaScope.USER, "me", max_sessions=1, max_fgpu_milli=1000)
    lab = replace(on_demand(on_demand(world(), "me"), "me"), quotas=(own,))
    assert [getattr(d, "reason", None) for d in plan(lab, Policy()).decisions] == [None, QUOTA]


# --- Parking ---

PARKS = AllRules(Rules(park_after_s=600))
ALWAYS = AllRules(Rules(park_after_s=600, park_always=True))


def parking(lab: World, rules: AllRules, held: int = 1000, room: int = 10**6, **idle_s: int) -> ParkingPlan:
    """Plan parking, with the seconds for which the GPUs of some users have been idle."""
    idle = {lab.of(user).id: NOW_S - seconds for user, seconds in idle_s.items()}
    held_mib = {s.id: held for s in lab.sessions}
    host = {node.id: room for node in lab.nodes}
    return plan_parking(lab, rules, gpu_idle_since_s=idle, held_mib=held_mib, host_mib=host)


def due(lab: World, rules: AllRules, held: int = 1000, room: int = 10**6, **idle_s: int) -> list[str]:
    """Return the users of the sessions to park."""
    return [s.request.user for s in parking(lab, rules, held, room, **idle_s).due]


def test_the_session_that_has_been_idle_for_longest_is_parked_first() -> None:
    lab = world(devices=3).running("a", "1").running("b", "1").running("c", "1")
    assert due(lab, ALWAYS, a=600, b=900, c=599) == ["b", "a"]
    assert due(lab.having("b", kept_until_s=NOW_S + 1), ALWAYS, a=600, b=900) == ["a"]
    assert due(lab, AllRules(), a=600) == []


def test_a_session_is_parked_only_while_it_helps_another_one() -> None:
    lab = world(devices=2).running("a", "1").running("b", "1")
    assert due(lab, PARKS, a=600) == []
    waits = lab.pending("new", "1")
    assert due(waits.having("new", wait_reason=RESOURCES), PARKS, a=600) == ["a"]
    assert due(waits.having("new", wait_reason=QUOTA), PARKS, a=600) == []


def test_a_session_is_parked_for_one_that_wants_its_gpu_back() -> None:
    lab = parked(world().running("away", "1"), "away", 5).running("a", "1", on=GPU)
    assert due(lab, PARKS, a=600) == ["a"]
    assert due(parked(lab, "away"), PARKS, a=600) == []


def test_a_session_on_demand_is_parked_for_others_without_a_rule() -> None:
    lab = world().running("a", "1").pending("new", "1")
    lab = lab.having("new", wait_reason=RESOURCES)
    lab = lab.having("a", on_demand=True)
    assert due(lab, AllRules(), a=599) == []
    assert due(lab, AllRules(), a=600) == ["a"]


def test_a_session_is_parked_first_if_a_person_asks_for_it_and_whatever_the_rules() -> None:
    lab = world(devices=2).running("a", "1").running("b", "1")
    lab = lab.having("b", park_asked_at_s=NOW_S, kept_until_s=NOW_S + 1)
    assert due(lab, ALWAYS, a=9000) == ["b", "a"]
    assert due(lab, AllRules()) == ["b"]
    assert due(lab.having("b", park_asked_at_s=NOW_S - 600), AllRules()) == [], (
        "the wish stands for ten minutes"
    )


def test_no_session_is_parked_that_the_host_memory_does_not_hold() -> None:
    lab = world(devices=2).running("a", "1").running("b", "1")
    assert due(lab, ALWAYS, 1000, 1500, a=600, b=900) == ["b"]
    full = parked(lab, "b").having("b", parked_mib=1000)
    assert due(full, ALWAYS, 1000, 1500, a=600) == []
    (words,) = parking(full, ALWAYS, 1000, 1500, a=600).no_room.values()
    assert (
        words == "it holds 1.0 GiB of GPU memory, and n1 has 500 MiB left of the 1.5 GiB for parked sessions"
    )
    unknown = plan_parking(lab, ALWAYS, gpu_idle_since_s={1: 0}, held_mib={}, host_mib={"n1": 1500})
    assert unknown.due == ()


def test_the_owner_of_an_idle_session_is_warned_before_it_is_parked() -> None:
    lab = world(devices=2).running("a", "1").running("b", "1")

    def soon(rules: AllRules, idle_s: int, lab: World = lab) -> dict[int, int]:
        return dict(parking(lab, rules, a=idle_s).soon)

    assert soon(ALWAYS, 299) == {}
    assert soon(ALWAYS, 300) == {1: NOW_S + 300}
    assert soon(ALWAYS, 600) == {}, "it is parked now"
    assert soon(AllRules(Rules(park_after_s=60, park_always=True)), 29) == {}, "half of the idle time"
    assert soon(PARKS, 300) == {}, "no session waits"
    waits = lab.pending("new", "1").having("new", wait_reason=RESOURCES)
    assert soon(PARKS, 300, waits) == {1: NOW_S + 300}
    assert soon(ALWAYS, 300, lab.having("a", kept_until_s=NOW_S + 1)) == {}


def test_an_idle_session_is_parked_only_after_a_warning_once_it_may_be_parked_again() -> None:
    rules = AllRules(Rules(park_after_s=600, park_always=True, park_opt_out=True))
    for kept_until_s, warned, parked in (
        (NOW_S, {1: NOW_S + 300}, []),
        (NOW_S - 299, {1: NOW_S + 1}, []),
        (NOW_S - 300, {}, ["a"]),
    ):
        lab = world().running("a", "1").having("a", kept_until_s=kept_until_s)
        found = parking(lab, rules, a=9000)
        assert (dict(found.soon), [s.request.user for s in found.due]) == (warned, parked)


def test_an_owner_may_choose_that_a_session_is_never_parked_where_the_rules_allow_it() -> None:
    lab = world().running("a", "1").having("a", kept_until_s=FOR_GOOD_S)
    allowed = AllRules(Rules(park_after_s=600, park_always=True, park_opt_out=True))
    assert due(lab, allowed, a=9000) == []
    assert due(lab, ALWAYS, a=9000) == ["a"], "the rules have changed since"
    assert due(lab.having("a", park_asked_at_s=NOW_S), allowed) == ["a"], "its owner asks for it"


def test_a_wish_that_was_refused_is_over() -> None:
    lab = world().running("a", "1").having("a", park_asked_at_s=NOW_S, park_refused="it has no room")
    assert due(lab, AllRules()) == []
