"""What administrators change in the store: the audit log, the banner, quota edits, priorities, end messages."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
from store_worlds import S, ask, node, opened, run

from fgpu_scheduler import BadSettings, InvalidTransition, Quota, QuotaScope, plan
from fgpu_scheduler.core import reclaim
from fgpu_scheduler.core.model import EndCause, Session
from fgpu_scheduler.core.planner import Policy
from fgpu_scheduler.store.administration import MOST_BANNER_TEXT, Audit, Banner, BannerLevel, Notice
from fgpu_scheduler.store.hub_requests import EndMessages
from fgpu_scheduler.store.quotas import QuotaEdits, QuotaSource, listed_quotas
from fgpu_scheduler.store.store import Store
from fgpu_scheduler.store.transaction import END_MESSAGE_VALID_S, MOST_DETAILS

EACH = Quota(QuotaScope.USER, "*", None, max_fgpu_milli=2000)
ALICE = Quota(QuotaScope.USER, "alice", "lab", max_sessions=3)


def audited(store: Store, **asked: str) -> list[tuple[str, str, str, str]]:
    return [(a.actor, a.action, a.target, a.details) for a in Audit(store).lines(limit=99, **asked)]


# --- The audit log ---


def test_audit_log_pages_are_newest_first(store: Store) -> None:
    audit, before = Audit(store), store.version()
    for n in range(5):
        audit.add(actor="root", action="node.cordon", target=f"node n{n}", details="said", now_s=50 + n)
    assert store.version() == before, "the log of what was done is nothing to plan anew for"
    newest = audit.lines(limit=2)
    assert [(line.at_s, line.target) for line in newest] == [(54, "node n4"), (53, "node n3")]
    assert [line.target for line in audit.lines(limit=9, before_id=newest[-1].id)] == [
        "node n2",
        "node n1",
        "node n0",
    ]


def test_audit_log_filters_by_actor_action_and_text(store: Store) -> None:
    audit = Audit(store)
    audit.add(actor="root", action="node.cordon", target="node n1", now_s=1)
    audit.add(actor="eve", action="nodes", target="node 100%", details="Für ALLE", now_s=2)
    audit.add(actor="eve", action="banner.set", target="banner", details="a_b", now_s=3)
    assert [line[1] for line in audited(store, actor="eve")] == ["banner.set", "nodes"]
    assert [line[1] for line in audited(store, action="node")] == ["node.cordon"]
    assert [line[1] for line in audited(store, text="NODE")] == ["nodes", "node.cordon"]
    assert [line[1] for line in audited(store, text="100%")] == ["nodes"]
    assert [line[1] for line in audited(store, text="Für")] == ["nodes"]
    audit.add(actor="eve", action="nodes", target="quota of Ärztin", now_s=4)
    assert len(audited(store, text="Ärztin")) == 1
    assert [line[1] for line in audited(store, text="a_")] == ["banner.set"], "no pattern, but a text"


def test_audit_log_filters_by_resource_group(store: Store) -> None:
    audit = Audit(store)
    for n, group in enumerate(("lab", "class", None, "lab")):
        audit.add(actor="root", action="node.cordon", target=f"n{n}", group=group, now_s=n)

    def found(**asked: Any) -> list[str]:
        return [line.target for line in audit.lines(limit=9, **asked)]

    assert found() == found(groups=None) == ["n3", "n2", "n1", "n0"]
    assert found(groups=["lab"]) == ["n3", "n0"]
    assert found(groups=["lab", "class"], text="n1") == ["n1"]
    assert found(groups=["other"]) == found(groups=[]) == []
    assert [line.resource_group for line in audit.lines(limit=2)] == ["lab", None]


def test_audit_log_text_is_one_line_of_bounded_length(store: Store) -> None:
    Audit(store).add(actor="root", action="session.end", target="a\nb\0c", details="<script>" * 4000, now_s=1)
    ((_, _, target, details),) = audited(store)
    assert (target, len(details), details[:8]) == ("a b c", MOST_DETAILS, "<script>")


# --- The banner ---


def test_banner_is_shown_until_it_expires_or_is_taken_down(store: Store) -> None:
    banner = Banner(store)
    assert banner.at(50) is None
    banner.put(Notice(" Down\n at 3 ", BannerLevel.WARNING, 100), by="root", now_s=50)
    assert banner.at(99) == Notice("Down at 3", BannerLevel.WARNING, 100, "root", 50)
    assert banner.at(100) is None
    banner.put(Notice("Again"), by="eve", now_s=120)
    assert banner.at(10**9) == Notice("Again", BannerLevel.INFO, None, "eve", 120)
    banner.take_down(by="eve", now_s=130)
    banner.take_down(by="eve", now_s=131)
    assert banner.at(140) is None
    assert audited(store) == [
        ("eve", "banner.clear", "banner", ""),
        ("eve", "banner.set", "banner", "info: Again"),
        ("root", "banner.set", "banner", "warning: Down at 3"),
    ]


@pytest.mark.parametrize(
    ("notice", "field"),
    [
        (Notice(" \n"), "text"),
        (Notice("x" * (MOST_BANNER_TEXT + 1)), "text"),
        (Notice("x", until_at_s=50), "until"),
    ],
)
def test_empty_too_long_or_expired_banner_is_refused(store: Store, notice: Notice, field: str) -> None:
    Banner(store).put(Notice("stays"), by="root", now_s=40)
    with pytest.raises(BadSettings, match=f"^{field}: "):
        Banner(store).put(notice, by="root", now_s=50)
    found = Banner(store).at(50)
    assert found is not None
    assert found.text == "stays"


# --- Quotas over the file's ---


def sources(store: Store, file: tuple[Quota, ...]) -> list[tuple[QuotaSource, Quota]]:
    return [(one.source, one.quota) for one in listed_quotas(file, QuotaEdits(store).all())]


def test_quota_of_the_file_is_edited_removed_and_restored(store: Store) -> None:
    file, edits = (ALICE, EACH), QuotaEdits(store)
    store.set_quotas(file, now_s=1)
    stricter = replace(EACH, max_fgpu_milli=500)
    more = Quota(QuotaScope.GROUP, "class", None, max_pending=1)
    edits.put(stricter, file=file, by="root", now_s=2)
    edits.remove(ALICE, file=file, by="root", now_s=3)
    edits.put(more, file=file, by="eve", now_s=4)
    assert store.snapshot(5).quotas == (more, stricter)
    assert sources(store, file) == [
        (QuotaSource.ADDED, more),
        (QuotaSource.EDITED, stricter),
        (QuotaSource.REMOVED, ALICE),
    ]
    edits.back_to_file(ALICE, file=file, by="eve", now_s=6)
    edits.remove(more, file=file, by="eve", now_s=7)
    edits.back_to_file(EACH, file=file, by="eve", now_s=8)
    assert store.snapshot(9).quotas == (EACH, ALICE)
    assert audited(store)[-1] == ("root", "quota.set", "each user", "0.5 fGPU")
    assert [line[1] for line in audited(store)] == [
        "quota.back",
        "quota.remove",
        "quota.back",
        "quota.set",
        "quota.remove",
        "quota.set",
    ]


def test_quota_changes_are_applied_together_or_not_at_all(store: Store) -> None:
    file, edits = (ALICE, EACH), QuotaEdits(store)
    store.set_quotas(file, now_s=1)
    before = store.version()
    stricter, more = replace(EACH, max_fgpu_milli=500), Quota(QuotaScope.GROUP, "class", None, max_pending=1)
    for wrong in (replace(more, name="x" * 256), replace(more, max_pending=None), stricter):
        with pytest.raises(BadSettings):
            edits.put_all([stricter, wrong], without=[ALICE], file=file, by="root", now_s=2)
    assert (store.version(), edits.all(), audited(store)) == (before, (), [])
    edits.put_all([stricter, more], without=[ALICE], file=file, by="root", now_s=3)
    assert store.snapshot(4).quotas == (more, stricter)
    assert [source for source, _ in sources(store, file)] == [
        QuotaSource.ADDED,
        QuotaSource.EDITED,
        QuotaSource.REMOVED,
    ]
    assert [line[1] for line in audited(store)] == ["quota.remove", "quota.set", "quota.set"]
    edits.put_all([ALICE], without=[more], file=file, by="eve", now_s=5)
    assert store.snapshot(6).quotas == (stricter, ALICE)


def test_quota_edits_survive_a_restart_with_a_newer_file(url: str) -> None:
    with opened(url) as store:
        store.set_quotas([EACH], now_s=1)
        QuotaEdits(store).put(replace(EACH, max_fgpu_milli=500), file=[EACH], by="root", now_s=2)
    with opened(url) as store:
        store.set_quotas([replace(EACH, max_fgpu_milli=4000), ALICE], now_s=3)
        assert store.snapshot(4).quotas == (replace(EACH, max_fgpu_milli=500), ALICE)


# --- Priorities ---


def test_session_given_a_higher_priority_is_placed_first(store: Store) -> None:
    store.set_nodes([node("n1", devices=1)], now_s=0)
    holder = run(store, ask("zoe", fgpu_milli=1000))
    first, second = store.submit([ask("alice", fgpu_milli=1000), ask("bob", fgpu_milli=1000)], now_s=2)
    store.snapshot(2)
    changed = store.set_priority(second.id, 5, by="root", now_s=3)
    assert (changed.request.priority, changed.own_request.priority) == (5, 0)
    assert store.session(second.id) == changed
    assert store.set_priority(second.id, 5, by="root", now_s=4) == changed
    store.move(holder.id, S.TERMINATING, now_s=5, cause=EndCause.USER)
    store.move(holder.id, S.TERMINATED, now_s=5)
    (placed,) = store.commit(plan(store.snapshot(6), Policy()), now_s=6)
    assert placed.id == second.id
    assert store.session(first.id).request.priority == 0  # type: ignore[union-attr]
    assert audited(store) == [("root", "session.priority", f"session {second.id} of bob", "0 -> 5")]
    with pytest.raises(InvalidTransition):
        store.set_priority(second.id, 7, by="root", now_s=7)


# --- End messages ---


def test_concurrent_writes_of_the_same_row_both_succeed(url: str) -> None:
    with opened(url) as store, ThreadPoolExecutor(4) as pool:
        banner, messages = Banner(store), EndMessages(store)

        def write(n: int) -> None:
            banner.put(Notice(f"text {n}"), by="root", now_s=1)
            messages.put(7, f"text {n}", now_s=1)
            messages.drop(7)
            banner.take_down(by="root", now_s=1)

        for done in [pool.submit(write, n) for n in range(80)]:
            done.result()
        assert banner.at(1) is None


def test_end_message_of_an_administrator_reaches_the_owner(store: Store) -> None:
    store.set_nodes([node("n1", devices=1)], now_s=0)
    runs = run(store, ask("alice", fgpu_milli=500))
    messages = EndMessages(store)
    messages.put(runs.id, "first", now_s=4)
    messages.put(runs.id, "repair at 3", now_s=4)
    ended = store.move(runs.id, S.TERMINATING, now_s=5, cause=EndCause.USER)
    assert (ended.message, store.move(runs.id, S.TERMINATED, now_s=6).message) == ("repair at 3",) * 2


def test_end_message_is_ignored_for_another_end_cause_or_when_dropped_or_old(store: Store) -> None:
    store.set_nodes([node("n1", devices=2)], now_s=0)
    lost, kept, late = (run(store, ask(user, fgpu_milli=500)) for user in ("alice", "bob", "carol"))
    messages = EndMessages(store)
    for session in (lost, kept, late):
        messages.put(session.id, "repair at 3", now_s=4)
    messages.drop(kept.id)
    ended = store.move(lost.id, S.TERMINATING, now_s=5, cause=EndCause.OOM, message="out of memory")
    assert ended.message == "out of memory"
    assert store.move(kept.id, S.TERMINATING, now_s=5, cause=EndCause.USER).message is None
    assert (
        store.move(late.id, S.TERMINATING, now_s=4 + END_MESSAGE_VALID_S + 1, cause=EndCause.USER).message
        is None
    )


def test_session_queued_again_keeps_its_changed_priority() -> None:
    given = Session(7, ask(), S.RUNNING, 1, asked_priority=0)
    given = replace(given, request=replace(given.request, priority=9))
    again = reclaim.requeued(given, now_s=60)
    assert (again.request.priority, again.own_request) == (9, ask())
    assert (again.submitted_at_s, again.waits_since_s) == (1, 60), "it ran meanwhile"
