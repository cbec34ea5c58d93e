"""Which requests of the past say what people will ask for next, and how they are counted.

All processes that read one database count the same ones, so that a forecast places as the scheduler does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import fields
from operator import attrgetter
from typing import Any

from fgpu_scheduler.core.model import Request, RequestCount

NEWEST = 2000
"""So many of the newest requests are counted, of all resource groups together."""

EVERY = 100
"""They are counted anew with every so many requests: scores are made from the counts, and that takes a while."""

AMOUNTS = tuple(field.name for field in fields(RequestCount) if field.name != "count")
"""All of an `RequestCount` but its count: what a request asks for of which resource group."""

_amounts_of = attrgetter(*AMOUNTS)


def counted_ids(newest_id: int) -> range:
    """Return the ids of the sessions whose requests are counted when the newest session has this id."""
    last = newest_id // EVERY * EVERY
    return range(max(1, last - NEWEST + 1), last + 1)


def count_requests(requests: Iterable[Request]) -> tuple[RequestCount, ...]:
    """Count requests, in whatever order they come."""
    counts = Counter(map(_amounts_of, requests))
    return in_order((*amounts, count) for amounts, count in counts.items())


def in_order(counts: Iterable[Iterable[Any]]) -> tuple[RequestCount, ...]:
    """Return the counts of amounts as a snapshot has them: by resource group, then by amounts; an open one first."""
    found = [RequestCount(*count) for count in counts]
    return tuple(sorted(found, key=lambda one: [(value is not None, value) for value in _amounts_of(one)]))
