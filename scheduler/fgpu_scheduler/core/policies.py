"""What an administrator configures for a resource group: the order of its queue, backfill and placement."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from fgpu_scheduler.core import orders
from fgpu_scheduler.core.accounts import Accounts
from fgpu_scheduler.core.orders import Order
from fgpu_scheduler.core.scores.placements import PLACEMENTS, ScoreFactory
from fgpu_scheduler.errors import BadSettings

T = TypeVar("T")

DAY_S = 86400


@dataclass(frozen=True, slots=True)
class GroupPolicy:
    """How the queue of one resource group is ordered and where its sessions are placed. Times are in seconds.

    With ``strict`` no session starts before the first one of the queue. Otherwise a place is reserved for the first one
    that does not fit, and others start if they do not delay it. A request for n GPUs that has waited for an n-th of
    ``longest_wait_s`` comes first within its priority and gets the reservation; None: never. No session runs longer than
    ``max_lifetime_s``.
    """

    order: Order = orders.fifo
    placing: ScoreFactory = PLACEMENTS["default"]
    strict: bool = False
    longest_wait_s: int | None = None
    half_life_s: int = 7 * DAY_S
    max_lifetime_s: int | None = None


@dataclass(frozen=True, slots=True)
class Policy:
    """The policy of every resource group: its own, or else the default. The accounts are those of all."""

    default: GroupPolicy = GroupPolicy()
    groups: Mapping[str, GroupPolicy] = field(default_factory=dict)
    accounts: Accounts = field(default_factory=Accounts)

    def of(self, resource_group: str) -> GroupPolicy:
        """Return the policy of a resource group."""
        return self.groups.get(resource_group, self.default)


#: Each order by its name in a configuration.
ORDERS: Mapping[str, Order] = {
    "default": orders.usage_size_age,
    "fair-share": orders.fair_share,
    "drf": orders.drf,
    "fifo": orders.fifo,
    "fifo-skip": orders.fifo,
    "lifo": orders.lifo,
}
#: The name of the order in which no request overtakes another.
STRICT = "fifo"
#: A quarter of the usual `queue_timeout_s`: with half of it, without time limits, 8 % of 4-GPU requests timed out.
LONGEST_WAIT_S = DAY_S // 4


def group_policy(
    *,
    order: str = "default",
    placement: str = "default",
    longest_wait_s: int = LONGEST_WAIT_S,
    half_life_s: int = 7 * DAY_S,
) -> GroupPolicy:
    """Return the policy with these names of a configuration. Times are in seconds.

    Raises:
        BadSettings: a name is not known, or a number is not possible; the message lists the known names.
    """
    for name, value in (("longest_wait_s", longest_wait_s), ("half_life_s", half_life_s)):
        if value < 1:
            raise BadSettings(f"{name}: {value} is not a number of seconds of at least 1")
    return GroupPolicy(
        _named(ORDERS, order, "order"),
        _named(PLACEMENTS, placement, "placement"),
        order == STRICT,
        longest_wait_s,
        half_life_s,
    )


def _named(known: Mapping[str, T], name: str, what: str) -> T:
    if name not in known:
        raise BadSettings(f"{what}: {name!r} is not one of {', '.join(sorted(known))}")
    return known[name]
