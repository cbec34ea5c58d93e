"""What a session gets with kernels of unknown length: kernels of seconds, and functions that change.

worlds.py [--out FILE]

In the simulated time of isolation/tests/throttle_world.c, with the throttle as it is shipped: exact, the same everywhere.
A share of 25 %, alone, and at the end beside one of 75 %. Always exits with 0.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ISOLATION = Path(__file__).parents[2] / "isolation"
PARTS = ("throttle", "batches", "sentinel", "gate", "account", "slots", "lending", "launch")
FLAGS = ("-O2", "-g", "-D_GNU_SOURCE", f"-I{ISOLATION / 'include'}", f"-I{ISOLATION / 'libfgpu'}")
CHANGING = (
    (5, 5000),
    (5, 20_000),
    (20, 20_000),
    (20, 100_000),
    (20, 1_000_000),
    (20, 5_000_000),
    (100, 20_000),
)
SHARE = "slots=0-25"
NEIGHBOUR = "slots=25-100,kernel_us=500"


def main() -> int:
    """Run each world, print a line for it, write the results file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        command = built(Path(folder))
        for seconds, tenants in worlds():
            rows.append(row(command, seconds, tenants))
            print(line(rows[-1]), flush=True)
    if chosen.out:
        chosen.out.write_text(json.dumps({"how": __doc__, "rows": rows}, indent=1) + "\n")
    return 0


def built(folder: Path) -> list[str]:
    """Compile the throttle and its world; return how to start it."""
    throttle, world = folder / "throttle.so", folder / "world"
    sources = [ISOLATION / "libfgpu" / f"{part}.c" for part in PARTS]
    for command in (
        ["gcc", *FLAGS, "-shared", "-fPIC", "-Wl,-Bsymbolic", *sources, "-o", throttle],
        [
            "gcc",
            *FLAGS,
            ISOLATION / "tests" / "throttle_world.c",
            "-rdynamic",
            "-ldl",
            "-lm",
            "-pthread",
            "-o",
            world,
        ],
    ):
        subprocess.run(command, check=True)
    return [str(world), str(throttle)]


def worlds() -> Iterator[tuple[int, tuple[str, ...]]]:
    """Yield the seconds and the tenants of each world."""
    for kernel_s in (1, 2, 3, 5):
        for seconds in (20, 60, 600):
            yield seconds, (f"{SHARE},kernel_us={kernel_s}000000",)
    for more in ("processes=2", "streams=3", "burst=3,idle_ms=15000"):
        yield 600, (f"{SHARE},kernel_us=5000000,{more}",)
    for every, change_us in CHANGING:
        pause_ms = 2 * change_us // 1000
        for program in (
            f"wait_each={every}",
            f"poll_each={every}",
            f"burst={every},idle_ms={pause_ms}",
            "host_us=2",
        ):
            text = f"{SHARE},kernel_us=10,change_us={change_us},every={every},{program}"
            yield 60 if change_us < 1_000_000 else 600, (text,)
    for policy in ("fifo", "sliced"):
        for first in ("kernel_us=20000", "kernel_us=10,change_us=20000,every=20,wait_each=20"):
            yield 60, (f"{SHARE},{first}", NEIGHBOUR, f"policy={policy}")


def row(command: list[str], seconds: int, tenants: tuple[str, ...]) -> dict[str, Any]:
    """Return what came of one world: shares, and the most above them in any stretch of 50 ms to a minute."""
    words = [word if word.startswith("policy=") else f"tenant:{word}" for word in tenants]
    done = subprocess.run(
        [*command, f"seconds={seconds}", *words], check=True, capture_output=True, text=True, timeout=300
    )
    found = json.loads(done.stdout)["tenants"]
    return {
        "seconds": seconds,
        "tenants": tenants,
        "percent": [tenant["share"] for tenant in found],
        "most_above_ms": [max(above for _, above in t["off_ms"].values()) for t in found],
    }


def line(each: dict[str, Any]) -> str:
    """Return a row as a line of text."""
    shares = ", ".join(f"{percent:6.2f} %" for percent in each["percent"])
    above = ", ".join(f"{ms:.0f} ms above" for ms in each["most_above_ms"])
    return f"{each['seconds']:>4} s  {shares}  {above}  {' | '.join(each['tenants'])}"


if __name__ == "__main__":
    raise SystemExit(main())
