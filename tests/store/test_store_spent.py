"""Reading which shares sessions held in a period, on both databases."""

from __future__ import annotations

from dataclasses import replace

import pytest
from store_worlds import ask, end, node, run

from fgpu_scheduler.core.model import EndCause, SessionState
from fgpu_scheduler.core.records import SessionMeasurements
from fgpu_scheduler.store import history
from fgpu_scheduler.store.history import History, Meters, spent_between
from fgpu_scheduler.store.store import Store


def test_sessions_holding_shares_in_a_period_are_listed_with_their_gpu_share(store: Store) -> None:
    store.set_nodes([node("n1", devices=2)], now_s=0)
    asked = replace(ask("alice", "early", fgpu_milli=250), groups=("class",))
    early, over = run(store, asked, now_s=100), run(store, ask("bob", fgpu_milli=1000), now_s=150)
    waiting = store.submit([ask("carol", fgpu_milli=2000)], now_s=160)[0]
    end(store, early.id, now_s=200)
    later = run(store, ask("alice", "later", fgpu_milli=500), now_s=300)
    found = tuple(spent_between(store, 100, 300))
    assert [one.session_id for one in found] == [early.id, over.id]
    first, second = found
    assert (first.user, first.hub_groups, first.gpu_millionths, first.fgpu_milli) == (
        "alice",
        ("class",),
        250_000,
        250,
    )
    assert (first.waits_since_s, first.scheduled_at_s, first.started_at_s, first.ended_at_s) == (
        100,
        100,
        100,
        200,
    )
    assert (second.gpu_millionths, second.ended_at_s) == (1_000_000, None)
    assert [one.session_id for one in spent_between(store, 200, 301)] == [over.id, later.id]
    assert waiting.id not in [one.session_id for one in spent_between(store, 0, 10**9)]


def test_share_of_a_removed_gpu_comes_from_the_meter_or_its_compute_percent(store: Store) -> None:
    store.set_nodes([node("n1", devices=1), node("n2", devices=1)], now_s=0)
    noted = run(store, ask("alice", fgpu_milli=500), now_s=10)
    end(store, noted.id, now_s=20)
    other = run(store, ask("bob", fgpu_milli=300), now_s=30)
    end(store, other.id, now_s=40)
    Meters(store).save([SessionMeasurements(noted.id, 20, gpu_millionths=480_000, limit_mib=4096)])
    store.set_nodes([], now_s=50)
    assert [one.gpu_millionths for one in spent_between(store, 0, 100)] == [480_000, 300_000]


def test_each_session_has_its_own_shares_across_read_batches(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history, "AT_ONCE", 2)
    store.set_nodes([node("n1", devices=2)], now_s=0)
    amounts = (100, 2000, 300, 400, 500, 600, 700)
    for at_s, milli in enumerate(amounts):
        end(store, run(store, ask(fgpu_milli=milli), now_s=at_s).id, now_s=at_s + 1)
    assert [one.fgpu_milli for one in spent_between(store, 0, 100)] == list(amounts)


def test_waits_without_a_start_are_listed_until_they_ended(store: Store) -> None:
    store.set_nodes([node("n1", devices=1)], now_s=0)
    past = History(store)
    assert past.begins_at_s() is None
    over = run(store, ask("bob", fgpu_milli=1000), now_s=150)
    waiting, cancelled, early = (
        store.submit([ask("carol", name, fgpu_milli=2000)], now_s=at_s)[0]
        for name, at_s in (("a", 160), ("b", 170), ("c", 151))
    )
    store.move(early.id, SessionState.CANCELLED, now_s=155, cause=EndCause.USER)
    store.move(cancelled.id, SessionState.CANCELLED, now_s=300, cause=EndCause.USER)
    assert past.begins_at_s() == 150
    assert sorted(past.waits_without_start(200)) == [(160, None), (170, 300)]
    Meters(store).save([SessionMeasurements(over.id, 200, 1, 1, counts='{"sm": {}}')])
    assert past.counts_since(10_000) == {over.id: '{"sm": {}}'}
    end(store, over.id, now_s=400)
    assert past.counts_since(400) == {}
    assert past.waits_without_start(300) == ((160, None),)
    assert waiting.state is SessionState.PENDING
