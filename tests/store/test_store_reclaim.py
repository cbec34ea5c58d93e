"""Warnings, their withdrawal, ends by the rules, and queueing again."""

from __future__ import annotations

import pytest
from store_worlds import S, ask, node, opened, run, schedule

from fgpu_scheduler.core.model import EndCause, Quota, QuotaScope, Session
from fgpu_scheduler.core.reclaim import End, Warn, WithdrawWarning
from fgpu_scheduler.errors import InvalidTransition, StaleVersion, UnknownSession
from fgpu_scheduler.store.sessions import SessionStore
from fgpu_scheduler.store.store import Store

IDLE, PREEMPTED, LIMIT = EndCause.IDLE, EndCause.PREEMPTED, EndCause.TIME_LIMIT


def running(store: SessionStore) -> Session:
    store.set_nodes([node()], now_s=0)
    return run(store, ask("alice", "work"), now_s=5)


def warned(store: SessionStore, cause: EndCause = IDLE, *, ends_at_s: int = 100) -> Session:
    session = running(store)
    return store.reclaim([Warn(session.id, cause, ends_at_s)], store.version(), now_s=10)[0]


def test_warning_is_stored_and_withdrawn(any_store: SessionStore) -> None:
    session = warned(any_store)
    assert (session.ends_at_s, session.ends_cause) == (100, IDLE)
    assert any_store.session(session.id) == session
    (spared,) = any_store.reclaim([WithdrawWarning(session.id)], any_store.version(), now_s=11)
    assert (spared.ends_at_s, spared.ends_cause, spared.state) == (None, None, S.RUNNING)
    assert any_store.session(session.id) == spared


def test_later_warning_replaces_the_first(any_store: SessionStore) -> None:
    session = warned(any_store)
    (again,) = any_store.reclaim([Warn(session.id, LIMIT, 70)], any_store.version(), now_s=20)
    assert (again.ends_at_s, again.ends_cause) == (70, LIMIT)


@pytest.mark.parametrize("cause", [IDLE, PREEMPTED, LIMIT])
def test_warned_session_ends_at_the_announced_time(any_store: SessionStore, cause: EndCause) -> None:
    session = warned(any_store, cause)
    (ended,) = any_store.reclaim([End(session.id, cause, "why")], any_store.version(), now_s=100)
    assert (ended.state, ended.end_cause, ended.message) == (S.TERMINATING, cause, "why")
    assert ended.placement == session.placement
    assert any_store.session(session.id) == ended


@pytest.mark.parametrize(("cause", "now_s"), [(IDLE, 99), (LIMIT, 100), (PREEMPTED, 500)])
def test_end_earlier_or_for_another_cause_than_warned_is_refused(
    any_store: SessionStore, cause: EndCause, now_s: int
) -> None:
    session = warned(any_store)
    version = any_store.version()
    with pytest.raises(StaleVersion, match="was not warned"):
        any_store.reclaim([End(session.id, cause, "why")], version, now_s=now_s)
    assert any_store.session(session.id) == session
    assert any_store.version() == version


def test_end_without_a_warning_is_refused(any_store: SessionStore) -> None:
    session = running(any_store)
    with pytest.raises(StaleVersion, match="was not warned"):
        any_store.reclaim([End(session.id, IDLE, "why")], any_store.version(), now_s=10**6)
    assert any_store.session(session.id) == session


def test_reclaim_on_a_stale_version_is_refused(any_store: SessionStore) -> None:
    session = warned(any_store)
    version = any_store.version()
    kept = any_store.keep(session.id, 5000, now_s=50)
    with pytest.raises(StaleVersion, match="planned on version"):
        any_store.reclaim([End(session.id, IDLE, "why")], version, now_s=100)
    assert any_store.session(session.id) == kept


def test_reclaim_round_is_written_whole_or_not_at_all(any_store: SessionStore) -> None:
    session = warned(any_store)
    other = any_store.submit([ask("bob")], now_s=11)[0]
    version = any_store.version()
    with pytest.raises(StaleVersion, match="does not run"):
        any_store.reclaim([WithdrawWarning(session.id), Warn(other.id, IDLE, 50)], version, now_s=12)
    assert any_store.session(session.id) == session
    assert any_store.version() == version
    assert any_store.reclaim([], version, now_s=12) == ()
    assert any_store.version() == version


def test_keep_running_withdraws_an_idle_warning(any_store: SessionStore) -> None:
    session = warned(any_store)
    kept = any_store.keep(session.id, 900, now_s=20)
    assert (kept.kept_until_s, kept.ends_at_s, kept.ends_cause) == (900, None, None)
    assert any_store.session(session.id) == kept
    version = any_store.version()
    assert any_store.keep(session.id, 800, now_s=21).kept_until_s == 900
    assert any_store.version() == version
    assert any_store.keep(session.id, 1000, now_s=21).kept_until_s == 1000


@pytest.mark.parametrize("cause", [PREEMPTED, LIMIT])
def test_keep_running_withdraws_no_other_warning(any_store: SessionStore, cause: EndCause) -> None:
    session = warned(any_store, cause)
    kept = any_store.keep(session.id, 900, now_s=20)
    assert (kept.kept_until_s, kept.ends_at_s, kept.ends_cause) == (900, 100, cause)


def test_idle_since_is_stored_until_the_session_works_again(any_store: SessionStore) -> None:
    session = running(any_store)
    assert any_store.note_idle(session.id, 8, now_s=9).idle_since_s == 8
    version = any_store.version()
    any_store.note_idle(session.id, 8, now_s=10)
    assert any_store.version() == version
    assert any_store.note_idle(session.id, None, now_s=11).idle_since_s is None
    assert any_store.session(session.id) == session


def test_only_running_sessions_are_kept_or_marked_idle(any_store: SessionStore) -> None:
    waiting = any_store.submit([ask()], now_s=1)[0]
    with pytest.raises(InvalidTransition):
        any_store.keep(waiting.id, 9, now_s=1)
    with pytest.raises(InvalidTransition):
        any_store.note_idle(waiting.id, 9, now_s=1)
    with pytest.raises(UnknownSession):
        any_store.keep(99, 9, now_s=1)


def test_preempted_session_is_queued_again_at_its_place_under_its_name(any_store: SessionStore) -> None:
    first = warned(any_store, PREEMPTED)
    other = any_store.submit([ask("bob", fgpu_milli=2000)], now_s=20)[0]
    decisions = [End(first.id, PREEMPTED, "why", requeue=True)]
    ended, again = any_store.reclaim(decisions, any_store.version(), now_s=100)
    assert (ended.id, ended.state) == (first.id, S.TERMINATING)
    assert again == Session(
        other.id + 1,
        first.request,
        S.PENDING,
        first.submitted_at_s,
        True,
        replaces=first.id,
        place_of=first.id,
        queued_at_s=100,
    )
    assert again.place < other.place
    assert any_store.serving("alice", "work") == again
    assert any_store.held_sessions() == (again,)
    assert any_store.snapshot(100).sessions == (ended, other, again)


def test_session_queued_again_twice_keeps_its_first_place(any_store: SessionStore) -> None:
    first = warned(any_store, PREEMPTED)
    decisions = [End(first.id, PREEMPTED, "why", requeue=True)]
    _, second = any_store.reclaim(decisions, any_store.version(), now_s=100)
    any_store.move(first.id, S.TERMINATED, now_s=101)
    any_store.set_held(second.id, False, now_s=102)
    schedule(any_store, now_s=103)
    any_store.move(second.id, S.PREPARING, now_s=104)
    any_store.move(second.id, S.RUNNING, now_s=104)
    any_store.reclaim([Warn(second.id, PREEMPTED, 200)], any_store.version(), now_s=105)
    decisions = [End(second.id, PREEMPTED, "why", requeue=True)]
    _, third = any_store.reclaim(decisions, any_store.version(), now_s=200)
    assert (third.replaces, third.place_of, third.place) == (second.id, first.id, first.id)
    assert third.submitted_at_s == first.submitted_at_s


def test_queueing_again_ignores_the_pending_quota(any_store: SessionStore) -> None:
    session = warned(any_store, PREEMPTED)
    any_store.set_quotas([Quota(QuotaScope.USER, "*", max_pending=0)], now_s=11)
    decisions = [End(session.id, PREEMPTED, "why", requeue=True)]
    assert len(any_store.reclaim(decisions, any_store.version(), now_s=100)) == 2


def test_extended_time_limit_is_stored_and_moves_its_warning(
    any_store: SessionStore,
) -> None:
    session = warned(any_store, LIMIT)
    longer = any_store.extend(session.id, 3600, any_store.version(), now_s=20)
    assert (longer.extended_s, longer.ends_at_s, longer.ends_cause) == (3600, 3700, LIMIT)
    assert longer.request == session.request
    assert any_store.session(session.id) == longer
    again = any_store.extend(session.id, 60, any_store.version(), now_s=21)
    assert again.extended_s == 3660


def test_extended_time_limit_withdraws_no_other_warning(any_store: SessionStore) -> None:
    session = warned(any_store)
    longer = any_store.extend(session.id, 3600, any_store.version(), now_s=20)
    assert (longer.ends_at_s, longer.ends_cause) == (100, IDLE)


def test_extension_on_a_stale_version_or_of_a_session_not_running_is_refused(
    any_store: SessionStore,
) -> None:
    session = warned(any_store, LIMIT)
    version = any_store.version()
    any_store.keep(session.id, 5000, now_s=50)
    with pytest.raises(StaleVersion, match="planned on version"):
        any_store.extend(session.id, 3600, version, now_s=51)
    any_store.move(session.id, S.TERMINATING, now_s=60, cause=EndCause.USER)
    with pytest.raises(StaleVersion, match="does not run"):
        any_store.extend(session.id, 3600, any_store.version(), now_s=61)


def test_every_reclaim_step_is_logged(store: Store) -> None:
    session = running(store)
    before = store.last_event_id()
    store.note_idle(session.id, 8, now_s=8)
    store.note_idle(session.id, 9, now_s=9)
    store.reclaim([Warn(session.id, IDLE, 100)], store.version(), now_s=10)
    store.keep(session.id, 500, now_s=11)
    store.note_idle(session.id, None, now_s=12)
    store.extend(session.id, 60, store.version(), now_s=12)
    store.reclaim([Warn(session.id, LIMIT, 100)], store.version(), now_s=13)
    store.reclaim([WithdrawWarning(session.id)], store.version(), now_s=14)
    store.reclaim([Warn(session.id, PREEMPTED, 100)], store.version(), now_s=15)
    store.reclaim([End(session.id, PREEMPTED, "why", True)], store.version(), now_s=100)
    log = store.events(after_id=before)
    assert [(e.at_s, e.session_id, e.kind, e.reason, e.to_state) for e in log] == [
        (8, session.id, "idle", "IDLE", None),
        (10, session.id, "ends", "IDLE", None),
        (11, session.id, "kept", "IDLE", None),
        (11, session.id, "ends", None, None),
        (12, session.id, "idle", None, None),
        (12, session.id, "extended", "TIME_LIMIT", None),
        (13, session.id, "ends", "TIME_LIMIT", None),
        (14, session.id, "ends", None, None),
        (15, session.id, "ends", "PREEMPTED", None),
        (100, session.id, "moved", "PREEMPTED", S.TERMINATING),
        (100, session.id + 1, "submitted", f"replaces {session.id}", S.PENDING),
    ]


def test_a_warning_outlives_the_process(url: str) -> None:
    with opened(url) as store:
        session = warned(store)
        kept = store.note_idle(session.id, 7, now_s=11)
    with opened(url) as store:
        assert store.session(session.id) == kept
