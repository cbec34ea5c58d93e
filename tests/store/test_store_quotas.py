"""Quotas, and the usage of ended sessions."""

from __future__ import annotations

from dataclasses import replace

import pytest
from store_worlds import ask, end, node, opened, run

from fgpu_scheduler.core.model import Quota, QuotaScope, Request, Usage
from fgpu_scheduler.core.quota import quota_words
from fgpu_scheduler.core.usage import HALF_LIFE_S
from fgpu_scheduler.errors import BadSettings, OverQuota, TooManyPending
from fgpu_scheduler.store.store import Store

USER, GROUP, ALL, ACCOUNT = QuotaScope.USER, QuotaScope.GROUP, QuotaScope.ALL, QuotaScope.ACCOUNT
CLASS = Quota(GROUP, "class", "lab", max_fgpu_milli=1000, max_pending=2, max_lifetime_s=3600)
EACH = Quota(USER, "*", max_sessions=3, max_pending=4)


def of(user: str, server: str, *groups: str) -> Request:
    return replace(ask(user, server), groups=groups)


def test_quotas_are_read_back_sorted_and_replaced_as_a_whole(store: Store) -> None:
    everybody = Quota(ALL, "*", max_sessions=0)
    store.set_quotas([EACH, CLASS, everybody], now_s=1)
    assert store.snapshot(1).quotas == (everybody, CLASS, EACH)
    version = store.version()
    store.set_quotas([CLASS, everybody, EACH], now_s=2)
    assert store.version() == version
    store.set_quotas([replace(EACH, max_sessions=5)], now_s=3)
    assert store.snapshot(1).quotas == (replace(EACH, max_sessions=5),)
    assert store.version() > version
    store.set_quotas([], now_s=4)
    assert store.snapshot(1).quotas == ()


@pytest.mark.parametrize(
    ("quotas", "said"),
    [
        ([EACH, replace(EACH, max_sessions=1)], "the quota of each user is there twice"),
        ([Quota(USER, "", max_sessions=1)], "a name is missing"),
        ([Quota(USER, "a", "", max_sessions=1)], "a name is missing"),
        ([Quota(USER, "a")], "the quota of user 'a' limits nothing; give one of max_fgpu_milli"),
        ([Quota(ALL, "a", max_sessions=1)], "the name is 'a', and can only be '*'"),
        ([Quota(USER, "a", max_fgpu_milli=-1)], "max_fgpu_milli is -1, and may be 0 to 1000000000"),
        ([Quota(USER, "a", max_sessions=-1)], "max_sessions is -1"),
        ([Quota(USER, "a", max_pending=10**12)], "max_pending is 1000000000000"),
        ([Quota(USER, "a", guaranteed_milli=1)], "guaranteed_milli is for accounts only; leave it out"),
        (
            [Quota(ACCOUNT, "a", max_fgpu_milli=1, guaranteed_milli=2)],
            "guaranteed_milli is 2, above max_fgpu_milli of 1",
        ),
        ([Quota(USER, "a", max_lifetime_s=59)], "max_lifetime_s is 59, and may be 60 to"),
    ],
)
def test_invalid_quotas_are_refused_and_the_old_ones_kept(
    store: Store, quotas: list[Quota], said: str
) -> None:
    store.set_quotas([CLASS], now_s=1)
    before = store.snapshot(1)
    with pytest.raises(BadSettings) as refused:
        store.set_quotas([Quota(USER, "b", max_sessions=1), *quotas], now_s=2)
    assert said in str(refused.value)
    assert store.snapshot(1) == before


def test_each_changed_quota_is_logged(store: Store) -> None:
    store.set_quotas([CLASS, EACH], now_s=1)
    account = Quota(ACCOUNT, "physics", max_fgpu_milli=3000, guaranteed_milli=2000)
    store.set_quotas([replace(EACH, max_sessions=1), Quota(USER, "a", max_fgpu_milli=500), account], now_s=2)
    assert account in store.snapshot(2).quotas
    assert [(e.kind, e.at_s, e.reason) for e in store.events()] == [
        ("quotas", 1, "group 'class' in resource group 'lab': 1 fGPU, 2 waiting, 1 h"),
        ("quotas", 1, "each user: 3 sessions, 4 waiting"),
        ("quotas", 2, "group 'class' in resource group 'lab': none"),
        ("quotas", 2, "account 'physics': 2 fGPU guaranteed, at most 3 fGPU"),
        ("quotas", 2, "each user: 1 session, 4 waiting"),
        ("quotas", 2, "user 'a': 0.5 fGPU"),
    ]


def test_submission_over_a_pending_quota_is_refused_whole(store: Store) -> None:
    store.set_quotas([CLASS], now_s=1)
    store.submit([of("alice", "a", "class", "staff"), of("bob", "b")], now_s=1)
    version = store.version()
    with pytest.raises(TooManyPending) as refused:
        store.submit([of("bob", "c", "class"), of("carol", "d", "class")], now_s=1)
    assert str(refused.value) == (
        f"the quota of {quota_words(CLASS)} is 2 requests waiting: 1 wait already, and this would add 2"
    )
    assert store.version() == version
    assert len(store.submit([of("bob", "c", "class"), of("carol", "d")], now_s=1)) == 2


def test_usage_of_an_ended_session_halves_in_each_half_life(
    store: Store,
) -> None:
    store.set_nodes([node()], now_s=0)
    first = run(store, ask("alice"), now_s=1000)
    assert store.snapshot(1500).usage == ()
    end(store, first.id, now_s=1600)
    assert store.snapshot(1600).usage == (Usage("alice", "lab", 500 * 600),)
    later_s = 1600 + HALF_LIFE_S
    assert store.snapshot(later_s).usage == (Usage("alice", "lab", 500 * 300),)
    end(store, run(store, ask("alice"), now_s=later_s - 100).id, now_s=later_s)
    end(store, run(store, ask("Zoë"), now_s=later_s).id, now_s=later_s + 1)
    assert store.snapshot(later_s).usage == (
        Usage("Zoë", "lab", 500),
        Usage("alice", "lab", 500 * 400),
    )
    assert store.snapshot(later_s + 100 * HALF_LIFE_S).usage == ()


def test_usage_of_each_account_of_a_user_is_kept(store: Store) -> None:
    store.set_nodes([node()], now_s=0)
    for account, length_s in (("physics", 10), ("science/physics", 20), ("physics", 30)):
        session = run(store, replace(ask("alice"), account=account), now_s=60 - length_s)
        end(store, session.id, now_s=60)
    assert store.snapshot(60).usage == (
        Usage("alice", "lab", 500 * 40, "physics"),
        Usage("alice", "lab", 500 * 20, "science/physics"),
    )


def test_each_resource_group_has_its_own_half_life(url: str) -> None:
    with opened(url, half_life_s=lambda group: {"lab": 100}[group]) as store:
        store.set_nodes([node()], now_s=0)
        end(store, run(store, ask("alice"), now_s=0).id, now_s=8)
        assert store.snapshot(208).usage == (Usage("alice", "lab", 1000),)


@pytest.mark.parametrize(
    ("quota", "said"),
    [
        (Quota(USER, "*", max_fgpu_milli=499), "fgpu: 0.5 fGPU is above 0.499, the quota of each user"),
        (Quota(GROUP, "class", max_sessions=0), "1 is above 0 sessions, the quota of group 'class'"),
    ],
)
def test_request_larger_than_a_quota_is_refused(store: Store, quota: Quota, said: str) -> None:
    store.set_nodes([node()], now_s=0)
    store.set_quotas([quota], now_s=1)
    version = store.version()
    with pytest.raises(OverQuota) as refused:
        store.submit([of("bob", "b"), of("alice", "a", "class")], now_s=1)
    assert said in str(refused.value)
    assert store.version() == version
