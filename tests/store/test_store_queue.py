"""Submitting, and reading the queue."""

from __future__ import annotations

import pytest
from sqlalchemy import insert
from sqlalchemy.exc import IntegrityError
from store_worlds import S, ask, end, node, run, schedule

from fgpu_scheduler.core.model import EndCause, Session
from fgpu_scheduler.core.run_lengths import LengthSource, RemainingTime
from fgpu_scheduler.errors import SessionExists, TooManyPending
from fgpu_scheduler.store.rows import life_values, request_values
from fgpu_scheduler.store.schema import sessions
from fgpu_scheduler.store.store import Store


def test_submitted_request_is_pending_and_read_back_unchanged(store: Store) -> None:
    submitted = store.submit([ask("alice", "work")], now_s=7)
    assert submitted == (Session(1, ask("alice", "work"), S.PENDING, 7),)
    assert store.snapshot(8).sessions == submitted
    assert store.session(1) == submitted[0]
    assert store.serving("alice", "work") == submitted[0]


def test_submission_with_two_requests_for_one_server_is_refused(store: Store) -> None:
    with pytest.raises(SessionExists):
        store.submit([ask("alice", "work"), ask("alice", "work")], now_s=1)
    assert store.snapshot(1).sessions == ()


def test_ended_session_is_not_ended_again_by_a_replacement(store: Store) -> None:
    old = store.submit([ask("alice")], now_s=1)[0]
    ended = store.move(old.id, S.CANCELLED, now_s=2, cause=EndCause.USER, message="cancelled")
    assert store.submit([ask("alice")], now_s=5, replacing=old.id)[0].state is S.PENDING
    assert store.session(old.id) == ended


def test_database_constraint_refuses_a_second_session_of_a_server(store: Store) -> None:
    session = store.submit([ask()], now_s=1)[0]
    row = {**request_values(session.request), **life_values(session)}
    with pytest.raises(IntegrityError), store._database.writing() as connection:
        connection.execute(insert(sessions).values(row))


def test_too_many_pending_requests_are_refused_with_limit_and_count(store: Store) -> None:
    store.submit([ask("alice", "a"), ask("alice", "b")], now_s=1, max_pending_per_user=3)
    before = store.version()
    with pytest.raises(TooManyPending) as refused:
        store.submit([ask("alice", "c"), ask("alice", "d")], now_s=1, max_pending_per_user=3)
    assert str(refused.value) == "alice may have 3 requests waiting: 2 wait already, and this would add 2"
    assert store.version() == before
    assert len(store.submit([ask("alice", "c")], now_s=1, max_pending_per_user=3)) == 1


def test_ids_are_never_reused(store: Store) -> None:
    first = store.submit([ask("alice", "a")], now_s=1)[0]
    store.move(first.id, S.CANCELLED, now_s=1, cause=EndCause.USER)
    with store._database.writing() as connection:
        connection.execute(sessions.delete())
    assert store.submit([ask("alice", "a")], now_s=2)[0].id > first.id


def test_held_sessions_with_shares_come_first_then_the_queue(store: Store) -> None:
    store.set_nodes([node()], now_s=0)
    launching = store.submit([ask("launching")], now_s=20)[0]
    scheduled = store.submit([ask("scheduled")], now_s=19)[0]
    schedule(store)
    store.move(launching.id, S.PREPARING, now_s=21)
    late, early, also_early = (
        store.submit([ask(name, fgpu_milli=2000)], now_s=now_s)[0]
        for name, now_s in (("late", 9), ("early", 5), ("also early", 5))
    )
    run(store, ask("running"))
    let_go = store.submit([ask("let go", fgpu_milli=2000)], now_s=1)[0]
    store.hold_waiting(now_s=22)
    store.set_held(let_go.id, False, now_s=23)
    held = store.held_sessions()
    assert [s.id for s in held] == [scheduled.id, launching.id, early.id, also_early.id, late.id]
    assert [s.placement is not None for s in held] == [True, True, False, False, False]


def test_ended_sessions_are_newest_first_with_their_shares(store: Store) -> None:
    store.set_nodes([node()], now_s=0)
    first = end(store, run(store, ask("alice")).id, now_s=10)
    second = end(store, run(store, ask("bob")).id, now_s=30)
    third = end(store, run(store, ask("alice")).id, now_s=20)
    assert store.ended(user=None, limit=10) == (second, third, first)
    assert store.ended(user="alice", limit=10) == (third, first)
    assert store.ended(user=None, limit=1) == (second,)
    assert store.session(first.id) == first
    assert first.placement is not None
    assert store.snapshot(40).sessions == ()


def test_run_lengths_count_only_sessions_that_ran(store: Store) -> None:
    store.set_nodes([node()], now_s=0)
    for number, length_s in enumerate((1000, 10, 20, 30, 60)):
        session = run(store, ask(), now_s=number)
        assert not store.experience("lab").lengths
        end(store, session.id, now_s=2000 * number + length_s)
    cancelled = store.submit([ask()], now_s=1)[0]
    store.move(cancelled.id, S.CANCELLED, now_s=50000, cause=EndCause.USER)
    lengths = sorted((1000, 2010 - 1, 4020 - 2, 6030 - 3, 8060 - 4))
    asked = ask()
    found = store.experience("lab").lengths.rest(asked.user, asked.image, 0)
    assert found == RemainingTime(LengthSource.USER_IMAGE, 0, lengths)
    # A group without runs uses the runs of all groups.
    found = store.experience("other").lengths.rest(asked.user, asked.image, 0)
    assert found == RemainingTime(LengthSource.ALL, 0, lengths)


def test_names_are_read_back_unchanged(store: Store) -> None:
    for number, name in enumerate(("o'brien", "Zoë; DROP TABLE", "日本", "100%", ":user")):
        session = store.submit([ask(name, name)], now_s=number)[0]
        assert store.serving(name, name) == session


def test_latest_sessions_of_a_user_are_live_and_ended_newest_first(store: Store) -> None:
    asked = [ask("ann", "a"), ask("bob", "a"), ask("ann", "b"), ask("ann", "c")]
    first, other, second, third = store.submit(asked, now_s=1)
    ended = store.move(second.id, S.CANCELLED, now_s=2, cause=EndCause.USER)
    assert store.latest(user="ann", limit=5) == (third, ended, first)
    assert store.latest(user="ann", limit=2) == (third, ended)
    assert store.latest(user="bob", limit=5) == (other,)
