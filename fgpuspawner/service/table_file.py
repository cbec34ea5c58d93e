"""Tables as CSV files that a spreadsheet opens without running what is in them. Pure."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime

from fgpuspawner.service.rows import end_words
from fgpuspawner.service.view import Json

Cell = str | int | float | None

SESSION_COLUMNS = (
    "id",
    "user",
    "session",
    "state",
    "why",
    "position",
    "image",
    "resource_group",
    "amount",
    "fgpu",
    "gpu_memory_mib",
    "gpu_memory_used_mib",
    "gpu_compute_percent",
    "cpu",
    "memory_mib",
    "node",
    "submitted",
    "started",
    "ends",
    "simulated",
)


def csv_text(columns: Sequence[str], lines: Iterable[Sequence[Cell]]) -> str:
    """Return a table as CSV; what a spreadsheet would take for a formula begins with an apostrophe."""
    found = io.StringIO()
    writer = csv.writer(found)
    writer.writerow(columns)
    writer.writerows([_defused(cell) for cell in line] for line in lines)
    return found.getvalue()


def _defused(cell: Cell) -> Cell:
    if isinstance(cell, str) and cell.lstrip()[:1] in ("=", "+", "-", "@"):
        return f"'{cell}"
    return cell


def session_cells(session: Json) -> tuple[Cell, ...]:
    """Return a session's line, in the order of `SESSION_COLUMNS`. Instants are UTC."""
    meter = session.get("meter") or {}
    waits = session["state"] == "PENDING"
    return (
        session["id"],
        session["user"],
        session["display_name"],
        session["state"],
        session["message"]
        or (session["wait_text"] if waits else "")
        or end_words(session["end_cause"], None),
        session["position"],
        session["image_name"],
        session["resource_group"],
        session["amount"],
        session["fgpu"],
        session["gpu_memory_mib"],
        meter.get("memory_used_mib"),
        meter.get("sm_percent"),
        session["cpu"],
        session["memory_mib"],
        session["node"],
        utc(session["submitted_at_s"]),
        utc(session["started_at_s"]),
        utc(session["ends_at_s"]),
        "yes" if session["simulated"] else "no",
    )


def utc(at_s: int | None) -> str | None:
    """Return an instant as spreadsheets read it."""
    return None if at_s is None else datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%d %H:%M:%S")
