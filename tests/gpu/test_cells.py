"""Cells of notebooks: how many times as long as on a whole GPU they take, strict, with compute lent, and time sliced."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import pytest
from lenders import WARM_UP_S, Start, milliseconds
from slices import Gpu

QUARTERS = ("0-25", "25-50", "50-75", "75-100")
CELLS = {5: (2, 250), 10: (4, 400), 19: (7, 400)}
"""Of each of four sessions, and their mean length in ms, by the percent of the time for which one would have work on a
whole GPU."""
NOISE = 1.05
"""Some dozen cells tell no smaller difference."""


@pytest.mark.parametrize("duty", CELLS)
def test_cells_take_less_time_where_idle_compute_is_lent(
    bench: Any, gpu: Gpu, started: Start, record_property: Callable[..., None], duty: int
) -> None:
    """Four sessions of 25 %. Without libfgpu the GPU slices its time, which is the best that lending can come near to."""
    chance = random.Random(duty)
    count, cell_ms = CELLS[duty]
    programs = [
        [
            str(round(chance.expovariate(1 / mean)) + 1)
            for _ in range(count)
            for mean in (cell_ms, cell_ms * (100 - duty) / duty)
        ]
        for _ in QUARTERS
    ]
    work_ms = sum(int(word) for program in programs for word in program[::2])
    longer = {}
    for name, lends in (("strict", False), ("elastic", True), ("time slicing", None)):
        begin = str(time.monotonic_ns() + round(WARM_UP_S * 1e9))
        running = [
            started(slots, lends, ["cells", "1000", begin, *program])
            for slots, program in zip(QUARTERS, programs, strict=True)
        ]
        longer[name] = sum(sum(milliseconds(each)) for each in running) / work_ms
    record_property("times_as_long", {name: round(value, 2) for name, value in longer.items()})
    assert bench.complaints() == ""
    assert longer["elastic"] < longer["strict"] / 1.5
    if not gpu.simulated:  # A simulated GPU serves kernels in the order of their launches.
        assert longer["elastic"] <= NOISE * longer["time slicing"]
