"""Whether the owner of a running session may extend its time limit: only if no promised start is delayed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from fgpu_scheduler.core.lifecycle import UP
from fgpu_scheduler.core.model import EndCause, Session, Snapshot
from fgpu_scheduler.core.planner import Reservation, delays_start, plan
from fgpu_scheduler.core.policies import Policy
from fgpu_scheduler.core.reclaim import extended


@dataclass(frozen=True, slots=True)
class Extension:
    """What owners may do: extend a session by ``by_s`` seconds, at most ``times`` times, up to ``longest_s`` in all."""

    by_s: int = 0
    times: int = 1
    longest_s: int | None = None


class NotExtended(StrEnum):
    """Why a session is not extended."""

    OFF = "OFF"
    NOT_RUNNING = "NOT_RUNNING"
    NO_LIMIT = "NO_LIMIT"
    PREEMPTED = "PREEMPTED"
    USED_UP = "USED_UP"
    LONGEST = "LONGEST"
    PROMISED = "PROMISED"


def not_extended(session: Session, allowed: Extension) -> NotExtended | None:
    """Return why the session itself may not be extended once more, or None. Waiting sessions are not considered."""
    limit_s = session.time_limit_s
    if not allowed.by_s:
        return NotExtended.OFF
    if session.state not in UP:
        return NotExtended.NOT_RUNNING
    if limit_s is None:
        return NotExtended.NO_LIMIT
    if session.ends_cause is EndCause.PREEMPTED:
        return NotExtended.PREEMPTED
    if session.extended_s + allowed.by_s > allowed.by_s * allowed.times:
        return NotExtended.USED_UP
    if allowed.longest_s is not None and limit_s + allowed.by_s > allowed.longest_s:
        return NotExtended.LONGEST
    return None


def delays_promised_start(snapshot: Snapshot, session: Session, by_s: int, policy: Policy) -> bool:
    """Return whether a promised start would be later if the session were extended.

    The planner promises a start only where the ends before it are known.
    """
    own = snapshot.of_group(session.request.resource_group)
    before = plan(own, policy)
    promised = tuple(d for d in before.decisions if isinstance(d, Reservation) and d.until_s is not None)
    if not promised:
        return False
    longer = extended(session, by_s)
    world = own.with_sessions(longer if s.id == session.id else s for s in own.sessions)
    return delays_start(replace(before, decisions=promised), plan(world, policy), own.now_s)
