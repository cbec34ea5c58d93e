"""What libfgpu adds to a kernel launch: direct, with compute not limited, and limited but not in use, in turns.

launch.py [--rounds 15] [--out FILE]

"Limited but not in use": 99 of 100 slots, kernels that do nothing, so that the account is never empty; the launches
that fall into the hundredth slot wait, and the median leaves them out. On the simulated driver; `make gpu-check` measures
the same on a GPU. Exits with 0 whatever the figures say.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from sessions import Bench, load, prepare, surroundings

LAUNCHES, BLOCKS = 500, 101
DIRECT, OFF, UNUSED = "direct", "not limited", "limited, not in use"
TARGETS = {OFF: 10, UNUSED: 25}
"""Nanoseconds that may be added."""


def main() -> int:
    """Measure, print the table, write the results file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=15, help="turns of each (default 15)")
    parser.add_argument("--out", type=Path, help="results file (JSON)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        results = measure(prepare(Path(scratch)), args.rounds)
    print(table(results))
    if args.out:
        args.out.write_text(json.dumps(results, indent=1) + "\n")
    return 0


def measure(bench: Bench, rounds: int) -> dict[str, Any]:
    """Return ns per launch of each, as medians over the rounds, and every single value."""
    program = bench.program("launch.c")
    environments = {
        DIRECT: bench.environment,
        OFF: bench.session("off"),
        UNUSED: bench.session("unused", "0-99"),
    }
    values: dict[str, list[float]] = {way: [] for way in environments}
    before = load()
    for turn in range(rounds):
        for way in list(environments)[:: 1 if turn % 2 else -1]:
            done = subprocess.run(
                [program, str(LAUNCHES), str(BLOCKS)],
                env=environments[way],
                capture_output=True,
                text=True,
                check=True,
            )
            values[way].append(float(done.stdout))
    if complaints := bench.complaints():
        raise SystemExit(f"libfgpu complained, so nothing was measured:\n{complaints}")
    direct = statistics.median(values[DIRECT])
    return {
        **surroundings(bench),
        "load": {"before": before, "after": load()},
        "how": f"medians of {rounds} turns, the three ways one after another; a turn's value is the median of its blocks",
        "figures": {
            way: {
                "ns": round(statistics.median(each), 1),
                "added_ns": round(statistics.median(each) - direct, 1),
                "ratio": round(statistics.median(each) / direct, 3),
            }
            for way, each in values.items()
        },
        "values": values,
    }


def table(results: dict[str, Any]) -> str:
    """Return the figures as a table."""
    lines = [f"{'cuLaunchKernel':24}{'ns':>10}{'added':>10}{'ratio':>8}"]
    for way, found in results["figures"].items():
        target = TARGETS.get(way)
        verdict = (
            ""
            if target is None
            else f"  {'PASS' if found['added_ns'] <= target else 'MISS'}: at most {target} ns"
        )
        lines.append(f"{way:24}{found['ns']:>10.1f}{found['added_ns']:>10.1f}{found['ratio']:>8.3f}{verdict}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
