"""Resized sessions and resize requests in the store."""

from __future__ import annotations

import pytest
from store_worlds import S, ask, assert_nothing_is_oversold, node, run

from fgpu_scheduler.core.model import EndCause, Session
from fgpu_scheduler.core.resizing import Amount, NotResized
from fgpu_scheduler.errors import InvalidTransition, StaleVersion
from fgpu_scheduler.store.history import spent_between
from fgpu_scheduler.store.hub_requests import Resizes, ResizeState
from fgpu_scheduler.store.retention import Retention
from fgpu_scheduler.store.store import Store


@pytest.fixture
def running(store: Store) -> Session:
    store.set_nodes([node(devices=1)], now_s=0)
    return run(store, ask("alice", fgpu_milli=500), now_s=1)


def resize(store: Store, session: Session, milli: int, *, now_s: int = 100) -> Session | NotResized:
    return store.resize(session.id, Amount(milli), store.version(), now_s=now_s)


def test_resize_stores_new_amount_and_keeps_old_one_in_history(store: Store, running: Session) -> None:
    grown = resize(store, running, 750)
    assert isinstance(grown, Session)
    assert store.session(running.id) == grown
    assert store.snapshot(100).session(running.id) == grown
    assert grown.placement is not None
    assert [share.fgpu_milli for share in grown.placement.shares] == [750]
    assert (grown.request.fgpu_milli, [size.fgpu_milli for size in grown.sizes]) == (750, [500])
    last = store.events(limit=100)[-1]
    assert (last.kind, last.session_id, last.reason) == ("resized", running.id, "0.5 fGPU -> 0.75 fGPU")
    assert_nothing_is_oversold(store)


def test_resize_on_a_stale_version_is_refused(store: Store, running: Session) -> None:
    version = store.version()
    store.submit([ask("bob", fgpu_milli=100)], now_s=5)
    with pytest.raises(StaleVersion):
        store.resize(running.id, Amount(600), version, now_s=6)


def test_reports_count_each_amount_for_the_time_it_was_held(store: Store, running: Session) -> None:
    grown = resize(store, running, 750)
    assert isinstance(grown, Session)
    (spent,) = spent_between(store, 0, 1000)
    assert [held[2] for held in spent.held(200)] == [500, 750]
    store.move(running.id, S.TERMINATING, now_s=200, cause=EndCause.USER)
    store.move(running.id, S.TERMINATED, now_s=200)
    (used,) = store.snapshot(200).usage
    began = running.scheduled_at_s or 0
    assert used.fgpu_milli_s == (100 - began) * 500 + 100 * 750


def test_answered_resize_request_is_no_longer_pending(store: Store, running: Session) -> None:
    wishes = Resizes(store)
    assert wishes.asked() == ()
    wish = wishes.ask(running.id, Amount(750), by="alice", now_s=10)
    assert wishes.asked() == wishes.of_live() == (wish,)
    with pytest.raises(InvalidTransition):
        wishes.ask(running.id, Amount(250), by="alice", now_s=11)
    before = store.version()
    wishes.answer(running.id, ResizeState.REFUSED, "no", now_s=12)
    assert wishes.asked() == ()
    (told,) = wishes.of_live()
    assert (told.state, told.message, told.amount) == (ResizeState.REFUSED, "no", Amount(750))
    assert store.version() == before + 1, "who shows the session looks again"
    assert (store.events(limit=100)[-1].kind, store.events(limit=100)[-1].reason) == ("answered", "REFUSED")
    assert wishes.ask(running.id, Amount(0, 1024, 25), by="alice", now_s=13) == wishes.asked()[0]


def test_resize_requests_of_ended_sessions_are_deleted(store: Store, running: Session) -> None:
    wishes = Resizes(store)
    wishes.ask(running.id, Amount(750), by="alice", now_s=10)
    store.move(running.id, S.TERMINATING, now_s=200, cause=EndCause.USER)
    store.move(running.id, S.TERMINATED, now_s=200)
    assert wishes.of_live() == ()
    wishes.answer(running.id, ResizeState.REFUSED, "it has ended", now_s=201)
    other = run(store, ask("bob", fgpu_milli=100), now_s=201)
    wishes.ask(other.id, Amount(200), by="bob", now_s=202)
    assert [wish.session_id for wish in wishes.asked()] == [other.id]
    assert Retention(store).delete_old_sessions(10**9, now_s=10**9) >= 0
