"""The administrator's limits on one request, and why one is not accepted."""

from __future__ import annotations

from dataclasses import dataclass

MIN_TIME_LIMIT_S = 60
"""Below this a session would be warned of its end while it starts."""


@dataclass(frozen=True, slots=True)
class Caps:
    """The administrator's limits on one request. None is no limit but the largest node's.

    ``max_priority`` is the highest that this user may ask for; ``min_priority`` the lowest that anybody may.
    """

    fgpu_step_milli: int
    max_fgpu_milli: int | None = None
    max_cpu_milli: int | None = None
    max_memory_mib: int | None = None
    max_count: int = 8
    max_pending_per_user: int = 16
    min_time_limit_s: int = MIN_TIME_LIMIT_S
    max_time_limit_s: int | None = None
    min_priority: int | None = None
    max_priority: int | None = None


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a request is not accepted. ``limit`` and ``nearest`` are in the field's own notation."""

    field: str
    code: str
    message: str
    limit: str | None = None
    nearest: str | None = None
