"""How much of a device's time sessions get, in real time: shares and kernel lengths, alone, in twos, in processes.

shares.py [--seconds 8] [--quick] [--out FILE]

Each program launches kernels of one length as fast as it may; its launches in a window of time are counted. On the
simulated driver; `make gpu-check` measures the same on a GPU. Always exits with 0. With busy CPUs a session misses
parts of its slots (the load is in the results): start it with `chrt -f 1` then, as it uses little CPU.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sessions import Bench, load, prepare, surroundings

SHARES = ("0-10", "0-25", "0-50", "0-75")
PAIRS = (("0-25", "25-100"), ("0-50", "50-100"), ("0-10", "25-100"))
KERNELS_US = (50, 200, 1000, 5000, 20_000, 50_000)
WITHIN_POINTS, SHORT_US = 3.0, 5000
PERIOD_S, IN_FLIGHT_S = 0.05, 0.004
WARM_UP_S = 1.5
MORE = 2
"""Further windows where the first one misses: another program on the CPUs may have taken a slot from it."""


@dataclass(frozen=True, slots=True)
class Tenant:
    """One session of a measurement: its slots, and what each of its processes runs."""

    slots: str
    kernel_us: int
    processes: int = 1
    streams: int = 1
    long_us: int = 0
    """Of each ``every``th kernel, of the same function; 0: all take equally long."""
    every: int = 1

    @property
    def percent(self) -> int:
        return sum(int(to) - int(since) for since, to in (slot.split("-") for slot in self.slots.split(",")))

    def __str__(self) -> str:
        longer = f"/{self.long_us}us" if self.long_us else ""
        return f"{self.slots}:{self.kernel_us}us{longer}" + (
            f"x{self.processes}" if self.processes > 1 else ""
        )

    def bound_points(self, seconds: float) -> float:
        """Return the deviation that docs/isolation.md allows in a window of this length, in percentage points."""
        slots_s = self.percent / 100 * PERIOD_S
        longest_s = max(self.kernel_us, self.long_us) / 1e6
        kernels = 1.0
        if self.long_us or longest_s > PERIOD_S:
            kernels = max(1, 30 / self.every if self.long_us else 1) + math.log2(1 + longest_s / PERIOD_S)
        return 100 * (self.processes * kernels * longest_s + 2.5 * slots_s + IN_FLIGHT_S) / seconds


def main() -> int:
    """Measure, print the table, write the results file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=8, help="the window of each measurement (default 8)")
    parser.add_argument("--quick", action="store_true", help="fewer measurements")
    parser.add_argument("--out", type=Path, help="results file (JSON)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        bench = prepare(Path(scratch))
        before, rows = load(), []
        for tenants in measurements(quick=args.quick):
            rows.append(measured(bench, tenants, args.seconds))
            print(line(rows[-1]), flush=True)
        if complaints := bench.complaints():
            raise SystemExit(f"libfgpu complained:\n{complaints}")
        results = {
            **surroundings(bench),
            "seconds": args.seconds,
            "how": "each tenant's programs launch as fast as they may, on the same CPUs as all else here; one window "
            f"each, and where it misses {MORE} more, of which with the first the median counts (`windows` has all)",
            "load": {"before": before, "after": load()},
            "scheduling": {0: "others", 1: "first in, first out"}.get(os.sched_getscheduler(0), "?"),
            "rows": rows,
        }
    missed = [each for each in rows if not each["holds"]]
    print(f"{len(rows) - len(missed)} of {len(rows)} measurements hold")
    if args.out:
        args.out.write_text(json.dumps(results, indent=1) + "\n")
    return 0


def measurements(*, quick: bool) -> Iterator[tuple[Tenant, ...]]:
    """Yield what is measured."""
    for kernel_us in (50, 5000) if quick else KERNELS_US:
        for slots in SHARES:
            yield (Tenant(slots, kernel_us),)
        for pair in PAIRS:
            yield tuple(Tenant(slots, kernel_us) for slots in pair)
    yield Tenant("0-25", 50), Tenant("25-100", 5000)
    yield Tenant("0-25", 5000), Tenant("25-100", 50)
    for kernel_us in (50, 1000):
        yield (Tenant("0-50", kernel_us, processes=3),)
        yield (Tenant("0-50", kernel_us, streams=4),)
        yield Tenant("0-25", kernel_us, processes=2), Tenant("25-75", kernel_us, streams=4)


def measured(bench: Bench, tenants: tuple[Tenant, ...], seconds: float) -> dict[str, Any]:
    """Return the figures of one window, or of the median of several where one window misses."""
    windows = [run(bench, tenants, seconds)]
    found = row(tenants, windows[0], seconds)
    if not found["holds"]:
        windows += [run(bench, tenants, seconds) for _ in range(MORE)]
        found = row(tenants, [statistics.median(each) for each in zip(*windows, strict=True)], seconds)
    return found | {"windows": [[round(percent, 2) for percent in window] for window in windows]}


def run(bench: Bench, tenants: tuple[Tenant, ...], seconds: float) -> list[float]:
    """Return what each tenant got of the device, in percent."""
    number = len(list(bench.scratch.glob("session*")))
    program = bench.scratch / "share"
    if not program.exists():
        bench.program("share.c")
    begin = time.monotonic_ns() + round(WARM_UP_S * 1e9)
    window = [str(begin), str(begin + round(seconds * 1e9))]
    running: list[list[subprocess.Popen[str]]] = []
    for n, tenant in enumerate(tenants):
        environment = bench.session(f"session{number + n}", tenant.slots)
        command = [str(program), str(tenant.kernel_us), str(tenant.streams), *window]
        command += [str(tenant.long_us), str(tenant.every)] if tenant.long_us else []
        running.append(
            [
                subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
                for _ in range(tenant.processes)
            ]
        )
    outputs = [[process.communicate()[0] for process in each] for each in running]
    if any(process.returncode for each in running for process in each):
        raise SystemExit(f"a program failed: {tenants}")
    return [100 * sum(map(float, each)) for each in outputs]


def row(tenants: tuple[Tenant, ...], found: list[float], seconds: float) -> dict[str, Any]:
    """Return one measurement's figures, and whether each tenant's share is as near as it has to be."""
    each = [
        {
            **asdict(tenant),
            "percent": round(percent, 2),
            "off_points": round(percent - tenant.percent, 2),
            "may_be_off_points": round(allowed(tenants, tenant, seconds), 2),
            "neighbours_may_take_points": round(taken_by_neighbours(tenants, tenant), 2),
        }
        for tenant, percent in zip(tenants, found, strict=True)
    ]
    holds = all(
        -t["may_be_off_points"] - t["neighbours_may_take_points"] <= t["off_points"] <= t["may_be_off_points"]
        for t in each
    )
    return {"tenants": each, "holds": holds}


def allowed(tenants: tuple[Tenant, ...], tenant: Tenant, seconds: float) -> float:
    """Return 3 points for short kernels; for longer ones the published bound, and 3 points beside it."""
    if max(each.kernel_us for each in tenants) <= SHORT_US:
        return WITHIN_POINTS
    return WITHIN_POINTS + tenant.bound_points(seconds)


def taken_by_neighbours(tenants: tuple[Tenant, ...], tenant: Tenant) -> float:
    """Return the points that neighbours' longer kernels take: once a period, half of one runs on into others' slots."""
    longest_us = max((each.kernel_us for each in tenants if each is not tenant), default=0)
    return 100 * longest_us / 1e6 / (2 * PERIOD_S) if longest_us > tenant.kernel_us else 0


def line(each: dict[str, Any]) -> str:
    """Return one measurement as a line of the table."""
    parts = [
        f"{t['slots']:>7} {t['kernel_us']:>6} us x{t['processes']}x{t['streams']}: {t['percent']:6.2f} %"
        f" ({t['off_points']:+.2f}, at most {t['may_be_off_points']:.1f}"
        f" and {t['neighbours_may_take_points']:.1f} below)"
        for t in each["tenants"]
    ]
    return ("  " if each["holds"] else "! ") + "  |".join(parts)


if __name__ == "__main__":
    sys.exit(main())
