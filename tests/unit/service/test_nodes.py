"""Nodes as administrators see them, with isolation and sessions."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from worlds import Build, gpu, node

from fgpu_scheduler import NodeAction, NodeState, SessionState, node_actions_of
from fgpuspawner.isolation.choice import MOST_PROBLEMS, MOST_TEXT, VERDICTS, note_verdict
from fgpuspawner.service.admin.nodes import nodes_object


def test_node_lists_its_sessions_per_gpu_and_its_actions() -> None:
    two = node("n1", "default", gpu("n1"), gpu("n1", 1))
    world = Build(two, node("n2", state=NodeState.LOST)).running("alice", 500).running("bob", 1000).world()
    first, second = nodes_object(world, [])["nodes"]
    assert [[s["user"] for s in d["sessions"]] for d in first["devices"]] == [["alice", "bob"], []]
    assert (first["actions"], first["can_drain"], first["sessions"]) == (["cordon"], True, 2)
    assert (second["actions"], second["can_drain"], second["verified"]) == (["gone"], False, None)


def test_node_shows_the_gpu_memory_of_its_parked_sessions() -> None:
    build = Build(node("n1"), node("n2")).running("alice", 500, state=SessionState.PARKED)
    build.sessions = [replace(build.sessions[0], parked_at_s=100, parked_mib=6349)]
    assert [n["parked_mib"] for n in nodes_object(build.world(), [])["nodes"]] == [6349, 0]


def test_cordoned_gpu_keeps_sessions_and_shows_its_reason() -> None:
    broken = replace(gpu("n1", 1), cordon_reason="the fan")
    world = Build(node("n1", "default", gpu("n1"), broken)).world()
    ((one, two),) = [n["devices"] for n in nodes_object(world, [])["nodes"]]
    assert (one["cordoned"], one["cordon_reason"], one["action"]) == (False, None, "cordon")
    assert (two["cordoned"], two["cordon_reason"], two["action"]) == (True, "the fan", "uncordon")
    assert (two["fgpu_used"], two["fgpu_total"]) == ("0", "2")


def test_node_actions_depend_on_its_state() -> None:
    assert {state: node_actions_of(replace(node("n1"), state=state)) for state in NodeState} == {
        NodeState.READY: (NodeAction.CORDON,),
        NodeState.CORDONED: (NodeAction.UNCORDON,),
        NodeState.LOST: (NodeAction.GONE,),
        NodeState.GONE: (),
    }


def test_node_closed_by_its_cluster_cannot_be_uncordoned() -> None:
    closed = replace(node("n1"), state=NodeState.CORDONED, closed=True)
    (shown,) = nodes_object(Build(closed).world(), [])["nodes"]
    assert (shown["state"], shown["closed"], shown["actions"]) == ("CORDONED", True, [])
    assert shown["state_text"] == "takes no new sessions: its cluster has closed it"
    lost = replace(closed, state=NodeState.LOST)
    assert node_actions_of(lost) == (NodeAction.GONE,)


def test_newest_verdict_of_each_node_is_kept(tmp_path: Path) -> None:
    build = Build(node("n1"), node("n2")).running("alice", 500).running("bob", 500, at="n2")
    alice, bob = build.sessions
    note_verdict(tmp_path, alice, "interposer", ["x" * 1000] * 99)
    note_verdict(tmp_path, bob, "mps", [])
    bad, good = VERDICTS.read(tmp_path)
    assert (bad.node_id, bad.session_id, len(bad.problems), len(bad.problems[0])) == (
        "n1",
        alice.id,
        MOST_PROBLEMS,
        MOST_TEXT,
    )
    assert (good.node_id, good.backend, good.problems) == ("n2", "mps", ())
    note_verdict(tmp_path, alice, "interposer", [])
    assert [v.problems for v in VERDICTS.read(tmp_path)] == [(), ()]


@pytest.mark.parametrize(
    "text", ["", "[", "{}", '[{"node_id": 1}]', '[{"node_id": "n", "at_s": "soon"}]', "[7]"]
)
def test_unreadable_verdicts_are_empty(tmp_path: Path, text: str) -> None:
    (tmp_path / VERDICTS.name).write_text(text)
    assert VERDICTS.read(tmp_path) == ()
