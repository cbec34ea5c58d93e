"""Read how fast requests become allocations that survive a crash, and how soon a release starts the next.

The real store on SQLite (a file, WAL) and on PostgreSQL, transactions on, each as the Hub uses it: every
request is a transaction of its own, and one plan commits all that wait by then. Sessions that run already
make the snapshots as large as on a busy machine.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import json
import os
import pstats
import secrets
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from datetime import date
from pathlib import Path
from statistics import median

from sqlalchemy import NullPool, create_engine, make_url, text

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "scheduler"), str(ROOT / "bench")]

from machine import load, machine, source  # noqa: E402

from fgpu_scheduler import (  # noqa: E402  # noqa: E402  # noqa: E402
    Caps,
    Deadlines,
    Device,
    EndCause,
    Node,
    Observed,
    Policy,
    Request,
    Scheduler,
    Seen,
    Session,
    SessionState,
    Store,
    plan,
)

S = SessionState
POSTGRES = "FGPU_TEST_POSTGRES_URL"
GPUS_PER_NODE = 8
AT_LEAST_PER_S = 500
AT_MOST_MS = 50


def nodes(gpus: int) -> tuple[Node, ...]:
    """Return nodes of eight GPUs, each of 1 fGPU."""
    return tuple(
        Node(
            f"n{number:03d}",
            "default",
            256_000,
            1_048_576,
            tuple(
                Device(f"GPU-{number:03d}-{i}", f"n{number:03d}", i, "Simulated", 81920, 1000, True)
                for i in range(GPUS_PER_NODE)
            ),
        )
        for number in range(gpus // GPUS_PER_NODE)
    )


def ask(user: str, fgpu_milli: int = 250) -> Request:
    """Return a request of a quarter of a GPU."""
    return Request(user, "", "image@sha256:0", "default", fgpu_milli, 2000, 4096)


@contextmanager
def sqlite_url() -> Iterator[str]:
    """Give a database in a file of its own."""
    with tempfile.TemporaryDirectory() as folder:
        yield f"sqlite:///{folder}/fgpu.sqlite"


@contextmanager
def postgres_url() -> Iterator[str]:
    """Give a schema of its own in the server that the tests use."""
    server = make_url(os.environ[POSTGRES])
    schema = f"fgpu_bench_{secrets.token_hex(6)}"
    engine = create_engine(server, poolclass=NullPool)
    with engine.begin() as connection:
        connection.execute(text(f"CREATE SCHEMA {schema}"))
    try:
        url = server.update_query_dict({"options": f"-csearch_path={schema}"})
        yield url.render_as_string(hide_password=False)
    finally:
        with engine.begin() as connection:
            connection.execute(text(f"DROP SCHEMA {schema} CASCADE"))


def allocated(store: Store, requests: Sequence[Request], *, batch: int) -> tuple[float, list[int]]:
    """Submit and allocate all of them, this number per plan; return the seconds it took, and their ids."""
    ids: list[int] = []
    policy = Policy()
    began = time.perf_counter()
    for first in range(0, len(requests), batch):
        now_s = int(time.time())
        for asked in requests[first : first + batch]:
            store.submit([asked], now_s=now_s)
        placed = store.commit(plan(store.snapshot(now_s), policy), now_s=now_s)
        ids += [session.id for session in placed]
    took_s = time.perf_counter() - began
    if len(ids) != len(requests):
        raise RuntimeError(f"{len(ids)} of {len(requests)} were placed: the cluster is too small")
    return took_s, ids


def end(store: Store, ids: Sequence[int]) -> None:
    """End sessions that were only allocated."""
    for session_id in ids:
        store.move(session_id, S.CANCELLED, now_s=int(time.time()), cause=EndCause.USER)


class NoEngine:
    """A launcher in this process: every node answers, and what is removed is gone."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self._node_ids = [node.id for node in nodes]

    def watch(self, changed: Callable[[], None]) -> None:
        """Nothing ever ends by itself here."""

    async def observe(self) -> Seen:
        """Tell of nothing: the only look is the one at the start, when nothing runs."""
        return Seen((), self._node_ids)

    async def remove(self, observed: Observed) -> bool:
        """It is gone at once."""
        return True


async def releases(store: Store, lab: tuple[Node, ...], *, rounds: int) -> list[float]:
    """Return for each round the milliseconds from a release until the next session may be launched.

    Every GPU is taken. One session ends: from the call that tells so, to where the spawn that waited has its share and
    has committed that its launch begins, which is the last step before its first effect.
    """
    deadlines = Deadlines(reconcile_every_s=3600.0)
    scheduler = Scheduler(store, policy=Policy(), caps=Caps(250), launcher=NoEngine(lab), deadlines=deadlines)
    await scheduler.start(lab)
    gpus = sum(len(node.devices) for node in lab)
    running = [await _runs(scheduler, ask(f"holder{n}", 1000)) for n in range(gpus)]
    took_ms = []
    for number in range(rounds):
        (waits,) = await scheduler.submit([ask(f"next{number}", 1000)])
        spawn = asyncio.create_task(_launches(scheduler, waits.id))
        await asyncio.sleep(0.02)
        oldest = running.pop(0)
        await scheduler.end(oldest.id, EndCause.USER)
        began = time.perf_counter()
        await scheduler.gone(oldest.id)
        session, at = await spawn
        took_ms.append(1000 * (at - began))
        running.append(await scheduler.running(session.id, session.attempt, "{}"))
    await scheduler.stop()
    return took_ms


async def _launches(scheduler: Scheduler, session_id: int) -> tuple[Session, float]:
    await scheduler.placed(session_id)
    with scheduler.launching(session_id):
        session = await scheduler.prepare(session_id)
        return session, time.perf_counter()


async def _runs(scheduler: Scheduler, asked: Request) -> Session:
    (session,) = await scheduler.submit([asked])
    launched, _ = await _launches(scheduler, session.id)
    return await scheduler.running(session.id, launched.attempt, "{}")


def measure(url: str, options: argparse.Namespace) -> dict[str, float]:
    """Return the figures of one database."""
    with closing(Store(url)) as store:
        store.open()
        lab = nodes(options.gpus)
        store.set_nodes(lab, now_s=int(time.time()))
        # The running ones: half of the cluster, in quarters.
        _, kept = allocated(store, [ask(f"early{n}") for n in range(options.live)], batch=100)
        rates = []
        for turn in range(options.rounds):
            asked = [ask(f"user{turn}-{n}") for n in range(options.sessions)]
            took_s, ids = allocated(store, asked, batch=options.batch)
            rates.append(len(ids) / took_s)
            end(store, ids)
        end(store, kept)
    return {"per_s": round(median(rates), 1), "lowest_per_s": round(min(rates), 1)}


def measure_releases(url: str, options: argparse.Namespace) -> dict[str, float]:
    """Return how soon a release starts the next, on one database."""
    with closing(Store(url)) as store:
        store.open()
        found = sorted(asyncio.run(releases(store, nodes(64), rounds=options.releases)))
    return {
        "release_median_ms": round(median(found), 2),
        "release_p95_ms": round(found[len(found) * 95 // 100], 2),
        "release_longest_ms": round(found[-1], 2),
    }


def main() -> int:
    """Run it all; return 1 where a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--gpus", type=int, default=512, help="default: %(default)s")
    parser.add_argument(
        "--live", type=int, default=200, help="sessions that run already; default: %(default)s"
    )
    parser.add_argument("--sessions", type=int, default=500, help="of one round; default: %(default)s")
    parser.add_argument("--batch", type=int, default=50, help="submitted per plan; default: %(default)s")
    parser.add_argument("--rounds", type=int, default=5, help="default: %(default)s")
    parser.add_argument("--releases", type=int, default=200, help="default: %(default)s")
    parser.add_argument("--profile", action="store_true", help="print where the time of SQLite goes, and end")
    parser.add_argument("--out", type=Path, help="write a results file here")
    options = parser.parse_args()
    if options.profile:
        with sqlite_url() as url, cProfile.Profile() as profile:
            measure(url, options)
        pstats.Stats(profile).sort_stats("cumulative").print_stats(40)
        return 0
    databases = {"sqlite": sqlite_url}
    if os.environ.get(POSTGRES):
        databases["postgresql"] = postgres_url
    else:
        print(f"skipped: PostgreSQL, since {POSTGRES} is not set; tests/services.sh starts a server")
    before = load()
    figures: dict[str, dict[str, float]] = {}
    missed = []
    for name, database in databases.items():
        with database() as url:
            own = measure(url, options)
        with database() as url:
            own |= measure_releases(url, options)
        figures[name] = own
        print(
            f"{name:10}  {own['per_s']:.0f} submitted and allocated per second (lowest {own['lowest_per_s']:.0f}); "
            f"release to launch {own['release_median_ms']:.1f} ms, p95 {own['release_p95_ms']:.1f}, "
            f"longest {own['release_longest_ms']:.1f}",
            flush=True,
        )
        if own["per_s"] < AT_LEAST_PER_S:
            missed.append(f"{name}: {own['per_s']:.0f} < {AT_LEAST_PER_S} per second")
        if own["release_p95_ms"] > AT_MOST_MS:
            missed.append(f"{name}: p95 of release to launch {own['release_p95_ms']:.1f} > {AT_MOST_MS} ms")
    for line in missed:
        print("missed:", line)
    if options.out:
        what = {
            "date": date.today().isoformat(),
            "machine": machine(),
            "source": source(),
            "load": {"before": before, "after": load()},
            "options": {k: v for k, v in vars(options).items() if isinstance(v, int) and k != "profile"},
            "figures": figures,
        }
        options.out.write_text(json.dumps(what, indent=2) + "\n")
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
