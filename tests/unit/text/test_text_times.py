"""Lengths of time in words."""

from __future__ import annotations

import pytest

from fgpuspawner.text.times import clock, duration, moment, seconds_of


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (-5, "0 s"),
        (0, "0 s"),
        (59, "59 s"),
        (60, "1 min"),
        (125, "2 min 5 s"),
        (700, "11 min"),
        (3599, "59 min"),
        (3600, "1 h"),
        (7260, "2 h 01 min"),
        (47 * 3600 + 300, "47 h 05 min"),
        (48 * 3600, "2 d"),
        (200000, "2 d 7 h"),
        (100 * 3600, "4 d 4 h"),
    ],
)
def test_duration_text_has_two_units(seconds: int, words: str) -> None:
    assert duration(seconds) == words


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


def test_moment_is_read_by_machines_and_marked_where_its_distance_matters() -> None:
    assert moment(0) == '<time datetime="1970-01-01T00:00:00Z">1970-01-01 00:00 UTC</time>'
    assert moment(0, near=True).startswith('<time datetime="1970-01-01T00:00:00Z" data-near>1970')
