"""What an administrator decides of a resource group: who comes first, who may pass, and where sessions go."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeVar

from fgpu_scheduler.core import orders
from fgpu_scheduler.core.orders import Order
from fgpu_scheduler.core.scores.chosen import PLACEMENTS, Placing
from fgpu_scheduler.errors import BadSettings

T = TypeVar("T")

DAY_S = 86400


class Backfill(StrEnum):
    """Who may start before the first of the queue while that does not fit.

    STRICT: nobody. SKIP: whoever fits, however long the first waits. EASY: whoever does not delay the start
    that is promised to the first. BOUNDED: whoever fits, until the first has waited for as long as it may.
    """

    STRICT = "strict"
    SKIP = "skip"
    EASY = "easy"
    BOUNDED = "bounded"


class Promises(StrEnum):
    """What a start that was promised is worth. Promises are made where time limits tell when a place is free.

    LATEST: it starts at that instant or sooner; for a part of the time until then others may go ahead in their order, if
    that does not make it later. FIRST: nobody of its priority goes ahead of it at all: it starts as soon as it can. NONE:
    none is made; a place is kept for who is first now, and somebody else may be first soon.
    """

    LATEST = "latest"
    FIRST = "first"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class GroupPolicy:
    """How the queue of one resource group is ordered and where its sessions go.

    ``longest_wait_s``: who has waited for that long comes before all others of its priority, and what it needs is
    kept for it; None where nobody does. ``most_priority``: the highest priority that a user's requests have, by user,
    and of everybody else under "*"; without either it is what was asked for. ``max_lifetime_s``: no session runs longer.
    """

    order: Order = orders.fifo
    placing: Placing = PLACEMENTS["default"]
    backfill: Backfill = Backfill.SKIP
    longest_wait_s: int | None = None
    half_life_s: int = 7 * DAY_S
    most_priority: Mapping[str, int] = field(default_factory=dict)
    promises: Promises = Promises.LATEST
    max_lifetime_s: int | None = None


@dataclass(frozen=True, slots=True)
class Policy:
    """The policy of every resource group: its own, or else the default."""

    default: GroupPolicy = GroupPolicy()
    groups: Mapping[str, GroupPolicy] = field(default_factory=dict)

    def of(self, resource_group: str) -> GroupPolicy:
        """Return the policy of a resource group."""
        return self.groups.get(resource_group, self.default)


ORDERS: Mapping[str, tuple[Order, Backfill]] = {
    "fifo": (orders.fifo, Backfill.STRICT),
    "fifo-skip": (orders.fifo, Backfill.SKIP),
    "lifo": (orders.lifo, Backfill.SKIP),
    "fair-share": (orders.fair_share, Backfill.EASY),
    "drf": (orders.drf, Backfill.EASY),
    "default": (orders.usage_size_age, Backfill.EASY),
}
"""Each order by its name in a configuration, with the backfill that it has unless another is chosen."""

LONGEST_WAIT_S = {Backfill.EASY: 7 * DAY_S, Backfill.BOUNDED: 2 * DAY_S}
"""How long the oldest may wait where nothing else is configured.

Without time limits a place is kept by leaving it empty, so short bounds cost much there.
"""


def group_policy(
    *,
    order: str = "default",
    placement: str = "default",
    backfill: str | None = None,
    longest_wait_s: int | None = None,
    half_life_s: int = 7 * DAY_S,
    most_priority: Mapping[str, int] | None = None,
    promises: str = Promises.LATEST,
) -> GroupPolicy:
    """Return the policy that these words of a configuration stand for. Times are in seconds.

    Raises:
        BadSettings: a name is not known, or a number cannot be; the message has the names that are.
    """
    chosen, usual = _named(ORDERS, order, "order")
    placing = _named(PLACEMENTS, placement, "placement")
    modes = {mode.value: mode for mode in Backfill}
    mode = usual if backfill is None else _named(modes, backfill, "backfill")
    for name, value in (("longest_wait_s", longest_wait_s), ("half_life_s", half_life_s)):
        if value is not None and value < 1:
            raise BadSettings(f"{name}: {value} is not a number of seconds of at least 1")
    if longest_wait_s is None:
        longest_wait_s = LONGEST_WAIT_S.get(mode)
    kind = _named({one.value: one for one in Promises}, promises, "promises")
    return GroupPolicy(chosen, placing, mode, longest_wait_s, half_life_s, dict(most_priority or {}), kind)


def _named(known: Mapping[str, T], name: str, what: str) -> T:
    if name not in known:
        raise BadSettings(f"{what}: {name!r} is not one of {', '.join(sorted(known))}")
    return known[name]
