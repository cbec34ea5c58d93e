"""What is configured becomes what is stored, and nothing that is held is forgotten."""

from __future__ import annotations

from dataclasses import replace

import pytest
from store_worlds import S, ask, assert_nothing_is_oversold, device, end, node, run, schedule

from fgpu_scheduler import NodeAction, act_on_node
from fgpu_scheduler.core.model import NodeState
from fgpu_scheduler.errors import BadSettings
from fgpu_scheduler.store.audit import Audit
from fgpu_scheduler.store.sessions import SessionStore
from fgpu_scheduler.store.store import Store


def notes(store: Store) -> list[str | None]:
    return [event.reason for event in store.events(limit=1000) if event.kind == "nodes"]


def test_nodes_come_by_id_and_devices_by_index(store: Store) -> None:
    upper, lower = node("B", devices=12), node("a")
    shuffled = replace(upper, devices=upper.devices[::-1])
    store.set_nodes([lower, shuffled], now_s=1)
    assert store.snapshot(2).nodes == (upper, lower)
    assert notes(store) == ["B: added", "a: added"]


def test_the_same_nodes_again_change_nothing(store: Store) -> None:
    store.set_nodes([node()], now_s=1)
    before = store.version()
    store.set_nodes([node()], now_s=2)
    assert store.version() == before


def test_changed_nodes_and_devices_are_taken_over(store: Store) -> None:
    store.set_nodes([node(devices=1)], now_s=1)
    changed = node(devices=2, cpu_milli=500)
    store.set_nodes([changed], now_s=2)
    assert store.snapshot(3).nodes == (changed,)
    assert notes(store) == ["n1: added", "n1: changed"]
    bigger = replace(changed, devices=(replace(changed.devices[0], capacity_milli=4000), changed.devices[1]))
    store.set_nodes([bigger], now_s=3)
    assert store.snapshot(3).nodes == (bigger,)


def test_a_node_that_is_no_longer_configured_goes(store: Store) -> None:
    store.set_nodes([node("n1"), node("n2")], now_s=1)
    end(store, run(store, ask()).id)
    store.set_nodes([node("n2")], now_s=2)
    assert store.snapshot(3).nodes == (node("n2"),)
    assert notes(store)[-1] == "n1: removed"


def test_a_node_that_goes_while_it_is_held_is_lost_until_it_is_free(store: Store) -> None:
    store.set_nodes([node("n1")], now_s=1)
    running = run(store, ask())
    store.set_nodes([node("n2")], now_s=2)
    assert store.snapshot(3).nodes == (replace(node("n1"), state=NodeState.LOST), node("n2"))
    assert store.session(running.id) == running
    store.set_nodes([node("n2")], now_s=3)
    assert [n.id for n in store.snapshot(3).nodes] == ["n1", "n2"]
    end(store, running.id)
    store.set_nodes([node("n2")], now_s=4)
    assert store.snapshot(5).nodes == (node("n2"),)
    assert notes(store) == ["n1: added", "n1: READY -> LOST", "n2: added", "n1: removed"]


def test_a_lost_node_that_is_configured_again_is_ready(store: Store) -> None:
    store.set_nodes([node("n1")], now_s=1)
    run(store, ask())
    store.set_nodes([], now_s=2)
    store.set_nodes([node("n1")], now_s=3)
    assert store.snapshot(4).nodes == (node("n1"),)


def test_a_device_that_goes_while_it_is_held_takes_nothing_new_and_is_not_forgotten(store: Store) -> None:
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


def test_a_device_that_goes_while_it_is_free_is_deleted(store: Store) -> None:
    store.set_nodes([node(devices=2)], now_s=1)
    store.set_nodes([node(devices=1)], now_s=2)
    assert store.snapshot(3).nodes == (node(devices=1),)


def test_a_held_device_stays_on_its_node_and_a_free_one_moves(store: Store) -> None:
    store.set_nodes([node("n1", devices=1)], now_s=1)
    running = run(store, ask())
    moved = replace(node("n2"), devices=(replace(device(0), node_id="n2"),))
    store.set_nodes([moved], now_s=2)
    assert store.snapshot(3).nodes == (
        replace(node("n1", devices=1), state=NodeState.LOST),
        replace(moved, devices=()),
    )
    end(store, running.id)
    store.set_nodes([moved], now_s=3)
    assert store.snapshot(4).nodes == (moved,)


def test_a_cordon_outlives_a_restart(store: Store) -> None:
    store.set_nodes([node()], now_s=1)
    store.set_node_state("n1", NodeState.CORDONED, now_s=2)
    store.set_nodes([node()], now_s=3)
    assert store.snapshot(4).nodes[0].state is NodeState.CORDONED
    store.set_node_state("n1", NodeState.READY, now_s=5)
    assert store.snapshot(6).nodes == (node(),)
    assert notes(store) == ["n1: added", "n1: READY -> CORDONED", "n1: CORDONED -> READY"]


def test_a_cordon_outlives_a_restart_while_its_machine_is_away(store: Store) -> None:
    store.set_nodes([node()], now_s=1)
    store.set_node_state("n1", NodeState.CORDONED, now_s=2)
    store.set_nodes([replace(node(), state=NodeState.LOST)], now_s=3)
    assert store.snapshot(4).nodes[0].state is NodeState.CORDONED


def test_the_state_that_a_node_has_changes_nothing(store: Store) -> None:
    store.set_nodes([node()], now_s=1)
    before = store.version()
    store.set_node_state("n1", NodeState.READY, now_s=2)
    assert store.version() == before


def test_an_unknown_node_is_named(store: Store) -> None:
    with pytest.raises(BadSettings, match="there is no node 'n9'"):
        store.set_node_state("n9", NodeState.LOST, now_s=1)


def test_nothing_may_be_configured_twice(store: Store) -> None:
    with pytest.raises(BadSettings, match="node 'n1' is configured twice"):
        store.set_nodes([node(), node()], now_s=1)
    twice = replace(node("n2"), devices=(device(0),))
    with pytest.raises(BadSettings, match="device 'GPU-n1-0' is configured twice"):
        store.set_nodes([node(), twice], now_s=1)
    assert store.snapshot(1).nodes == ()


def test_a_session_that_is_only_scheduled_holds_its_node(store: Store) -> None:
    store.set_nodes([node()], now_s=1)
    store.submit([ask()], now_s=1)
    assert schedule(store)[0].state is S.SCHEDULED
    store.set_nodes([], now_s=2)
    assert store.snapshot(3).nodes[0].state is NodeState.LOST


def test_a_state_is_set_only_where_the_node_is_still_as_it_was(any_store: SessionStore) -> None:
    any_store.set_nodes([node()], now_s=1)
    assert (
        any_store.set_node_state("n1", NodeState.CORDONED, now_s=2, only=NodeState.READY) is NodeState.READY
    )
    before = any_store.version()
    was = any_store.set_node_state("n1", NodeState.LOST, now_s=3, only=NodeState.READY)
    assert (was, any_store.version()) == (NodeState.CORDONED, before)
    assert any_store.snapshot(4).nodes[0].state is NodeState.CORDONED


def test_a_node_that_has_come_back_meanwhile_is_not_said_to_be_gone(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
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
