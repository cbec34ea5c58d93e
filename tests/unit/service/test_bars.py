"""Bars of pages."""

from __future__ import annotations

import pytest
from worlds import Build, shown

from fgpuspawner.service.model import Viewer
from fgpuspawner.service.pages.session_rows import memory_bar, percent
from fgpuspawner.service.pages.sessions_view import stack
from fgpuspawner.text.sessions import gib_words


def test_used_memory_is_never_shown_as_zero() -> None:
    assert [gib_words(mib) for mib in (0, 1, 128, 3000, 6528, 21503)] == [
        "0",
        "0.1",
        "0.125",
        "2.9",
        "6.375",
        "21",
    ]


@pytest.mark.parametrize(
    ("held_mib", "total_mib", "text", "parts"),
    [
        (24_020, 24_060, "23.46 of 23.5 GiB", ["23.46 in use", "0.04 free"]),
        (12_000, 24_060, "11.7 of 23.5 GiB", ["11.7 in use", "11.8 free"]),
        (2_048, 8_192, "2 of 8 GiB", ["2 in use", "6 free"]),
        (24_060, 24_060, "23.5 of 23.5 GiB", ["23.5 in use", "0 free"]),
    ],
)
def test_shown_parts_of_memory_add_up(held_mib: int, total_mib: int, text: str, parts: list[str]) -> None:
    amounts = [("used", "in use", held_mib), ("free", "free", total_mib - held_mib)]
    found = stack("", amounts, total_mib, "memory_mib", "GiB", None)
    assert (found.text, [part.words for part in found.parts]) == (text, parts)


def test_memory_bar_is_full_only_at_the_limit() -> None:
    told = [memory_bar("", used_mib, 2176) for used_mib in (0, 1, 700, 2150, 2175, 2176)]
    assert [bar.text for bar in told if bar is not None] == [
        f"{used} of 2.125 GiB" for used in ("0", "0.001", "0.7", "2.1", "2.124", "2.125")
    ]


def test_bar_of_nothing_is_empty() -> None:
    assert percent(0, 0) == "0"
    assert percent(1, 3) == "33.3"
    assert percent(2, 2) == "100.0"
    assert shown(Build().world(), Viewer("eve")).gauges == ()
