"""Conversion between rows of the tables and the scheduler's values."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple, fields
from enum import StrEnum
from operator import attrgetter, itemgetter
from typing import Any

from fgpu_scheduler.core.model import (
    Device,
    EndCause,
    Node,
    NodeState,
    Placement,
    Quota,
    QuotaScope,
    RefusedNode,
    Request,
    Session,
    SessionState,
    Share,
    ShareMode,
    Size,
    WaitReason,
)
from fgpu_scheduler.core.records import Event
from fgpu_scheduler.store.schema import sessions

EMPTY = "[]"

Used = Mapping[tuple[str, str, str], tuple[float, int]]
"""The usage of ended sessions by user, resource group and account, in fGPU x 1000 x seconds, decayed to a time."""


def event_of(row: Sequence[Any]) -> Event:
    """Return the event of a row with columns in the table's order."""
    id_, at_s, session_id, kind, *states, reason, user = row
    was, to = (SessionState(state) if state else None for state in states)
    return Event(id_, at_s, session_id, kind, was, to, reason, user)


def sessions_of(
    session_rows: Iterable[Sequence[Any]], share_rows: Iterable[Sequence[Any]]
) -> tuple[Session, ...]:
    """Return the sessions of rows in the tables' column order; shares in order of their position."""
    held: dict[int, list[Share]] = {}
    for session_id, _, uuid, fgpu_milli, memory_mib, compute_percent, mode in share_rows:
        share = Share(uuid, fgpu_milli, memory_mib, compute_percent, ShareMode(mode))
        held.setdefault(session_id, []).append(share)
    return tuple(_session(row, held) for row in session_rows)


_REQUEST = {f.name: "user_name" if f.name == "user" else f.name for f in fields(Request)}
"""The column of each field of a request."""
_LIFE = tuple(f.name for f in fields(Session) if f.name not in ("id", "request", "placement"))
"""The fields of a session that change in its life, which are columns of the same names."""
_life = attrgetter(*_LIFE)
_CHANGEABLE = ("fgpu_milli", "gpu_memory_mib", "compute_percent", "priority", "name")
"""The fields of a request that a resize, a rename or an administrator changes."""
_ENUMS: dict[str, type[StrEnum]] = {
    "state": SessionState,
    "wait_reason": WaitReason,
    "end_cause": EndCause,
    "ends_cause": EndCause,
}


def _columns(names: Iterable[str]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """Return a function from a row of `sessions` to these columns."""
    places = {column.name: place for place, column in enumerate(sessions.columns)}
    return itemgetter(*(places[name] for name in names))


_key_of, _request_of, _life_of = _columns(("id", "node_id")), _columns(_REQUEST.values()), _columns(_LIFE)


def _session(row: Sequence[Any], held: Mapping[int, list[Share]]) -> Session:
    id_, node_id = _key_of(row)
    asked = dict(zip(_REQUEST, _request_of(row), strict=True))
    for name in ("groups", "gpu_models", "folders"):
        asked[name] = texts_of(asked[name])
    life = dict(zip(_LIFE, _life_of(row), strict=True))
    for name, word in _ENUMS.items():
        if life[name] is not None:
            life[name] = word(life[name])
    life["sizes"] = sizes_of(life["sizes"])
    refused = life["refused"]
    life["refused"] = () if refused == EMPTY else tuple(RefusedNode(*n) for n in json.loads(refused))
    placement = None if node_id is None else Placement(node_id, tuple(held.get(id_, ())))
    return Session(id=id_, request=Request(**asked), placement=placement, **life)


def sizes_of(column: str) -> tuple[Size, ...]:
    """Return what a session held before. Almost none was resized or parked, so "[]" is not parsed."""
    return () if column == EMPTY else tuple(Size(*size) for size in json.loads(column))


def texts_of(column: str | None) -> tuple[str, ...]:
    """Return the texts of a column's array; null is none. Most sessions have none, so "[]" is not parsed."""
    return () if column in (None, EMPTY) else tuple(json.loads(column))


def request_values(request: Request) -> dict[str, Any]:
    """Return the columns of a session's request."""
    values = {column: getattr(request, name) for name, column in _REQUEST.items()}
    for name in ("gpu_models", "folders"):
        values[name] = json.dumps(values[name]) if values[name] else None
    return {**values, "groups": json.dumps(request.groups)}


def life_values(session: Session, before: Session | None = None) -> dict[str, Any]:
    """Return the columns that change in a session's life; given ``before``, only those that differ from it."""
    if before is None:
        values = dict(zip(_LIFE, _life(session), strict=True))
    else:
        pairs = zip(_LIFE, _life(session), _life(before), strict=True)
        values = {name: value for name, value, was in pairs if value is not was}
    for name, value in values.items():
        if isinstance(value, StrEnum):
            values[name] = value.value
    for name in ("refused", "sizes"):
        if name in values:
            found = values[name]
            values[name] = json.dumps([astuple(one) for one in found]) if found else EMPTY
    if before is not None and session.request is not before.request:
        asked, was_asked = session.request, before.request
        values |= {n: getattr(asked, n) for n in _CHANGEABLE if getattr(asked, n) != getattr(was_asked, n)}
    if before is None or session.placement is not before.placement:
        values["node_id"] = session.placement.node_id if session.placement else None
    return values


def share_values(session: Session) -> list[dict[str, Any]]:
    """Return the rows of `shares` for the session's placement."""
    found = session.placement.shares if session.placement else ()
    return [
        {**_fields(share), "session_id": session.id, "position": position, "mode": share.mode.value}
        for position, share in enumerate(found)
    ]


def quota_of(row: Iterable[Any]) -> Quota:
    """Return the quota of a row in the table's column order."""
    scope, name, resource_group, *limits = row
    return Quota(QuotaScope(scope), name, resource_group or None, *limits)


def quota_key(quota: Quota) -> tuple[str, str, str]:
    """Return the scope, name and resource group of a quota, unique among quotas; group "" is all groups."""
    return quota.scope.value, quota.name, quota.resource_group or ""


def nodes_of(node_rows: Iterable[Sequence[Any]], device_rows: Iterable[Sequence[Any]]) -> tuple[Node, ...]:
    """Return the nodes of rows in the tables' column order, by id; devices by index."""
    by_node: dict[str, list[Device]] = {}
    for uuid, node_id, index, model, memory_mib, capacity_milli, simulated, _, *more in device_rows:
        device = Device(uuid, node_id, index, model, memory_mib, capacity_milli, simulated, *more)
        by_node.setdefault(node_id, []).append(device)
    found = [
        Node(
            id_,
            group,
            cpu_milli,
            memory_mib,
            tuple(sorted(by_node.get(id_, ()), key=lambda d: (d.index, d.uuid))),
            NodeState.CORDONED if closed and state == NodeState.READY else NodeState(state),
            closed,
        )
        for id_, group, cpu_milli, memory_mib, state, closed in node_rows
    ]
    # Sorted here: the order of texts depends on a PostgreSQL database's collation.
    return tuple(sorted(found, key=lambda node: node.id))


def node_values(node: Node, state: NodeState) -> dict[str, Any]:
    """Return the row of a node in this state."""
    values = {**_fields(node), "state": state.value}
    del values["devices"]
    return values


def device_values(device: Device, node_id: str) -> dict[str, Any]:
    """Return the row of a device on this node."""
    values = {**_fields(device), "node_id": node_id, "retired": False}
    values["device_index"] = values.pop("index")
    return values


def _fields(value: Share | Node | Device) -> dict[str, Any]:
    """Return the fields of a value, which are columns of the same names."""
    return {field.name: getattr(value, field.name) for field in fields(value)}
