"""Parses policies, quotas and GPUs from the command line; raises BadSettings with what is wrong and what would work."""

from __future__ import annotations

from typing import Any

from fgpu_scheduler import (
    BadAmount,
    BadSettings,
    Device,
    Node,
    Policy,
    Quota,
    QuotaScope,
    group_policy,
    parse_milli,
)
from fgpuspawner.settings.queue import POLICY

NO_QUOTA = "none"
QUOTA_FORM = "SCOPE:NAME[@GROUP]:LIMIT=AMOUNT[,...]"
LIMITS = {
    "fgpu": "max_fgpu_milli",
    "sessions": "max_sessions",
    "pending": "max_pending",
    "lifetime": "max_lifetime_s",
}
MOST_GPUS = 10_000
PLENTY = 10**9
"""CPU and memory of an imagined node: never a limit."""
GPU_MEMORY_MIB = 81920


def policy_of(words: str) -> Policy:
    """Parse a policy for every resource group: ``fair-share``, or ``order=drf,placement=spread``."""
    found: dict[str, Any] = {}
    for part in words.split(","):
        key, equals, value = part.partition("=")
        if not equals:
            key, value = "order", part
        if key in found:
            raise BadSettings(f"policy: {words!r}: {key} is there twice")
        if key not in POLICY:
            raise BadSettings(f"policy: {words!r}: there is no {key!r}; there are {', '.join(POLICY)}")
        found[key] = value if POLICY[key] is str else _count(value, f"policy: {key}")
    try:
        return Policy(group_policy(**found))
    except BadSettings as e:
        raise BadSettings(f"policy: {e}") from None


def quota_of(words: str) -> Quota:
    """Parse a quota such as ``user:*:fgpu=2,sessions=3``; the lifetime is in seconds."""
    scope, _, rest = words.partition(":")
    who, _, limits = rest.rpartition(":")
    name, _, group = who.partition("@")
    scopes = [one.value for one in QuotaScope]
    if scope not in scopes or not name:
        raise BadSettings(
            f"quota: {words!r} is not {QUOTA_FORM} with a scope of {', '.join(scopes)}, as in user:*:fgpu=2"
        )
    found: dict[str, int] = {}
    for limit in limits.split(","):
        key, _, amount = limit.partition("=")
        if key not in LIMITS:
            raise BadSettings(
                f"quota: {words!r}: there is no limit {key!r}; the limits are {', '.join(LIMITS)}"
            )
        found[LIMITS[key]] = (_fgpu if key == "fgpu" else _count)(amount, f"quota: {key}")
    return Quota(QuotaScope(scope), name, group or None, **found)


def gpus_of(words: str, resource_group: str) -> Node:
    """Parse ``8`` or ``8x2``: a node with that many GPUs of 1 or the given fGPU each."""
    number, times, unit = words.partition("x")
    count, capacity = _count(number, "gpus"), _fgpu(unit if times else "1", "gpus")
    if not 1 <= count <= MOST_GPUS or capacity < 1:
        raise BadSettings(f"gpus: {words!r} is not 1 to {MOST_GPUS} GPUs of some fGPU each, such as 8 or 8x2")
    devices = tuple(
        Device(f"GPU-{i:05d}", "replay", i, "any", GPU_MEMORY_MIB, capacity, True) for i in range(count)
    )
    return Node("replay", resource_group, PLENTY, PLENTY, devices)


def _fgpu(amount: str, field: str) -> int:
    try:
        return parse_milli(amount, field=field)
    except BadAmount as e:
        raise BadSettings(str(e)) from None


def _count(amount: str, field: str) -> int:
    if not (amount.isascii() and amount.isdigit() and len(amount) < 10):
        raise BadSettings(f"{field}: {amount!r} is not a whole number such as 3")
    return int(amount)
