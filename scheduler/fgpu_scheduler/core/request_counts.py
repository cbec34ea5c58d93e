"""Which past requests predict future ones, and how often each was made.

All processes that read one database count the same requests, so that a forecast places as the scheduler does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from fgpu_scheduler.core.model import Request, RequestCount
from fgpu_scheduler.core.shares import shape

#: How many of the newest requests are counted, over all resource groups.
NEWEST = 2000
#: The counts are renewed after this many requests: scores are computed from them, which takes a while.
EVERY = 100


def counted_ids(newest_id: int) -> range:
    """Return the ids of the sessions that are counted when the newest session has this id."""
    last = newest_id // EVERY * EVERY
    return range(max(1, last - NEWEST + 1), last + 1)


def count_requests(requests: Iterable[Request]) -> tuple[RequestCount, ...]:
    """Return the counts of these requests, whatever their order."""
    counts = Counter(map(shape, requests))
    return in_order((*amounts, count) for amounts, count in counts.items())


def in_order(counts: Iterable[Iterable[Any]]) -> tuple[RequestCount, ...]:
    """Return counts in the order of a snapshot: by resource group, then by amounts, None first."""
    found = [RequestCount(*count) for count in counts]
    return tuple(sorted(found, key=lambda one: [(value is not None, value) for value in shape(one)]))
