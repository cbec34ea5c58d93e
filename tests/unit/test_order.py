"""The order of the queue."""

from __future__ import annotations

from dataclasses import replace

from fgpu_scheduler.core.order import Order, in_order, line, queue, waited_s
from fgpu_scheduler.core.orders import fifo, lifo
from fgpu_scheduler.testing import World, world


def users(lab: World) -> list[str]:
    return [s.request.user for s in queue(lab.sessions)]


def test_only_those_who_wait_are_in_the_queue_first_come_first() -> None:
    lab = world(devices=2).pending("b", "1").running("x", "1").pending("a", "1").pending("c", "1", held=True)
    assert users(lab) == ["b", "a", "c"]


def test_the_queue_does_not_depend_on_the_order_of_its_input() -> None:
    lab = world().pending("a", "1").pending("b", "1").pending("c", "1")
    assert queue(reversed(lab.sessions)) == queue(lab.sessions)


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
    own = line(lab, "default", half_life_s=1)

    def ordered(order: Order) -> list[str]:
        return [own.waiting[at].request.user for at in in_order(own, order)]

    assert ordered(fifo) == ["a", "b", "c"]
    assert ordered(lifo) == ["c", "b", "a"]
    assert ordered(lambda own: [s.request.fgpu_milli for s in own.waiting]) == ["b", "a", "c"]


def test_nobody_has_waited_less_than_somebody_behind() -> None:
    lab = world().pending("a", "1")
    set_back = replace(lab, now_s=lab.now_s - 3600).pending("b", "1")
    set_back = replace(set_back, now_s=set_back.now_s + 60).pending("c", "1")
    assert waited_s(queue(set_back.sessions), set_back.now_s + 40) == [100, 100, 40]
    assert waited_s(queue(lab.sessions), lab.now_s - 5) == [0]
