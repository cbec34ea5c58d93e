"""Slots: neighbours never overlap while there is room, each session gets exactly its share, always the same one."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fgpuspawner.isolation.limits import Slots, assign_slots, parse_slots, render_slots

percents = st.integers(1, 100)


def hundredths(slots: Slots) -> list[int]:
    return [h for first, end in slots for h in range(first, end)]


@pytest.mark.parametrize(
    ("taken", "percent", "expected"),
    [
        ([], 25, ((0, 25),)),
        ([], 100, ((0, 100),)),
        ([((0, 25),)], 75, ((25, 100),)),
        # The smaller of two gaps that are both large enough: the larger one stays whole.
        ([((0, 10),), ((40, 50),)], 25, ((10, 35),)),
        ([((0, 10),), ((70, 80),)], 15, ((80, 95),)),
        # Of equal gaps the first.
        ([((10, 20),), ((30, 100),)], 10, ((0, 10),)),
        # No gap is large enough: the largest first.
        ([((0, 25),), ((50, 75),)], 40, ((25, 50), (75, 90))),
        ([((10, 20),), ((25, 60),)], 50, ((0, 10), (60, 100))),
        ([((10, 20),), ((25, 60),)], 52, ((0, 10), (20, 22), (60, 100))),
    ],
)
def test_the_smallest_gap_that_holds_it_is_taken(taken: list[Slots], percent: int, expected: Slots) -> None:
    assert assign_slots(taken, percent) == expected


@given(st.data())
@settings(max_examples=300)
def test_sessions_that_come_and_go_never_overlap_and_always_fit(data: st.DataObject) -> None:
    live: dict[int, Slots] = {}
    for number in range(data.draw(st.integers(1, 40))):
        room = 100 - sum(len(hundredths(slots)) for slots in live.values())
        if live and (room == 0 or data.draw(st.booleans())):
            live.pop(data.draw(st.sampled_from(sorted(live))))
            continue
        percent = data.draw(st.integers(1, room))
        live[number] = assign_slots(live.values(), percent)
        assert len(hundredths(live[number])) == percent
        held = [h for slots in live.values() for h in hundredths(slots)]
        assert len(held) == len(set(held)) == sum(len(hundredths(slots)) for slots in live.values())


@given(st.lists(percents, max_size=8), percents)
def test_assigned_slots_are_ascending_and_have_the_requested_width(before: list[int], percent: int) -> None:
    # More in all than there is, as after a change of the unit while sessions run.
    taken: list[Slots] = []
    for other in before:
        taken.append(assign_slots(taken, other))
    slots = assign_slots(taken, percent)
    assert len(hundredths(slots)) == percent
    assert len(slots) <= 50
    edges = [edge for slot in slots for edge in slot]
    assert edges == sorted(set(edges)), "no two touch, none is empty"
    assert 0 <= edges[0] < edges[-1] <= 100
    assert parse_slots(render_slots(slots)) == slots


def test_what_does_not_fit_is_shared_with_as_few_as_can_be() -> None:
    taken = [((0, 50),), ((25, 75),)]
    # Free are 75 to 100. Of what is held, 25 to 50 is held twice, and has to wait for the last.
    assert assign_slots(taken, 30) == ((70, 100),)
    assert assign_slots(taken, 75) == ((0, 25), (50, 100))
    assert assign_slots(taken, 80) == ((0, 25), (45, 100))


NOT_SLOTS = [
    "",
    "-",
    "5",
    "5-",
    "-5",
    "5-5",
    "6-5",
    "0-101",
    "0-5,4-8",
    "5-8,0-2",
    "0-5,",
    "0-5;6-7",
    "\u0660-\u0665",
]


@pytest.mark.parametrize("text", [*NOT_SLOTS, "+1-2"])
def test_slots_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"no slot|not within"):
        parse_slots(text)
