"""Notebook sessions of two days on fewer GPUs: as today, parked after ten idle minutes, and on demand.

The sessions and cells are those of an excerpt of AdobeTrace (`FOLDER/*.json.gz`). It counts in minutes, so each cell
starts at an instant of its minute that a seed draws. A cell waits for the session's share, and for its GPU memory to be
copied back (`COPY_S` and `COPY_GB_S`, assumed); the next cell starts no sooner than it ends. Everything is decided by
the product's planner and its rules for parking, in virtual time; a launch takes none.

A GPU has 40 GB. A session of one GPU asks for the part of it that its GPU memory is, in steps of 0.1; one of several
GPUs asks for whole ones, because a fraction lies on one GPU. With `--split` it asks for its part of each, as if it were
that many sessions with the same cells.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from datetime import date
from heapq import heappop, heappush
from itertools import count, pairwise, product
from math import ceil
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "scheduler"), str(ROOT / "bench")]

from machine import machine, source  # noqa: E402

from fgpu_scheduler import Device, Node, Policy, Request, Session, SessionState, Snapshot  # noqa: E402
from fgpu_scheduler.core import lifecycle  # noqa: E402
from fgpu_scheduler.core.parking import plan_parking  # noqa: E402
from fgpu_scheduler.core.planner import PlanCache, committed, plan  # noqa: E402
from fgpu_scheduler.core.reclaim import AllRules, Rules  # noqa: E402
from fgpu_scheduler.store.sessions import parked  # noqa: E402

S = SessionState
MINUTE_S, HOUR_S = 60, 3600
CARD_GB, EACH = 40, 8
"""The memory of a GPU, and the GPUs of a node."""
COPY_S, COPY_GB_S = 1, 4
"""Seconds of a way back, and the GB per second that are copied."""
PARK_AFTER_S = 600
LATE_S = 10
MODES = ("whole GPUs", "sessions as today", "parked", "on demand")


@dataclass(slots=True)
class Notebook:
    """One session of the trace: its begin and end, its GPUs and GB of each, and its cells (begin, length) in seconds."""

    begins_s: int
    ends_s: int
    gpus: int
    gb: float
    cells: list[tuple[int, int]]
    parts: list[int] = field(default_factory=list)
    waits_since_s: int | None = None
    runs_until_s: int | None = None
    idle_since_s: int = 0


def notebooks(folder: Path, seed: int) -> list[Notebook]:
    """Return the sessions of the trace that use a GPU."""
    rng, found = Random(seed), []
    for file in sorted(folder.glob("*.json.gz")):
        for one in json.loads(gzip.decompress(file.read_bytes()))["sessions"]:
            asked = one["max_resource_request"]
            cells = [
                (t["start_tick"] * MINUTE_S + rng.randrange(MINUTE_S), t["duration_in_ticks"] * MINUTE_S)
                for t in one["trainings"]
                if t["gpus"]
            ]
            begins_s, ends_s = one["start_tick"] * MINUTE_S, (one["stop_tick"] + 1) * MINUTE_S
            if cells:
                found.append(Notebook(begins_s, ends_s, asked["gpus"], asked["vram"], cells))
    return sorted(found, key=lambda n: n.begins_s)


def requests(book: Notebook, number: int, mode: str, *, split: bool) -> list[Request]:
    """Return what a session asks for: one request, or with ``split`` one for each GPU."""
    part = 1000 if mode == MODES[0] else 100 * max(1, ceil(10 * book.gb / CARD_GB))
    several = split and mode != MODES[0]
    milli = part if book.gpus == 1 or several else 1000 * book.gpus
    asked = Request(f"u{number}", "", "image", "default", milli, 1, 1, on_demand=mode == MODES[3])
    return [replace(asked, server_name=str(n)) for n in range(book.gpus if several else 1)]


class Days:
    """The days of the trace on a number of GPUs."""

    def __init__(self, books: list[Notebook], gpus: int, mode: str, *, split: bool) -> None:
        self.mode, self.split, self.books = mode, split, books
        devices = [
            Device(f"GPU-{n:03}", f"n{n // EACH:02}", n % EACH, "A100", 40960, 1000) for n in range(gpus)
        ]
        self.nodes = tuple(
            Node(f"n{i:02}", "default", 10**6, 10**6, tuple(devices[i * EACH : (i + 1) * EACH]))
            for i in range(ceil(gpus / EACH))
        )
        always = Rules(park_after_s=PARK_AFTER_S, park_always=True)
        self.rules = AllRules(always if mode in MODES[2:] else Rules())
        self.live: dict[int, Session] = {}
        self.book_of: dict[int, Notebook] = {}
        self.delays: list[int] = []
        self.peak_gpus, self.held_milli_s, self.never, self.parks = 0, 0, 0, 0
        self._ids, self._order, self._version = count(1), count(), 0
        self._due: list[tuple[int, int, str, Any]] = []
        self._cache, self._policy = PlanCache(), Policy()

    def _at(self, at_s: int, what: str, of: Any) -> None:
        heappush(self._due, (at_s, next(self._order), what, of))

    def run(self) -> Days:
        """Run all events."""
        for number, book in enumerate(self.books):
            self._at(book.begins_s, "begins", (number, book))
        now_s = 0
        while self._due:
            at_s = self._due[0][0]
            self._count(now_s, at_s)
            now_s = at_s
            while self._due and self._due[0][0] == now_s:
                _, _, what, of = heappop(self._due)
                getattr(self, f"_{what}")(of, now_s)
            self._decide(now_s)
        return self

    def _count(self, from_s: int, to_s: int) -> None:
        shares = [x for s in self.live.values() if lifecycle.holds_shares(s) for x in _shares(s)]
        self.peak_gpus = max(self.peak_gpus, len({x.device_uuid for x in shares}))
        self.held_milli_s += sum(x.fgpu_milli for x in shares) * (to_s - from_s)

    def _begins(self, of: tuple[int, Notebook], now_s: int) -> None:
        number, book = of
        book.idle_since_s = now_s
        for asked in requests(book, number, self.mode, split=self.split):
            session = Session(next(self._ids), asked, S.PENDING, now_s)
            self.live[session.id], self.book_of[session.id] = session, book
            book.parts.append(session.id)
        self._at(book.cells[0][0], "cell", (book, 0))
        self._at(max(book.ends_s, book.cells[-1][0] + 1), "ends", book)

    def _cell(self, of: tuple[Notebook, int], now_s: int) -> None:
        book, _ = of
        book.waits_since_s = now_s
        self._wish(book, now_s)

    def _wish(self, book: Notebook, now_s: int) -> None:
        """Want the parked parts back, and run the cell once all of them have their GPUs."""
        if book.waits_since_s is None:
            return
        for i in book.parts:
            session = self.live[i]
            if session.state is S.PARKED and session.wanted_at_s is None:
                self.live[i] = replace(session, wanted_at_s=now_s)
        if all(self.live[i].state is S.RUNNING for i in book.parts):
            done = len([d for d in book.cells if d[0] < 0])
            length_s = book.cells[done][1]
            self.delays.append(now_s - book.waits_since_s)
            book.waits_since_s, book.runs_until_s = None, now_s + length_s
            book.cells[done] = (-1, length_s)
            self._at(now_s + length_s, "done", (book, done))

    def _done(self, of: tuple[Notebook, int], now_s: int) -> None:
        book, number = of
        book.runs_until_s, book.idle_since_s = None, now_s
        self._at(now_s + PARK_AFTER_S, "looks", book)
        if number + 1 < len(book.cells):
            self._at(max(now_s, book.cells[number + 1][0]), "cell", (book, number + 1))

    def _looks(self, book: Notebook, now_s: int) -> None:
        """Only decide again."""

    def _ends(self, book: Notebook, now_s: int) -> None:
        left = sum(1 for begins_s, _ in book.cells if begins_s >= 0)
        if book.runs_until_s is not None or left:
            # Its last cells were delayed: it stays for them.
            self._at(max(now_s + MINUTE_S, book.runs_until_s or 0), "ends", book)
            return
        for i in book.parts:
            del self.live[i], self.book_of[i]

    def _back(self, session_id: int, now_s: int) -> None:
        self.live[session_id] = lifecycle.moved(self.live[session_id], S.RUNNING, now_s=now_s)
        book = self.book_of[session_id]
        book.idle_since_s = now_s
        self._wish(book, now_s)

    def _decide(self, now_s: int) -> None:
        """Park what is due, then plan, and carry out what is decided."""
        idle = {
            i: book.idle_since_s
            for i, book in self.book_of.items()
            if book.waits_since_s is None and book.runs_until_s is None
        }
        held = {i: round(1024 * book.gb) for i, book in self.book_of.items()}
        room = {node.id: 10**9 for node in self.nodes}
        snapshot = self._snapshot(now_s)
        parking = plan_parking(snapshot, self.rules, gpu_idle_since_s=idle, held_mib=held, host_mib=room)
        for session in parking.due:
            self.live[session.id] = parked(session, self.nodes, held[session.id], None, now_s=now_s)
            self.parks += 1
        snapshot = self._snapshot(now_s)
        for _, new in committed(plan(snapshot, self._policy, self._cache), snapshot, now_s=now_s):
            if new.state is S.SCHEDULED:
                to = S.PARKED if new.request.on_demand else S.RUNNING
                prepares = lifecycle.moved(new, S.PREPARING, now_s=now_s)
                self.live[new.id] = lifecycle.moved(prepares, to, now_s=now_s)
                self._at(now_s + PARK_AFTER_S, "looks", self.book_of[new.id])
            else:
                self.live[new.id] = new
            if new.state is S.RESUMING:
                book = self.book_of[new.id]
                self._at(now_s + COPY_S + ceil(book.gb / COPY_GB_S), "back", new.id)
            elif new.state is S.SCHEDULED:
                self._wish(self.book_of[new.id], now_s)
        if any(s.state is S.PARKED and s.wanted_at_s == now_s for s in self.live.values()) and not any(
            at_s == now_s for at_s, *_ in self._due
        ):
            # A cell waits since this instant: the plan may not have seen it.
            self._at(now_s + 1, "looks", None)

    def _snapshot(self, now_s: int) -> Snapshot:
        self._version += 1
        return Snapshot(now_s, self._version, self.nodes, tuple(self.live[i] for i in sorted(self.live)))


def _shares(session: Session) -> Iterable[Any]:
    return session.placement.shares if session.placement else ()


def figures(days: Days) -> dict[str, Any]:
    """Return the figures of one run; delays are in seconds."""
    delays = sorted(days.delays)
    return {
        "mode": days.mode,
        "gpus": sum(len(node.devices) for node in days.nodes),
        "peak_gpus": days.peak_gpus,
        "gpu_hours": round(days.held_milli_s / 1000 / HOUR_S),
        "cells": len(delays),
        "delay_p50_s": median(delays),
        "delay_p95_s": delays[ceil(0.95 * len(delays)) - 1],
        "delay_longest_s": delays[-1],
        "cells_late": sum(d > LATE_S for d in delays),
        "kernels_ended": 0,
        "parks": days.parks,
    }


def ended_by_idleness(books: list[Notebook], idle_s: int) -> int:
    """Return how many kernels with cells to come would be ended after this idle time."""
    return sum(
        1
        for b in books
        for (begins_s, length_s), after in pairwise(b.cells)
        if after[0] - begins_s - length_s > idle_s
    )


def main() -> None:
    """Run each mode on each number of GPUs."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("folder", type=Path)
    arguments.add_argument("--seed", type=int, default=1)
    arguments.add_argument("--gpus", type=int, nargs="+", default=[168, 56], help="multiples of 8")
    arguments.add_argument("--split", action="store_true")
    arguments.add_argument("--out", type=Path)
    given = arguments.parse_args()

    def run(mode: str, gpus: int) -> dict[str, Any]:
        return figures(Days(notebooks(given.folder, given.seed), gpus, mode, split=given.split).run())

    found = []
    for gpus, mode in product(given.gpus, MODES):
        found.append(run(mode, gpus))
        print(found[-1])
    books = notebooks(given.folder, given.seed)
    whole = {
        "date": date.today().isoformat(),
        "seed": given.seed,
        "split": given.split,
        "copy_s": COPY_S,
        "copy_gb_s": COPY_GB_S,
        "park_after_s": PARK_AFTER_S,
        "kernels_ended_by_idleness": {str(s): ended_by_idleness(books, s) for s in (PARK_AFTER_S, HOUR_S)},
        "runs": found,
        "machine": machine(),
        "source": source(),
    }
    if given.out is not None:
        given.out.write_text(json.dumps(whole, indent=1) + "\n")


if __name__ == "__main__":
    main()
