"""What is left of somebody's quotas, for the launch form. Pure."""

from __future__ import annotations

from fgpu_scheduler import Request, Snapshot, format_milli
from fgpu_scheduler.core.quota import Ledger, Left, shown
from fgpuspawner.service.view import Json


def quota_object(snapshot: Snapshot, request: Request) -> Json:
    """Return what the quotas leave whoever makes a request; what waits counts for nothing yet."""
    left = Ledger(snapshot).left(request)
    return {
        "fgpu_left": None if left.fgpu_milli is None else format_milli(left.fgpu_milli),
        "sessions_left": left.sessions,
        "text": _words(left),
    }


def _words(left: Left) -> str | None:
    parts: list[tuple[str, str]] = []
    if left.fgpu_milli is not None and left.fgpu_of is not None:
        parts.append((f"{format_milli(left.fgpu_milli)} fGPU", shown(left.fgpu_of)))
    if left.sessions is not None and left.sessions_of is not None:
        number = "1 session" if left.sessions == 1 else f"{left.sessions} sessions"
        parts.append((number, shown(left.sessions_of)))
    if not parts:
        return None
    if len({whose for _, whose in parts}) == 1:
        return f"{' and '.join(amount for amount, _ in parts)} left of the quota of {parts[0][1]}"
    return "; ".join(f"{amount} left of the quota of {whose}" for amount, whose in parts)
