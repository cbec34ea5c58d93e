"""What libfgpu adds to a call of the driver and to the start of a process: with it and without it, in turns.

overhead.py [--rounds 25] [--out FILE]

On the simulated driver; `make gpu-check` measures the same on a GPU. Exits with 0 whatever the figures say.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from sessions import Bench, load, prepare, surroundings

CALLS = {"alloc-free": (2000, 21), "info": (20000, 21)}
"""Calls in a block, and number of blocks for the median."""

TARGETS = {
    "alloc-free": "at most 300 ns",
    "info": "",
    "start": "at most 1 ms",
    "start of a CUDA program": "at most 1 ms",
}
STARTS = 60


def main() -> int:
    """Measure, print the table, write the results file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=25, help="turns (default 25)")
    parser.add_argument("--out", type=Path, help="results file (JSON)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        results = measure(prepare(Path(scratch)), rounds=args.rounds)
    print(table(results))
    if args.out:
        args.out.write_text(json.dumps(results, indent=2) + "\n")
    return 0


def measure(bench: Bench, *, rounds: int) -> dict[str, Any]:
    """Return the figures: each with and without libfgpu, in turns, as medians over the rounds."""
    program = bench.program("memory.c")
    env = {"direct": bench.environment, "libfgpu": bench.session("session")}
    ways = {name: [str(program), name, *map(str, sizes)] for name, sizes in CALLS.items()}
    starts = {"start": ["/bin/true"], "start of a CUDA program": [str(program), "nothing"]}
    values: dict[str, dict[str, list[float]]] = {n: {"direct": [], "libfgpu": []} for n in [*ways, *starts]}
    before = load()
    for turn in range(rounds):
        for which in ("direct", "libfgpu") if turn % 2 else ("libfgpu", "direct"):
            for name, command in ways.items():
                done = subprocess.run(command, env=env[which], capture_output=True, text=True, check=True)
                values[name][which].append(float(done.stdout))
            for name, command in starts.items():
                values[name][which].append(start_ms(command, env[which]))
    if logged := bench.complaints():
        raise SystemExit(f"libfgpu complained, so nothing was measured:\n{logged}")
    return {
        **surroundings(bench),
        "load": {"before": before, "after": load()},
        "how": f"{rounds} turns, each with both ways one after the other; a turn's value is the median of its blocks or "
        "starts. `added` and `ratio` are medians over the turns of what a turn's two values differ by, so that a load "
        "that lasts longer than a turn is in both; `added_at_best` compares the fastest of all turns",
        "figures": {name: figure(name, both) for name, both in values.items()},
        "values": values,
    }


def start_ms(command: list[str], env: dict[str, str]) -> float:
    """Return how long the program takes from its start to its end: the median of many."""
    times = []
    for _ in range(STARTS):
        began = time.perf_counter()
        pid = os.posix_spawn(command[0], command, env)
        os.waitpid(pid, 0)
        times.append((time.perf_counter() - began) * 1000)
    return statistics.median(times)


def figure(name: str, both: dict[str, list[float]]) -> dict[str, Any]:
    """Return medians, what was added, and the ratio. Times of calls are in ns, of starts in ms."""
    direct, ours = (statistics.median(both[which]) for which in ("direct", "libfgpu"))
    turns = list(zip(both["direct"], both["libfgpu"], strict=True))
    return {
        "unit": "ms" if name.startswith("start") else "ns",
        "direct": round(direct, 3),
        "libfgpu": round(ours, 3),
        "added": round(statistics.median(after - before for before, after in turns), 3),
        "added_at_best": round(min(both["libfgpu"]) - min(both["direct"]), 3),
        "ratio": round(statistics.median(after / before for before, after in turns), 3),
        "target": TARGETS[name],
    }


def table(results: dict[str, Any]) -> str:
    """Return the figures as a table."""
    lines = [f"{'':26}{'direct':>12}{'libfgpu':>12}{'added':>12}{'ratio':>8}  target of what is added"]
    for name, f in results["figures"].items():
        values = "".join(f"{f[key]:>9.2f} {f['unit']}" for key in ("direct", "libfgpu", "added"))
        lines.append(f"{name:26}{values}{f['ratio']:>8.2f}  {f['target']}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
