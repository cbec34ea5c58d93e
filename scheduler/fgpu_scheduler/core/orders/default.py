"""The default: short and small requests of those who have used little first, and all the sooner the longer they wait."""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt

from fgpu_scheduler.core.order import Line
from fgpu_scheduler.core.orders.sizes import UNLIMITED_S, asked_milli, lengths_s
from fgpu_scheduler.core.usage import held_by_user, used_by_user

# Set on seeds 1 to 12 of bench/scheduler/lab.py; docs/decisions/0027 has what else was tried.
USAGE = 0.3
"""How much it counts to have used as much as users have on average."""
HELD = 3.0
"""How much it counts, without a time limit, to hold as much as users who hold something do on average."""
PATIENCE_S = 3600
"""Who has waited for that long counts as half the size."""


def usage_size_age(line: Line) -> Sequence[float]:
    """Rank by size, more with the user's usage, and less with the time waited.

    The size is the square of the time limit, times the root of the fGPU: limits tell more of the wait that a session
    causes than amounts do. Without a limit the length is guessed from sessions that have ended, and counts once: it says
    less. Usage is that of `fair_share`, with the user's own requests ahead. Where no limit tells when a
    session ends, what its user holds now counts as well, and holds up those who ask for much at a time.
    """
    used: dict[str, float] = {**used_by_user(line.snapshot, line.resource_group)}
    held = held_by_user(line.snapshot, line.resource_group)
    usage = USAGE / max(1.0, sum(used.values()) / max(1, len(used)))
    holding = HELD / max(1.0, sum(held.values()) / max(1, len(held)))
    ranks = []
    sizes: dict[tuple[int, float, int | None], float] = {}
    lengths = lengths_s(line)
    for session, waited_s, milli, length_s in zip(
        line.waiting, line.waited_s, asked_milli(line), lengths, strict=True
    ):
        asked = session.request
        user, limit_s = asked.user, asked.time_limit_s
        size = sizes.get((milli, length_s, limit_s))
        if size is None:
            size = sqrt(milli) * length_s * (limit_s or UNLIMITED_S)
            sizes[milli, length_s, limit_s] = size
        before = used.get(user, 0)
        used[user] = before + milli * length_s
        rank = size * (1 + usage * before) / (PATIENCE_S + waited_s)
        if limit_s is None:
            beside = held.get(user, 0)
            held[user] = beside + milli
            rank *= 1 + holding * beside
        ranks.append(rank)
    return ranks
