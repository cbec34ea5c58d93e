"""The queue as administrators see it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from worlds import ADMIN, SITE, Build, node

from fgpu_scheduler import Account, Accounts, NodeState
from fgpuspawner.service.admin.objects import WaitingQueue
from fgpuspawner.service.admin.queue import LONG_WAIT_S, STUCK_AFTER_S, queues_object
from fgpuspawner.service.model import World


def queue_of(world: World, waited_s: int, **more: Any) -> WaitingQueue:
    """Return the only queue of a world, this many seconds after its requests were submitted."""
    submitted_at_s = max(s.submitted_at_s for s in world.snapshot.sessions)
    world = replace(world, snapshot=replace(world.snapshot, now_s=submitted_at_s + waited_s))
    (queue,) = queues_object(world, ADMIN, SITE, **more)["queues"]
    return queue


@pytest.mark.parametrize(
    ("waited_s", "mark"), [(STUCK_AFTER_S - 1, None), (STUCK_AFTER_S, "stuck"), (LONG_WAIT_S, "stuck")]
)
def test_requests_without_a_forecast_are_marked_stuck_sooner(waited_s: int, mark: str | None) -> None:
    world = Build(node(state=NodeState.CORDONED)).pending("alice", 1000).world()
    queue = queue_of(world, waited_s)
    assert [entry["mark"] for entry in queue["entries"]] == [mark]
    assert (queue["marked"], queue["longest_wait_s"], queue["nodes_ready"]) == (int(bool(mark)), waited_s, 0)


@pytest.mark.parametrize(("waited_s", "mark"), [(LONG_WAIT_S - 1, None), (LONG_WAIT_S, "long")])
def test_long_waits_are_marked(waited_s: int, mark: str | None) -> None:
    world = Build().running("bob", 2000).pending("alice", 1000).world(typical_length_s=7200)
    (entry,) = queue_of(world, waited_s)["entries"]
    assert entry["expected_start_at_s"] is not None
    assert entry["mark"] == mark


def test_shortened_queue_still_counts_all_requests() -> None:
    build = Build(node(state=NodeState.CORDONED))
    for n in range(3):
        build.pending(f"user{n}", 1000)
    queue = queue_of(build.world(), LONG_WAIT_S, most=1)
    assert (len(queue["entries"]), queue["length"], queue["marked"]) == (1, 3, 3)


def test_queue_has_users_reasons_and_requested_and_current_priorities() -> None:
    build = Build().running("bob", 2000).pending("alice", 1000).pending("cy", 1000)
    waits = build.sessions[1]
    build.sessions[1] = replace(waits, request=replace(waits.request, priority=9), asked_priority=0)
    queue = queue_of(build.world(), 1)
    first, second = queue["entries"]
    assert (first["priority"], first["asked_priority"], first["mark"]) == (9, 0, None)
    assert (first["wait_reason"], first["wait_text"]) == ("RESOURCES", "all GPUs are busy")
    assert [(e["user"], e["position"]) for e in (first, second)] == [("alice", 1), ("cy", 2)]
    assert (queue["group"], queue["length"], queue["fgpu_free"], queue["fgpu_used"]) == (
        "default",
        2,
        "0",
        "2",
    )


def test_queue_shows_the_share_and_the_use_of_each_account() -> None:
    world = Build().running("bob", 2000).pending("alice", 1000).world()
    accounts = Accounts({"physics": Account(3)})
    found = queue_of(world, 60, accounts=accounts)["accounts"]
    assert [(a.path, a.share_percent) for a in found] == [("default", 25), ("physics", 75)]
    assert queue_of(world, 60)["accounts"] == []
