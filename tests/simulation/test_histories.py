"""Seeded histories of a simulated lab: the real core, every check after every write."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fgpu_scheduler.core import reclaim
from fgpu_scheduler.core.model import EndCause, QuotaScope, ShareMode, WaitReason
from fgpu_scheduler.core.policies import ORDERS, PLACEMENTS, Backfill
from fgpu_scheduler.store.store import Store
from fgpu_scheduler.testing import Faults, MemoryStore, Report, Violation, checks, simulate

ROOT = Path(__file__).parents[2]
EVENTS = 300
MEMORY_SEEDS = range(60)
SQL_SEEDS = range(100, 106)
SLOW_MEMORY_SEEDS = range(1000, 1400)
SLOW_SQL_SEEDS = range(2000, 2040)


def run_all(seeds: range, *, sql: bool = False, events: int = EVENTS) -> list[Report]:
    reports = []
    for seed in seeds:
        if not sql:
            reports.append(simulate(seed, events))
            continue
        store = Store("sqlite://")
        store.open()
        try:
            reports.append(simulate(seed, events, store=store))
        finally:
            store.close()
    # Shown by pytest when something fails, and with -s or -rP.
    print(f"seeds {seeds.start}..{seeds.stop - 1} x {events} events, {sum(r.looks for r in reports)} looks")
    return reports


WAITS_FOR = [f"waits {reason}" for reason in WaitReason]
ENDS_BY = [f"ends {cause}" for cause in EndCause]
WARNED_OF = [f"warned {cause}" for cause in reclaim.CAUSES]
CHOSEN = [
    *(f"order {order.__name__}" for order, _ in ORDERS.values()),
    *(f"placement {name}" for name in PLACEMENTS),
    *(f"backfill {mode}" for mode in Backfill),
]
ASKED = [
    f"asks {what}"
    for what in ("memory", "memory and compute", "a model", "several models", "a time limit", "a priority")
]
STARTED = [
    *("starts as promised", "starts on several devices", "queued again", "kept", "extended"),
    *("starts on the model liked most", "starts on a model liked less"),
    *(f"starts a share of {mode}" for mode in ShareMode),
    *(f"starts beside a quota of {scope}" for scope in QuotaScope),
    *(f"starts beside a quota of {limit}" for limit in ("fgpu", "sessions", "pending", "lifetime")),
]


def test_every_check_holds_after_every_write():
    reports = run_all(MEMORY_SEEDS)
    # The histories must be rich enough to mean something.
    assert sum(r.ran for r in reports) > 10 * len(reports)
    assert sum(r.stale for r in reports) > len(reports)
    assert sum(r.restarts for r in reports) > len(reports)
    assert sum(r.orphans for r in reports) > 0
    assert sum(r.promises_kept for r in reports) > len(reports)
    met = {what for report in reports for what, _ in report.met}
    wanted = [*WAITS_FOR, *ENDS_BY, *WARNED_OF, *CHOSEN, *ASKED, *STARTED]
    assert [what for what in wanted if what not in met] == []


def test_every_check_holds_with_the_sql_store():
    assert all(report.looks > 0 for report in run_all(SQL_SEEDS, sql=True))


def test_both_stores_have_the_same_history():
    seeds = range(SQL_SEEDS.start, SQL_SEEDS.start + 2)
    assert run_all(seeds, sql=True) == run_all(seeds)


def test_where_the_cluster_refuses_most_places_all_run_once_it_stops_and_none_is_lost():
    """The simulator ends nobody who could still run: each session runs, is ended by its user, or could never fit."""
    often = Faults(not_bound=70)
    reports = [simulate(seed, EVENTS, faults=often) for seed in range(7000, 7030)]
    refused = sum(number for r in reports for what, number in r.met if what == "waits CLUSTER")
    assert refused > 5 * len(reports)
    assert sum(r.ran for r in reports) > 3 * len(reports)


def test_nodes_that_shrink_and_grow_between_placing_and_launching_over_commit_nothing_and_lose_nobody():
    often = Faults(inventory=60)
    reports = [simulate(seed, 100, faults=often) for seed in range(8000, 8200)]
    assert sum(r.ran for r in reports) > 3 * len(reports)


@pytest.mark.slow
def test_every_check_holds_in_many_more_histories():
    run_all(SLOW_MEMORY_SEEDS, events=800)


@pytest.mark.slow
def test_every_check_holds_in_many_more_histories_of_the_sql_store():
    run_all(SLOW_SQL_SEEDS, sql=True, events=400)


@pytest.mark.parametrize("seed", [10636, 20015, 41494, 80512])
def test_histories_that_were_once_judged_or_decided_wrongly(seed):
    """A lifetime by quota is an end to count on, a promise below somebody's priority is none, and the same again."""
    simulate(seed, 500)


def history_under(hash_seed: str) -> str:
    env = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(ROOT / "scheduler")}
    command = [sys.executable, "-m", "fgpu_scheduler.testing", "--seed", "5", "--events", "200", "--log"]
    return subprocess.run(command, env=env, check=True, capture_output=True, text=True, timeout=60).stdout


def test_a_seed_is_one_history_under_every_hash_seed():
    one, other = history_under("1"), history_under("4711")
    assert "log_hash=" in one
    assert one == other


def test_a_failure_says_how_to_see_it_again(monkeypatch):
    monkeypatch.setattr(
        checks, "served_twice", lambda now: ["broken on purpose"] if len(now.sessions) > 3 else []
    )
    with pytest.raises(Violation, match="--seed 3 --events 100") as failure:
        simulate(3, 100)
    assert "broken on purpose" in str(failure.value)
    assert "seed 3, step" in str(failure.value)


def test_the_simulator_uses_no_store_but_the_one_it_is_given():
    store = MemoryStore()
    simulate(1, 30, store=store)
    assert store.version() > 1
