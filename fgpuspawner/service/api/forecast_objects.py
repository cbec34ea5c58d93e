"""The API's objects of a forecast: what would become of a request, why it never can run, what quotas leave. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace

from fgpu_scheduler import Refusal, Request, RequestForecast, Snapshot, format_milli
from fgpu_scheduler.core.quota import Ledger, Left, shown
from fgpuspawner.service.api.objects import waits_for
from fgpuspawner.service.model import Json, Viewer, World
from fgpuspawner.service.problems import Problem

INSTEAD_OF = "instead_of"
MOST_DIGITS = 15


def forecast_object(
    found: RequestForecast, world: World, viewer: Viewer, *, count: int, simulated: bool
) -> Json:
    """Return what would become of ``count`` sessions that may queue, and which amount would start now or sooner."""
    waiting = count - found.startable_now
    return {
        "starts_now": waiting == 0,
        "startable_now": found.startable_now,
        "count": count,
        "position": found.position,
        "expected_start_at_s": found.expected_start_at_s,
        "basis": found.basis,
        "text": _forecast_text(found, count),
        "wait_reason": None if found.reason is None else found.reason.value,
        "waits_for": waits_for(found.ahead, world, viewer),
        "largest_now": None if found.largest_now_milli is None else format_milli(found.largest_now_milli),
        "soonest": None if found.soonest_milli is None else format_milli(found.soonest_milli),
        "soonest_at_s": found.soonest_at_s,
        "refusals": [],
        "simulated": simulated,
    }


def _forecast_text(found: RequestForecast, count: int) -> str:
    waiting = count - found.startable_now
    if not waiting:
        return "starts now" if count == 1 else f"all {count} start now"
    wait = "waits" if waiting == 1 else "wait"
    if count == 1:
        return f"waits: {found.text}"
    if not found.startable_now:
        return f"all {count} wait: {found.text}"
    start = "starts" if found.startable_now == 1 else "start"
    return f"{found.startable_now} {start} now, {waiting} {wait}: after those, {found.text}"


def refused_object(refusals: Sequence[Refusal], *, count: int, simulated: bool) -> Json:
    """Return why a request can never run; each reason names the field, the limit and what would work."""
    unknown = (
        "position",
        "expected_start_at_s",
        "wait_reason",
        "waits_for",
        "largest_now",
        "soonest",
        "soonest_at_s",
    )
    return {
        **dict.fromkeys(unknown),
        "starts_now": False,
        "startable_now": 0,
        "count": count,
        "basis": "refused",
        "text": "; ".join(r.message for r in refusals),
        "refusals": [asdict(refusal) for refusal in refusals],
        "simulated": simulated,
    }


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


def without_session(world: World, user: str, session_id: str) -> World:
    """Return the world as it will be when this session has ended.

    Raises:
        Problem: the user has no live session with this id, whoever else may have.
    """
    is_id = session_id.isascii() and session_id.isdigit() and len(session_id) <= MOST_DIGITS
    left_out = world.session(int(session_id)) if is_id else None
    if left_out is None or left_out.request.user != user:
        raise Problem(
            404, "no_such_session", "instead_of: you have no live session with this id", field=INSTEAD_OF
        )
    others = (s for s in world.snapshot.sessions if s is not left_out)
    return replace(world, snapshot=world.snapshot.with_sessions(others))
