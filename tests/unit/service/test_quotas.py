"""Quotas as administrators see them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from worlds import Build

from fgpu_scheduler import Quota, QuotaEdit, QuotaScope
from fgpu_scheduler.core.quota import QuotaUsage, usage_of_quotas
from fgpuspawner.service.admin.quotas import key_of, quotas_object, spec_of, why_not_group_admin
from fgpuspawner.service.model import Viewer
from fgpuspawner.settings.queue import quota_of

EACH = Quota(QuotaScope.USER, "*", None, max_fgpu_milli=1000)


def test_quota_use_is_counted_per_holder() -> None:
    world = Build().running("alice", 500).running("bob", 1500).pending("alice", 1000).world()
    together = Quota(QuotaScope.ALL, "*", "default", max_sessions=2)
    absent = Quota(QuotaScope.USER, "carol", None, max_sessions=1)
    elsewhere = Quota(QuotaScope.USER, "bob", "other", max_sessions=1)
    assert usage_of_quotas((EACH, together, absent, elsewhere), world.snapshot) == (
        (QuotaUsage("bob", 1500, 1, 0), QuotaUsage("alice", 500, 1, 1)),
        (QuotaUsage("*", 2000, 2, 1),),
        (),
        (),
    )


def test_full_quota_is_marked_and_removed_quota_counts_nothing() -> None:
    world = Build().running("alice", 500).running("bob", 1000).world()
    (found,) = quotas_object([EACH], [], world)["quotas"]
    assert {who["name"]: who["full"] for who in found["held"]} == {"bob": True, "alice": False}
    (removed,) = quotas_object([EACH], [QuotaEdit(EACH, removed=True)], world)["quotas"]
    assert (removed["in_force"], removed["held"], removed["file"]) == (False, [], "1 fGPU")


@pytest.mark.parametrize(
    "quota",
    [
        replace(EACH, max_sessions=1, max_pending=0, max_lifetime_s=60),
        Quota(QuotaScope.GROUP, "class", "lab", max_fgpu_milli=1234),
        Quota(QuotaScope.ALL, "*", "lab", max_sessions=3),
        Quota(QuotaScope.ACCOUNT, "physics", max_fgpu_milli=3000, guaranteed_milli=2500),
    ],
)
def test_quota_object_is_read_back_as_the_same_quota(quota: Quota) -> None:
    assert quota_of(spec_of(quota), "quota") == quota
    assert quota_of({**key_of(quota), "max_sessions": 7}, "quota").name == quota.name


def quota(scope: QuotaScope, name: str = "*", **limits: int) -> Quota:
    return Quota(scope, name, "class", **limits)


@pytest.mark.parametrize(
    ("others", "most"),
    [
        ((), None),
        ((quota(QuotaScope.ALL, max_sessions=5), quota(QuotaScope.GROUP, "a", max_sessions=9)), 5),
        ((quota(QuotaScope.GROUP, "a", max_sessions=3), quota(QuotaScope.GROUP, "b", max_sessions=9)), 9),
        ((quota(QuotaScope.GROUP, "a", max_sessions=3), quota(QuotaScope.GROUP, "b", max_pending=9)), None),
        ((quota(QuotaScope.USER, "x", max_sessions=1), quota(QuotaScope.ALL, max_pending=1)), None),
        ((Quota(QuotaScope.ALL, "*", "other", max_sessions=1),), None),
    ],
    ids=["none", "of all", "of Hub groups", "not of each Hub group", "of another amount", "of another group"],
)
def test_group_administrators_set_quotas_within_the_groups_limits(
    others: tuple[Quota, ...], most: int | None
) -> None:
    tina = Viewer("tina", administers=("class",))

    def refused(sessions: int) -> str | None:
        found = why_not_group_admin(quota(QuotaScope.USER, "dave", max_sessions=sessions), tina, others)
        return None if found is None else " ".join(found)

    if most is None:
        assert refused(10**6) is None
    else:
        assert refused(most) is None
        assert refused(most + 1) == f"max_sessions at most {most}, the quota of resource group 'class'"


def test_group_administrators_set_no_quotas_of_accounts() -> None:
    viewer = Viewer("ann", administers=("class",))
    found = why_not_group_admin(quota(QuotaScope.ACCOUNT, "physics", guaranteed_milli=1000), viewer, ())
    assert found == ("account", "set it for a user, or for each user (*); for a whole group you must not")
