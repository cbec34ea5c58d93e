"""What administrators' pages are made of: who waits too long, whose quota is full, verdicts of nodes, node actions."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from worlds import ADMIN, SITE, Build, gpu, node

from fgpu_scheduler import NodeState, Quota, QuotaScope
from fgpu_scheduler.core.quota import Held, held_of
from fgpu_scheduler.store.quota_edits import QuotaEdit
from fgpuspawner.isolation.verified import MOST_PROBLEMS, MOST_TEXT, WRITTEN, note_verdict, read_verdicts
from fgpuspawner.node_actions import NodeAction, actions_of
from fgpuspawner.service.admin.banner import read_until
from fgpuspawner.service.admin.nodes_view import nodes_object
from fgpuspawner.service.admin.queue_view import LONG_WAIT_S, STUCK_AFTER_S, queues_object
from fgpuspawner.service.admin.quotas_view import key_of, quotas_object, spec_of
from fgpuspawner.service.model import World
from fgpuspawner.settings.queue import quota_of
from fgpuspawner.text.times import duration

EACH = Quota(QuotaScope.USER, "*", None, max_fgpu_milli=1000)


def queue_of(world: World, waited_s: int, **more: Any) -> dict[str, Any]:
    """Return the one queue of a world, so long after everybody in it has asked."""
    submitted_at_s = max(s.submitted_at_s for s in world.snapshot.sessions)
    (queue,) = queues_object(world, ADMIN, SITE, now_s=submitted_at_s + waited_s, **more)["queues"]
    return dict(queue)


# --- The queue ---


@pytest.mark.parametrize(
    ("waited_s", "mark"), [(STUCK_AFTER_S - 1, None), (STUCK_AFTER_S, "stuck"), (LONG_WAIT_S, "stuck")]
)
def test_who_waits_without_a_start_in_sight_is_marked_sooner(waited_s: int, mark: str | None) -> None:
    world = Build(node(state=NodeState.CORDONED)).pending("alice", 1000).world()
    queue = queue_of(world, waited_s)
    assert [entry["mark"] for entry in queue["entries"]] == [mark]
    assert (queue["marked"], queue["longest_wait_s"], queue["nodes_ready"]) == (int(bool(mark)), waited_s, 0)


@pytest.mark.parametrize(("waited_s", "mark"), [(LONG_WAIT_S - 1, None), (LONG_WAIT_S, "long")])
def test_who_waits_for_long_with_a_start_in_sight_is_marked(waited_s: int, mark: str | None) -> None:
    world = Build().running("bob", 2000).pending("alice", 1000).world(typical_length_s=7200)
    (entry,) = queue_of(world, waited_s)["entries"]
    assert entry["expected_start_at_s"] is not None
    assert entry["mark"] == mark


def test_a_queue_that_is_cut_counts_and_marks_all_who_wait() -> None:
    build = Build(node(state=NodeState.CORDONED))
    for n in range(3):
        build.pending(f"user{n}", 1000)
    queue = queue_of(build.world(), LONG_WAIT_S, most=1)
    assert (len(queue["entries"]), queue["length"], queue["marked"]) == (1, 3, 3)


def test_an_entry_tells_the_priority_that_was_asked_for_beside_the_one_that_counts() -> None:
    build = Build().running("bob", 2000).pending("alice", 1000)
    waits = build.sessions[-1]
    build.sessions[-1] = replace(waits, request=replace(waits.request, priority=9), asked_priority=0)
    (entry,) = queue_of(build.world(), 1)["entries"]
    assert (entry["priority"], entry["asked_priority"]) == (9, 0)


# --- Nodes ---


def test_a_node_tells_who_is_on_each_gpu_and_what_can_be_done_with_it() -> None:
    two = node("n1", "default", gpu("n1"), gpu("n1", 1))
    world = Build(two, node("n2", state=NodeState.LOST)).running("alice", 500).running("bob", 1000).world()
    first, second = nodes_object(world, [])["nodes"]
    assert [[s["user"] for s in d["sessions"]] for d in first["devices"]] == [["alice", "bob"], []]
    assert (first["actions"], first["can_drain"], first["sessions"]) == (["cordon"], True, 2)
    assert (second["actions"], second["can_drain"], second["verified"]) == (["gone"], False, None)


def test_every_state_of_a_node_has_its_own_actions() -> None:
    assert {state: actions_of(state) for state in NodeState} == {
        NodeState.READY: (NodeAction.CORDON,),
        NodeState.CORDONED: (NodeAction.UNCORDON,),
        NodeState.LOST: (NodeAction.GONE,),
        NodeState.GONE: (),
    }


# --- Verdicts ---


def test_the_last_verdict_of_each_node_is_kept(tmp_path: Path) -> None:
    build = Build(node("n1"), node("n2")).running("alice", 500).running("bob", 500, at="n2")
    alice, bob = build.sessions
    note_verdict(tmp_path, alice, "interposer", ["x" * 1000] * 99)
    note_verdict(tmp_path, bob, "mps", [])
    bad, good = read_verdicts(tmp_path)
    assert (bad.node_id, bad.session_id, len(bad.problems), len(bad.problems[0])) == (
        "n1",
        alice.id,
        MOST_PROBLEMS,
        MOST_TEXT,
    )
    assert (good.node_id, good.backend, good.problems) == ("n2", "mps", ())
    note_verdict(tmp_path, alice, "interposer", [])
    assert [v.problems for v in read_verdicts(tmp_path)] == [(), ()]


@pytest.mark.parametrize(
    "text", ["", "[", "{}", '[{"node_id": 1}]', '[{"node_id": "n", "at_s": "soon"}]', "[7]"]
)
def test_a_file_of_verdicts_that_cannot_be_read_says_nothing(tmp_path: Path, text: str) -> None:
    (tmp_path / WRITTEN).write_text(text)
    assert read_verdicts(tmp_path) == ()


# --- Quotas ---


def test_what_is_had_of_a_quota_is_counted_by_whom_it_counts() -> None:
    world = Build().running("alice", 500).running("bob", 1500).pending("alice", 1000).world()
    assert held_of(EACH, world.snapshot) == (Held("bob", 1500, 1, 0), Held("alice", 500, 1, 1))
    together = Quota(QuotaScope.ALL, "*", "default", max_sessions=2)
    assert held_of(together, world.snapshot) == (Held("*", 2000, 2, 1),)
    assert held_of(Quota(QuotaScope.USER, "carol", None, max_sessions=1), world.snapshot) == ()
    assert held_of(Quota(QuotaScope.USER, "bob", "other", max_sessions=1), world.snapshot) == ()


def test_a_quota_that_is_used_up_says_so_and_one_that_is_removed_counts_nobody() -> None:
    world = Build().running("alice", 500).running("bob", 1000).world()
    (found,) = quotas_object([EACH], [], world)["quotas"]
    assert {who["name"]: who["full"] for who in found["held"]} == {"bob": True, "alice": False}
    (removed,) = quotas_object([EACH], [QuotaEdit(EACH, removed=True)], world)["quotas"]
    assert (removed["in_force"], removed["held"], removed["file"]) == (False, [], "1 fGPU")


@pytest.mark.parametrize(
    "quota",
    [
        replace(EACH, max_sessions=1, max_pending=0, max_lifetime_s=60),
        Quota(QuotaScope.GROUP, "class", "lab", max_fgpu_milli=1234),
        Quota(QuotaScope.ALL, "*", "lab", max_sessions=3),
    ],
)
def test_the_object_of_a_quota_is_read_as_the_same_quota(quota: Quota) -> None:
    assert quota_of(spec_of(quota), "quota") == quota
    assert quota_of({**key_of(quota), "max_sessions": 7}, "quota").name == quota.name


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (-5, "0 s"),
        (59, "59 s"),
        (60, "1 min"),
        (125, "2 min 5 s"),
        (700, "11 min"),
        (7260, "2 h 01 min"),
        (90000, "25 h 00 min"),
        (200000, "2 d 7 h"),
    ],
)
def test_durations_are_as_exact_as_it_matters(seconds: int, words: str) -> None:
    assert duration(seconds) == words


@pytest.mark.parametrize(
    ("text", "at_s"),
    [
        ("", None),
        ("2026-05-01T18:00", 1777658400),
        ("2026-05-01T18:00+00:00", 1777658400),
        ("2026-05-01T20:00+02:00", 1777658400),
    ],
)
def test_a_banners_end_is_in_utc_unless_it_names_another_zone(text: str, at_s: int | None) -> None:
    assert read_until(text) == at_s
