"""Accounts share by weight, whatever their number of users."""

from __future__ import annotations

from dataclasses import replace

import pytest
from simulator import World, world
from simulator.world import request

from fgpu_scheduler.core import orders
from fgpu_scheduler.core.accounts import Account, Accounts, AccountShare
from fgpu_scheduler.core.forecast import forecast
from fgpu_scheduler.core.forecast_accuracy import ForecastHistory
from fgpu_scheduler.core.model import Usage
from fgpu_scheduler.core.orders import Order, in_order, queue_snapshots
from fgpu_scheduler.core.policies import Policy, group_policy
from fgpu_scheduler.core.replay import Job, replay

HOUR_OF_ONE = 1000 * 3600
TWO = Accounts({"physics": Account(groups=("phys",)), "biology": Account(groups=("bio",))})
TREE = Accounts(
    {
        "science": Account(weight=3),
        "physics": Account(2, "science", ("phys",)),
        "biology": Account(1, "science", ("bio",)),
        "arts": Account(groups=("arts", "bio")),
    }
)
COUNTING = (orders.usage_size_age, orders.fair_share, orders.drf)


def lab_of(*waiting: tuple[str, str], **hours: float) -> World:
    """Return requests for 1 fGPU of "user", "account path", and users' past usage in hours of 1 fGPU."""
    lab = world(devices=4)
    for user, path in waiting:
        lab = lab.pending(user, "1").having(user, account=path)
    paths = dict(waiting)
    usage = tuple(Usage(u, "default", round(h * HOUR_OF_ONE), paths[u]) for u, h in hours.items())
    return replace(lab, usage=usage)


def ordered(lab: World, order: Order, accounts: Accounts) -> str:
    own = queue_snapshots(lab, accounts)["default"]
    return "".join(own.waiting[n].request.user for n in in_order(own, order(own)))


def test_paths_for_a_user_begin_with_the_first_account_of_the_configuration() -> None:
    assert TREE.paths_for(["bio", "phys"]) == ("science/physics", "science/biology", "arts")
    assert TREE.paths_for(["other"]) == ("default",)
    assert Accounts().paths_for(["bio"]) == ()


@pytest.mark.parametrize("order", COUNTING)
def test_three_users_of_an_account_wait_behind_the_only_user_of_another(order: Order) -> None:
    requests = [("a", "physics"), ("b", "physics"), ("c", "physics"), ("z", "biology"), ("z", "biology")]
    alone, together = ordered(lab_of(*requests), order, Accounts()), ordered(lab_of(*requests), order, TWO)
    assert together.index("z") == 1 < alone.index("z")


def test_usage_of_an_account_counts_for_its_users_who_have_used_nothing() -> None:
    lab = lab_of(("a", "physics"), ("b", "physics"), ("z", "biology"), a=10, z=2)
    assert ordered(lab, orders.fair_share, Accounts()) == "bza"
    assert ordered(lab, orders.fair_share, TWO) == "zba"


def test_twice_the_weight_may_use_twice_as_much() -> None:
    heavy = Accounts({**TWO.by_name, "physics": Account(2)})
    lab = lab_of(("a", "physics"), ("z", "biology"), a=3, z=2)
    assert (ordered(lab, orders.fair_share, TWO), ordered(lab, orders.fair_share, heavy)) == ("za", "az")


def test_accounts_of_a_parent_share_what_the_parent_gets() -> None:
    """Fair tree: the weights of science's accounts count only between the two."""
    lab = lab_of(("a", "science/physics"), ("b", "science/biology"), ("z", "arts"), a=2, b=2, z=1)
    assert ordered(lab, orders.fair_share, TREE) == "zab"  # 4/3 against 1, then 2/2 against 2/1.
    assert ordered(replace(lab, usage=lab.usage[1:]), orders.fair_share, TREE) == "azb"


def test_moved_account_keeps_its_usage_and_an_unknown_one_counts_as_default() -> None:
    lab = lab_of(("a", "arts/physics"), ("b", "gone"), ("c", "default"), a=3, b=1)
    assert ordered(lab, orders.fair_share, TWO) == "cab"  # With c, default has more than physics.
    assert ordered(lab, orders.fair_share, Accounts()) == "cba"


@pytest.mark.parametrize(("order", "weight", "part"), [("drf", 1, 1 / 2), ("fair-share", 3, 3 / 4)])
def test_busy_accounts_get_their_shares_over_time(order: str, weight: float, part: float) -> None:
    """Ten users of one account and one of another always wait for four GPUs."""
    node = world(devices=4, cpu=4).nodes
    users = [*((f"u{n}", "physics") for n in range(10)), ("z", "biology")]
    jobs = [
        Job(replace(request(user, "1"), account=account), 0, 3000 + 600 * (n % 3))
        for user, account in users
        for n in range(60 if user == "z" else 10)
    ]
    accounts = Accounts({"physics": Account(), "biology": Account(weight)})
    found = replay(jobs, node, Policy(group_policy(order=order), accounts=accounts))
    # While both still wait.
    early = [o for o in found if o.placed_at_s is not None and o.placed_at_s < 12 * 3600]
    own = sum(o.taken_milli * o.job.length_s for o in early if o.job.request.user == "z")
    assert own / sum(o.taken_milli * o.job.length_s for o in early) == pytest.approx(part, abs=0.05)


def test_forecast_says_what_the_account_has_used_if_the_order_counts_it() -> None:
    lab = lab_of(("a", "science/physics"), ("z", "arts"), a=3, z=1)
    for _ in range(4):
        lab = lab.running("y", "1")

    def texts(order: str) -> list[str]:
        own = Policy(group_policy(order=order), accounts=TREE)
        return [f.text for f in forecast(lab, own, ForecastHistory())]

    assert any("account arts has used 25 % of late, and its share is 20 %" in one for one in texts("drf"))
    assert any("account physics has used 75 % of late, and its share is 40 %" in one for one in texts("drf"))
    assert not any("account" in one for one in texts("fifo-skip"))


def test_shares_are_parts_of_those_above() -> None:
    found = TREE.shares({"science/physics": {"a": 3}, "gone": {"b": 1}})
    assert found == {
        "arts": AccountShare("arts", 20, 0),
        "default": AccountShare("default", 20, 25),
        "science": AccountShare("science", 60, 75),
        "biology": AccountShare("science/biology", 20, 0),
        "physics": AccountShare("science/physics", 40, 75),
    }
    assert Accounts().shares({"": {"a": 3}}) == {}
