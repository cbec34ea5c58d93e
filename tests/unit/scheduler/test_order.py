"""The order of the queue."""

from __future__ import annotations

from dataclasses import replace

from simulator import World, world

from fgpu_scheduler.core.orders import First, Order, by_place, fifo, in_order, lifo, lines, waited_s


def users(lab: World) -> list[str]:
    return [s.request.user for s in lines(lab)["default"].waiting]


def test_only_those_who_wait_are_in_the_queue_first_come_first() -> None:
    lab = world(devices=2).pending("b", "1").running("x", "1").pending("a", "1").pending("c", "1", held=True)
    assert users(lab) == ["b", "a", "c"]


def test_the_queue_does_not_depend_on_the_order_of_its_input() -> None:
    lab = world().pending("a", "1").pending("b", "1").pending("c", "1")
    assert by_place(reversed(lab.sessions)) == by_place(lab.sessions)


def test_a_clock_that_is_set_back_lets_nobody_overtake() -> None:
    lab = world().pending("a", "1")
    late = replace(lab, now_s=lab.now_s - 3600).pending("b", "1")
    assert users(late) == ["a", "b"]


def test_a_session_that_is_queued_again_has_the_place_of_the_first_that_it_goes_back_to() -> None:
    lab = world().pending("a", "1").pending("b", "1").pending("c", "1")
    again = replace(lab.of("c"), id=7, place_of=1, replaces=6)
    assert users(replace(lab, sessions=(lab.of("b"), again))) == ["c", "b"]


def test_an_order_ranks_those_of_one_group_and_ties_go_by_place() -> None:
    lab = (
        world().pending("a", "0.5").pending("b", "0.1").pending("c", "0.5").pending("d", "0.1", group="class")
    )
    own = lines(lab)["default"]

    def ordered(order: Order) -> list[str]:
        return [own.waiting[at].request.user for at in in_order(own, order)]

    assert ordered(fifo) == ["a", "b", "c"]
    assert ordered(lifo) == ["c", "b", "a"]
    assert ordered(lambda own: [s.request.fgpu_milli for s in own.waiting]) == ["b", "a", "c"]


def test_nobody_has_waited_less_than_somebody_behind() -> None:
    lab = world().pending("a", "1")
    set_back = replace(lab, now_s=lab.now_s - 3600).pending("b", "1")
    set_back = replace(set_back, now_s=set_back.now_s + 60).pending("c", "1")
    assert waited_s(by_place(set_back.sessions), set_back.now_s + 40) == [100, 100, 40]
    assert waited_s(by_place(lab.sessions), lab.now_s - 5) == [0]


def test_one_that_was_queued_again_has_waited_since_then_and_makes_nobody_wait_less() -> None:
    lab = world().pending("a", "1").pending("b", "1").pending("c", "1")
    day_s = 24 * 3600
    lab = with_(lab, "b", submitted_at_s=lab.now_s - 8 * day_s, queued_at_s=lab.now_s - 60)
    lab = with_(
        with_(lab, "a", submitted_at_s=lab.now_s - 9 * day_s), "c", submitted_at_s=lab.now_s - 2 * day_s
    )
    assert waited_s(by_place(lab.sessions), lab.now_s) == [9 * day_s, 60, 2 * day_s]
    # It keeps its place, and is aged only once it has waited.
    assert first(lab, First(longest_wait_s=day_s)) == ["a", "c", "b"]
    assert first(lab, First()) == ["a", "b", "c"]


def first(lab: World, rules: First, order: Order = fifo) -> list[str]:
    own = lines(lab)["default"]
    return [own.waiting[n].request.user for n in in_order(own, order, rules)]


def with_(lab: World, user: str, **values: object) -> World:
    changed = replace(lab.of(user), **values)  # type: ignore[arg-type]
    return replace(lab, sessions=tuple(changed if s.id == changed.id else s for s in lab.sessions))


def test_promises_come_before_age_and_age_before_the_order() -> None:
    lab = world().pending("a", "1").pending("b", "1").pending("c", "1").pending("d", "1")
    lab = with_(with_(lab, "a", submitted_at_s=lab.now_s - 100), "c", promised_at_s=lab.now_s)
    assert first(lab, First(), lifo) == ["d", "c", "b", "a"]
    assert first(lab, First(longest_wait_s=100), lifo) == ["a", "d", "c", "b"]
    assert first(lab, First(promises=True, longest_wait_s=100), lifo) == ["c", "a", "d", "b"]
    assert first(lab, First(longest_wait_s=101), lifo) == ["d", "c", "b", "a"]


def test_priority_comes_first_as_far_as_a_user_may_have_it() -> None:
    lab = world().pending("a", "1").pending("b", "1").pending("c", "1").pending("d", "1")
    for user, priority in (("b", 5), ("c", 9), ("d", -1)):
        lab = with_(lab, user, request=replace(lab.of(user).request, priority=priority))
    lab = with_(lab, "a", promised_at_s=lab.now_s)
    assert first(lab, First(promises=True)) == ["c", "b", "a", "d"]
    assert first(lab, First(promises=True, most_priority={"c": 5})) == ["b", "c", "a", "d"]
    assert first(lab, First(promises=True, most_priority={"*": 0, "b": 9})) == ["b", "a", "c", "d"]
