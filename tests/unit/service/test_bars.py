"""Bars of pages."""

from __future__ import annotations

from worlds import Build, shown

from fgpuspawner.service.model import Viewer
from fgpuspawner.service.pages.bars import percent
from fgpuspawner.text.sessions import gib_words


def test_memory_is_in_gib_and_something_is_never_nothing() -> None:
    assert [gib_words(mib) for mib in (0, 1, 128, 3000, 6528, 21503)] == [
        "0",
        "0.1",
        "0.125",
        "2.9",
        "6.375",
        "21",
    ]


def test_a_bar_without_anything_is_empty_and_not_an_error() -> None:
    assert percent(0, 0) == "0"
    assert percent(1, 3) == "33.3"
    assert percent(2, 2) == "100.0"
    assert shown(Build().world(), Viewer("eve")).gauges == ()
