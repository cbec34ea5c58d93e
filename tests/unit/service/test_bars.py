"""Bars of pages."""

from __future__ import annotations

from worlds import Build, shown

from fgpuspawner.service.model import Viewer
from fgpuspawner.service.pages.bars import percent


def test_a_bar_without_anything_is_empty_and_not_an_error() -> None:
    assert percent(0, 0) == "0"
    assert percent(1, 3) == "33.3"
    assert percent(2, 2) == "100.0"
    assert shown(Build().world(), Viewer("eve")).gauges == ()
