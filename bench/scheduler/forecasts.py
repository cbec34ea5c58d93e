"""Hold expected starts against the starts, on the days of a lab (`lab.py`), with time limits and without.

Every request that has to wait is told a range when it comes, from what has ended by then, and how earlier ranges did; the
lab then goes on as it did. Everything is virtual time: a seed gives the same figures on every machine.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "scheduler"), str(ROOT / "bench"), str(ROOT / "bench" / "scheduler")]

from machine import machine, source  # noqa: E402

import lab  # noqa: E402
from fgpu_scheduler import (  # noqa: E402
    NEWEST_OUTCOMES,
    NEWEST_RUNS,
    Forecast,
    ForecastHistory,
    ForecastOutcome,
    PastRun,
    Policy,
    RunLengths,
    Session,
    Snapshot,
    calibrated,
    forecast,
    forecast_accuracy,
    replay,
)

GROUP = "default"
SEEDS = range(101, 113)
NOT_BEFORE_S = 2 * lab.DAY_S
"""Before that too little has ended to judge by."""


@dataclass
class Watch:
    """Sees the lab go on, tells each who waits once, and notes what became of it."""

    policy: Policy
    learns: bool
    told: dict[int, tuple[int, Forecast]] = field(default_factory=dict)
    scores: list[ForecastOutcome] = field(default_factory=list)
    took_s: float = 0.0
    _runs: deque[PastRun] = field(default_factory=lambda: deque(maxlen=NEWEST_RUNS))
    _running: dict[int, tuple[Session, int]] = field(default_factory=dict)
    _lengths_s: Sequence[int] = ()
    _newest: int = 0

    def look(self, snapshot: Snapshot) -> None:
        """Take in what has happened, and tell those who are new."""
        live = {s.id: s for s in snapshot.sessions}
        for i, (session, started_s) in list(self._running.items()):
            if i not in live:
                del self._running[i]
                length_s = min(snapshot.now_s - started_s, self._lengths_s[i - 1])
                self._runs.append(PastRun(GROUP, session.request.user, session.request.image, length_s))
        for s in live.values():
            if s.started_at_s is not None and s.id not in self._running:
                self._running[s.id] = s, s.started_at_s
                self._started(s.id, s.started_at_s)
        new = [i for i in live if i > self._newest]
        if not new:
            return
        self._newest = max(new)
        began = time.perf_counter()
        lengths = RunLengths(GROUP, self._runs)
        taught = calibrated(self.scores[-NEWEST_OUTCOMES:]) if self.learns else None
        experience = ForecastHistory(lengths, taught)
        found = {f.session_id: f for f in forecast(snapshot, self.policy, experience)}
        self.took_s += time.perf_counter() - began
        for i in new:
            one = found.get(i)
            if one is not None and one.position and one.expected_start_at_s is not None:
                self.told[i] = snapshot.now_s, one

    def _started(self, session_id: int, at_s: int) -> None:
        if session_id not in self.told:
            return
        told_at_s, f = self.told.pop(session_id)
        if f.shown is not None and f.planned is not None:
            self.scores.append(ForecastOutcome(told_at_s, f.shown, f.planned, at_s))


def figures(scores: Sequence[ForecastOutcome]) -> dict[str, float]:
    """Return the figures of what was told from `NOT_BEFORE_S` on. Waits are medians in hours."""
    own = [s for s in scores if s.told_at_s >= NOT_BEFORE_S]
    found = forecast_accuracy(own)
    if found is None:
        return {"forecasts": 0}
    widths = sorted(s.shown.late_at_s - s.shown.early_at_s for s in own)
    later = sum(s.at_s > s.shown.middle_at_s for s in own)
    twice = sum(s.at_s - s.told_at_s > 2 * (s.shown.middle_at_s - s.told_at_s) for s in own)
    return {
        "forecasts": found.starts,
        "inside": round(found.inside, 3),
        "before": round(found.early, 3),
        "after": round(found.late, 3),
        "later_than_expected": round(later / len(own), 3),
        "later_than_twice": round(twice / len(own), 3),
        "told_wait_h": round(found.told_wait_s / lab.HOUR_S, 2),
        "true_wait_h": round(found.true_wait_s / lab.HOUR_S, 2),
        "range_h": round(widths[len(widths) // 2] / lab.HOUR_S, 2),
    }


def run(seed: int, *, limits: bool, learns: bool) -> Watch:
    """Let one lab go on, and return what was told."""
    asked = lab.jobs(seed) if limits else lab.without_limits(lab.jobs(seed))
    policy = Policy(lab.POLICIES["default"])
    watch = Watch(policy, learns, _lengths_s=[job.length_s for job in asked])
    replay(asked, lab.nodes(seed), policy, seen=watch.look)
    return watch


def main() -> int:
    """PastRun the labs and print a table; return 1 where too few starts are inside what was told."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seeds", type=int, default=len(SEEDS), help="how many; default: %(default)s")
    parser.add_argument("--setting", action="store_true", help="the seeds that constants are set on")
    parser.add_argument("--untaught", action="store_true", help="ranges are not stretched by earlier scores")
    parser.add_argument("--out", type=Path, help="write a results file here")
    options = parser.parse_args()
    seeds = (lab.SET_SEEDS if options.setting else SEEDS)[: options.seeds]
    found: dict[str, dict[str, float]] = {}
    for words, limits in (("time limits", True), ("no time limits", False)):
        began = time.perf_counter()
        watches = [run(seed, limits=limits, learns=not options.untaught) for seed in seeds]
        row = found[words] = figures([s for w in watches for s in w.scores])
        print(
            f"{words}: {row}  [{time.perf_counter() - began:.0f} s, {sum(w.took_s for w in watches):.0f} s forecasts]"
        )
    if options.out:
        what = {
            "date": date.today().isoformat(),
            "machine": machine(),
            "source": source(),
            "seeds": [seeds[0], seeds[-1]],
            "generator": lab.fingerprint(1),
            "figures": found,
        }
        options.out.write_text(json.dumps(what, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
