"""Amounts and durations in words, the same on every page and in every message. Pure."""

from __future__ import annotations

from fgpu_scheduler import EndCause, Request, Session, SessionState, format_milli


def amount_words(asked: Request) -> str:
    """Return what was asked for of a GPU: "0.5 fGPU", "5120 MiB + 25 %", or "5120 MiB" for memory only."""
    if asked.gpu_memory_mib is None:
        return f"{format_milli(asked.fgpu_milli)} fGPU"
    if asked.compute_percent is None:
        return f"{asked.gpu_memory_mib} MiB"
    return f"{asked.gpu_memory_mib} MiB + {asked.compute_percent} %"


WARNINGS = {
    EndCause.IDLE: "idle: it is ended unless you keep it or use it",
    EndCause.TIME_LIMIT: "its time limit is reached soon",
    EndCause.PREEMPTED: "a session of higher priority needs its place",
}


def warning_words(session: Session) -> str | None:
    """Return what the owner of a running session is warned of, or None. When it ends is said beside it."""
    if session.state is not SessionState.RUNNING or session.ends_cause is None:
        return None
    return WARNINGS.get(session.ends_cause, "it is about to be ended")


def hours_minutes(duration_s: int) -> str:
    """Return a duration as hours:minutes, such as "2:30"; part of a minute counts as one."""
    minutes = -(-duration_s // 60)
    return f"{minutes // 60}:{minutes % 60:02}"


def fgpu_of(session: Session) -> str | None:
    """Return what was asked for in fGPU, or what an exact amount came to; None while that is not known."""
    if session.request.gpu_memory_mib is None:
        return format_milli(session.request.fgpu_milli)
    if session.placement is None:
        return None
    return format_milli(sum(share.fgpu_milli for share in session.placement.shares))
