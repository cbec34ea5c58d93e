"""The runs of a replay as a picture: how long sessions waited, and how much was held."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from fgpu_scheduler import BadSettings, Outcome
from fgpuspawner.replay.report import Report

INSTALL = "pip install 'fgpuspawner[plot]'"


def check_plot(path: str) -> None:
    """Refuse what cannot be drawn before anything is replayed.

    Raises:
        BadSettings: the name is not that of a PNG file, or matplotlib is not installed.
    """
    if not path.lower().endswith(".png"):
        raise BadSettings(f"plot: {path!r} does not end in .png, the only format there is")
    _figure()


def _figure() -> Any:
    try:
        # Without pyplot: no window system is asked for, and nothing global is changed.
        from matplotlib.figure import Figure
    except ImportError:
        raise BadSettings(f"plot: matplotlib is not installed: {INSTALL}") from None
    return Figure(figsize=(10, 8), layout="constrained")


def draw(report: Report, path: str) -> None:
    """Write the picture.

    Raises:
        BadSettings: matplotlib is not installed.
        OSError: the file cannot be written.
    """
    figure = _figure()
    waits, held = figure.subplots(2, 1)
    for run in report.runs:
        hours, percent = waits_curve(run.outcomes, from_s=report.from_s)
        waits.step(hours, percent, where="post", label=run.policy)
        days, fgpu = held_curve(run.outcomes, from_s=report.from_s, until_s=report.until_s)
        held.step(days, fgpu, where="post", label=run.policy)
    waits.set(xlabel="hours in the queue", ylabel="% of sessions that waited no longer", ylim=(0, 102))
    waits.set_xscale("symlog", linthresh=0.1)
    waits.set_xlim(left=0)
    held.set(xlabel="days", ylabel="fGPU held", ylim=(0, 1.05 * report.capacity_milli / 1000))
    for axes in (waits, held):
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path, dpi=120, format="png")


def waits_curve(outcomes: Iterable[Outcome], *, from_s: int) -> tuple[list[float], list[float]]:
    """Return waits in hours, ascending, and the percentage of sessions that waited no longer."""
    waits = sorted(o.waited_s / 3600 for o in outcomes if not o.refused and o.job.submitted_at_s >= from_s)
    return [0.0, *waits], [0.0, *(100 * (n + 1) / len(waits) for n in range(len(waits)))]


def held_curve(outcomes: Iterable[Outcome], *, from_s: int, until_s: int) -> tuple[list[float], list[float]]:
    """Return days since ``from_s``, and how much fGPU is held from each instant on."""
    changes: dict[int, int] = {}
    for outcome in outcomes:
        if outcome.placed_at_s is None or outcome.left_at_s <= from_s or outcome.placed_at_s > until_s:
            continue
        begins = max(outcome.placed_at_s, from_s)
        changes[begins] = changes.get(begins, 0) + outcome.taken_milli
        changes[outcome.left_at_s] = changes.get(outcome.left_at_s, 0) - outcome.taken_milli
    days, fgpu = [0.0], [0.0]
    taken_milli = 0
    for at_s in sorted(changes):
        if at_s > until_s:
            break
        taken_milli += changes[at_s]
        days.append((at_s - from_s) / 86400)
        fgpu.append(taken_milli / 1000)
    return days, fgpu
