"""Moving a session through its states."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace

import pytest
from store_worlds import S, ask, node, schedule

from fgpu_scheduler.core.lifecycle import UP
from fgpu_scheduler.core.model import EndCause, Session
from fgpu_scheduler.errors import InvalidTransition, UnknownSession
from fgpu_scheduler.store.store import Store

PATHS: dict[S, tuple[S, ...]] = {
    S.PENDING: (),
    S.SCHEDULED: (S.SCHEDULED,),
    S.PREPARING: (S.SCHEDULED, S.PREPARING),
    S.PULLING: (S.SCHEDULED, S.PREPARING, S.PULLING),
    S.RUNNING: (S.SCHEDULED, S.PREPARING, S.RUNNING),
    S.PARKED: (S.SCHEDULED, S.PREPARING, S.RUNNING, S.PARKED),
    S.RESUMING: (S.SCHEDULED, S.PREPARING, S.RUNNING, S.PARKED, S.RESUMING),
    S.TERMINATING: (S.SCHEDULED, S.PREPARING, S.TERMINATING),
    S.TERMINATED: (S.SCHEDULED, S.PREPARING, S.TERMINATING, S.TERMINATED),
    S.ERROR: (S.SCHEDULED, S.PREPARING, S.TERMINATING, S.ERROR),
    S.CANCELLED: (S.CANCELLED,),
}


def session_in(store: Store, state: S, *, user: str = "alice") -> Session:
    store.set_nodes([node(devices=4)], now_s=0)
    session = store.submit([ask(user)], now_s=1)[0]
    for to in PATHS[state]:
        session = step(store, session, to)
    return session


def step(store: Store, session: Session, to: S) -> Session:
    if to is S.RESUMING:
        store.want(session.id, True, now_s=2)
    if to in (S.SCHEDULED, S.RESUMING):
        return schedule(store, now_s=2)[0]
    if to is S.PARKED:
        return store.park(session.id, 512, now_s=2)
    cause = EndCause.USER if to in (S.TERMINATING, S.CANCELLED) else None
    return store.move(session.id, to, now_s=2, cause=cause)


def test_each_launch_is_a_new_attempt(store: Store) -> None:
    session = session_in(store, S.SCHEDULED)
    assert session.attempt == 0
    assert store.move(session.id, S.PREPARING, now_s=3).attempt == 1
    store.move(session.id, S.PULLING, now_s=4, launched="container-1")
    again = store.new_attempt(session.id, now_s=5)
    assert (again.state, again.attempt, again.launched) == (S.PREPARING, 2, None)
    assert again.placement == session.placement
    assert store.session(session.id) == again
    last = store.events()[-1]
    assert (last.kind, last.from_state, last.to_state) == ("attempt", S.PULLING, S.PREPARING)


def test_move_from_an_unexpected_state_or_attempt_is_refused(store: Store) -> None:
    session = session_in(store, S.RUNNING)
    with pytest.raises(InvalidTransition, match="is RUNNING and not PREPARING or PULLING"):
        store.move(session.id, S.TERMINATING, now_s=3, cause=EndCause.USER, expect=(S.PULLING, S.PREPARING))
    with pytest.raises(InvalidTransition, match="is at attempt 1 and not 2"):
        store.move(session.id, S.TERMINATING, now_s=3, cause=EndCause.USER, attempt=2)
    assert store.session(session.id) == session
    ended = store.move(session.id, S.TERMINATING, now_s=3, cause=EndCause.USER, expect=[S.RUNNING], attempt=1)
    assert ended.state is S.TERMINATING


def test_error_names_the_unknown_session(store: Store) -> None:
    for attempted in (
        lambda: store.move(5, S.RUNNING, now_s=1),
        lambda: store.new_attempt(5, now_s=1),
        lambda: store.set_held(5, True, now_s=1),
    ):
        with pytest.raises(UnknownSession, match="there is no session 5"):
            attempted()


def test_events_are_read_in_pages(store: Store) -> None:
    assert (store.events(), store.last_event_id()) == ((), 0)
    store.submit([ask(f"user{number}") for number in range(5)], now_s=1)
    log = store.events()
    assert store.events(limit=2) == log[:2]
    assert store.events(after_id=log[1].id, limit=2) == log[2:4]
    assert store.events(after_id=store.last_event_id()) == ()


def test_warning_is_stored_logged_withdrawn_and_cleared_at_the_end(store: Store) -> None:
    session = session_in(store, S.RUNNING)
    warned = store.warn(session.id, "above its limit", now_s=5)
    assert warned == store.session(session.id) == replace(session, message="above its limit")
    events, version = store.events(limit=1000), store.version()
    assert (events[-1].kind, events[-1].reason, events[-1].to_state) == ("warned", "ISOLATION_FAILED", None)
    store.warn(session.id, "above its limit", now_s=6)
    assert (store.events(limit=1000), store.version()) == (events, version), "the same again is nothing new"
    assert store.warn(session.id, None, now_s=7) == session
    assert store.events(limit=1000)[-1].reason is None
    store.warn(session.id, "above its limit", now_s=8)
    ended = store.move(session.id, S.TERMINATING, now_s=9, cause=EndCause.USER)
    assert ended.message is None, "it was not ended for that"


ONLY_IN: dict[str, tuple[Collection[S], Callable[[Store, int], Session]]] = {
    "new_attempt": ((S.PREPARING, S.PULLING), lambda store, i: store.new_attempt(i, now_s=3)),
    "warn": (UP, lambda store, i: store.warn(i, "above its limit", now_s=3)),
    "keep": (UP, lambda store, i: store.keep(i, 9, now_s=3)),
    "note_idle": (UP, lambda store, i: store.note_idle(i, 9, now_s=3)),
    "park": (UP, lambda store, i: store.park(i, 512, now_s=3)),
}


@pytest.mark.parametrize("state", S)
def test_change_is_refused_in_other_states(store: Store, state: S) -> None:
    session = session_in(store, state)
    for states, change in ONLY_IN.values():
        if state not in states:
            with pytest.raises(InvalidTransition):
                change(store, session.id)
    assert store.session(session.id) == session


def test_wish_to_park_can_be_repeated(store: Store) -> None:
    session = session_in(store, S.RUNNING)
    assert store.ask_to_park(session.id, now_s=5).park_asked_at_s == 5
    refused = store.refuse_to_park(session.id, "it has no room", now_s=6)
    assert (refused.park_refused, store.session(session.id)) == ("it has no room", refused)
    again = store.ask_to_park(session.id, now_s=900)
    assert (again.park_asked_at_s, again.park_refused) == (900, None)
    parked = store.park(session.id, 512, now_s=901)
    assert parked.park_asked_at_s is None
    assert store.refuse_to_park(session.id, "too late", now_s=902) == parked
