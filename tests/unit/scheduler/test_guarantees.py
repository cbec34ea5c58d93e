"""Accounts borrow what others leave of their guarantee, and give it back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from random import Random

import pytest
from simulator import World, world
from simulator.world import request

from fgpu_scheduler.core import group_scheduler, guarantees, preemption
from fgpu_scheduler.core.accounts import account_names
from fgpu_scheduler.core.lifecycle import moved
from fgpu_scheduler.core.model import EndCause, Quota, QuotaScope, Session, SessionState, Snapshot
from fgpu_scheduler.core.planner import Policy, applied, plan
from fgpu_scheduler.core.policies import group_policy
from fgpu_scheduler.core.quota import Ledger
from fgpu_scheduler.core.reclaim import AllRules, Rules, Warn, reclaims

ACCOUNT, PREEMPTED = QuotaScope.ACCOUNT, EndCause.PREEMPTED
RULES = AllRules(Rules(grace_s=600, preempt=True))


def guaranteed(**fgpu: float) -> tuple[Quota, ...]:
    return tuple(Quota(ACCOUNT, name, guaranteed_milli=round(1000 * most)) for name, most in fgpu.items())


def lab_of(running: str, waiting: str, quotas: tuple[Quota, ...], devices: int = 4) -> World:
    """Return a lab of sessions such as "a1 a1 b2": account and fGPU, then priority, as in "a1+5"; oldest first."""
    lab = replace(world(devices=devices), quotas=quotas)
    sessions: list[Session] = []
    for n, one in enumerate(running.split()):
        account, fgpu, priority = _parts(one)
        asked = replace(request(f"r{n}{account}", fgpu), account=account, priority=priority)
        lab = lab.holding(asked, started_ago_s=1000 - n)
    for n, one in enumerate(waiting.split()):
        account, fgpu, priority = _parts(one)
        lab = lab.pending(f"w{n}{account}", fgpu)
        last = lab.sessions[-1]
        asked = replace(last.request, account=account, priority=priority)
        sessions = [*lab.sessions[:-1], replace(last, request=asked)]
        lab = replace(lab, sessions=tuple(sessions))
    return lab


def _parts(one: str) -> tuple[str, str, int]:
    words, _, priority = one.partition("+")
    account = words.rstrip("0123456789.")
    return account, words.removeprefix(account), int(priority or 0)


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


# A seeded lab: requests come, sessions end, and what borrows is ended when its grace is over.


def holds(now: Snapshot, name: str) -> int:
    own = [s for s in now.sessions if s.placement and name in account_names(s.request.account)]
    return sum(share.fgpu_milli for s in own for share in s.placement.shares)  # type: ignore[union-attr]


def within(now: Snapshot, session: Session, name: str, most: int) -> bool:
    """Return whether a session is within a guarantee, by its own sums: what is longest there, if it fits."""
    own = [s for s in now.sessions if s.placement and name in account_names(s.request.account)]
    kept = 0
    for one in sorted(own, key=lambda s: (s.scheduled_at_s, s.id)):
        if kept + one.request.fgpu_milli <= most:
            kept += one.request.fgpu_milli
            if one.id == session.id:
                return True
    return False


def broken(now: Snapshot, ended: list[Session]) -> Iterator[str]:
    """Yield what is wrong with these pre-emptions."""
    most = {q.name: q.guaranteed_milli for q in now.quotas if q.guaranteed_milli is not None}
    waiting = [s for s in now.sessions if s.state is SessionState.PENDING]
    for session in ended:
        path = account_names(session.request.account)
        takers = []
        for other in waiting:
            theirs = account_names(other.request.account)
            shared = [a for a, b in zip(path, theirs, strict=False) if a == b]
            if any(within(now, session, a, most[a]) for a in path if a in most and a not in shared):
                continue
            claims = [a for a in theirs if a in most and a not in shared]
            covered = any(holds(now, a) + other.request.fgpu_milli <= most[a] for a in claims)
            if covered or other.request.priority > session.request.priority:
                takers.append(other)
        if not takers:
            yield f"session {session.id} of {session.request.account} was ended, and no request may end it"


def history(seed: int, steps: int = 60) -> tuple[list[str], Counter[str]]:
    """Return what was wrong in a random history, and what happened."""
    rng = Random(seed)
    paths = ("s/a", "s/c", "b", "d")
    quotas = (
        Quota(ACCOUNT, "s", max_fgpu_milli=6000, guaranteed_milli=4000),
        Quota(ACCOUNT, "a", guaranteed_milli=rng.choice((1000, 2000))),
        Quota(
            ACCOUNT, "b", max_fgpu_milli=rng.choice((None, 5000)), guaranteed_milli=rng.choice((2000, 3000))
        ),
    )
    now: Snapshot = replace(world(devices=4).node("n2", devices=4), quotas=quotas)
    policy, wrong, happened, next_id = Policy(group_policy(order="fair-share")), [], Counter[str](), 1
    for _ in range(steps):
        now = replace(now, now_s=now.now_s + 60, version=now.version + 1)
        for _ in range(rng.choice((0, 1, 2))):
            asked = request(f"u{rng.randrange(6)}", rng.choice(("0.5", "1", "1", "2")))
            asked = replace(asked, account=rng.choice(paths), priority=rng.choice((0, 0, 1)))
            new = Session(next_id, asked, SessionState.PENDING, now.now_s)
            now, next_id = now.changed([(None, new)]), next_id + 1
        there = [s for s in now.sessions if s.state is SessionState.RUNNING]
        now = now.changed([(s, None) for s in there if rng.randrange(8) == 0])
        decided = plan(now, policy)
        victims = {one.session_id for one in reclaims(now, decided, RULES, warned_for_s={})}
        gone = [s for s in now.sessions if s.id in victims]
        # Their places are there at once; what starts now is not part of what the victims ended for.
        wrong += broken(now, gone)
        happened["ended"] += len(gone)
        before = {s.id for s in now.sessions if s.state is SessionState.PENDING}
        started = applied(now.changed([(s, None) for s in gone]), replace(decided, version=now.version))
        for quota in quotas:
            new = [s for s in started.sessions if s.id in before and s.placement]
            over = holds(started, quota.name) > (quota.max_fgpu_milli or 10**9)
            if over and any(quota.name in account_names(s.request.account) for s in new):
                wrong.append(f"account {quota.name} holds {holds(started, quota.name)}")
        changes = []
        for s in started.sessions:
            if s.state is SessionState.SCHEDULED:
                happened["started"] += 1
                running = moved(
                    moved(s, SessionState.PREPARING, now_s=now.now_s), SessionState.RUNNING, now_s=now.now_s
                )
                changes.append((s, running))
        now = started.changed(changes)
        happened["borrows"] += sum(holds(now, q.name) > (q.guaranteed_milli or 0) for q in quotas)
    return wrong, happened


def test_no_session_within_its_guarantee_ends_for_another_account_and_no_limit_is_exceeded() -> None:
    total = Counter[str]()
    for seed in range(8):
        wrong, happened = history(seed)
        assert wrong == [], seed
        total += happened
    assert min(total["ended"], total["started"], total["borrows"]) > 40


def notices(monkeypatch: pytest.MonkeyPatch, where: object, name: str, mutant: object) -> bool:
    monkeypatch.setattr(where, name, mutant)
    return any(history(seed)[0] for seed in range(8))


def test_dropping_the_protection_by_guarantees_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert notices(monkeypatch, preemption, "within_guarantees", lambda snapshot: {})


def test_claiming_a_guarantee_that_is_used_up_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def anybody(self: Ledger, asked: object) -> Iterator[tuple[str, int]]:
        yield from ((name, 10**6) for name, _ in real(self, asked))  # type: ignore[arg-type]

    real = Ledger.guarantees_left
    assert notices(monkeypatch, Ledger, "guarantees_left", anybody)


def test_counting_accounts_that_both_sessions_share_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guarantees, "account_names", lambda path: account_names(path)[::-1])
    assert ended(lab_of("s/a1 s/a1 s/a1 s/a1", "s/c1", guaranteed(s=4, c=1))) != ["r3s/a"]


def test_dropping_limits_of_accounts_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert notices(monkeypatch, Ledger, "allows", lambda self, session, where=None: True)


def test_order_without_guarantees_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_scheduler, "guaranteed_first", lambda waiting, ledger: list(waiting))
    assert starts(lab_of("b1 b1 b1", "b1+5 a1", guaranteed(a=1))) != ["w1a"]
