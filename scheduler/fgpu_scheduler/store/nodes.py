"""Stores the configured nodes and devices, and keeps removed ones while sessions hold them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import ColumnElement, Table, delete, select

from fgpu_scheduler.core.model import Node, NodeState
from fgpu_scheduler.errors import BadSettings
from fgpu_scheduler.store.rows import device_values, node_values
from fgpu_scheduler.store.schema import devices, nodes
from fgpu_scheduler.store.statements import HELD_DEVICES, put
from fgpu_scheduler.store.transaction import Write

Rows = dict[str, dict[str, Any]]
"""Rows of a table, by key."""


def replace_nodes(configured: Sequence[Node], write: Write, *, keep_states: bool = False) -> None:
    """Replace the stored nodes and devices, with an event for each node that changes.

    With ``keep_states`` known nodes keep their states.

    Raises:
        BadSettings: a node or a device is configured twice.
    """
    _refuse_twice("node", [node.id for node in configured])
    _refuse_twice("device", [device.uuid for node in configured for device in node.devices])
    old_nodes, old_devices = _rows(write, nodes, "id"), _rows(write, devices, "uuid")
    held = write.connection.execute(HELD_DEVICES).all()
    new_nodes = _nodes(configured, old_nodes, {node_id for node_id, _ in held}, keep_states=keep_states)
    new_devices = _devices(configured, old_devices, {uuid for _, uuid in held}, lost=new_nodes)
    changed = {row["node_id"] for row in _differing(old_devices, new_devices)}
    changed |= {row["id"] for row in _differing(old_nodes, new_nodes)}
    # Devices have a foreign key to nodes: delete them first, and add them last.
    _delete(write, devices, devices.c.uuid, old_devices, new_devices)
    _put(write, nodes, old_nodes, new_nodes)
    _put(write, devices, old_devices, new_devices)
    _delete(write, nodes, nodes.c.id, old_nodes, new_nodes)
    for node_id in sorted(changed):
        write.event("nodes", reason=f"{node_id}: {_change(node_id, old_nodes, new_nodes)}")


def _refuse_twice(what: str, names: Sequence[str]) -> None:
    for name in names:
        if names.count(name) > 1:
            raise BadSettings(f"the {what} {name!r} is configured twice")


def _nodes(configured: Sequence[Node], old: Rows, held: set[str], *, keep_states: bool) -> Rows:
    new = {}
    for node in configured:
        # An administrator set these states: a restart of the Hub keeps them.
        before = NodeState(old[node.id]["state"]) if node.id in old else None
        kept = keep_states or before in (NodeState.GONE, NodeState.CORDONED)
        new[node.id] = node_values(node, before if before is not None and kept else node.state)
    for node_id, row in old.items():
        if node_id not in new and node_id in held:
            # Reconciliation still finds out whether it answers; closed, it takes no sessions even then.
            state = row["state"] if row["closed"] and keep_states else NodeState.LOST.value
            new[node_id] = {**row, "state": state, "closed": True}
    return new


def _devices(configured: Sequence[Node], old: Rows, held: set[str], *, lost: Rows) -> Rows:
    new = {}
    for node in configured:
        for device in node.devices:
            row = old.get(device.uuid)
            # A held device stays on the session's node, where its shares count: on another node it would look free.
            stays = row is not None and device.uuid in held and row["node_id"] != node.id
            if not stays:
                # Keep an administrator's cordon.
                reason = device.cordon_reason if row is None else row["cordon_reason"]
                new[device.uuid] = {**device_values(device, node.id), "cordon_reason": reason}
    names = {node.id for node in configured}
    for uuid, row in old.items():
        if uuid in new:
            continue
        if row["node_id"] in lost and row["node_id"] not in names:
            new[uuid] = row
        elif uuid in held or (row["cordon_reason"] is not None and row["node_id"] in names):
            # A cordoned GPU stays cordoned if it disappears for a while.
            new[uuid] = {**row, "retired": True}
    return new


def _rows(write: Write, table: Table, key: str) -> Rows:
    return {row[key]: dict(row) for row in write.connection.execute(select(table)).mappings()}


def _differing(old: Rows, new: Rows) -> list[dict[str, Any]]:
    keys = sorted({*old, *new})
    return [
        row for key in keys if old.get(key) != new.get(key) for row in (old.get(key), new.get(key)) if row
    ]


def _put(write: Write, table: Table, old: Rows, new: Rows) -> None:
    put(write.connection, table, [row for name, row in new.items() if row != old.get(name)])


def _delete(write: Write, table: Table, key: ColumnElement[str], old: Rows, new: Rows) -> None:
    for name in old:
        if name not in new:
            write.connection.execute(delete(table).where(key == name))


def _change(node_id: str, old: Rows, new: Rows) -> str:
    if node_id not in new:
        return "removed"
    if node_id not in old:
        return "added"
    if new[node_id]["state"] != old[node_id]["state"]:
        return f"{old[node_id]['state']} -> {new[node_id]['state']}"
    if new[node_id]["closed"] != old[node_id]["closed"]:
        return "closed by its cluster" if new[node_id]["closed"] else "opened by its cluster"
    return "changed"
