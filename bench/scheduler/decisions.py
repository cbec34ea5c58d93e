"""Read what one placement costs in memory on a large cluster, and on four times as large a one.

The cluster and the tasks are those of the openb traces (see openb.py). It is filled to 90 %; then, again and again, a
task ends and the next one is placed, by the default placement, which knows the workload. Both clusters take turns in
one run. The time of a placement has in it that the placer is told of the end before it.

Every other turn is without Python's garbage collection, as with `timeit`, and gives the figures: it goes through whatever
the process holds, here the traces and the bench's own books. Those with it have `collected` before their names.

Times are CPU time of the thread, so that what else the machine does counts little; those of the clock stand beside them.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import date
from itertools import cycle
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "scheduler"), str(ROOT / "bench"), str(ROOT / "bench" / "scheduler")]

import openb  # noqa: E402
from machine import load, machine, source  # noqa: E402

from fgpu_scheduler import (  # noqa: E402  # noqa: E402
    Free,
    Placement,
    Placer,
    Request,
    claimed,
    released,
    untouched,
)

SEED = 60
FULL_PERCENT = 90
TURN = 500
"""Placements on one cluster before the other's turn."""

AT_LEAST_PER_S = 1000
P99_AT_MOST_MS = 20
FOUR_TIMES_AT_MOST = 2.0


class Busy:
    """A cluster that is filled, and stays about as full."""

    def __init__(self, cluster: Free, asked: list[openb.Task], seed: int) -> None:
        self.nodes = len(cluster)
        self.left = {left.node.id: left for left in cluster}
        self.capacity = sum(d.fgpu_milli for left in cluster for d in left.devices)
        self.held: list[tuple[Request, Placement]] = []
        self.cpu_s: dict[bool, list[float]] = {True: [], False: []}
        """With the garbage collection, and without."""
        self.clock_s: list[float] = []
        self._rng = random.Random(seed)
        offered = openb.offered(asked, seed, capacity_milli=self.capacity)
        known = {task: openb.request(task) for task in asked}
        self._next: Iterator[Request] = cycle([known[task] for task in offered])
        self._placer = Placer(
            cluster, score=openb.POLICIES["worth"](openb.typical(asked), openb.added_up(cluster))
        )

    def fill(self) -> None:
        """Place until it is full enough."""
        held = 0
        while 100 * held < FULL_PERCENT * self.capacity:
            request = next(self._next)
            if self._note(request, self._placer.place(request)):
                held += request.fgpu_milli

    def turn(self, placements: int, *, collected: bool) -> None:
        """End this number of tasks, and place others."""
        placed = 0
        if not collected:
            gc.disable()
        while placed < placements:
            at = self._rng.randrange(len(self.held))
            self.held[at], self.held[-1] = self.held[-1], self.held[at]
            ended, where = self.held.pop()
            left = self.left[where.node_id] = released(self.left[where.node_id], ended, where)
            request = next(self._next)
            cpu_s, clock_s = time.thread_time(), time.perf_counter()
            self._placer.update(left)
            found = self._placer.place(request)
            took_s, cpu_s = time.perf_counter() - clock_s, time.thread_time() - cpu_s
            self.cpu_s[collected].append(cpu_s)
            if not collected:
                self.clock_s.append(took_s)
            placed += self._note(request, found)
        gc.enable()

    def _note(self, request: Request, where: Placement | None) -> bool:
        if where is not None:
            self.left[where.node_id] = claimed(self.left[where.node_id], request, where)
            self.held.append((request, where))
        return where is not None

    def figures(self) -> dict[str, float]:
        """Return what a placement took."""
        cpu, clock, collected = sorted(self.cpu_s[False]), sorted(self.clock_s), sorted(self.cpu_s[True])
        return {
            "nodes": self.nodes,
            "decisions": len(cpu),
            "per_s": round(len(cpu) / sum(cpu)),
            "median_ms": round(1000 * cpu[len(cpu) // 2], 4),
            "p99_ms": round(1000 * cpu[len(cpu) * 99 // 100], 4),
            "collected_per_s": round(len(collected) / sum(collected)),
            "collected_p99_ms": round(1000 * collected[len(collected) * 99 // 100], 4),
            "clock_per_s": round(len(clock) / sum(clock)),
            "clock_p99_ms": round(1000 * clock[len(clock) * 99 // 100], 4),
        }


def copied(cluster: Free, times: int) -> Free:
    """Return a cluster with each node this number of times."""
    found = []
    for copy in range(times):
        for node in (left.node for left in cluster):
            name = f"{node.id}.{copy}"
            devices = tuple(replace(d, uuid=f"{d.uuid}.{copy}", node_id=name) for d in node.devices)
            found.append(untouched(replace(node, id=name, devices=devices)))
    return tuple(sorted(found, key=lambda left: left.node.id))


def main() -> int:
    """Run it; return 1 where a figure is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("traces", type=Path, help="the folder with openb_*.csv.gz")
    parser.add_argument("--placements", type=int, default=10_000, help="on each; default: %(default)s")
    parser.add_argument("--out", type=Path, help="write a results file here")
    options = parser.parse_args()
    if not (options.traces / "openb_node_list_gpu_node.csv.gz").is_file():
        print(f"skipped: the openb traces are not in {options.traces}")
        return 0
    before = load()
    asked = openb.tasks(options.traces, "default")
    one = openb.nodes(options.traces)
    clusters = [Busy(one, asked, SEED), Busy(copied(one, 4), asked, SEED)]
    for cluster in clusters:
        cluster.fill()
    for _ in range(-(-options.placements // TURN)):
        for cluster in clusters:
            for collected in (False, True):
                cluster.turn(TURN, collected=collected)
    small, large = (cluster.figures() for cluster in clusters)
    ratio = round(small["per_s"] / large["per_s"], 3)
    for found in (small, large):
        print(", ".join(f"{name} {value}" for name, value in found.items()))
    print(f"a placement on four times the cluster costs {ratio:.2f} x")
    missed = []
    if small["per_s"] < AT_LEAST_PER_S:
        missed.append(f"{small['per_s']} placements per second < {AT_LEAST_PER_S}")
    if small["p99_ms"] >= P99_AT_MOST_MS:
        missed.append(f"p99 {small['p99_ms']} ms, not below {P99_AT_MOST_MS}")
    if ratio > FOUR_TIMES_AT_MOST:
        missed.append(f"four times the cluster: {ratio} x > {FOUR_TIMES_AT_MOST} x")
    for line in missed:
        print("missed:", line)
    if options.out:
        what = {
            "date": date.today().isoformat(),
            "machine": machine(),
            "source": source(),
            "load": {"before": before, "after": load()},
            "seed": SEED,
            "one": small,
            "four_times": large,
            "ratio": ratio,
        }
        options.out.write_text(json.dumps(what, indent=2) + "\n")
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
