from __future__ import annotations

from dataclasses import replace

import pytest

from fgpu_scheduler import Device, Node, NodeState, Placement, Request, Session, SessionState, Share, Snapshot
from fgpu_scheduler.service.healing import filled_from_store, node_changes

S = SessionState


def node(name: str, state: NodeState = NodeState.READY) -> Node:
    device = Device(f"GPU-{name}", name, 0, "A100", 40960, 2000)
    return Node(name, "default", 8000, 65536, (device,), state)


def session(number: int, state: SessionState, on: Node | None) -> Session:
    asked = Request("alice", f"s{number}", "python", "default", 1000, 1000, 1024)
    shares = (Share.of(on.devices[0], 1000),) if on else ()
    return Session(number, asked, state, 0, placement=Placement(on.id, shares) if on else None)


def test_a_node_that_does_not_answer_is_lost_and_only_what_was_not_started_goes_back() -> None:
    a, b = node("a"), node("b")
    sessions = [
        session(1, S.RUNNING, a),
        session(2, S.SCHEDULED, a),
        session(3, S.SCHEDULED, b),
        session(4, S.SCHEDULED, a),
        session(5, S.PREPARING, a),
        session(6, S.TERMINATING, a),
        session(7, S.PENDING, None),
    ]
    found = node_changes(Snapshot(0, 1, (a, b), tuple(sessions)), ["b"], launching=[4])
    assert (found.lost, found.back) == (("a",), ())
    assert found.requeued == (2,)
    assert (found.gone, found.ended) == ((), ())


def test_a_lost_node_that_answers_is_back_and_a_cordoned_one_stays_cordoned() -> None:
    nodes = (node("a", NodeState.LOST), node("b", NodeState.CORDONED), node("c"))
    found = node_changes(Snapshot(0, 1, nodes), ["a", "b", "c"], launching=())
    assert (found.lost, found.back) == ((), ("a",))
    changes = node_changes(Snapshot(0, 1, nodes), ["a", "b", "c"], launching=(), nodes_with_ghosts=["a"])
    assert changes.back == (), "it still runs what belongs to nobody"
    assert node_changes(Snapshot(0, 1, nodes), [], launching=()).lost == ("c",)


@pytest.mark.parametrize("answers", [True, False])
def test_what_is_gone_ends_whatever_it_was_doing_but_for_a_launch_in_this_process(answers: bool) -> None:
    a, b = node("a", NodeState.GONE), node("b")
    sessions = [
        session(1, S.RUNNING, a),
        session(2, S.TERMINATING, a),
        session(3, S.PULLING, a),
        session(4, S.PREPARING, a),
        session(5, S.RUNNING, b),
        session(6, S.PENDING, None),
    ]
    snapshot = Snapshot(0, 1, (a, b), tuple(sessions))
    found = node_changes(snapshot, ["a", "b"] if answers else ["b"], launching=[4])
    assert (found.gone, found.ended) == ((), (1, 2, 3)), "it stays GONE until that launch has come to nothing"
    assert (found.lost, found.back) == ((), ())
    found = node_changes(snapshot, ["b"], launching=[])
    assert (found.gone, found.ended) == (("a",), (1, 2, 3, 4))


def test_of_a_silent_node_what_was_there_last_is_kept_and_what_is_declared_counts() -> None:
    stored = node("a")
    unknown = replace(
        stored, resource_group="class", cpu_milli=0, memory_mib=0, devices=(), state=NodeState.LOST
    )
    (found,) = filled_from_store([unknown], [stored])
    assert found == replace(stored, resource_group="class", state=NodeState.LOST)
    assert filled_from_store([unknown], []) == (unknown,)
    only_gpus = replace(stored, cpu_milli=0, memory_mib=0, state=NodeState.LOST)
    assert filled_from_store([only_gpus], [stored]) == (replace(stored, state=NodeState.LOST),)
    declared = replace(stored, cpu_milli=4000, state=NodeState.LOST)
    assert filled_from_store([declared], [stored]) == (declared,)
    was_lost = replace(stored, state=NodeState.LOST)
    assert filled_from_store([stored], [was_lost]) == (was_lost,), "until it has been seen what it runs"
    answering = replace(stored, devices=())
    assert filled_from_store([answering, node("b")], [stored]) == (answering, node("b"))
