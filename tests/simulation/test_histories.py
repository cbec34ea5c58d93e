"""Seeded histories of a simulated lab: the real scheduler and store, killed at any await, checked after every write."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest
from simulator import Faults, Violation, checks, simulate, simulate_in_file
from simulator.virtual import VirtualLoop

from fgpu_scheduler.core import reclaim
from fgpu_scheduler.core.model import EndCause, QuotaScope, ShareMode, WaitReason
from fgpu_scheduler.core.orders import ORDERS
from fgpu_scheduler.core.scores.workload import LEAST_ASKED

ROOT = Path(__file__).parents[2]
PATHS = os.pathsep.join((str(ROOT / "scheduler"), str(Path(__file__).parent)))
EVENTS = 120
SEEDS = range(6)
FILE_SEEDS = range(105, 107)
LARGE_SEEDS = range(500, 502)
SLOW_SEEDS = range(1000, 1100)
SLOW_FILE_SEEDS = range(2000, 2020)


WAITS_FOR = [f"waits {reason}" for reason in WaitReason]
ENDS_BY = [f"ends {cause}" for cause in EndCause]
WARNED_OF = [f"warned {cause}" for cause in reclaim.CAUSES]
CHOSEN = [
    *(f"order {row.order.__name__}" for row in ORDERS.values()),
    *(f"strict {strict}" for strict in (True, False)),
]
ASKED = [
    f"asks {what}"
    for what in ("memory", "memory and compute", "a model", "several models", "a time limit", "a priority")
]
STARTED = [
    *("starts as promised", "starts on several devices", "queued again", "kept", "extended"),
    *("grown", "shrunk"),
    *("becomes PARKED from RUNNING", "becomes PARKED from RESUMING", "becomes PARKED from PREPARING"),
    *("becomes RESUMING from PARKED",),
    *("starts on the model liked most", "starts on a model liked less"),
    *(f"starts a share of {mode}" for mode in ShareMode),
    *(f"starts beside a quota of {scope}" for scope in QuotaScope),
    *(f"starts beside a quota of {limit}" for limit in ("fgpu", "sessions", "pending", "lifetime")),
]


def test_every_check_holds_after_every_write():
    reports = [simulate(seed, EVENTS) for seed in SEEDS]
    # The histories must contain enough events to prove something.
    assert sum(r.ran for r in reports) > 10 * len(reports)
    assert sum(r.restarts for r in reports) > len(reports)
    assert sum(r.promises_kept for r in reports) > len(reports) / 2


def test_every_check_holds_where_others_write_the_same_file():
    reports = [simulate_in_file(seed, EVENTS) for seed in FILE_SEEDS]
    assert sum(r.ran for r in reports) > 10 * len(reports)


def test_all_sessions_run_after_a_cluster_stops_refusing_placements():
    """The simulator ends no session that could run: each one runs, is ended by its user, or could never fit."""
    often = Faults(not_bound=70)
    reports = [simulate(seed, EVENTS, faults=often) for seed in range(7000, 7002)]
    refused = sum(number for r in reports for what, number in r.met if what == "waits CLUSTER")
    assert refused > 5 * len(reports)
    assert sum(r.ran for r in reports) > 3 * len(reports)


def test_plans_from_what_earlier_plans_left_equal_fresh_ones_on_many_nodes():
    """The simulator compares each plan with a fresh one; with many nodes and requests planning keeps more."""
    for seed in LARGE_SEEDS:
        assert simulate(seed, 2 * EVENTS, nodes=30).submitted > LEAST_ASKED


def test_lost_database_answers_lose_no_session():
    reports = [simulate(seed, EVENTS, faults=Faults(lost_answer=20)) for seed in range(8000, 8004)]
    assert sum(r.ran for r in reports) > 3 * len(reports)


@pytest.mark.slow
def test_every_check_holds_in_many_histories_that_cover_every_event():
    reports = [simulate(seed, 500) for seed in SLOW_SEEDS]
    assert sum(r.orphans for r in reports) > 0
    met = {what for report in reports for what, _ in report.met}
    wanted = [*WAITS_FOR, *ENDS_BY, *WARNED_OF, *CHOSEN, *ASKED, *STARTED]
    assert [what for what in wanted if what not in met] == []


@pytest.mark.slow
def test_every_check_holds_in_many_histories_in_a_file():
    reports = [simulate_in_file(seed, 500) for seed in SLOW_FILE_SEEDS]
    assert sum(r.stale for r in reports) > 0


def history_under(hash_seed: str) -> str:
    env = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": PATHS}
    command = [sys.executable, "-m", "simulator", "--seed", "5", "--events", "100", "--log"]
    return subprocess.run(command, env=env, check=True, capture_output=True, text=True, timeout=60).stdout


def test_a_seed_gives_the_same_history_under_every_hash_seed():
    one, other = history_under("1"), history_under("4711")
    assert "log_hash=" in one
    assert one == other


def test_failure_message_has_the_command_to_reproduce_it(monkeypatch):
    monkeypatch.setattr(
        checks, "served_twice", lambda now: ["broken on purpose"] if len(now.sessions) > 3 else []
    )
    with pytest.raises(Violation, match="--seed 3 --events 100") as failure:
        simulate(3, 100)
    assert "broken on purpose" in str(failure.value)
    assert "seed 3, step" in str(failure.value)


def test_virtual_loop_never_sleeps_and_runs_threads_in_sequence():
    loop, done = VirtualLoop(0.0, lambda: 2.0), []

    async def works(name: str) -> None:
        await loop.run_in_executor(None, done.append, name)
        await asyncio.sleep(3600)
        done.append(f"{name} at {loop.time():.0f}")

    for name in ("one", "other"):
        loop.create_task(works(name))
    while (at_s := loop.next_at_s()) is not None:
        loop.pass_to(at_s)
        loop.step()
    assert done == ["one", "other", "one at 3602", "other at 3604"]


def test_killed_process_has_no_further_effects():
    loop, done = VirtualLoop(0.0, lambda: 2.0), []

    async def works() -> None:
        await loop.run_in_executor(None, done.append, "work")
        done.append("answered")

    loop.create_task(works())
    while not done:
        loop.pass_to(loop.next_at_s())
        loop.step()
    loop.kill()
    assert loop.next_at_s() is None
    assert not loop.step()
    assert done == ["work"]
