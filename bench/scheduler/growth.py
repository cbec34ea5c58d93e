"""Time what the Hub does for one request after the other, as clusters, sessions and queues grow.

The real store on SQLite (a file, WAL) and the real scheduler, with the default policy: each request goes through
`submit` and `placed` by itself, as a spawn does, and ends again outside of the time. Garbage is collected as in the Hub.
Plans are in CPU time of the thread, which other load changes less; `per_s` is by the clock, `cpu_per_s` by CPU time.
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
from typing import Any

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
    SessionState,
    Share,
    Store,
    group_policy,
    plan,
)
from fgpu_scheduler.core.forecast import outlook  # noqa: E402
from fgpu_scheduler.core.planner import Plan, StartDecision  # noqa: E402
from fgpu_scheduler.service import scheduler as service  # noqa: E402

S = SessionState
SIZES = ((120, 100, 0), (1200, 1000, 0), (1200, 1000, 200), (12000, 10000, 0), (12000, 10000, 200))
"""GPUs, live sessions, and how many of them wait."""
SHOWN, PAGES = (1200, 3000, 2000), 100
"""The queue that pages show during submissions."""
WARM = 8
"""How many requests come before those that are timed: the first of each amount ranks all nodes."""
AT_LEAST_PER_S = {(1200, 1000, 0): 400, (12000, 10000, 200): 60}
AT_MOST_P99_MS = 2.0
"""The time of a plan without waiting sessions."""


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
        placed = tuple(StartDecision(i, one) for i, one in where.items())
        store.commit(Plan(store.version(), placed), now_s=now_s)
        store.submit([ask(f"w{n % 50}-{n}", 1000 * GPUS_PER_NODE) for n in range(waiting)], now_s=now_s)
        caps = Caps(250, max_pending_per_user=100)
        yield store, Scheduler(store, policy=Policy(group_policy()), caps=caps, launcher=NoEngine(there))


async def one_by_one(store: Store, scheduler: Scheduler, requests: int) -> dict[str, float]:
    """Return the time of one request after the other, until `placed` has returned its placement."""
    planned: list[float] = []

    def timed(*args: Any, **kwargs: Any) -> Plan:
        began = time.thread_time()
        found = plan(*args, **kwargs)
        planned.append(time.thread_time() - began)
        return found

    service.plan = timed  # type: ignore[attr-defined]
    loop = asyncio.create_task(scheduler._schedule())
    scheduler.wake()
    await scheduler.call(store.version)
    took, cpu_s = list[float](), 0.0
    for number in range(requests + WARM):
        asked = ask(f"new{number}", (250, 500, 1000, 2000)[number % 4])
        if number == WARM:
            planned.clear()
        began, began_cpu = time.perf_counter(), time.process_time()
        (session,) = await scheduler.submit([asked])
        await scheduler.placed(session.id)
        if number >= WARM:
            took.append(time.perf_counter() - began)
            cpu_s += time.process_time() - began_cpu
        end = {"now_s": int(time.time()), "cause": EndCause.USER}
        await scheduler.call(lambda i=session.id, e=end: store.move(i, S.CANCELLED, **e))
    loop.cancel()
    await asyncio.gather(loop, return_exceptions=True)
    service.plan = plan  # type: ignore[attr-defined]
    planned.sort()
    return {
        "request_ms": _ms(median(took)),
        "plan_ms": _ms(median(planned)),
        "plan_p99_ms": _ms(planned[len(planned) * 99 // 100]),
        "per_s": round(requests / sum(took), 1),
        "cpu_per_s": round(requests / cpu_s, 1),
    }


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
            gc.collect()
            with cProfile.Profile() if options.profile else tempfile.TemporaryFile() as profile:
                own = asyncio.run(one_by_one(store, scheduler, options.requests))
            if isinstance(profile, cProfile.Profile):
                pstats.Stats(profile).sort_stats("tottime").print_stats(30)
            if waiting:
                own["forecast_ms"] = forecast_ms(store, scheduler)
            elif not options.profile:
                store.set_quotas([Quota(QuotaScope.USER, "*", max_fgpu_milli=8000)], now_s=1)
                limited = asyncio.run(one_by_one(store, scheduler, options.requests // 4))
                own |= {f"user_quota_{name}": limited[name] for name in ("plan_ms", "cpu_per_s")}
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
