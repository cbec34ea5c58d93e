"""Configured nodes are stored, and what sessions hold on removed ones is kept."""

from __future__ import annotations

from dataclasses import replace

import pytest
from store_worlds import ask, assert_nothing_is_oversold, device, end, node, run, schedule

from fgpu_scheduler import NodeAction, act_on_gpu, act_on_node
from fgpu_scheduler.core.model import NodeState
from fgpu_scheduler.errors import BadSettings
from fgpu_scheduler.store.administration import Audit
from fgpu_scheduler.store.store import Store


def notes(store: Store) -> list[str | None]:
    return [event.reason for event in store.events(limit=1000) if event.kind == "nodes"]


def test_nodes_are_sorted_by_id_and_devices_by_index(store: Store) -> None:
    upper, lower = node("B", devices=12), node("a")
    shuffled = replace(upper, devices=upper.devices[::-1])
    store.set_nodes([lower, shuffled], now_s=1)
    assert store.snapshot(2).nodes == (upper, lower)
    assert notes(store) == ["B: added", "a: added"]


def test_configured_nodes_and_devices_are_stored_and_others_deleted(store: Store) -> None:
    store.set_nodes([node(devices=1), node("n2")], now_s=1)
    end(store, run(store, ask()).id)
    more = node(devices=2, cpu_milli=500)
    bigger = replace(more, devices=(replace(more.devices[0], capacity_milli=4000), more.devices[1]))
    for now_s, nodes in ((2, (more, node("n2"))), (3, (bigger, node("n2"))), (4, (node("n2"),))):
        store.set_nodes(nodes, now_s=now_s)
        assert store.snapshot(now_s).nodes == nodes
    assert notes(store) == ["n1: added", "n2: added", "n1: changed", "n1: changed", "n1: removed"]


def test_removed_node_stays_lost_while_sessions_hold_it(store: Store) -> None:
    store.set_nodes([node("n1")], now_s=1)
    running = run(store, ask())
    store.set_nodes([node("n2")], now_s=2)
    lost = replace(node("n1"), state=NodeState.LOST, closed=True)
    assert store.snapshot(3).nodes == (lost, node("n2"))
    assert store.session(running.id) == running
    store.set_nodes([node("n2")], now_s=3)
    assert [n.id for n in store.snapshot(3).nodes] == ["n1", "n2"]
    end(store, running.id)
    store.set_nodes([node("n2")], now_s=4)
    assert store.snapshot(5).nodes == (node("n2"),)
    assert notes(store) == ["n1: added", "n1: READY -> LOST", "n2: added", "n1: removed"]


def test_removed_device_stays_stored_while_held_but_takes_nothing_new(store: Store) -> None:
    store.set_nodes([node(devices=2)], now_s=1)
    running = run(store, ask(fgpu_milli=300))
    assert running.placement is not None
    held = running.placement.shares[0].device_uuid
    left = tuple(d for d in node(devices=2).devices if d.uuid != held)
    store.set_nodes([replace(node(), devices=left)], now_s=2)
    assert store.snapshot(3).nodes[0].devices == left
    store.submit([ask(f"user{number}") for number in range(3)], now_s=3)
    placed = [s.placement.shares[0].device_uuid for s in schedule(store) if s.placement]
    assert placed == [left[0].uuid] * 2
    store.set_nodes([node(devices=2)], now_s=4)
    assert store.snapshot(5).nodes == (node(devices=2),)
    assert_nothing_is_oversold(store)
    assert store.session(running.id) == running


def test_a_held_device_stays_on_its_node_and_a_free_one_moves(store: Store) -> None:
    store.set_nodes([node("n1", devices=1)], now_s=1)
    running = run(store, ask())
    moved = replace(node("n2"), devices=(replace(device(0), node_id="n2"),))
    store.set_nodes([moved], now_s=2)
    assert store.snapshot(3).nodes == (
        replace(node("n1", devices=1), state=NodeState.LOST, closed=True),
        replace(moved, devices=()),
    )
    end(store, running.id)
    store.set_nodes([moved], now_s=3)
    assert store.snapshot(4).nodes == (moved,)


def test_cordon_survives_a_restart(store: Store) -> None:
    store.set_nodes([node()], now_s=1)
    store.set_node_state("n1", NodeState.CORDONED, now_s=2)
    store.set_nodes([node()], now_s=3)
    assert store.snapshot(4).nodes[0].state is NodeState.CORDONED
    store.set_node_state("n1", NodeState.READY, now_s=5)
    assert store.snapshot(6).nodes == (node(),)
    assert notes(store) == ["n1: added", "n1: READY -> CORDONED", "n1: CORDONED -> READY"]


def test_duplicate_nodes_and_devices_are_refused(store: Store) -> None:
    with pytest.raises(BadSettings, match="node 'n1' is configured twice"):
        store.set_nodes([node(), node()], now_s=1)
    twice = replace(node("n2"), devices=(device(0),))
    with pytest.raises(BadSettings, match="device 'GPU-n1-0' is configured twice"):
        store.set_nodes([node(), twice], now_s=1)
    assert store.snapshot(1).nodes == ()


def test_cluster_state_and_cordon_do_not_overwrite_each_other(
    store: Store,
) -> None:
    def state(**more: object) -> NodeState:
        store.set_nodes([replace(node(), **more)], now_s=1, keep_states=True)  # type: ignore[arg-type]
        return store.snapshot(2).nodes[0].state

    cordon, uncordon = (NodeState.CORDONED, NodeState.READY), (NodeState.READY, NodeState.CORDONED)
    assert state() is NodeState.READY
    # Only the cluster closes and opens it.
    assert [state(closed=True), state()] == [NodeState.CORDONED, NodeState.READY]
    # Cordoned while the cluster has closed it: it stays cordoned when the cluster opens it.
    assert state(closed=True) is NodeState.CORDONED
    assert store.set_node_state("n1", cordon[0], now_s=3, only=cordon[1]) is NodeState.READY
    assert [state(closed=True), state()] == [NodeState.CORDONED] * 2
    # Uncordoned while the cluster has closed it: it stays closed.
    assert state(closed=True) is NodeState.CORDONED
    assert store.set_node_state("n1", uncordon[0], now_s=4, only=uncordon[1]) is NodeState.CORDONED
    assert [state(closed=True), state()] == [NodeState.CORDONED, NodeState.READY]
    # A silent node is lost, closed or not, and stays lost until it answers.
    assert state(closed=True) is NodeState.CORDONED
    store.set_node_state("n1", NodeState.LOST, now_s=5, only=NodeState.READY)
    assert [state(closed=True), state()] == [NodeState.LOST] * 2


def test_node_added_while_running_gets_its_given_state_and_others_keep_theirs(
    store: Store,
) -> None:
    store.set_nodes([node("n1")], now_s=1)
    lost = [replace(node(name), state=NodeState.LOST) for name in ("n1", "n2")]
    lost[1] = replace(lost[1], devices=())
    store.set_nodes(lost, now_s=2, keep_states=True)
    assert [n.state for n in store.snapshot(3).nodes] == [NodeState.READY, NodeState.LOST]


def test_only_the_cluster_opens_a_node_it_closed(store: Store) -> None:
    store.set_nodes([replace(node(), closed=True)], now_s=1)
    with pytest.raises(BadSettings, match="'n1' was closed by its cluster; open it there"):
        act_on_node(store, "n1", NodeAction.UNCORDON, by="root", now_s=2)
    assert act_on_node(store, "n1", NodeAction.CORDON, by="root", now_s=3) == "takes no new sessions"
    said = act_on_node(store, "n1", NodeAction.UNCORDON, by="root", now_s=4)
    assert said == "takes sessions again once its cluster opens it"
    assert store.snapshot(5).nodes[0].state is NodeState.CORDONED
    store.set_nodes([node()], now_s=6, keep_states=True)
    assert store.snapshot(7).nodes[0].state is NodeState.READY
    assert notes(store)[-1] == "n1: opened by its cluster"


def test_node_state_is_set_only_from_the_expected_state(store: Store) -> None:
    store.set_nodes([node()], now_s=1)
    assert store.set_node_state("n1", NodeState.CORDONED, now_s=2, only=NodeState.READY) is NodeState.READY
    before = store.version()
    was = store.set_node_state("n1", NodeState.LOST, now_s=3, only=NodeState.READY)
    assert (was, store.version()) == (NodeState.CORDONED, before)
    assert store.snapshot(4).nodes[0].state is NodeState.CORDONED


def test_node_that_answers_again_is_not_marked_gone(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store.set_nodes([node()], now_s=1)
    store.set_node_state("n1", NodeState.LOST, now_s=2)
    looked_at = store.snapshot(3)
    store.set_node_state("n1", NodeState.READY, now_s=3)
    with monkeypatch.context() as then:
        then.setattr(store, "snapshot", lambda now_s: looked_at)
        with pytest.raises(BadSettings, match="node 'n1' is READY; gone is for a node that is LOST"):
            act_on_node(store, "n1", NodeAction.GONE, by="root", now_s=4)
    assert store.snapshot(5).nodes[0].state is NodeState.READY
    assert Audit(store).lines(limit=1) == ()


def cordons(store: Store) -> list[str | None]:
    return [d.cordon_reason for n in store.snapshot(9).nodes for d in n.devices]


def test_gpu_cordon_survives_every_configuration_change(store: Store) -> None:
    store.set_nodes([node(devices=2)], now_s=1)
    first = node(devices=2).devices[0].uuid
    before = store.version()
    assert store.set_cordon(first, "the fan", now_s=2) is None
    assert store.version() > before
    assert cordons(store) == ["the fan", None]
    store.set_nodes([node(devices=2, cpu_milli=500)], now_s=3)
    assert cordons(store) == ["the fan", None]
    # The GPU disappears for a while: that does not repair it.
    gone = node(devices=2)
    store.set_nodes([replace(gone, devices=gone.devices[1:])], now_s=4)
    assert cordons(store) == [None]
    store.set_nodes([node(devices=2)], now_s=5)
    assert cordons(store) == ["the fan", None]
    assert store.set_cordon(first, None, now_s=6) == "the fan"
    assert cordons(store) == [None, None]
    assert f"n1: {first} takes sessions again" in notes(store)
    with pytest.raises(BadSettings, match="no GPU 'none'"):
        store.set_cordon("none", "x", now_s=7)
    store.set_cordon(first, "the fan", now_s=8)
    store.set_nodes([], now_s=9)
    assert store.snapshot(9).nodes == ()


def test_gpu_cordon_and_its_reason_are_in_the_audit_log(store: Store) -> None:
    store.set_nodes([node(devices=2)], now_s=1)
    uuid = node(devices=2).devices[1].uuid
    said = act_on_gpu(store, "n1", "1", NodeAction.CORDON, reason=" the  fan ", by="root", now_s=2)
    assert said == "takes no new sessions"
    act_on_gpu(store, "n1", uuid, NodeAction.UNCORDON, reason="", by="root", now_s=3)
    assert [(a.action, a.target, a.details) for a in Audit(store).lines(limit=5)] == [
        ("gpu.uncordon", "GPU 1 of node n1", uuid),
        ("gpu.cordon", "GPU 1 of node n1", f"{uuid}: the fan"),
    ]
