"""The order of the queue."""

from __future__ import annotations

from dataclasses import replace

from fgpu_scheduler.core.order import fifo, positions, queue
from fgpu_scheduler.testing import World, world


def users(lab: World) -> list[str]:
    return [s.request.user for s in queue(lab.sessions, order=fifo)]


def test_only_those_who_wait_are_in_the_queue_first_come_first() -> None:
    lab = world(devices=2).pending("b", "1").running("x", "1").pending("a", "1").pending("c", "1", held=True)
    assert users(lab) == ["b", "a", "c"]


def test_the_queue_does_not_depend_on_the_order_of_its_input() -> None:
    lab = world().pending("a", "1").pending("b", "1").pending("c", "1")
    assert queue(reversed(lab.sessions), order=fifo) == queue(lab.sessions, order=fifo)


def test_a_clock_that_is_set_back_lets_nobody_overtake() -> None:
    lab = world().pending("a", "1")
    late = replace(lab, now_s=lab.now_s - 3600).pending("b", "1")
    assert users(late) == ["a", "b"]


def test_a_session_that_is_queued_again_has_the_place_of_the_first_that_it_goes_back_to() -> None:
    lab = world().pending("a", "1").pending("b", "1").pending("c", "1")
    again = replace(lab.of("c"), id=7, place_of=1, replaces=6)
    assert users(replace(lab, sessions=(lab.of("b"), again))) == ["c", "b"]


def test_another_order_can_be_given_and_ties_break_by_id() -> None:
    lab = world().pending("a", "0.5").pending("b", "0.1").pending("c", "0.5")
    smallest_first = queue(reversed(lab.sessions), order=lambda s: (s.request.fgpu_milli,))
    assert [s.request.user for s in smallest_first] == ["b", "a", "c"]


def test_positions_count_from_one_in_each_resource_group() -> None:
    lab = (
        world().node("n2", group="class").pending("a", "1").pending("b", "1", group="class").pending("c", "1")
    )
    assert positions(lab.sessions, order=fifo) == {1: 1, 2: 1, 3: 2}
