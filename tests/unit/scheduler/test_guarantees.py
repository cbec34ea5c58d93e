"""Accounts borrow what others leave of their guarantee, and give it back."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import count, islice
from random import Random

import pytest
from simulator import World, world
from simulator.quota_checks import over_quota
from simulator.reclaim_checks import goes_first

from fgpu_scheduler.core import guarantees, preemption
from fgpu_scheduler.core.accounts import Account, Accounts
from fgpu_scheduler.core.model import EndCause, Quota, QuotaScope, SessionState
from fgpu_scheduler.core.planner import Policy, plan
from fgpu_scheduler.core.policies import group_policy
from fgpu_scheduler.core.quota import Ledger
from fgpu_scheduler.core.reclaim import AllRules, Rules, Warn, reclaims

ACCOUNT, PREEMPTED = QuotaScope.ACCOUNT, EndCause.PREEMPTED
RULES = AllRules(Rules(grace_s=600, preempt=True))


def guaranteed(**fgpu: float) -> tuple[Quota, ...]:
    return tuple(Quota(ACCOUNT, name, guaranteed_milli=round(1000 * most)) for name, most in fgpu.items())


def lab_of(running: str, waiting: str, quotas: tuple[Quota, ...]) -> World:
    """Return a lab of sessions such as "a1 a1 b2": account and fGPU, then priority, as in "a1+5"; oldest first."""
    lab = replace(world(devices=4), quotas=quotas)
    for kind, text in (("r", running), ("w", waiting)):
        for n, one in enumerate(text.split()):
            words, _, priority = one.partition("+")
            account = words.rstrip("0123456789.")
            user, fgpu = f"{kind}{n}{account}", words.removeprefix(account)
            lab = lab.pending(user, fgpu) if kind == "w" else lab.running(user, fgpu, started_ago_s=1000 - n)
            lab = lab.having(user, account=account, priority=int(priority or 0))
    return lab


def starts(lab: World) -> list[str]:
    placed = {d.session_id for d in plan(lab, Policy(group_policy(order="fifo-skip"))).placed}
    return [s.request.user for s in lab.sessions if s.id in placed]


def ended(lab: World) -> list[str]:
    found = reclaims(lab, plan(lab, Policy()), RULES, warned_for_s={})
    assert all(isinstance(one, Warn) and one.cause is PREEMPTED for one in found)
    return [s.request.user for s in lab.sessions if s.id in {one.session_id for one in found}]


def test_request_within_its_guarantee_starts_before_one_of_higher_priority() -> None:
    assert starts(lab_of("b1 b1 b1", "b1+5 a1", guaranteed(a=1))) == ["w1a"]
    assert starts(lab_of("b1 b1 b1", "b1+5 a1", ())) == ["w0b"]


def test_only_as_many_requests_come_first_as_the_guarantee_has_left() -> None:
    assert starts(lab_of("a1", "b1 a1 a1 a1", guaranteed(a=2))) == ["w0b", "w1a", "w2a"]


def test_what_an_account_leaves_is_lent_to_others() -> None:
    assert starts(lab_of("", "b1 b1 b1 b1", guaranteed(a=3))) == ["w0b", "w1b", "w2b", "w3b"]


def test_lent_sessions_are_taken_back_the_youngest_first() -> None:
    assert ended(lab_of("b1 b1 b1 b1", "a1 a1", guaranteed(a=2))) == ["r2b", "r3b"]
    assert ended(lab_of("b1 b1 b1 b1", "a1 a1", ())) == []


def test_sessions_within_the_guarantee_of_their_account_stay() -> None:
    assert ended(lab_of("b1 b1 b1 b1", "a1 a1", guaranteed(a=2, b=3))) == ["r3b"]
    assert ended(lab_of("b1 b1 b1 b1", "a1 a1", guaranteed(a=2, b=4))) == []


def test_account_above_its_guarantee_takes_nothing_back() -> None:
    assert ended(lab_of("a2 b1 b1", "a1", guaranteed(a=2))) == []


def test_guarantee_comes_before_priority_both_ways() -> None:
    assert ended(lab_of("b1+9 b1+9 b1+9 b1+9", "a1", guaranteed(a=1))) == ["r3b"]
    assert ended(lab_of("a1 a1 b1+9 b1+9", "b1+9", guaranteed(a=2))) == []
    assert ended(lab_of("a1 a1 b1+9 b1+9", "b1+9", guaranteed(a=1))) == ["r1a"]


def test_priority_still_counts_within_one_account() -> None:
    assert ended(lab_of("a1 a1 a1 a1", "a1+1", guaranteed(a=4))) == ["r3a"]


def test_session_across_the_end_of_the_guarantee_borrows() -> None:
    """Else one large session would keep what is lent for ever."""
    assert ended(lab_of("b4", "a1", guaranteed(a=1, b=3))) == ["r0b"]


def test_guarantee_above_covers_its_accounts_against_others_only() -> None:
    quotas = guaranteed(s=3)
    assert ended(lab_of("s/a1 s/a1 s/a1 b1", "s/c1", quotas)) == []
    assert ended(lab_of("s/a1 s/a1 b1 b1", "s/c1", quotas)) == ["r3b"]
    assert ended(lab_of("s/a1 s/a1 s/a1 b1+1", "d1+1", quotas)) == []
    assert ended(lab_of("s/a1 s/a1 s/a1 b1", "s/c1", (*quotas, *guaranteed(c=1)))) == ["r3b"]
    assert ended(lab_of("s/a1 s/a1 s/a1 s/a1", "s/c1", guaranteed(s=4, c=1))) == ["r3s/a"]


def test_limit_of_an_account_counts_those_below_it() -> None:
    quotas = (Quota(ACCOUNT, "s", max_fgpu_milli=2000),)
    assert starts(lab_of("s/a1", "s/c1 s/c1 b1", quotas)) == ["w0s/c", "w2b"]


def history(seed: int, steps: int = 60) -> Iterator[str | None]:
    """Yield None for each pre-emption of a random history, and what was wrong by the simulator's own sums."""
    rng = Random(seed)
    quotas = (
        Quota(ACCOUNT, "s", max_fgpu_milli=6000, guaranteed_milli=4000),
        Quota(ACCOUNT, "a", guaranteed_milli=rng.choice((1000, 2000))),
        Quota(
            ACCOUNT, "b", max_fgpu_milli=rng.choice((None, 5000)), guaranteed_milli=rng.choice((2000, 3000))
        ),
    )
    lab = replace(world(devices=4).node("n2", devices=4), quotas=quotas)
    policy, users = Policy(group_policy(order="fair-share")), (f"u{n}" for n in count())
    for _ in range(steps):
        lab = replace(lab, now_s=lab.now_s + 60)
        for user in islice(users, rng.choice((0, 1, 2))):
            account, priority = rng.choice(("s/a", "s/c", "b", "d")), rng.choice((0, 0, 1))
            lab = lab.pending(user, rng.choice(("0.5", "1", "1", "2")))
            lab = lab.having(user, account=account, priority=priority)
        lab = replace(lab, sessions=tuple(s for s in lab.sessions if not s.placement or rng.randrange(8)))
        victims = {one.session_id for one in reclaims(lab, plan(lab, policy), RULES, warned_for_s={})}
        for victim in (s for s in lab.sessions if s.id in victims):
            waiting = [s for s in lab.sessions if s.state is SessionState.PENDING]
            yield None if any(goes_first(s, victim, lab) for s in waiting) else f"{victim} was ended"
        lab = replace(lab, sessions=tuple(s for s in lab.sessions if s.id not in victims))
        before = {s.id: s for s in lab.sessions}
        lab = lab.placed(plan(lab, policy))
        yield from over_quota(before, lab)


def complaints() -> list[str | None]:
    return [wrong for seed in range(8) for wrong in history(seed)]


def test_no_session_within_its_guarantee_ends_for_another_account_and_no_limit_is_exceeded() -> None:
    found = complaints()
    assert [wrong for wrong in found if wrong is not None] == []
    assert len(found) > 40


@pytest.mark.parametrize(
    ("where", "name", "mutant"),
    [
        (preemption, "within_guarantees", lambda snapshot: {}),
        (Ledger, "guarantees_left", lambda self, asked: [(name, 10**6) for name in ("s", "a", "b")]),
        (Ledger, "allows", lambda self, session, where=None: True),
    ],
    ids=["no protection", "guarantees that are used up", "no limits of accounts"],
)
def test_a_broken_guarantee_is_noticed(
    monkeypatch: pytest.MonkeyPatch, where: object, name: str, mutant: object
) -> None:
    monkeypatch.setattr(where, name, mutant)
    assert any(wrong is not None for wrong in complaints())


@pytest.mark.parametrize(
    ("given", "beyond"),
    [
        ({"science": 4, "arts": 4}, None),
        ({"science": 4, "arts": 5}, "9"),
        # The guarantee of science covers physics and biology.
        ({"science": 4, "physics": 2, "biology": 2, "arts": 4}, None),
        ({"science": 1, "physics": 5, "biology": 4}, "9"),
        # Four accounts and "default"; science covers two of them.
        ({"*": 2.5}, "10"),
    ],
)
def test_guarantees_beyond_the_gpus_are_named(given: dict[str, float], beyond: str | None) -> None:
    science = Account(parent="science")
    tree = Accounts({"science": Account(), "arts": Account(), "physics": science, "biology": science})
    own = replace(
        world(devices=8), quotas=(*guaranteed(**given), Quota(QuotaScope.USER, "science", max_sessions=1))
    )
    words = (
        f"accounts are guaranteed {beyond} fGPU, and there is 8: lower guaranteed_fgpu in c.FGPU.quotas or on the page "
        "Quotas"
    )
    assert guarantees.beyond_capacity(own, tree) == ([words] if beyond else [])
    classes = tuple(replace(quota, resource_group="default") for quota in own.quotas)
    found = guarantees.beyond_capacity(replace(own, quotas=classes), tree)
    assert [" in resource group 'default', and" in one for one in found] == [True] * bool(beyond)
