"""What each order policy goes by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from simulator import World, world
from simulator.world import request

from fgpu_scheduler.core import orders
from fgpu_scheduler.core.model import Usage
from fgpu_scheduler.core.orders import ORDERS, Order, in_order, queue_snapshots
from fgpu_scheduler.core.planner import plan
from fgpu_scheduler.core.policies import LONGEST_WAIT_S, Policy, group_policy
from fgpu_scheduler.core.run_lengths import PastRun, PastRuns
from fgpu_scheduler.errors import BadSettings

HOUR_S = 3600
HOUR_OF_ONE = 1000 * HOUR_S
"""What a session of 1 fGPU uses in an hour."""


def ordered(lab: World, order: Order) -> list[str]:
    own = queue_snapshots(lab)["default"]
    return [own.waiting[n].request.user for n in in_order(own, order(own))]


def used(lab: World, **hours: float) -> World:
    """Give users a past usage, in hours of 1 fGPU."""
    amounts = {u.user: u for u in lab.usage}
    for user, own in hours.items():
        amounts[user] = Usage(user, "default", round(own * HOUR_OF_ONE))
    return replace(lab, usage=tuple(amounts.values()))


# fair share


def test_fair_share_puts_the_least_usage_first() -> None:
    lab = used(world().pending("a", "1").pending("b", "0.1").pending("c", "1"), a=3, b=2)
    assert ordered(lab, orders.fair_share) == ["c", "b", "a"]


def test_fair_share_counts_what_runs_now_too() -> None:
    lab = used(world(devices=2).running("a", "1", started_ago_s=2 * HOUR_S), b=1)
    assert ordered(lab.pending("a", "0.1").pending("b", "0.1"), orders.fair_share) == ["b", "a"]
    assert ordered(used(lab, b=3).pending("b", "0.1").pending("a", "0.1"), orders.fair_share) == ["a", "b"]


def test_fair_share_of_another_resource_group_does_not_count() -> None:
    lab = world().pending("a", "1").pending("b", "1")
    elsewhere = replace(lab, usage=(Usage("a", "class", HOUR_OF_ONE),))
    assert ordered(elsewhere, orders.fair_share) == ["a", "b"]


def test_a_second_request_of_a_user_stands_behind_the_first_of_others_who_used_as_little() -> None:
    lab = world().pending("a", "1").pending("a", "1").pending("b", "1")
    assert ordered(lab, orders.fair_share) == ["a", "b", "a"]


def test_a_requests_time_limit_says_how_much_it_moves_the_users_next_one_back() -> None:
    lab = world().pending("a", "1")
    lab = used(lab.having("a", time_limit_s=HOUR_S).pending("a", "1").pending("b", "1"), b=2)
    assert ordered(lab, orders.fair_share) == ["a", "a", "b"]
    assert ordered(used(lab, b=0.5), orders.fair_share) == ["a", "b", "a"]


# drf


def test_drf_puts_the_smallest_dominant_share_first() -> None:
    """Of 4 fGPU and 10 CPUs: a holds a quarter of the fGPU, b, with less fGPU, four tenths of the CPUs."""
    lab = world(devices=4, cpu=10).running("a", "1", cpu=1).running("b", "0.5", cpu=4)
    lab = lab.pending("b", "0.1", cpu="0.1").pending("a", "0.1", cpu="0.1")
    assert ordered(lab, orders.drf) == ["a", "b"]
    assert ordered(lab, orders.fifo) == ["b", "a"]


def test_drf_counts_memory_and_the_users_own_requests_ahead() -> None:
    lab = world(devices=4, cpu=100, node_memory_mib=100_000)
    lab = lab.running("a", "0.1", memory_mib=50_000).running("b", "1")
    assert ordered(lab.pending("a", "0.1").pending("b", "0.1"), orders.drf) == ["b", "a"]
    twice = world(devices=4).pending("a", "1").pending("a", "1").pending("b", "2")
    assert ordered(twice, orders.drf) == ["a", "b", "a"]


# default


def test_default_order_puts_short_then_small_requests_first() -> None:
    lab = world(devices=2).pending("a", "2").pending("b", "0.5").pending("c", "0.1")
    assert ordered(lab, orders.usage_size_age) == ["c", "b", "a"]
    lab = lab.having("a", time_limit_s=HOUR_S).having("c", time_limit_s=24 * HOUR_S)
    assert ordered(lab, orders.usage_size_age) == ["a", "b", "c"]


def test_default_order_puts_less_usage_first() -> None:
    lab = world().pending("a", "0.5").pending("b", "0.5")
    assert ordered(lab, orders.usage_size_age) == ["a", "b"]
    assert ordered(used(lab, a=5, b=1), orders.usage_size_age) == ["b", "a"]


def test_default_order_puts_long_waits_before_smaller_requests() -> None:
    lab = world().pending("a", "1").pending("b", "0.1")
    assert ordered(lab, orders.usage_size_age) == ["b", "a"]
    assert ordered(lab.having("a", submitted_at_s=lab.now_s - 4 * HOUR_S), orders.usage_size_age) == [
        "a",
        "b",
    ]


def test_default_order_counts_held_shares_only_without_a_limit() -> None:
    lab = world(devices=2).running("a", "1").pending("a", "0.5").pending("b", "0.5")
    assert ordered(lab, orders.usage_size_age) == ["b", "a"]
    for user in "ab":
        lab = lab.having(user, time_limit_s=HOUR_S)
    assert ordered(lab, orders.usage_size_age) == ["a", "b"]


def ran(lab: World, **hours: Sequence[float]) -> World:
    """Add ended sessions of these lengths, in hours."""
    runs = [
        PastRun("default", user, "image", round(own * HOUR_S), n, n)
        for user, all_of in hours.items()
        for n, own in enumerate(all_of)
    ]
    return replace(lab, runs=PastRuns().then(runs))


def test_without_limits_users_with_long_runs_come_later() -> None:
    lab = world().pending("a", "1").pending("b", "1")
    assert ordered(lab, orders.usage_size_age) == ["a", "b"]
    lab = ran(lab, a=[8] * 5, b=[1] * 5)
    assert ordered(lab, orders.usage_size_age) == ["b", "a"]
    assert ordered(ran(lab, a=[8] * 4, b=[1] * 4), orders.usage_size_age) == ["a", "b"]


def test_estimated_length_moves_the_users_next_request_back() -> None:
    lab = used(world().pending("a", "1").pending("a", "1").pending("b", "1"), b=2)
    assert ordered(lab, orders.fair_share) == ["a", "b", "a"]
    assert ordered(ran(lab, a=[1] * 5), orders.fair_share) == ["a", "a", "b"]


def test_time_limit_replaces_the_estimate() -> None:
    lab = ran(world().pending("a", "1").pending("b", "1"), a=[8] * 5, b=[1] * 5)
    for user in "ab":
        lab = lab.having(user, time_limit_s=HOUR_S)
    assert ordered(lab, orders.usage_size_age) == ["a", "b"]


def test_estimate_is_at_least_a_quarter_of_an_hour() -> None:
    lab = ran(world().pending("b", "1").pending("a", "1"), a=[0.001] * 400, b=[0.25] * 5)
    assert ordered(lab, orders.usage_size_age) == ["b", "a"]


def test_waiting_session_passes_the_shortest_estimates_within_a_day() -> None:
    """A guess is at least 15 minutes, which an 8 times longer one makes up for in 7 hours of waiting."""
    lab = ran(world().pending("b", "1").pending("a", "1"), a=[0.001] * 99, b=[2] * 5)
    for hours, order in ((6, ["a", "b"]), (8, ["b", "a"])):
        waits = lab.having("b", submitted_at_s=lab.now_s - hours * HOUR_S)
        assert ordered(waits, orders.usage_size_age) == order


# all of them


@pytest.mark.parametrize("name", sorted(ORDERS))
def test_an_order_has_one_rank_for_each_and_does_not_depend_on_the_order_of_its_input(name: str) -> None:
    lab = used(world(devices=2).running("a", "1"), a=3, b=1)
    for user in "abcab":
        lab = lab.pending(user, "0.5")
    lab = lab.pending("d", "0").having("d", gpu_memory_mib=1024, compute_percent=10)
    backwards = replace(lab, sessions=lab.sessions[::-1], usage=lab.usage[::-1], nodes=lab.nodes[::-1])
    order = ORDERS[name].order
    assert len(order(queue_snapshots(lab)["default"])) == 6
    assert ordered(lab, order) == ordered(backwards, order)


@pytest.mark.parametrize(
    ("order", "expected"),
    [(orders.drf, [1, 2, 4, 3]), (orders.fair_share, [1, 2, 4, 3]), (orders.usage_size_age, [2, 1, 4, 3])],
)
def test_all_memory_of_a_device_counts_as_the_device(order: Order, expected: list[int]) -> None:
    """Were it worth nothing, a's second request would come before b's."""
    lab = world(devices=4).pending("a", "0").pending("b", "0.5").pending("a", "0.1").pending("b", "0.1")
    first = replace(lab.sessions[0], request=request("a", "0", gpu_memory_mib=8192))
    own = queue_snapshots(replace(lab, sessions=(first, *lab.sessions[1:])))["default"]
    assert [own.waiting[n].id for n in in_order(own, order(own))] == expected


# words of a configuration


def test_only_fifo_is_strict_and_every_other_order_has_a_longest_wait() -> None:
    assert [name for name in ORDERS if group_policy(order=name).strict] == ["fifo"]
    assert {group_policy(order=name).longest_wait_s for name in ORDERS} == {LONGEST_WAIT_S, None}
    assert group_policy(usual_wait_s=60).longest_wait_s == 60
    own = group_policy(order="lifo", longest_wait_s=60)
    assert (own.order, own.longest_wait_s) == (orders.lifo, 60)
    assert Policy(own, {"class": group_policy()}).of("class").order is orders.usage_size_age


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"order": "best"}, "order: 'best' is not one of default, drf, fair-share, fifo, fifo-skip, lifo"),
        ({"longest_wait_s": 0}, "longest_wait_s: 0 is not a number of seconds of at least 1"),
        ({"half_life_s": -1}, "half_life_s: -1 is not a number of seconds of at least 1"),
        ({"order": "drf", "half_life_s": 9}, "half_life_s: order 'drf' does not use it; leave it out"),
        (
            {"order": "fifo", "longest_wait_s": 9},
            "longest_wait_s: order 'fifo' does not use it; leave it out",
        ),
    ],
)
def test_unknown_policy_name_is_refused_with_the_known_names(words: dict[str, object], message: str) -> None:
    with pytest.raises(BadSettings) as e:
        group_policy(**words)  # type: ignore[arg-type]
    assert str(e.value) == message


def test_requests_are_ranked_where_all_running_sessions_have_no_gpu() -> None:
    lab = world().running("a", "0").pending("b", "1").pending("c", "1")
    assert len(plan(lab, Policy()).placed) == 1
