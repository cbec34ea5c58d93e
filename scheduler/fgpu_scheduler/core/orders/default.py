"""The default: short and small requests of those who have used little first, and all the sooner the longer they wait."""

from __future__ import annotations

from collections.abc import Sequence

from fgpu_scheduler.core.order import Line
from fgpu_scheduler.core.orders.sizes import UNLIMITED_S, asked_milli
from fgpu_scheduler.core.usage import used_by_user

# Set on seeds 1 to 12 of bench/scheduler/lab.py. A usage of 0 or 1 and a patience of 1 or 16 hours change the mean wait
# by less than a tenth.
USAGE = 0.3
"""How much it counts to have used as much as users have on average."""
PATIENCE_S = 4 * 3600
"""Who has waited for that long counts as half the size."""


def usage_size_age(line: Line) -> Sequence[float]:
    """Rank by size, more with the user's usage, and less with the time waited.

    The size is fGPU times the square of the time limit: limits tell more of the wait that a session causes than amounts
    do, being further apart. Usage is that of `fair_share`, with the user's own requests ahead.
    """
    used = used_by_user(line.snapshot, line.resource_group)
    mean = max(1.0, sum(used.values()) / max(1, len(used)))
    factor = USAGE / mean
    ranks = []
    for session, waited_s, milli in zip(line.waiting, line.waited_s, asked_milli(line), strict=True):
        asked = session.request
        user, limit_s = asked.user, asked.time_limit_s or UNLIMITED_S
        before = used.get(user, 0)
        area = milli * limit_s
        used[user] = before + area
        ranks.append(area * limit_s * (1 + factor * before) / (PATIENCE_S + waited_s))
    return ranks
