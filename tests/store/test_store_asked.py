"""The counts of recently requested amounts, and the lengths of the newest runs, in every snapshot."""

from __future__ import annotations

from dataclasses import replace

import pytest
from store_worlds import ask, end, node, opened, run

from fgpu_scheduler.core import request_counts
from fgpu_scheduler.core.model import RequestCount
from fgpu_scheduler.core.run_lengths import PastRun
from fgpu_scheduler.store.store import Store


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_counts, "EVERY", 4)
    monkeypatch.setattr(request_counts, "NEWEST", 8)


def lately(milli: int, count: int, group: str = "lab") -> RequestCount:
    return RequestCount(group, milli, 1000, 1024, None, None, (), count)


def submit(store: Store, first: int, number: int, *, fgpu_milli: int = 500) -> None:
    for n in range(first, first + number):
        store.submit([ask(f"u{n}", fgpu_milli=fgpu_milli)], now_s=1)


def test_requested_amounts_are_recounted_every_few_requests(store: Store) -> None:
    store.set_nodes([node()], now_s=0)
    submit(store, 1, 3)
    assert store.snapshot(1).request_counts == ()
    submit(store, 4, 1)
    assert store.snapshot(1).request_counts == (lately(500, 4),)
    submit(store, 5, 3, fgpu_milli=250)
    assert store.snapshot(1).request_counts == (lately(500, 4),), "not with each one"
    submit(store, 8, 1)
    assert store.snapshot(1).request_counts == (lately(250, 3), lately(500, 5))
    submit(store, 9, 4, fgpu_milli=1000)
    assert store.snapshot(1).request_counts == (lately(250, 3), lately(500, 1), lately(1000, 4)), (
        "the newest 8"
    )


def test_requests_are_counted_by_every_amount_and_group(store: Store) -> None:
    first = ask("a", group="b")
    memory = replace(ask("b", group="a", fgpu_milli=0), gpu_memory_mib=2048)
    both = replace(memory, user="c", compute_percent=25)
    model = replace(ask("d", group="a"), gpu_models=("T4",))
    several = [replace(model, user=user, gpu_models=("T4", "A,1")) for user in "efgh"]
    store.submit([first, memory, both, model, *several], now_s=1)
    assert store.snapshot(1).request_counts == (
        replace(lately(0, 1, "a"), gpu_memory_mib=2048),
        replace(lately(0, 1, "a"), gpu_memory_mib=2048, compute_percent=25),
        replace(lately(500, 1, "a"), gpu_models=("T4",)),
        replace(lately(500, 4, "a"), gpu_models=("T4", "A,1")),
        lately(500, 1, "b"),
    )


def test_another_process_counts_the_same_requests(url: str) -> None:
    with opened(url) as store, opened(url) as other:
        for n in range(1, 14):
            submit(store, n, 1, fgpu_milli=100 * n)
            assert other.snapshot(1).request_counts == store.snapshot(1).request_counts
        assert len(store.snapshot(1).request_counts) == 8


def lasts(store: Store, user: str, *, from_s: int, to_s: int) -> PastRun:
    session = run(store, ask(user), now_s=from_s)
    end(store, session.id, now_s=to_s)
    return PastRun("lab", user, session.request.image, to_s - from_s, to_s, session.id)


def test_another_process_reads_the_same_runs_in_the_same_order(url: str) -> None:
    """This holds also if the clock was set back between two ends."""
    with opened(url) as store, opened(url) as other:
        store.set_nodes([node()], now_s=0)
        for user, to_s in (("a", 900), ("b", 500), ("c", 900)):
            lasts(store, user, from_s=100, to_s=to_s)
            assert other.snapshot(1000).runs == store.snapshot(1000).runs
        assert [one.user for one in store.snapshot(1000).runs.of_group["lab"]] == ["c", "a", "b"]
