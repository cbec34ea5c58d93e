"""Fair share: who has used least, of late, comes first."""

from __future__ import annotations

from collections.abc import Sequence

from fgpu_scheduler.core.order import Line
from fgpu_scheduler.core.orders.sizes import asked_milli, lengths_s
from fgpu_scheduler.core.usage import used_by_user


def fair_share(line: Line) -> Sequence[float]:
    """Rank by what a user has used, decayed, and what their own requests ahead would use: fGPU x 1000 x seconds.

    So a user's second request stands behind the first of all who have used as little.
    """
    used: dict[str, float] = {**used_by_user(line.snapshot, line.resource_group)}
    ranks = []
    for session, milli, length_s in zip(line.waiting, asked_milli(line), lengths_s(line), strict=True):
        user = session.request.user
        before = used.get(user, 0)
        ranks.append(before)
        used[user] = before + milli * length_s
    return ranks
