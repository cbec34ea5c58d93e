from __future__ import annotations

from dataclasses import replace

from simulator import World, world

from fgpu_scheduler.core.model import NodeState, Quota, QuotaScope, SessionState
from fgpu_scheduler.core.policies import Policy, group_policy
from fgpu_scheduler.core.unblocking import Unblocking, unblocking


def told(lab: World) -> tuple[str, list[str]] | None:
    """Return the head and those who would start it, by their users."""
    users = {s.id: s.request.user for s in lab.sessions}
    found = unblocking(lab, Policy())
    return None if found is None else (users[found.head_id], [users[i] for i in found.ids])


def test_sufficient_ends_are_named_smallest_first() -> None:
    lab = world(devices=2).running("a", "0.6").running("b", "0.4").running("c", "0.8").pending("d", "0.4")
    assert told(lab) == ("d", ["b", "a", "c"])


def test_promised_place_behind_the_head_is_not_for_the_head() -> None:
    lab = world(devices=1).running("a", "1").pending("b", "0.1").pending("c", "1")
    promised = lab.with_sessions(
        replace(s, promised_at_s=lab.now_s + 60) if s.request.user == "c" else s for s in lab.sessions
    )
    easy = Policy(group_policy())
    assert unblocking(lab, easy) == Unblocking(lab.of("b").id, (lab.of("a").id,))
    assert unblocking(promised, easy) == Unblocking(lab.of("b").id)


def test_terminating_sessions_are_not_named() -> None:
    lab = world(devices=1).running("a", "0.6").running("b", "0.4").pending("c", "0.5")
    ending = lab.with_sessions(
        replace(s, state=SessionState.TERMINATING) if s.request.user == "a" else s for s in lab.sessions
    )
    head = lab.of("c").id
    assert unblocking(ending, Policy()) == Unblocking(head, by_itself=True)


def test_session_over_a_quota_is_not_the_head() -> None:
    lab = world(devices=2).running("a", "0.6").running("c", "0.7").pending("c", "0.5").pending("b", "1")
    limited = replace(lab, quotas=(Quota(QuotaScope.USER, "c", max_fgpu_milli=700),))
    assert told(limited) == ("b", ["a"])
    assert told(limited.with_sessions(s for s in limited.sessions if s.request.user != "b")) is None


def test_smallest_sessions_are_tried_and_the_others_counted() -> None:
    lab = world(devices=2).running("a", "0.6").running("b", "0.4").running("c", "0.8").pending("d", "0.4")
    head, b = lab.of("d").id, lab.of("b").id
    assert unblocking(lab, Policy(), tries=1) == Unblocking(head, (b,), untried=2)


def test_the_heads_own_sessions_are_tried_first() -> None:
    lab = world(devices=2).running("d", "0.6").running("b", "0.4").running("c", "0.8").pending("d", "0.4")
    assert unblocking(lab, Policy(), tries=1) == Unblocking(
        lab.sessions[3].id, (lab.sessions[0].id,), untried=2
    )


def test_head_that_no_end_could_start_is_marked() -> None:
    lab = world(devices=1).running("a", "0.5").pending("b", "1")
    closed = replace(lab, nodes=tuple(replace(n, state=NodeState.CORDONED) for n in lab.nodes))
    assert unblocking(closed, Policy()) == Unblocking(lab.of("b").id, never=True)
