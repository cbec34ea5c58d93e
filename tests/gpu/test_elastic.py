"""Compute that is lent, in real time: an owner who comes back has its share."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
from lenders import WARM_UP_S, Start, milliseconds

BACK_MS, PAUSE_MS, TIMES = 500, 1500, 3
"""An owner's work each time it comes back, and its pauses: it is quiet after 150 ms."""


@pytest.mark.parametrize("kernel_us", [50, 1000])
def test_an_owner_who_comes_back_has_its_share_from_100_ms_on(
    bench: Any, started: Start, record_property: Callable[..., None], kernel_us: int
) -> None:
    """Beside two borrowers who always have work; the fourth quarter is free, and lent too."""
    begin = time.monotonic_ns() + round(WARM_UP_S * 1e9)
    ends = begin + round(TIMES * (4 * BACK_MS + PAUSE_MS) * 1e6)
    busy = ["share", str(kernel_us), "1", str(begin), str(ends)]
    borrowers = [started(slots, True, busy) for slots in ("0-25", "50-75")]
    owner = started("25-50", True, ["cells", "500", str(begin), *[str(BACK_MS), str(PAUSE_MS)] * TIMES])
    took = milliseconds(owner)
    percents = [100 * BACK_MS / (each - 100) for each in took]
    record_property("owner_percent", [round(percent, 1) for percent in percents])
    record_property("borrowers_percent", [round(100 * milliseconds(each)[0], 1) for each in borrowers])
    assert bench.complaints() == ""
    assert min(percents) >= 24, f"{min(percents):.1f} % of 25 %"
