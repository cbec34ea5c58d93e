"""The lengths of the newest runs in every snapshot."""

from __future__ import annotations

from store_worlds import ask, end, node, opened, run

from fgpu_scheduler.core.run_lengths import PastRun
from fgpu_scheduler.store.store import Store


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
