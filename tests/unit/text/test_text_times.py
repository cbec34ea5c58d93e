"""Lengths of time in words."""

from __future__ import annotations

import pytest

from fgpuspawner.text.times import clock, duration, seconds_of


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
def test_duration_text_has_two_units(seconds: int, words: str) -> None:
    assert duration(seconds) == words


def test_durations_use_common_units() -> None:
    told = [duration(s) for s in (0, 59, 60, 3599, 3600, 47 * 3600 + 300, 48 * 3600, 100 * 3600)]
    assert told == ["0 s", "59 s", "1 min", "59 min", "1 h", "47 h 05 min", "2 d", "4 d 4 h"]


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("0:01", 60), ("2:30", 9000), ("0:01:30", 90), ("24:00", 86400), ("10000:00", 36_000_000)],
)
def test_hours_and_minutes_round_trip(text: str, seconds: int) -> None:
    assert seconds_of(text) == seconds
    assert clock(seconds) == text


@pytest.mark.parametrize("text", ["", "90", "2:3", "2:60", "2:30:60", "-1:00", "2h", "100000:00"])
def test_invalid_times_are_not_read(text: str) -> None:
    assert seconds_of(text) is None
