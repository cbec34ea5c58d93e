"""Instants and durations in words, the same on every page, in every file and in every message. Pure."""

from __future__ import annotations

import re
from datetime import UTC, datetime

from fgpu_scheduler import duration as duration


def instant(at_s: int, *, seconds: bool = True) -> str:
    """Return an instant in UTC: "2026-07-01 08:30:00Z"; beyond the calendar's range as seconds."""
    try:
        return datetime.fromtimestamp(at_s, UTC).strftime(f"%Y-%m-%d %H:%M{':%S' if seconds else ''}Z")
    except (OverflowError, ValueError, OSError):
        return f"{at_s} s"


def moment(at_s: int, *, near: bool = False) -> str:
    """Return an instant as escaped HTML: machine-readable, and in UTC for readers without scripts.

    With ``near`` the pages' script also says how far from now it is: "14:20 (in 20 min)".
    """
    at = datetime.fromtimestamp(at_s, UTC)
    mark = " data-near" if near else ""
    return f'<time datetime="{at:%Y-%m-%dT%H:%M:%SZ}"{mark}>{at:%Y-%m-%d %H:%M} UTC</time>'


def cell(at_s: int | None) -> str | None:
    """Return an instant as spreadsheets read it, in UTC: "2026-07-01 08:30:00"."""
    return None if at_s is None else f"{datetime.fromtimestamp(at_s, UTC):%Y-%m-%d %H:%M:%S}"


def hours_minutes(duration_s: int) -> str:
    """Return a duration as hours:minutes, such as "2:30"; part of a minute counts as one."""
    minutes = -(-duration_s // 60)
    return f"{minutes // 60}:{minutes % 60:02}"


def clock(duration_s: int) -> str:
    """Return a duration as `seconds_of` reads it, unrounded: "2:30", "0:01:30"."""
    minutes, rest_s = divmod(duration_s, 60)
    return hours_minutes(minutes * 60) + (f":{rest_s:02}" if rest_s else "")


def seconds_of(text: str) -> int | None:
    """Return the seconds of hours:minutes, such as "2:30", or hours:minutes:seconds; None for anything else."""
    found = re.fullmatch(r"([0-9]{1,5}):([0-5][0-9])(?::([0-5][0-9]))?", text)
    return int(found[1]) * 3600 + int(found[2]) * 60 + int(found[3] or 0) if found else None
