"""The results of a replay, as text and as JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from fgpu_scheduler import Outcome, Summary, format_milli, summary
from fgpuspawner.text.tables import table
from fgpuspawner.text.times import instant

HAPPENED = "what happened"
HEADING = [
    "policy",
    "started",
    "never",
    "refused",
    "mean wait",
    "median",
    "p95",
    "longest",
    "in use",
    "fairness",
]


@dataclass(frozen=True, slots=True)
class Run:
    """The outcome of every job under one policy, or in reality."""

    policy: str
    outcomes: tuple[Outcome, ...]


@dataclass(frozen=True, slots=True)
class Report:
    """Runs of the same jobs, with figures for those submitted in the window.

    ``quotas`` are the words of the quotas tried; None if the installation's own apply.
    """

    runs: tuple[Run, ...]
    capacity_milli: int
    from_s: int
    until_s: int
    quotas: tuple[str, ...] | None = None

    @property
    def summaries(self) -> tuple[Summary, ...]:
        of = {"capacity_milli": self.capacity_milli, "from_s": self.from_s, "until_s": self.until_s}
        return tuple(summary(run.outcomes, **of) for run in self.runs)

    @property
    def users(self) -> int:
        jobs = (o.job for o in self.runs[0].outcomes)
        return len({job.request.user for job in jobs if job.submitted_at_s >= self.from_s})


def as_json(report: Report) -> dict[str, Any]:
    """Return the report as JSON; durations in seconds, shares between 0 and 1."""
    return {
        "version": 1,
        "from_s": report.from_s,
        "until_s": report.until_s,
        "users": report.users,
        "fgpu_total": format_milli(report.capacity_milli),
        "quotas": None if report.quotas is None else list(report.quotas),
        "runs": [
            {"policy": run.policy, **asdict(figures)}
            for run, figures in zip(report.runs, report.summaries, strict=True)
        ],
    }


def as_lines(report: Report) -> list[str]:
    summaries = report.summaries
    rows = [_row(run.policy, figures) for run, figures in zip(report.runs, summaries, strict=True)]
    tried = []
    if report.quotas is not None:
        said = f"the quotas {' '.join(report.quotas)}" if report.quotas else "no quota"
        unlike = ", unlike what happened" if report.runs[0].policy == HAPPENED else ""
        tried.append(f"each policy with {said}{unlike}")
    first, last = (instant(at_s, seconds=False) for at_s in (report.from_s, report.until_s))
    return [
        f"{summaries[0].sessions} sessions of {report.users} users, submitted {first} to {last}, on "
        f"{format_milli(report.capacity_milli)} fGPU",
        *tried,
        "",
        *table(HEADING, rows, right_from=1),
    ]


def _row(policy: str, own: Summary) -> tuple[object, ...]:
    waits = own.mean_wait_s, own.median_wait_s, own.p95_wait_s, own.longest_wait_s
    shares = f"{100 * own.utilisation:.1f} %", f"{own.fairness:.3f}"
    return (policy, own.started, own.never_started, own.refused, *map(duration, waits), *shares)


def duration(seconds: float) -> str:
    """Return a duration as hours, minutes and seconds: ``1:05:00``."""
    whole = round(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"
