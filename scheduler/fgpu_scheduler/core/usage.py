"""What sessions have used, and how it is forgotten: amounts are fGPU x 1000 x seconds."""

from __future__ import annotations

from fgpu_scheduler.core.model import Session

HALF_LIFE_S = 7 * 24 * 3600
"""After so many seconds what was used counts half, unless the policy says otherwise."""


def fgpu_seconds(session: Session, now_s: int) -> int:
    """Return what a session has used until now, or until its end: its shares' fGPU x 1000 x the seconds it held them.

    It holds them from its placement on. A clock that was set back in between makes it 0 and never less.
    """
    if session.placement is None or session.scheduled_at_s is None:
        return 0
    until_s = now_s if session.ended_at_s is None else session.ended_at_s
    held_milli = sum(share.fgpu_milli for share in session.placement.shares)
    return held_milli * max(0, until_s - session.scheduled_at_s)


def decayed(amount: float, *, age_s: int, half_life_s: int) -> float:
    """Return what is left of an amount after ``age_s`` seconds; all of it where the clock was set back."""
    half_lives: float = max(0, age_s) / half_life_s
    return amount * float(0.5**half_lives)
