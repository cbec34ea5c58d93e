"""The history page in words: receipts line by line, and their totals. Pure: from the API's receipts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from fgpuspawner.service.model import Json
from fgpuspawner.service.pages.bars import Bar, memory_bar
from fgpuspawner.service.pages.session_rows import end_words
from fgpuspawner.text.sessions import mib
from fgpuspawner.text.times import duration


@dataclass(frozen=True, slots=True)
class Line:
    """One session that has ended. ``memory`` is None, and ``usual`` empty, where nothing was measured."""

    receipt: Json
    name: str
    gpu_memory: str
    state: str
    why: str
    waited: str
    ran: str
    gpu_hours: str
    memory: Bar | None
    usual: str
    energy: str


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums over the sessions that were looked through. ``more``: there are older ones beside them."""

    sessions: int
    gpu_hours: str
    waited: str
    energy: str
    more: bool


def line(receipt: Json) -> Line:
    """Return a receipt in words."""
    limit_mib = receipt["gpu_memory_mib"]
    return Line(
        receipt=receipt,
        name=receipt["server_name"] or "default server",
        gpu_memory="" if limit_mib is None else mib(limit_mib),
        state=_state(receipt),
        why=end_words(receipt["end_cause"], receipt["message"]),
        waited=duration(receipt["wait_s"]),
        ran="never ran" if receipt["started_at_s"] is None else duration(receipt["run_s"]),
        gpu_hours=hours(receipt["gpu_hours"]),
        memory=memory_bar("Peak", receipt["memory_peak_mib"], limit_mib),
        usual=_usual(receipt["memory_p95_mib"], receipt["sm_p95_percent"]),
        energy=_energy(receipt["energy_wh"], estimated=receipt["energy_estimated"]),
    )


def _usual(memory_mib: int | None, compute_percent: float | None) -> str:
    """Return what was not exceeded for 95 % of the time."""
    told = "" if memory_mib is None else f"{memory_mib} MiB"
    if compute_percent is None:
        return f"p95 {told}" if told else ""
    computed = f"{compute_percent:.0f} % of the GPU"
    return f"p95 {told}, {computed}" if told else f"p95 {computed}"


def totals(receipts: Sequence[Json], *, more: bool) -> Totals:
    """Return the sums of these receipts."""
    waits = [r["wait_s"] for r in receipts if r["started_at_s"] is not None]
    energy = [r["energy_wh"] for r in receipts if r["energy_wh"] is not None]
    return Totals(
        sessions=len(receipts),
        gpu_hours=hours(sum(r["gpu_hours"] for r in receipts)),
        waited=duration(round(median(waits))) if waits else "",
        energy=_energy(sum(energy), estimated=any(r["energy_estimated"] for r in receipts)) if energy else "",
        more=more,
    )


def hours(amount: float) -> str:
    """Return GPU-hours so that something is never shown as nothing."""
    return "below 0.01" if 0 < amount < 0.005 else f"{amount:.2f}"


def _state(receipt: Json) -> str:
    if receipt["started_at_s"] is None and receipt["end_cause"] in ("USER", "QUEUE_TIMEOUT"):
        return "CANCELLED"
    failed = ("NODE_LOST", "PULL_FAILED", "LAUNCH_FAILED", "OOM", "ISOLATION_FAILED")
    return "ERROR" if receipt["end_cause"] in failed else "TERMINATED"


def _energy(wh: float | None, *, estimated: bool) -> str:
    if wh is None:
        return ""
    told = f"{wh / 1000:.2f} kWh" if wh >= 1000 else f"{wh:.1f} Wh"
    return f"about {told}" if estimated else told
