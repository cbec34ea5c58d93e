"""Which requests of the past say what people will ask for next, and how they are counted.

All processes that read one database count the same ones, so that a forecast places as the scheduler does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from fgpu_scheduler.core.model import Asked, Request

NEWEST = 2000
"""So many of the newest requests are counted, of all resource groups together."""

EVERY = 100
"""They are counted anew with every so many requests: scores are made from the counts, and that takes a while."""

Amounts = tuple[str, int, int, int, int | None, int | None, str | None]
"""All of an `Asked` but its count."""


def counted_ids(newest_id: int) -> range:
    """Return the ids of the sessions whose requests are counted when the newest session has this id."""
    last = newest_id // EVERY * EVERY
    return range(max(1, last - NEWEST + 1), last + 1)


def asked_of(requests: Iterable[Request]) -> tuple[Asked, ...]:
    """Count requests, in whatever order they come."""
    found = Counter(
        (
            r.resource_group,
            r.fgpu_milli,
            r.cpu_milli,
            r.memory_mib,
            r.gpu_memory_mib,
            r.compute_percent,
            r.gpu_model,
        )
        for r in requests
    )
    return in_order(found.items())


def in_order(counts: Iterable[tuple[Amounts, int]]) -> tuple[Asked, ...]:
    """Return counts as a snapshot has them: by resource group, then by amounts."""
    found = [Asked(*amounts, count) for amounts, count in counts]
    return tuple(sorted(found, key=_order))


def _order(one: Asked) -> tuple[str, int, int, int, int, int, str]:
    return (
        one.resource_group,
        one.fgpu_milli,
        one.cpu_milli,
        one.memory_mib,
        one.gpu_memory_mib or 0,
        one.compute_percent or 0,
        one.gpu_model or "",
    )
