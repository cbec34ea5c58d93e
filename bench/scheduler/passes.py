"""Time the planner's passes over long queues of a lab of 8 GPUs, and forecasts on larger clusters. All are full.

Requests are of the lab's generator (`lab.py`): 60 users, all its amounts and time limits. The forecasts know how long 500
sessions ran. Every figure is the median of some runs.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from datetime import date
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "scheduler"), str(ROOT / "bench"), str(ROOT / "bench" / "scheduler")]

from machine import load, machine, source  # noqa: E402

import lab  # noqa: E402
from fgpu_scheduler import (  # noqa: E402
    NEWEST_RUNS,
    Caps,
    ForecastHistory,
    Node,
    PastRun,
    Policy,
    Quota,
    QuotaScope,
    Request,
    RunLengths,
    Session,
    SessionState,
    Snapshot,
    Usage,
    amounts_that_fit,
    forecast_request,
    group_policy,
    plan,
)
from fgpu_scheduler.core.forecast import outlook  # noqa: E402

AT_MOST_MS = {1000: 2.0, 10000: 20.0}
"""What one pass is held against, by the length of the queue."""
FORECAST_AT_MOST_MS = {(120, 20): (None, 10), (1200, 200): (None, 50), (1200, 2000): (300, None)}
"""The same of the forecast of all who wait and of one question of the form, by GPUs and by the length of the queue."""
QUOTA = Quota(QuotaScope.USER, "*", max_fgpu_milli=8000, max_sessions=12)

POLICIES = ("default", "fifo-skip", "fifo", "lifo", "fair-share", "drf")
NOW_S = 10_000_000


def requests() -> list[Request]:
    """Return more requests than the longest queue has."""
    found: list[Request] = []
    seed = 1
    while len(found) < 25 * 1200 + 2000:
        found += (job.request for job in lab.jobs(seed))
        seed += 1
    return found


def cluster(gpus: int) -> tuple[Node, ...]:
    """Return nodes of 8 GPUs, each as the node of the lab."""
    (one,) = lab.nodes(0)
    return tuple(
        replace(
            one,
            id=f"n{n:04}",
            devices=tuple(replace(d, uuid=f"{d.uuid}.{n:04}", node_id=f"n{n:04}") for d in one.devices),
        )
        for n in range(gpus // len(one.devices))
    )


def world(asked: list[Request], waiting: int, *, limits: bool, gpus: int = 8) -> Snapshot:
    """Return a full cluster with this number of waiting sessions, an hour after the last one came."""
    if not limits:
        asked = [replace(request, time_limit_s=None) for request in asked]
    users = sorted({request.user for request in asked})
    usage = tuple(Usage(user, "default", 10**7 * n) for n, user in enumerate(users))
    offered = asked[: 25 * gpus]
    first = tuple(
        Session(n, request, SessionState.PENDING, NOW_S - 7200) for n, request in enumerate(offered, 1)
    )
    empty = Snapshot(NOW_S, 1, cluster(gpus), first, usage)
    where = {p.session_id: p.placement for p in plan(empty, Policy()).placed}
    running = []
    for session in first:
        if session.id in where:
            ago_s = 60 * (session.id % 120)
            instants = {"scheduled_at_s": NOW_S - ago_s, "started_at_s": NOW_S - ago_s}
            running.append(
                replace(session, state=SessionState.RUNNING, placement=where[session.id], **instants)
            )
    queue = [
        Session(n, request, SessionState.PENDING, NOW_S - 3600)
        for n, request in enumerate(asked[len(first) :][:waiting], len(first) + 1)
    ]
    return Snapshot(NOW_S, 1, empty.nodes, (*running, *queue), usage)


def experience() -> ForecastHistory:
    """Return what 500 sessions of the lab's generator teach."""
    jobs = lab.jobs(1000)[:NEWEST_RUNS]
    return ForecastHistory(
        RunLengths("default", [PastRun("default", j.request.user, j.request.image, j.length_s) for j in jobs])
    )


def took_ms(run: Callable[[], object], rounds: int) -> float:
    """Return the median of some runs, in CPU time of the thread."""
    found = []
    for _ in range(rounds):
        began = time.thread_time()
        run()
        found.append(1000 * (time.thread_time() - began))
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
    policy, known = Policy(group_policy()), experience()
    caps = Caps(fgpu_step_milli=100)
    for (gpus, waiting), (at_most, question_at_most) in FORECAST_AT_MOST_MS.items():
        for limits, quotas in ((True, ()), (False, ()), (True, (QUOTA,))):
            snapshot = replace(world(asked, waiting, limits=limits, gpus=gpus), quotas=quotas)
            words = f"{waiting} waiting on {gpus} GPUs, {'' if limits else 'no '}time limits"
            words += ", a quota for each user" if quotas else ""
            # With quotas the user whose own sessions use the most of theirs.
            held = Counter[str]()
            for session in snapshot.sessions if quotas else ():
                held[session.request.user] += session.request.fgpu_milli
            user = max(held, key=held.__getitem__, default="asker")
            one = replace(asked[0], user=user, fgpu_milli=1000, time_limit_s=14400 if limits else None)
            amounts = [replace(one, fgpu_milli=n) for n in amounts_that_fit(snapshot.nodes, caps)]
            ahead = outlook(snapshot, policy, lambda _: known)
            for what, run, most in (
                ("forecast", lambda s=snapshot: outlook(s, policy, lambda _: known), at_most),
                (
                    "question of the form",
                    lambda s=snapshot, o=one, n=amounts, a=ahead: forecast_request(
                        o, 1, s, policy, known, n, a
                    ),
                    question_at_most,
                ),
            ):
                found = figures[f"{what}, {words}"] = took_ms(run, 3)
                print(f"{what}, {words}: {found:.0f} ms", flush=True)
                if most is not None and found > most:
                    missed.append(f"{what}, {words}: {found:.0f} ms > {most} ms")
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
