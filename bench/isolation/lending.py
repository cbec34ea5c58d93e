"""What notebook cells gain from lent compute, and what a returning owner gets.

lending.py [--sliced] [--out FILE]

In the simulated time of isolation/tests/throttle_world.c, with the throttle as it is shipped: exact, the same everywhere.
Each session runs cells that take 2 s on a whole device on average (exponential), with pauses that leave it busy for 5, 10
or 19 % of the time there. These figures, with cells and pauses of minutes, are those of a public trace (AdobeTrace); here
all is 60 times faster, which makes lending look worse. With --sliced only cells of 500 ms on a device that slices its
time as GPUs do, beside plain time slicing without a limit. Always exits with 0.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from worlds import built

sys.path.insert(0, str(Path(__file__).parents[1]))

GROUPS = ((2, 50), (4, 25), (10, 10))
DUTIES = (5, 10, 19)
SECONDS = {2: 1500, 4: 2000, 10: 400}
"""By the number of sessions: some hundred cells of each group."""
BACK_KERNELS_US = (50, 500, 1000, 2000, 4000)


def main() -> int:
    """Run each world, print a line for it, write the results file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("--sliced", action="store_true")
    chosen = parser.parse_args()
    cells, back, sliced = [], [], []
    with tempfile.TemporaryDirectory() as folder:
        command = built(Path(folder))
        if chosen.sliced:
            sliced = [sliced_cells(command, seed) for seed in (1, 2, 3)]
            print(*sliced, sep="\n")
        for count, percent in () if chosen.sliced else GROUPS:
            for duty in DUTIES:
                cells.append(cells_of(command, count, percent, duty))
                print(cells[-1], flush=True)
        for kernel_us in () if chosen.sliced else BACK_KERNELS_US:
            back.append(back_beside(command, kernel_us))
            print(back[-1], flush=True)
    if chosen.out:
        from machine import machine, source

        surroundings = {
            "date": time.strftime("%Y-%m-%d", time.gmtime()),
            "machine": machine(),
            "source": source(),
        }
        found = {"how": __doc__, **surroundings, "cells": cells, "owner_comes_back": back, "sliced": sliced}
        chosen.out.write_text(json.dumps(found, indent=1) + "\n")
    return 0


def run(command: list[str], seconds: int, *tenants: str) -> list[dict[str, Any]]:
    """Return what came of each tenant of a world."""
    words = [f"seconds={seconds}", *(f"tenant:{tenant}" for tenant in tenants)]
    done = subprocess.run([*command, *words], check=True, capture_output=True, text=True, timeout=600)
    found: list[dict[str, Any]] = json.loads(done.stdout)["tenants"]
    return found


def cells_of(command: list[str], count: int, percent: int, duty: int) -> dict[str, Any]:
    """Return how many times as long as on a whole device a cell takes, without and with lending."""
    row: dict[str, Any] = {"sessions": count, "percent_each": percent, "duty_percent": duty}
    for name, more in (("strict", ""), ("elastic", ",lending=1")):
        program = f"kernel_us=2000,task_ms=2000,gap_ms={2000 * (100 - duty) // duty}{more}"
        tenants = [f"slots={n * percent}-{(n + 1) * percent},{program}" for n in range(count)]
        found = run(command, SECONDS[count], *tenants)
        cells = sum(t["cells"] for t in found)
        row[f"{name}_cells"] = cells
        row[f"{name}_slow_down"] = round(sum(t["cells"] * t["cells_stretched"] for t in found) / cells, 2)
    return row


def sliced_cells(command: list[str], seed: int) -> dict[str, Any]:
    """Return how many times as long all cells of four quarters with work for 10 % of the time take, in three ways."""
    row: dict[str, Any] = {"seed": seed}
    for name, more in (("strict", "lending=0"), ("elastic", "lending=1"), ("time_slicing", "free=1")):
        program = f"kernel_us=1000,task_ms=500,gap_ms=4500,{more}"
        tenants = [f"slots={n * 25}-{n * 25 + 25},{program}" for n in range(4)]
        found = run([*command, "policy=sliced", f"seed={seed}"], 600, *tenants)
        cells = sum(t["cells"] for t in found)
        row[name] = round(sum(t["cells"] * t["stretched"] for t in found) / cells, 2)
    return row


def back_beside(command: list[str], kernel_us: int) -> dict[str, Any]:
    """Return the percent of an owner of a quarter from 100 ms after it came back, beside two borrowers."""
    row: dict[str, Any] = {"borrowers_kernel_us": kernel_us}
    for name, more in (("strict", ""), ("elastic", ",lending=1")):
        borrowers = [f"slots={slots},kernel_us={kernel_us}{more}" for slots in ("0-25", "50-75")]
        owner = f"slots=25-50,kernel_us=500,start_ms=3010{more}"
        percents = run(command, 20, owner, *borrowers)[0]["back"]
        row[f"{name}_percent_in_50_200_1000_5000_ms"] = percents[:4]
    return row


if __name__ == "__main__":
    raise SystemExit(main())
