"""Old sessions and events are deleted in small batches, except those that are still needed."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
from sqlalchemy import func, insert, select
from store_worlds import S, ask, device, end, node, run

from fgpu_scheduler.core.model import EndCause, Placement, Session, SessionState, Share
from fgpu_scheduler.core.records import SessionMeasurements
from fgpu_scheduler.core.request_counts import NEWEST
from fgpu_scheduler.store.history import History, Meters
from fgpu_scheduler.store.retention import BATCH, KEPT_EVENTS, TYPICAL_RUNS, Retention
from fgpu_scheduler.store.rows import life_values, request_values, share_values
from fgpu_scheduler.store.schema import events, meters, sessions, shares
from fgpu_scheduler.store.setups import KEPT_SETUPS, LOGS_KEPT_S, Setups
from fgpu_scheduler.store.store import Store
from fgpuspawner.concurrency.background import Background
from fgpuspawner.hub.retention import DAY_S, begin_retention, forget

YEAR_S = 365 * DAY_S
NOW_S = 10 * YEAR_S


class At:
    """A clock that does not move."""

    def now_s(self) -> int:
        return NOW_S


def ended_long_ago(store: Store, count: int, *, group: str = "lab", ended_at_s: int = 1000) -> list[int]:
    """Insert ended sessions, each with a share, a receipt and an event, and return their ids."""
    first = (_one(store, func.max(sessions.c.id)) or 0) + 1
    ids = list(range(first, first + count))
    asked = replace(ask("alice"), resource_group=group)
    where = Placement("n1", (Share.of(device(0), 500),))
    ended = Session(0, asked, SessionState.TERMINATED, 1, attempt=1, started_at_s=2, placement=where)
    row, (share,) = {**request_values(asked), **life_values(ended)}, share_values(ended)
    with store.writing_unversioned() as connection:
        rows = [{**row, "id": i, "ended_at_s": ended_at_s + i} for i in ids]
        connection.execute(insert(sessions), rows)
        connection.execute(insert(shares), [{**share, "session_id": i} for i in ids])
        log = [{"at_s": 1000 + i, "session_id": i, "kind": "moved", "user_name": "alice"} for i in ids]
        connection.execute(insert(events), log)
        if connection.dialect.name == "postgresql":
            connection.exec_driver_sql(f"SELECT setval('fgpu_sessions_id_seq', {ids[-1]})")
    Meters(store).save([SessionMeasurements(i, 1, 500, 4096, samples=1, peak_mib=5) for i in ids])
    return ids


def _one(store: Store, what: Any, *where: Any) -> Any:
    with store.reading() as connection:
        return connection.execute(select(what).where(*where)).scalar_one()


def counts(store: Store) -> list[int]:
    return [_one(store, func.count(), table.c[next(iter(table.c.keys()))].is_not(None)) for table in TABLES]


TABLES = (sessions, shares, meters)


def forget_all(store: Store, *, days: int = 365) -> tuple[int, int]:
    return asyncio.run(forget(Retention(store), At(), days=days, pause_s=0))


def test_old_sessions_are_deleted_in_batches_between_which_others_write(store: Store) -> None:
    store.set_nodes([node()], now_s=NOW_S)
    ended_long_ago(store, 6000)
    retention = Retention(store)
    forgotten, steps, version = 0, 0, store.version()
    while some := retention.delete_old_sessions(NOW_S - YEAR_S, now_s=NOW_S):
        assert some <= BATCH
        forgotten, steps = forgotten + some, steps + 1
        if steps % 10 == 0:
            store.submit([ask("bob", f"s{steps}")], now_s=NOW_S)
            if forgotten <= 6000 - 2 * NEWEST:
                assert store.version() == version + steps // 10, "of those nobody makes a plan"
    assert forgotten == 6000 - TYPICAL_RUNS
    assert steps == -(-forgotten // BATCH)
    assert counts(store) == [TYPICAL_RUNS + steps // 10, TYPICAL_RUNS, TYPICAL_RUNS]
    assert len(store.snapshot(NOW_S).sessions) == steps // 10
    gone = 0
    while some := retention.delete_old_events(NOW_S - YEAR_S):
        assert some <= BATCH
        gone += some
    # Submitting and deleting made newer events.
    assert 6000 - KEPT_EVENTS < gone <= 6000
    # One more: the young event of the node.
    assert len(store.events(limit=10**6)) == KEPT_EVENTS + 1


def test_young_live_and_referenced_sessions_are_kept(store: Store) -> None:
    store.set_nodes([node(devices=4)], now_s=1)
    young = run(store, ask("alice", "young"), now_s=5)
    end(store, young.id, now_s=NOW_S - YEAR_S + 1)
    lives = run(store, ask("alice", "lives"), now_s=5)
    parent, origin = ended_long_ago(store, 2)
    with store.writing(now_s=NOW_S) as write:
        own = sessions.c.id == lives.id
        write.connection.execute(sessions.update().where(own).values(replaces=parent, place_of=origin))
        write.event("test")
    ended_long_ago(store, TYPICAL_RUNS + 30)
    # The young session counts as a typical run, so one more old session is deleted.
    assert forget_all(store)[0] == 30 + 1
    for kept in (young.id, lives.id, parent, origin):
        assert store.session(kept) is not None
    assert store.session(lives.id) == store.snapshot(NOW_S).session(lives.id)
    assert forget_all(store) == (0, 0)


def newest_lengths_s(store: Store, group: str) -> Sequence[int]:
    found = store.experience(group).lengths.rest("nobody", "none", 0)
    return () if found is None else found.lengths_s


def test_typical_run_lengths_survive_deletion(store: Store) -> None:
    for number, group in enumerate(("lab", "class"), start=1):
        ended_long_ago(store, TYPICAL_RUNS + 20, group=group, ended_at_s=1000 * number)
    before = {group: newest_lengths_s(store, group) for group in ("lab", "class")}
    assert forget_all(store)[0] == 40
    after = {group: newest_lengths_s(store, group) for group in ("lab", "class")}
    assert {group: len(lengths_s) for group, lengths_s in after.items()} == dict.fromkeys(after, TYPICAL_RUNS)
    assert all(set(after[group]) <= set(before[group]) for group in after)


def test_usage_survives_deletion_and_ids_are_not_reused(store: Store) -> None:
    store.set_nodes([node()], now_s=1)
    session = run(store, ask("alice"), now_s=5)
    end(store, session.id, now_s=105)
    last = ended_long_ago(store, TYPICAL_RUNS + 1)[-1]
    used = store.snapshot(NOW_S).usage
    assert forget_all(store)[0] >= 1
    assert store.session(session.id) is None
    assert store.snapshot(NOW_S).usage == used
    assert store.submit([ask("bob")], now_s=NOW_S)[0].id > last


def test_setup_is_kept_while_the_log_of_its_session_can_be_read(store: Store) -> None:
    store.set_nodes([node()], now_s=0)
    setups = Setups(store)
    own = setups.put("alice", {"KEY": "value"}, "", now_s=0)
    end(store, run(store, replace(ask("alice"), setup=own)).id, now_s=10)
    for number in range(KEPT_SETUPS + 1):
        setups.put("alice", {"N": str(number)}, "", now_s=LOGS_KEPT_S + 9)
    assert setups.get(own, "alice") is not None
    setups.put("alice", {"KEY": "other"}, "", now_s=LOGS_KEPT_S + 10)
    assert setups.get(own, "alice") is None


def test_newest_session_is_never_deleted(store: Store) -> None:
    ids = ended_long_ago(store, 3)
    with store.writing_unversioned() as connection:
        # Without a start they are no typical runs, which would be kept.
        connection.execute(sessions.update().values(started_at_s=None))
    assert forget_all(store)[0] == 2
    assert [store.session(i) is not None for i in ids] == [False, False, True]


def test_all_processes_count_the_same_requests_after_deletion(store: Store) -> None:
    ended_long_ago(store, 400)
    store.submit([ask("bob")], now_s=NOW_S)
    before = store.snapshot(NOW_S)
    assert sum(one.count for one in before.request_counts) == 400
    forget_all(store)
    after = store.snapshot(NOW_S)
    assert after.version > before.version
    assert sum(one.count for one in after.request_counts) == TYPICAL_RUNS


def test_events_of_live_sessions_and_newest_events_are_kept(store: Store) -> None:
    store.set_nodes([node()], now_s=1)
    lives = run(store, ask("carol"), now_s=5)
    own = [e for e in store.events(limit=10**6) if e.session_id == lives.id]
    ended_long_ago(store, KEPT_EVENTS + 300)
    last = store.last_event_id()
    forget_all(store)
    kept = store.events(limit=10**6)
    assert [e for e in kept if e.session_id == lives.id] == own
    assert store.last_event_id() >= last
    assert KEPT_EVENTS <= len(kept) <= KEPT_EVENTS + len(own) + 20


def test_clock_correction_soon_after_the_start_deletes_nothing(store: Store) -> None:
    ids = ended_long_ago(store, TYPICAL_RUNS + 5)

    clock, done = At(), []
    now_s = [2000 + 10 * YEAR_S]
    clock.now_s = lambda: now_s[0]  # type: ignore[method-assign]

    def every(seconds: float, step: Any, *, first_after_s: float = 0, **_: object) -> None:
        """Correct the clock during the first wait, and run the step once."""
        assert first_after_s >= 900
        now_s[0] = 2000
        done.append(asyncio.run(step()))

    begin_retention(cast(Background, SimpleNamespace(every=every)), Retention(store), clock, days=1)
    assert done == [(0, 0)]
    assert counts(store)[0] == len(ids)


# --- Pages of the history, and measurements ---


def pages(history: History, user: str | None, limit: int) -> Iterable[list[int]]:
    before: int | None = None
    while found := history.page(user=user, before_id=before, limit=limit):
        yield [past.session.id for past in found]
        before = found[-1].session.id


@pytest.mark.parametrize("user", [None, "alice"])
def test_history_pages_are_newest_first_and_complete(store: Store, user: str | None) -> None:
    store.set_nodes([node()], now_s=1)
    ids = ended_long_ago(store, 7)
    run(store, ask("alice", "lives"), now_s=5)
    other = store.submit([ask("bob")], now_s=6)[0]
    store.move(other.id, S.CANCELLED, now_s=7, cause=EndCause.USER)
    expected = ([other.id] if user is None else []) + ids[::-1]
    found = list(pages(History(store), user, 3))
    assert [i for page in found for i in page] == expected
    assert {len(page) for page in found[:-1]} == {3}


def test_measurement_is_read_back_and_replaced(store: Store) -> None:
    full = SessionMeasurements(3, 2**33, 250, 2048, 9, 90, 700, 650, 21, 2**40, True, '{"memory":{"5":9}}')
    other = SessionMeasurements(4, 1, 500, 4096)
    saved = Meters(store)
    version = store.version()
    saved.save([full, other])
    assert saved.of([3, 4, 5]) == {3: full, 4: other}
    newer = SessionMeasurements(3, 2**33 + 60, 250, 2048, 15)
    saved.save([newer])
    assert saved.of([3]) == {3: newer}
    saved.save([])
    assert saved.of([]) == {}
    assert store.version() == version, "no plan is made of it"


def test_measured_runs_leave_out_sessions_without_samples(store: Store) -> None:
    ids = ended_long_ago(store, 4)
    Meters(store).save([SessionMeasurements(ids[1], 1, 500, 4096, samples=0)])
    found = History(store).measured_runs("alice", limit=2)
    assert [past.session.id for past in found] == [ids[3], ids[2]]
    assert [past.session.id for past in History(store).measured_runs("alice", limit=9)] == [
        ids[3],
        ids[2],
        ids[0],
    ]
    assert History(store).measured_runs("bob", limit=9) == ()
    one = History(store).one(ids[1])
    assert one is not None
    assert one.measured is not None
    assert one.measured.samples == 0
    assert History(store).one(10**9) is None
