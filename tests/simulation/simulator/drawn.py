"""Random nodes, requests, policies, rules and quotas, chosen so that most events happen often."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random

from fgpu_scheduler.core.accounts import Account, Accounts
from fgpu_scheduler.core.model import Device, Node, Quota, QuotaScope, Request
from fgpu_scheduler.core.orders import ORDERS
from fgpu_scheduler.core.policies import GroupPolicy, Policy, group_policy
from fgpu_scheduler.core.reclaim import AllRules, Rules
from fgpu_scheduler.core.units import MEMORY_GRAIN_MIB

GROUPS = ("lab", "class")
MODELS = ("Simulated A", "Simulated B")
USERS = tuple(f"u{n}" for n in range(8))
ACCOUNTS = Accounts({"science": Account(), "ml": Account(2, "science"), "bio": Account(1, "science")})
ACCOUNT_OF = {"u0": "science/ml", "u1": "science/bio", "u2": "science/ml", "u3": "science/bio"}
HUB_GROUPS = {"u0": ("ml101",), "u1": ("ml101", "staff"), "u2": ("staff",)}


def nodes(rng: Random, count: int | None = None) -> tuple[Node, ...]:
    """Return one to four nodes, or ``count``, of one to four devices, of one or two resource groups."""
    found = []
    for number in range(rng.randint(1, 4) if count is None else count):
        node_id = f"n{number}"
        capacity = 1000 * rng.choice((1, 1, 2, 5))
        memory_mib = rng.choice((8192, 16160, 24576, 81559))
        model = rng.choice((MODELS[0], MODELS[0], MODELS[1]))
        devices = tuple(
            Device(
                f"GPU-{node_id}-{i}",
                node_id,
                i,
                model,
                memory_mib,
                capacity,
                max_shares=rng.choice((20, 20, 3)),
            )
            for i in range(rng.randint(1, 4))
        )
        group = GROUPS[0] if number == 0 else rng.choice((GROUPS[0], *GROUPS))
        cpu_milli, node_memory_mib = 1000 * rng.choice((4, 16, 64)), 1024 * rng.choice((16, 128))
        found.append(Node(node_id, group, cpu_milli, node_memory_mib, devices))
    return tuple(found)


def policy(rng: Random) -> Policy:
    """Return a policy, in half of the cases with another one for the second resource group."""
    default = _group_policy(rng)
    return Policy(default, {GROUPS[1]: _group_policy(rng)} if rng.randrange(2) else {}, ACCOUNTS)


def _group_policy(rng: Random) -> GroupPolicy:
    order = rng.choice((*sorted(ORDERS), "fifo"))
    times = {"longest_wait_s": rng.choice((300, 1800, 43200)), "half_life_s": rng.choice((600, 86400))}
    return group_policy(order=order, **{name: times[name] for name in ORDERS[order].times})


def rules(rng: Random) -> AllRules:
    """Return rules for reclaiming, which may differ between the two resource groups."""
    return AllRules(_rules(rng), {GROUPS[1]: _rules(rng)} if rng.randrange(2) else {})


def _rules(rng: Random) -> Rules:
    grace_s = rng.choice((10, 30, 120, 600))
    return Rules(
        grace_s=grace_s,
        max_lifetime_s=rng.choice((None, None, 600, 3000)),
        idle_after_s=rng.choice((None, 20, 60, 900)),
        preempt=rng.randrange(3) > 0,
        requeue=rng.randrange(4) > 0,
        # Not drawn, so that existing seeds keep their histories.
        min_runtime_s={30: 60, 120: 900}.get(grace_s),
        park_after_s=rng.choice((None, 20, 60)),
        park_always=rng.randrange(2) > 0,
        parked_for_s=rng.choice((None, 60, 900)),
    )


def quotas(rng: Random) -> tuple[Quota, ...]:
    """Return a few quotas, or none."""
    if rng.randrange(3) == 0:
        return ()
    found: dict[tuple[QuotaScope, str, str | None], Quota] = {}
    for _ in range(rng.randint(1, 3)):
        scope, name = rng.choice(
            (
                (QuotaScope.USER, "*"),
                (QuotaScope.USER, "u1"),
                (QuotaScope.GROUP, "*"),
                (QuotaScope.GROUP, "staff"),
                (QuotaScope.ALL, "*"),
            )
        )
        quota = Quota(scope, name, rng.choice((None, None, *GROUPS)))
        limit = rng.randrange(4)
        if limit == 0:
            quota = replace(quota, max_fgpu_milli=rng.choice((500, 1000, 3000)))
        elif limit == 1:
            quota = replace(quota, max_sessions=rng.randint(0, 4))
        elif limit == 2:
            quota = replace(quota, max_pending=rng.randint(0, 6))
        else:
            quota = replace(quota, max_lifetime_s=rng.choice((60, 900)))
        found[scope, name, quota.resource_group] = quota
    if len(found) > 1:
        # Not drawn, as above.
        lent = Quota(QuotaScope.ACCOUNT, "science", max_fgpu_milli=4000, guaranteed_milli=2000)
        guaranteed = Quota(QuotaScope.ACCOUNT, "default", guaranteed_milli=1000)
        bio = Quota(QuotaScope.ACCOUNT, "bio", GROUPS[0], guaranteed_milli=1000)
        return (*found.values(), lent, guaranteed, bio)
    return tuple(found.values())


def request(rng: Random, group: str, amounts: Sequence[int], memories_mib: Sequence[int]) -> Request:
    """Return a request for a fraction, for whole devices, or for GPU memory with or without compute."""
    user = rng.choice(USERS)
    asked = Request(
        user=user,
        server_name="",
        image=f"image{rng.randrange(3)}",
        resource_group=group,
        fgpu_milli=rng.choice(amounts),
        cpu_milli=rng.choice((1000, 1000, 1000, 2000)),
        memory_mib=rng.choice((1024, 1024, 1024, 4096)),
        gpu_models=rng.choice(((), (), (), (), *((m,) for m in MODELS), MODELS, MODELS[::-1])),
        time_limit_s=rng.choice((None, 300, 300, 900, 3600)),
        priority=rng.choice((0, 0, 0, 1, 2)),
        groups=HUB_GROUPS.get(user, ()),
        account=ACCOUNT_OF.get(user, "default"),
        on_demand=rng.randrange(8) == 0,
    )
    if rng.randrange(100) >= 25:
        return asked
    memory_mib = rng.choice(memories_mib)
    part = rng.choice((1, 2, 4, 8))
    explicit_mib = memory_mib if part == 1 else memory_mib // part // MEMORY_GRAIN_MIB * MEMORY_GRAIN_MIB
    compute_percent = rng.choice((None, None, 5, 25, 50, 100))
    return replace(asked, fgpu_milli=0, gpu_memory_mib=explicit_mib, compute_percent=compute_percent)
