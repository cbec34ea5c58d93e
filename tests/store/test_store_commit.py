"""Committing plans: a plan that is stale or does not fit is refused whole."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from sqlalchemy import event
from store_worlds import S, ask, device, node, opened, placing, run, schedule

from fgpu_scheduler.core.model import (
    NodeState,
    Placement,
    Quota,
    QuotaScope,
    Session,
    Share,
    WaitReason,
)
from fgpu_scheduler.core.planner import Plan, Policy, Reservation, StartDecision, WaitDecision, plan
from fgpu_scheduler.errors import StaleVersion
from fgpu_scheduler.store.store import Store


def assert_refused(store: Store, decided: Plan) -> None:
    """Assert that the plan is refused and nothing is written."""
    before, log = store.snapshot(0), store.last_event_id()
    with pytest.raises(StaleVersion):
        store.commit(decided, now_s=99)
    assert store.snapshot(0) == before
    assert store.last_event_id() == log


def test_committed_plan_writes_shares_and_wait_reasons(store: Store) -> None:
    store.set_nodes([node(devices=1)], now_s=0)
    first, second = store.submit([ask("alice", fgpu_milli=600), ask("bob", fgpu_milli=600)], now_s=1)
    placed = schedule(store, now_s=5)
    where = Placement("n1", (Share.of(device(0), 600),))
    assert placed == (replace(first, state=S.SCHEDULED, placement=where, scheduled_at_s=5),)
    waits = replace(second, wait_reason=WaitReason.RESOURCES)
    assert store.snapshot(6).sessions == (*placed, waits)


def test_whole_devices_keep_their_order_in_the_placement(store: Store) -> None:
    store.set_nodes([node(devices=3)], now_s=0)
    session = store.submit([ask(fgpu_milli=3000)], now_s=1)[0]
    where = Placement("n1", tuple(Share.of(device(number), 1000) for number in (2, 0, 1)))
    placed = store.commit(Plan(store.version(), (StartDecision(session.id, where),)), now_s=2)
    assert placed[0].placement == where
    assert store.session(session.id) == placed[0]


def test_only_one_of_two_stores_commits_on_a_version(url: str) -> None:
    with opened(url) as one, opened(url) as other:
        one.set_nodes([node(devices=1)], now_s=0)
        one.submit([ask("alice", fgpu_milli=1000)], now_s=1)
        plans = [plan(store.snapshot(1), Policy()) for store in (one, other)]
        assert len(other.commit(plans[1], now_s=2)) == 1
        assert_refused(one, plans[0])


def test_plan_of_the_current_version_that_does_not_fit_is_refused_whole(store: Store) -> None:
    """Tests of the fit check (tests/unit/scheduler) hold what fits; these are one plan for each kind of refusal."""
    store.set_nodes([node(devices=2), node("n2", cpu_milli=500), node("n3")], now_s=0)
    store.set_node_state("n3", NodeState.CORDONED, now_s=0)
    running = run(store, ask("before", fgpu_milli=600))
    first, second = store.submit([ask("alice"), ask("bob")], now_s=1)
    assert running.placement is not None
    full, free = device(0), device(1)
    assert running.placement.shares[0].device_uuid == full.uuid
    fits = placing(store, first.id, on=[free])
    for wrong in (
        placing(store, first.id, on=[full]),
        replace(fits, decisions=(*fits.decisions, *placing(store, second.id, on=[full]).decisions)),
        placing(store, first.id, on=[device(0, node_id="n2")]),
        placing(store, first.id, on=[device(0, node_id="n3")]),
        placing(store, first.id, on=[device(0, node_id="n9")]),
        placing(store, first.id, on=[device(9)]),
        placing(store, 999, on=[free]),
        placing(store, running.id, on=[free]),
        placing(store, first.id, first.id, on=[free]),
        placing(store, first.id, on=[free], fgpu_milli=400),
        placing(store, first.id, on=[device(0, node_id="n1"), free], fgpu_milli=500),
        Plan(store.version(), (WaitDecision(running.id, WaitReason.QUOTA),)),
    ):
        assert_refused(store, wrong)
    assert len(store.commit(fits, now_s=2)) == 1


def test_wait_reason_is_written_only_when_it_changes(store: Store) -> None:
    store.set_nodes([node(devices=1)], now_s=0)
    session = store.submit([ask(fgpu_milli=3000)], now_s=1)[0]
    for reason in (WaitReason.RESOURCES, WaitReason.RESOURCES, WaitReason.QUOTA):
        store.commit(Plan(store.version(), (WaitDecision(session.id, reason),)), now_s=2)
        waits = store.session(session.id)
        assert waits is not None
        assert waits.wait_reason is reason
    assert [e.reason for e in store.events() if e.kind == "waits"] == ["RESOURCES", "QUOTA"]


def test_first_reserved_start_becomes_the_promise(
    store: Store,
) -> None:
    store.set_nodes([node()], now_s=0)
    session = store.submit([ask(fgpu_milli=2000)], now_s=1)[0]

    def reserve(starts_at_s: int | None) -> Session:
        decision = Reservation(session.id, Placement("n1", ()), 2, starts_at_s)
        assert store.commit(Plan(store.version(), (decision,)), now_s=2) == ()
        found = store.session(session.id)
        assert found is not None
        return found

    assert reserve(None) == replace(session, wait_reason=WaitReason.RESERVED)
    assert reserve(500) == replace(session, wait_reason=WaitReason.RESERVED, promised_at_s=500)
    version = store.version()
    assert reserve(400).promised_at_s == reserve(900).promised_at_s == 500
    assert store.version() == version
    # The session keeps its promise when it starts, and after.
    (placed,) = schedule(store, now_s=300)
    assert placed.promised_at_s == 500


@pytest.mark.parametrize(
    "quota",
    [
        Quota(QuotaScope.USER, "alice", max_fgpu_milli=999),
        Quota(QuotaScope.USER, "*", max_sessions=1),
        Quota(QuotaScope.GROUP, "class", "lab", max_fgpu_milli=700),
    ],
)
def test_a_plan_that_goes_over_a_quota_is_refused_whole(store: Store, quota: Quota) -> None:
    store.set_nodes([node()], now_s=0)
    store.set_quotas([quota], now_s=0)
    asked = [replace(ask("alice", name), groups=("class",)) for name in ("a", "b")]
    one, other = store.submit(asked, now_s=1)
    version = store.version()
    with pytest.raises(StaleVersion, match="over a quota"):
        store.commit(placing(store, one.id, other.id, on=[device(0)]), now_s=2)
    assert store.version() == version
    assert len(store.commit(placing(store, one.id, on=[device(0)]), now_s=2)) == 1
    with pytest.raises(StaleVersion, match="over a quota"):
        store.commit(placing(store, other.id, on=[device(1)]), now_s=3)


def test_plan_writes_only_changed_columns_of_pending_sessions(store: Store) -> None:
    """Each written column costs its indexes, and a plan of a busy queue has a reason for thousands of sessions."""
    store.set_nodes([node(devices=1)], now_s=0)
    store.submit(
        [ask("alice", fgpu_milli=600), ask("bob", fgpu_milli=600), ask("carol", fgpu_milli=600)], now_s=1
    )
    said: list[str] = []
    engine = store._database._writer
    assert engine is not None
    event.listen(engine, "before_cursor_execute", lambda c, cursor, sql, *more: said.append(sql))
    schedule(store, now_s=5)
    (waits,) = [sql for sql in said if "UPDATE fgpu_sessions" in sql and "node_id" not in sql]
    assert re.findall(r"(\w+)=", waits.split("WHERE")[0]) == ["wait_reason"]
    (placed,) = [sql for sql in said if "UPDATE fgpu_sessions" in sql and "node_id" in sql]
    assert set(re.findall(r"(\w+)=", placed.split("WHERE")[0])) == {"state", "node_id", "scheduled_at_s"}
