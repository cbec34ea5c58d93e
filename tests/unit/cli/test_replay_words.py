"""Policies, quotas and GPUs in the words of ``fgpu replay``."""

from __future__ import annotations

import pytest

from fgpu_scheduler import BadSettings, Quota, QuotaScope
from fgpu_scheduler.core import orders
from fgpuspawner.cli.replay import gpus_of, policy_of, quota_of


def test_a_policy_is_the_name_of_an_order() -> None:
    own = policy_of("lifo").of("any group")
    assert own.order is orders.lifo


def test_a_policy_is_several_words() -> None:
    own = policy_of("order=fair-share,longest_wait_s=60,half_life_s=7").of("g")
    assert (own.order, own.strict) == (orders.fair_share, False)
    assert (own.longest_wait_s, own.half_life_s) == (60, 7)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("nonsense", "policy: order: 'nonsense' is not one of "),
        ("fifo,longest_wait_s=60", "policy: longest_wait_s: order 'fifo' does not use it; leave it out"),
        ("fifo,size=3", "policy: 'fifo,size=3': there is no 'size'; there are order, longest_wait_s, "),
        ("fifo,order=lifo", "policy: 'fifo,order=lifo': order is there twice"),
        ("fifo,longest_wait_s=soon", "policy: longest_wait_s: 'soon' is not a whole number such as 3"),
    ],
)
def test_wrong_policy_is_refused_with_the_choices(words: str, said: str) -> None:
    with pytest.raises(BadSettings) as caught:
        policy_of(words)
    assert str(caught.value).startswith(said)


def test_a_quota_has_a_scope_a_name_and_limits() -> None:
    assert quota_of("user:*:fgpu=1.5,sessions=3") == Quota(QuotaScope.USER, "*", None, 1500, 3)
    assert quota_of("group:ml101@class:pending=10,lifetime=3600") == Quota(
        QuotaScope.GROUP, "ml101", "class", max_pending=10, max_lifetime_s=3600
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("fgpu=2", "quota: 'fgpu=2' is not SCOPE:NAME[@GROUP]:LIMIT=AMOUNT[,...] with a scope of "),
        ("user::fgpu=2", "quota: 'user::fgpu=2' is not "),
        ("team:*:fgpu=2", "quota: 'team:*:fgpu=2' is not "),
        ("user:*:gpus=2", "quota: 'user:*:gpus=2': there is no limit 'gpus'; the limits are fgpu, "),
        ("user:*:fgpu=two", "quota: fgpu: 'two' is not a number such as 0.5"),
        ("user:*:sessions=-1", "quota: sessions: '-1' is not a whole number such as 3"),
    ],
)
def test_wrong_quota_is_refused_with_the_form(words: str, said: str) -> None:
    with pytest.raises(BadSettings) as caught:
        quota_of(words)
    assert str(caught.value).startswith(said)


def test_gpus_have_a_number_and_a_unit() -> None:
    assert [d.capacity_milli for d in gpus_of("3", "lab").devices] == [1000, 1000, 1000]
    node = gpus_of("2x2.5", "lab")
    assert (node.resource_group, [d.capacity_milli for d in node.devices]) == ("lab", [2500, 2500])


@pytest.mark.parametrize("words", ["0", "many", "8x0", "8x", "-1", "100000000"])
def test_wrong_gpus_are_refused(words: str) -> None:
    with pytest.raises(BadSettings, match="gpus"):
        gpus_of(words, "lab")
