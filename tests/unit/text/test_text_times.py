"""Lengths of time in words."""

from __future__ import annotations

import pytest

from fgpuspawner.text.times import duration


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (-5, "0 s"),
        (59, "59 s"),
        (60, "1 min"),
        (125, "2 min 5 s"),
        (700, "11 min"),
        (7260, "2 h 01 min"),
        (90000, "25 h"),
        (200000, "2 d 7 h"),
    ],
)
def test_durations_are_as_exact_as_it_matters(seconds: int, words: str) -> None:
    assert duration(seconds) == words


def test_lengths_of_time_are_in_the_units_that_people_use() -> None:
    told = [duration(s) for s in (0, 59, 60, 3599, 3600, 47 * 3600 + 300, 48 * 3600, 100 * 3600)]
    assert told == ["0 s", "59 s", "1 min", "59 min", "1 h", "47 h 05 min", "2 d", "4 d 4 h"]
