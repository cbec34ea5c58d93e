"""What an administrator configures for a resource group: the order of its queue, and its times."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from fgpu_scheduler.core import orders
from fgpu_scheduler.core.accounts import Accounts
from fgpu_scheduler.core.orders import ORDERS, Order
from fgpu_scheduler.core.usage import HALF_LIFE_S
from fgpu_scheduler.errors import BadSettings

DAY_S = 86400


@dataclass(frozen=True, slots=True)
class GroupPolicy:
    """How the queue of one resource group is ordered. Times are in seconds.

    With ``strict`` no session starts before the first one of the queue. Otherwise a place is reserved for the first one
    that does not fit, and others start if they do not delay it. A request for n GPUs that has waited for an n-th of
    ``longest_wait_s`` comes first within its priority and gets the reservation; None: never. No session runs longer than
    ``max_lifetime_s``.
    """

    order: Order = orders.fifo
    strict: bool = False
    longest_wait_s: int | None = None
    half_life_s: int = HALF_LIFE_S
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


#: A quarter of the usual `queue_timeout_s`: with half of it, without time limits, 8 % of 4-GPU requests timed out.
LONGEST_WAIT_S = DAY_S // 4


def group_policy(
    *,
    order: str = "default",
    longest_wait_s: int | None = None,
    half_life_s: int | None = None,
    usual_wait_s: int = LONGEST_WAIT_S,
) -> GroupPolicy:
    """Return the policy with this order of a configuration; ``usual_wait_s`` is the longest wait if none is given.

    Raises:
        BadSettings: the order is not known, or does not use a time that is given, or the time is not possible.
    """
    if order not in ORDERS:
        raise BadSettings(f"order: {order!r} is not one of {', '.join(sorted(ORDERS))}")
    chosen, times = ORDERS[order]
    for name, value in (("longest_wait_s", longest_wait_s), ("half_life_s", half_life_s)):
        if value is not None and name not in times:
            raise BadSettings(f"{name}: order {order!r} does not use it; leave it out")
        if value is not None and value < 1:
            raise BadSettings(f"{name}: {value} is not a number of seconds of at least 1")
    if "longest_wait_s" not in times:
        return GroupPolicy(chosen, strict=True)
    return GroupPolicy(chosen, False, longest_wait_s or usual_wait_s, half_life_s or HALF_LIFE_S)
