"""Warnings, their withdrawal, ends by the rules, and queueing again."""

from __future__ import annotations

import pytest
from store_worlds import S, ask, node, run

from fgpu_scheduler.core.model import EndCause, Quota, QuotaScope, Session
from fgpu_scheduler.core.reclaim import FOR_GOOD_S, End, Warn, WithdrawWarning
from fgpu_scheduler.errors import StaleVersion
from fgpu_scheduler.store.store import Store

IDLE, PREEMPTED, LIMIT = EndCause.IDLE, EndCause.PREEMPTED, EndCause.TIME_LIMIT


def running(store: Store) -> Session:
    store.set_nodes([node()], now_s=0)
    return run(store, ask("alice", "work"), now_s=5)


def warned(store: Store, cause: EndCause = IDLE, *, ends_at_s: int = 100) -> Session:
    session = running(store)
    return store.reclaim([Warn(session.id, cause, ends_at_s)], store.version(), now_s=10)[0]


@pytest.mark.parametrize("cause", [IDLE, PREEMPTED, LIMIT])
def test_warned_session_ends_at_the_announced_time(store: Store, cause: EndCause) -> None:
    session = warned(store, cause)
    (ended,) = store.reclaim([End(session.id, cause, "why")], store.version(), now_s=100)
    assert (ended.state, ended.end_cause, ended.message) == (S.TERMINATING, cause, "why")
    assert ended.placement == session.placement
    assert store.session(session.id) == ended


@pytest.mark.parametrize(("cause", "now_s"), [(IDLE, 99), (LIMIT, 100), (PREEMPTED, 500)])
def test_end_earlier_or_for_another_cause_than_warned_is_refused(
    store: Store, cause: EndCause, now_s: int
) -> None:
    session = warned(store)
    version = store.version()
    with pytest.raises(StaleVersion, match="was not warned"):
        store.reclaim([End(session.id, cause, "why")], version, now_s=now_s)
    assert store.session(session.id) == session
    assert store.version() == version


def test_reclaim_on_a_stale_version_is_refused(store: Store) -> None:
    session = warned(store)
    version = store.version()
    kept = store.keep(session.id, 5000, now_s=50)
    with pytest.raises(StaleVersion, match="planned on version"):
        store.reclaim([End(session.id, IDLE, "why")], version, now_s=100)
    assert store.session(session.id) == kept


def test_reclaim_round_is_written_whole_or_not_at_all(store: Store) -> None:
    session = warned(store)
    other = store.submit([ask("bob")], now_s=11)[0]
    version = store.version()
    with pytest.raises(StaleVersion, match="does not run"):
        store.reclaim([WithdrawWarning(session.id), Warn(other.id, IDLE, 50)], version, now_s=12)
    assert store.session(session.id) == session
    assert store.version() == version
    assert store.reclaim([], version, now_s=12) == ()
    assert store.version() == version


def test_keep_running_withdraws_an_idle_warning(store: Store) -> None:
    session = warned(store)
    kept = store.keep(session.id, 900, now_s=20)
    assert (kept.kept_until_s, kept.ends_at_s, kept.ends_cause) == (900, None, None)
    assert store.session(session.id) == kept
    version = store.version()
    assert store.keep(session.id, 800, now_s=21).kept_until_s == 900
    assert store.version() == version
    assert store.keep(session.id, 1000, now_s=21).kept_until_s == 1000
    assert store.keep(session.id, FOR_GOOD_S, now_s=22).kept_until_s == FOR_GOOD_S
    assert store.keep(session.id, 1000, now_s=22).kept_until_s == FOR_GOOD_S
    assert store.keep(session.id, None, now_s=23).kept_until_s == 23
    assert store.keep(session.id, None, now_s=24).kept_until_s == 23


def test_keep_running_counts_after_a_choice_that_no_longer_does(store: Store) -> None:
    """A session that its owner had never parked, and then parked."""
    session = warned(store)
    store.keep(session.id, FOR_GOOD_S, now_s=20)
    store.reclaim([Warn(session.id, IDLE, 100)], store.version(), now_s=21)
    assert store.keep(session.id, 900, now_s=22).kept_until_s == 900


def test_a_session_that_is_queued_again_is_still_never_parked(store: Store) -> None:
    session = warned(store, PREEMPTED)
    store.keep(session.id, FOR_GOOD_S, now_s=20)
    (_, again) = store.reclaim([End(session.id, PREEMPTED, "why", requeue=True)], store.version(), now_s=100)
    assert store.session(again.id).kept_until_s == FOR_GOOD_S


@pytest.mark.parametrize("cause", [PREEMPTED, LIMIT])
def test_keep_running_withdraws_no_other_warning(store: Store, cause: EndCause) -> None:
    session = warned(store, cause)
    kept = store.keep(session.id, 900, now_s=20)
    assert (kept.kept_until_s, kept.ends_at_s, kept.ends_cause) == (900, 100, cause)


def test_preempted_session_is_queued_again_at_its_place_under_its_name(store: Store) -> None:
    first = warned(store, PREEMPTED)
    other = store.submit([ask("bob", fgpu_milli=2000)], now_s=20)[0]
    decisions = [End(first.id, PREEMPTED, "why", requeue=True)]
    ended, again = store.reclaim(decisions, store.version(), now_s=100)
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
    assert store.serving("alice", "work") == again
    assert store.held_sessions() == (again,)
    assert store.snapshot(100).sessions == (ended, other, again)


def test_queueing_again_ignores_the_pending_quota(store: Store) -> None:
    session = warned(store, PREEMPTED)
    store.set_quotas([Quota(QuotaScope.USER, "*", max_pending=0)], now_s=11)
    decisions = [End(session.id, PREEMPTED, "why", requeue=True)]
    assert len(store.reclaim(decisions, store.version(), now_s=100)) == 2


def test_extended_time_limit_is_stored_and_moves_its_warning(
    store: Store,
) -> None:
    session = warned(store, LIMIT)
    longer = store.extend(session.id, 3600, store.version(), now_s=20)
    assert (longer.extended_s, longer.ends_at_s, longer.ends_cause) == (3600, 3700, LIMIT)
    assert longer.request == session.request
    assert store.session(session.id) == longer
    again = store.extend(session.id, 60, store.version(), now_s=21)
    assert again.extended_s == 3660


def test_extended_time_limit_withdraws_no_other_warning(store: Store) -> None:
    session = warned(store)
    longer = store.extend(session.id, 3600, store.version(), now_s=20)
    assert (longer.ends_at_s, longer.ends_cause) == (100, IDLE)


def test_extension_on_a_stale_version_or_of_a_session_not_running_is_refused(
    store: Store,
) -> None:
    session = warned(store, LIMIT)
    version = store.version()
    store.keep(session.id, 5000, now_s=50)
    with pytest.raises(StaleVersion, match="planned on version"):
        store.extend(session.id, 3600, version, now_s=51)
    store.move(session.id, S.TERMINATING, now_s=60, cause=EndCause.USER)
    with pytest.raises(StaleVersion, match="does not run"):
        store.extend(session.id, 3600, store.version(), now_s=61)


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
