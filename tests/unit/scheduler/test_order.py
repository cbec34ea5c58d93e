"""The order of the queue."""

from __future__ import annotations

from dataclasses import replace

from simulator import World, world

from fgpu_scheduler.core.orders import (
    Order,
    aged_from_s,
    by_place,
    fifo,
    in_order,
    lifo,
    queue_snapshots,
    waited_s,
)


def users(lab: World) -> list[str]:
    return [s.request.user for s in queue_snapshots(lab)["default"].waiting]


def test_queue_has_only_waiting_sessions_in_order_of_arrival() -> None:
    lab = world(devices=2).pending("b", "1").running("x", "1").pending("a", "1").pending("c", "1", held=True)
    assert users(lab) == ["b", "a", "c"]


def test_clock_that_is_set_back_does_not_change_the_order() -> None:
    lab = world().pending("a", "1")
    late = replace(lab, now_s=lab.now_s - 3600).pending("b", "1")
    assert users(late) == ["a", "b"]


def test_requeued_session_has_its_old_position() -> None:
    lab = world().pending("a", "1").pending("b", "1").pending("c", "1")
    again = replace(lab.of("c"), id=7, place_of=1, replaces=6)
    assert users(replace(lab, sessions=(lab.of("b"), again))) == ["c", "b"]


def test_order_ranks_one_group_and_ties_go_by_position() -> None:
    lab = (
        world().pending("a", "0.5").pending("b", "0.1").pending("c", "0.5").pending("d", "0.1", group="class")
    )
    own = queue_snapshots(lab)["default"]

    def ordered(order: Order) -> list[str]:
        return [own.waiting[at].request.user for at in in_order(own, order(own))]

    assert ordered(fifo) == ["a", "b", "c"]
    assert ordered(lifo) == ["c", "b", "a"]
    assert ordered(lambda own: [s.request.fgpu_milli for s in own.waiting]) == ["b", "a", "c"]


def test_no_session_counts_as_having_waited_less_than_one_behind() -> None:
    lab = world().pending("a", "1")
    set_back = replace(lab, now_s=lab.now_s - 3600).pending("b", "1")
    set_back = replace(set_back, now_s=set_back.now_s + 60).pending("c", "1")
    assert waited_s(by_place(set_back.sessions), set_back.now_s + 40) == [100, 100, 40]
    assert waited_s(by_place(lab.sessions), lab.now_s - 5) == [0]


def test_requeued_session_has_waited_since_then() -> None:
    lab = world(devices=2).pending("a", "2").pending("b", "2").pending("c", "2")
    day_s = 24 * 3600
    lab = lab.having("b", submitted_at_s=lab.now_s - 8 * day_s, queued_at_s=lab.now_s - 60)
    lab = lab.having("a", submitted_at_s=lab.now_s - 9 * day_s).having(
        "c", submitted_at_s=lab.now_s - 2 * day_s
    )
    assert waited_s(by_place(lab.sessions), lab.now_s) == [9 * day_s, 60, 2 * day_s]
    # It keeps its place, and is aged only once it has waited.
    assert ordered(lab, longest_wait_s=2 * day_s) == ["a", "c", "b"]
    assert ordered(lab) == ["a", "b", "c"]


def ordered(lab: World, order: Order = fifo, *, longest_wait_s: int | None = None) -> list[str]:
    own = queue_snapshots(lab)["default"]
    aged = []
    if longest_wait_s is not None:
        from_s = aged_from_s(own, longest_wait_s)
        aged = [n for n, s in enumerate(own.waiting) if from_s.get(s.id, lab.now_s + 1) <= lab.now_s]
    return [own.waiting[n].request.user for n in in_order(own, order(own), aged)]


def test_a_request_for_several_gpus_ages_and_the_largest_comes_first() -> None:
    lab = world(devices=4).pending("two", "2").pending("one", "1").pending("four", "4")
    for user, ago_s in (("two", 50), ("one", 1000), ("four", 25)):
        lab = lab.having(user, submitted_at_s=lab.now_s - ago_s)
    assert ordered(lab, lifo) == ["four", "one", "two"]
    assert ordered(lab, longest_wait_s=104) == ["two", "one", "four"]
    assert ordered(lab, longest_wait_s=102) == ["four", "two", "one"]
    assert ordered(lab, longest_wait_s=100) == ["four", "two", "one"]


def test_priority_comes_before_age() -> None:
    lab = world(devices=2).pending("a", "2").pending("b", "2").pending("c", "2").pending("d", "2")
    for user, priority in (("b", 5), ("c", 9), ("d", -1)):
        lab = lab.having(user, priority=priority)
    lab = lab.having("d", submitted_at_s=lab.now_s - 100)
    assert ordered(lab, longest_wait_s=200) == ["c", "b", "a", "d"]
