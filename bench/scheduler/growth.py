"""Time what the Hub does for one request after the other, as clusters, sessions and queues grow.

The real store on SQLite (a file, WAL) and the cycle of the real scheduler, with the default policy: each request is
submitted, planned and committed by itself, and ends again outside of the time. Garbage is collected as in the Hub. Parts
are in CPU time of the thread, which other load changes less; `per_s` is by the clock, `cpu_per_s` the same by CPU time.
Every node runs something, and those who wait ask for whole nodes. `user_quota` is the same with a quota of each user.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import gc
import json
import pstats
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import date
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "scheduler"), str(ROOT / "bench"), str(ROOT / "bench" / "scheduler")]

from durable import GPUS_PER_NODE, NoEngine, nodes  # noqa: E402
from machine import load, machine, source  # noqa: E402

from fgpu_scheduler import (  # noqa: E402
    Caps,
    EndCause,
    Placement,
    Policy,
    Quota,
    QuotaScope,
    Request,
    Scheduler,
    Session,
    SessionState,
    Share,
    Store,
    group_policy,
)
from fgpu_scheduler.core.forecast import outlook  # noqa: E402
from fgpu_scheduler.core.planner import Place, Plan  # noqa: E402

S = SessionState
SIZES = ((120, 100, 0), (1200, 1000, 0), (1200, 1000, 200), (12000, 10000, 0), (12000, 10000, 200))
"""GPUs, live sessions, and how many of them wait."""
SHOWN, PAGES = (1200, 3000, 2000), 100
"""The queue that pages show during submissions."""
LONGEST = (12000, 12000, 2000)
"""The queue for timing the forecast only."""
AT_LEAST_PER_S = {(1200, 1000, 0): 1000, (12000, 10000, 0): 300}
AT_MOST_P99_MS = 1.0
"""What a decision may take: a snapshot, and the plan on it."""


def ask(user: str, fgpu_milli: int) -> Request:
    """Return a user's request, with its part of a node's CPU and memory."""
    return Request(user, "", "image@sha256:0", "default", fgpu_milli, 16 * fgpu_milli, 64 * fgpu_milli)


@contextmanager
def lab(gpus: int, live: int, waiting: int) -> Iterator[tuple[Store, Scheduler]]:
    """Yield a store with this number of sessions, spread over all nodes, and the scheduler on it."""
    with tempfile.TemporaryDirectory() as folder, closing(Store(f"sqlite:///{folder}/fgpu.sqlite")) as store:
        store.open()
        there = nodes(gpus)
        now_s = int(time.time())
        store.set_nodes(there, now_s=now_s)
        runs = store.submit([ask(f"u{n % 2000}-{n}", 1000) for n in range(live - waiting)], now_s=now_s)
        where = {}
        for n, session in enumerate(runs):
            node = there[n % len(there)]
            device = node.devices[n // len(there)]
            where[session.id] = Placement(node.id, (Share.of(device, 1000),))
        placed = tuple(Place(i, one) for i, one in where.items())
        store.commit(Plan(store.version(), placed), now_s=now_s)
        store.submit([ask(f"w{n % 50}-{n}", 1000 * GPUS_PER_NODE) for n in range(waiting)], now_s=now_s)
        caps = Caps(250, max_pending_per_user=100)
        yield store, Scheduler(store, policy=Policy(group_policy()), caps=caps, launcher=NoEngine(there))


def one_by_one(store: Store, scheduler: Scheduler, requests: int) -> dict[str, float]:
    """Return what one request after the other takes."""
    submit, decide, commit = [list[float]() for _ in range(3)]
    all_of_it = cpu_s = 0.0
    timed = _Timed(store)
    scheduler.store = timed  # type: ignore[assignment]
    for number in range(requests):
        asked = ask(f"new{number}", (250, 500, 1000, 2000)[number % 4])
        began, began_cpu = time.perf_counter(), time.thread_time()
        (session,) = store.submit([asked], now_s=int(time.time()), max_pending_per_user=100)
        then = time.thread_time()
        found = scheduler._cycle()
        ended = time.thread_time()
        all_of_it += time.perf_counter() - began
        assert [s.id for s in found] == [session.id], "the cluster is full"
        submit.append(then - began_cpu)
        commit.append(timed.commit_s)
        decide.append(ended - then - timed.commit_s)
        cpu_s += ended - began_cpu
        store.move(session.id, S.CANCELLED, now_s=int(time.time()), cause=EndCause.USER)
    scheduler.store = store
    return {
        "submit_ms": _ms(median(submit)),
        "plan_ms": _ms(median(decide)),
        "plan_p99_ms": _ms(sorted(decide)[len(decide) * 99 // 100]),
        "commit_ms": _ms(median(commit)),
        "per_s": round(requests / all_of_it, 1),
        "cpu_per_s": round(requests / cpu_s, 1),
    }


class _Timed:
    """A store that notes how long a commit takes."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.commit_s = 0.0

    def __getattr__(self, name: str) -> object:
        return getattr(self._store, name)

    def commit(self, plan: Plan, *, now_s: int) -> tuple[Session, ...]:
        """Commit, and note how long it took."""
        began = time.thread_time()
        try:
            return self._store.commit(plan, now_s=now_s)
        finally:
            self.commit_s = time.thread_time() - began


def forecast_ms(store: Store, scheduler: Scheduler) -> float:
    """Return what the forecast of all who wait takes, in CPU time."""
    snapshot = store.snapshot(int(time.time()))
    began = time.thread_time()
    outlook(snapshot, scheduler.policy, store.experience)
    return _ms(time.thread_time() - began)


async def beside_pages(scheduler: Scheduler, pages: int) -> dict[str, float]:
    """Return the time of a small write while this number of pages show the queue, each again after every change."""

    async def page() -> None:
        async for _ in scheduler.changes(at_least_every_s=20):
            await scheduler.outlook()

    async def writes(name: str) -> list[float]:
        took = []
        for number in range(40):
            began = time.perf_counter()
            await scheduler.submit([ask(f"{name}{number}", 1000 * GPUS_PER_NODE)])
            took.append(time.perf_counter() - began)
            await asyncio.sleep(0.05)
        return sorted(took)

    alone = await writes("alone")
    shown = [asyncio.create_task(page()) for _ in range(pages)]
    await asyncio.sleep(0.5)
    beside = await writes("beside")
    for task in shown:
        task.cancel()
    await asyncio.gather(*shown, return_exceptions=True)
    await scheduler.stop()
    return {
        "write_ms": _ms(median(alone)),
        "write_beside_pages_ms": _ms(median(beside)),
        "longest_write_beside_pages_ms": _ms(beside[-1]),
    }


def _ms(seconds: float) -> float:
    return round(1000 * seconds, 3)


def main() -> int:
    """Run it all; return 1 where a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--requests", type=int, default=400, help="of each size; default: %(default)s")
    parser.add_argument("--gpus", type=int, default=12000, help="largest cluster; default: %(default)s")
    parser.add_argument("--profile", action="store_true", help="print where the time of the largest goes")
    parser.add_argument("--out", type=Path, help="write a results file here")
    options = parser.parse_args()
    before = load()
    figures = {}
    missed = []
    for size in SIZES:
        gpus, live, waiting = size
        if gpus > options.gpus or (options.profile and gpus < options.gpus):
            continue
        with lab(*size) as (store, scheduler):
            # Every shape once: the first of them ranks all nodes.
            one_by_one(store, scheduler, 8)
            gc.collect()
            with cProfile.Profile() if options.profile else tempfile.TemporaryFile() as profile:
                own = one_by_one(store, scheduler, options.requests)
            if isinstance(profile, cProfile.Profile):
                pstats.Stats(profile).sort_stats("tottime").print_stats(30)
            if waiting:
                own["forecast_ms"] = forecast_ms(store, scheduler)
            elif not options.profile:
                store.set_quotas([Quota(QuotaScope.USER, "*", max_fgpu_milli=8000)], now_s=1)
                limited = one_by_one(store, scheduler, options.requests // 4)
                own |= {f"user_quota_{name}": limited[name] for name in ("plan_ms", "commit_ms", "cpu_per_s")}
        name = f"{gpus} GPUs, {live} live, {waiting} waiting"
        figures[name] = own
        print(f"{name:40}", "  ".join(f"{key} {value:g}" for key, value in own.items()), flush=True)
        least = AT_LEAST_PER_S.get(size)
        if least is not None and own["per_s"] < least:
            missed.append(f"{name}: {own['per_s']:.0f} < {least} per second")
        if own["plan_p99_ms"] > AT_MOST_P99_MS and not waiting:
            missed.append(f"{name}: p99 of a decision {own['plan_p99_ms']:.2f} > {AT_MOST_P99_MS} ms")
    if not options.profile:
        with lab(*SHOWN) as (store, scheduler):
            own = {"forecast_ms": forecast_ms(store, scheduler)}
            own |= asyncio.run(beside_pages(scheduler, PAGES))
        figures[name := f"{PAGES} pages, {SHOWN[2]} waiting on {SHOWN[0]} GPUs"] = own
        print(f"{name:40}", "  ".join(f"{key} {value:g}" for key, value in own.items()), flush=True)
        if options.gpus >= LONGEST[0]:
            with lab(*LONGEST) as (store, scheduler):
                own = {"forecast_ms": forecast_ms(store, scheduler)}
            figures[name := f"forecast of {LONGEST[2]} waiting on {LONGEST[0]} GPUs"] = own
            print(f"{name:40}", f"forecast_ms {own['forecast_ms']:g}", flush=True)
    for line in missed:
        print("missed:", line)
    if options.out:
        what = {
            "date": date.today().isoformat(),
            "machine": machine(),
            "source": source(),
            "load": {"before": before, "after": load()},
            "measured": "CPU time of the thread; by the clock, and so with what else ran: per_s, and writes beside pages",
            "requests": options.requests,
            "figures": figures,
        }
        options.out.write_text(json.dumps(what, indent=2) + "\n")
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
