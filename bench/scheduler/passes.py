"""Time the planner's passes over long queues, and forecasts of them, on a lab of 8 GPUs that is full.

Requests are of the lab's generator (`lab.py`): 60 users, all its amounts and time limits. Every figure is the
median of some runs, each on values that nothing was kept of.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import date
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "scheduler"), str(ROOT / "bench"), str(ROOT / "bench" / "scheduler")]
sys.path.append(str(ROOT / "tests" / "simulation"))

from machine import load, machine, source  # noqa: E402
from simulator import lasting  # noqa: E402

import lab  # noqa: E402
from fgpu_scheduler import (  # noqa: E402
    Caps,
    Policy,
    Request,
    Session,
    SessionState,
    Snapshot,
    Usage,
    amounts_that_fit,
    forecast,
    forecast_request,
    group_policy,
    plan,
)

AT_MOST_MS = {1000: 2.0, 10000: 20.0}
"""What one pass is held against, by the length of the queue."""

POLICIES = ("default", "fifo-skip", "fifo", "lifo", "fair-share", "drf")
NOW_S = 10_000_000


def requests() -> list[Request]:
    """Return more requests than the longest queue has."""
    found: list[Request] = []
    seed = 1
    while len(found) < max(AT_MOST_MS) + 200:
        found += (job.request for job in lab.jobs(seed))
        seed += 1
    return found


def world(asked: list[Request], waiting: int, *, limits: bool) -> Snapshot:
    """Return a full lab with so many waiting, an hour after the last of them came."""
    if not limits:
        asked = [replace(request, time_limit_s=None) for request in asked]
    users = sorted({request.user for request in asked})
    usage = tuple(Usage(user, "default", 10**7 * n) for n, user in enumerate(users))
    first = tuple(
        Session(n, request, SessionState.PENDING, NOW_S - 7200) for n, request in enumerate(asked[:200], 1)
    )
    empty = Snapshot(NOW_S, 1, lab.nodes(0), first, usage)
    where = {p.session_id: p.placement for p in plan(empty, Policy()).placed}
    running = [
        replace(
            s,
            state=SessionState.RUNNING,
            placement=where[s.id],
            scheduled_at_s=NOW_S - 60 * s.id,
            started_at_s=NOW_S - 60 * s.id,
        )
        for s in first
        if s.id in where
    ]
    queue = [
        Session(n, request, SessionState.PENDING, NOW_S - 3600)
        for n, request in enumerate(asked[200 : 200 + waiting], 201)
    ]
    return Snapshot(NOW_S, 1, empty.nodes, (*running, *queue), usage)


def took_ms(run: Callable[[], object], rounds: int) -> float:
    """Return the median of some runs."""
    found = []
    for _ in range(rounds):
        began = time.perf_counter()
        run()
        found.append(1000 * (time.perf_counter() - began))
    return round(median(found), 3)


def main() -> int:
    """Time everything; return 1 where a pass takes longer than it may."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=21, help="runs of each; default: %(default)s")
    parser.add_argument("--out", type=Path, help="write a results file here")
    options = parser.parse_args()
    asked = requests()
    before = load()
    figures: dict[str, float] = {}
    missed = []
    for waiting, at_most in AT_MOST_MS.items():
        snapshot = world(asked, waiting, limits=True)
        for name in POLICIES:
            policy = Policy(group_policy(order=name))
            placed = len(plan(snapshot, policy).placed)
            found = figures[f"pass, {waiting} waiting, {name}"] = took_ms(
                lambda s=snapshot, p=policy: plan(s, p), options.rounds
            )
            miss = found > at_most
            print(
                f"one pass over {waiting:5} waiting, {name:10} {found:7.2f} ms ({placed} start)", flush=True
            )
            if miss:
                missed.append(f"{name} over {waiting}: {found} ms > {at_most} ms")
    policy = Policy(group_policy())
    for waiting in (100, 1000):
        for limits in (True, False):
            snapshot = world(asked, waiting, limits=limits)
            words = f"{waiting} waiting, {'' if limits else 'no '}time limits"
            found = took_ms(lambda s=snapshot: forecast(s, policy, lasting(9000)), 3)
            figures[f"forecast, {words}"] = found
            print(f"forecast, {words}: {found:.0f} ms", flush=True)
            one = replace(asked[0], fgpu_milli=1000, time_limit_s=14400 if limits else None)
            found = took_ms(
                lambda s=snapshot, r=one: forecast_request(
                    r,
                    1,
                    s,
                    policy,
                    lasting(9000),
                    [
                        replace(r, fgpu_milli=amount)
                        for amount in amounts_that_fit(s.nodes, Caps(fgpu_step_milli=100))
                    ],
                ),
                3,
            )
            figures[f"forecast of a request, {words}"] = found
            print(f"forecast of a request, {words}: {found:.0f} ms", flush=True)
    for line in missed:
        print("missed:", line)
    if options.out:
        what = {
            "date": date.today().isoformat(),
            "machine": machine(),
            "source": source(),
            "load": {"before": before, "after": load()},
            "milliseconds": figures,
        }
        options.out.write_text(json.dumps(what, indent=2) + "\n")
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
