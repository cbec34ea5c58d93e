"""Compute that is lent, in real time: an owner who comes back has its share, and cells take less time than without it."""

from __future__ import annotations

import random
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

QUARTERS = ("0-25", "25-50", "50-75", "75-100")
BACK_MS, PAUSE_MS, TIMES = 500, 1500, 3
"""An owner's work each time it comes back, and its pauses: it is quiet after 150 ms."""
CELL_MS = 500
CELLS = {5: 2, 10: 4, 19: 7}
"""Of each of four sessions, by the percent of the time for which one would have work on a whole GPU."""
WARM_UP_S = 3.0


Start = Callable[[str, bool | None, list[str]], "subprocess.Popen[str]"]


@pytest.fixture
def started(bench: Any, tmp_path: Path) -> Start:
    """Start a program in a session with these slots: that lends, that does not, or (None) without libfgpu."""
    words = tmp_path / "words"
    words.mkdir()

    def start(slots: str, lends: bool | None, command: list[str]) -> subprocess.Popen[str]:
        name = f"lender{len(list(bench.scratch.glob('lender*')))}"
        environment = bench.environment
        if lends is not None:
            environment = bench.session(name, slots, words=words if lends else None)
        command = [str(bench.scratch / command[0]), *command[1:]]
        return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)

    return start


def milliseconds(process: subprocess.Popen[str]) -> list[float]:
    output = process.communicate()[0]
    if process.returncode:
        raise RuntimeError(f"a program ended with {process.returncode}")
    return [float(line) for line in output.split()]


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


@pytest.mark.parametrize("duty", CELLS)
def test_cells_take_less_time_where_idle_compute_is_lent(
    bench: Any, started: Start, record_property: Callable[..., None], duty: int
) -> None:
    """Four sessions of 25 %: how many times as long as on a whole GPU, strict, lent, and without libfgpu."""
    chance = random.Random(duty)
    programs = [
        [
            str(round(chance.expovariate(1 / mean)) + 1)
            for _ in range(CELLS[duty])
            for mean in (CELL_MS, CELL_MS * (100 - duty) / duty)
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
