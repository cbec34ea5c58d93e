"""What the runs of a replay say, for reading and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

from fgpu_scheduler import format_milli
from fgpu_scheduler.replay import Outcome, Summary, summary

HAPPENED = "what happened"
HEADING = (
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
)


@dataclass(frozen=True, slots=True)
class Run:
    """What became of every job under one policy, or what happened."""

    policy: str
    outcomes: tuple[Outcome, ...]


@dataclass(frozen=True, slots=True)
class Report:
    """Runs of the same jobs, with the figures of those submitted in the window.

    ``quotas`` are the words of those that are tried in place of the installation's, or None where these hold.
    """

    runs: tuple[Run, ...]
    capacity_milli: int
    from_s: int
    until_s: int
    quotas: tuple[str, ...] | None = None

    @property
    def summaries(self) -> tuple[Summary, ...]:
        """The figures of each run."""
        return tuple(
            summary(
                run.outcomes, capacity_milli=self.capacity_milli, from_s=self.from_s, until_s=self.until_s
            )
            for run in self.runs
        )

    @property
    def users(self) -> int:
        """How many users submitted something in the window."""
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
    """Return the report as a table, under a line that says of what."""
    summaries = report.summaries
    rows = [_row(run.policy, figures) for run, figures in zip(report.runs, summaries, strict=True)]
    widths = [max(len(row[n]) for row in (HEADING, *rows)) for n in range(len(HEADING))]
    return [
        f"{summaries[0].sessions} sessions of {report.users} users, submitted {_instant(report.from_s)} to "
        f"{_instant(report.until_s)}, on {format_milli(report.capacity_milli)} fGPU",
        *_tried(report),
        "",
        *(_line(row, widths) for row in (HEADING, *rows)),
    ]


def _tried(report: Report) -> list[str]:
    if report.quotas is None:
        return []
    said = f"the quotas {' '.join(report.quotas)}" if report.quotas else "no quota"
    known = report.runs[0].policy == HAPPENED
    return [f"each policy with {said}{', unlike what happened' if known else ''}"]


def _row(policy: str, figures: Summary) -> tuple[str, ...]:
    return (
        policy,
        str(figures.started),
        str(figures.never_started),
        str(figures.refused),
        duration(figures.mean_wait_s),
        duration(figures.median_wait_s),
        duration(figures.p95_wait_s),
        duration(figures.longest_wait_s),
        f"{100 * figures.utilisation:.1f} %",
        f"{figures.fairness:.3f}",
    )


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    first, *rest = (
        cell.ljust(width) if n == 0 else cell.rjust(width)
        for n, (cell, width) in enumerate(zip(row, widths, strict=True))
    )
    return "  ".join((first, *rest)).rstrip()


def duration(seconds: float) -> str:
    """Return a duration as hours, minutes and seconds: ``1:05:00``."""
    whole = round(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"


def _instant(at_s: int) -> str:
    try:
        return datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%d %H:%MZ")
    except (OverflowError, ValueError, OSError):
        return f"{at_s} s"
