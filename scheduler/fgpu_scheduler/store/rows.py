"""How rows of the tables become the scheduler's values, and back."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fgpu_scheduler.core.model import (
    Device,
    EndCause,
    Node,
    NodeState,
    Placement,
    Quota,
    QuotaScope,
    Request,
    Session,
    SessionState,
    Share,
    ShareMode,
    WaitReason,
)
from fgpu_scheduler.core.records import Event

NO_GROUPS = "[]"

Used = Mapping[tuple[str, str], tuple[float, int]]
"""Of each user and resource group what ended sessions have used, in fGPU x 1000 x seconds, decayed to an instant."""


def event_of(row: Sequence[Any]) -> Event:
    """Return the event of a row of `events`, columns in the table's order."""
    id_, at_s, session_id, kind, from_state, to_state, reason, user = row
    return Event(
        id_,
        at_s,
        session_id,
        kind,
        SessionState(from_state) if from_state else None,
        SessionState(to_state) if to_state else None,
        reason,
        user,
    )


def sessions_of(
    session_rows: Iterable[Sequence[Any]], share_rows: Iterable[Sequence[Any]]
) -> tuple[Session, ...]:
    """Return the sessions of rows in the tables' column order; shares in order of their position."""
    held: dict[int, list[Share]] = {}
    for session_id, _, uuid, fgpu_milli, memory_mib, compute_percent, mode in share_rows:
        share = Share(uuid, fgpu_milli, memory_mib, compute_percent, ShareMode(mode))
        held.setdefault(session_id, []).append(share)
    return tuple(_session(row, held) for row in session_rows)


def _session(row: Sequence[Any], held: Mapping[int, list[Share]]) -> Session:
    (
        id_,
        user,
        server_name,
        image,
        resource_group,
        fgpu_milli,
        cpu_milli,
        memory_mib,
        state,
        submitted_at_s,
        is_held,
        attempt,
        node_id,
        wait_reason,
        scheduled_at_s,
        started_at_s,
        ended_at_s,
        end_cause,
        message,
        launched,
        replaces,
        gpu_memory_mib,
        compute_percent,
        gpu_model,
        time_limit_s,
        priority,
        groups,
        promised_at_s,
        ends_at_s,
        ends_cause,
        idle_since_s,
        kept_until_s,
        place_of,
        asked_priority,
        queued_at_s,
    ) = row
    return Session(
        id_,
        Request(
            user,
            server_name,
            image,
            resource_group,
            fgpu_milli,
            cpu_milli,
            memory_mib,
            gpu_memory_mib,
            compute_percent,
            gpu_model,
            time_limit_s,
            priority,
            groups_of(groups),
        ),
        SessionState(state),
        submitted_at_s,
        is_held,
        attempt,
        None if node_id is None else Placement(node_id, tuple(held[id_])),
        WaitReason(wait_reason) if wait_reason else None,
        scheduled_at_s,
        started_at_s,
        ended_at_s,
        EndCause(end_cause) if end_cause else None,
        message,
        launched,
        replaces,
        promised_at_s,
        ends_at_s,
        EndCause(ends_cause) if ends_cause else None,
        idle_since_s,
        kept_until_s,
        place_of,
        asked_priority,
        queued_at_s,
    )


def groups_of(column: str) -> tuple[str, ...]:
    """Return the Hub groups of a column; those without any are almost all, and are not parsed."""
    return () if column == NO_GROUPS else tuple(json.loads(column))


def request_values(request: Request) -> dict[str, Any]:
    """Return the columns that a session has from its request and never changes."""
    return {
        "user_name": request.user,
        "server_name": request.server_name,
        "image": request.image,
        "resource_group": request.resource_group,
        "fgpu_milli": request.fgpu_milli,
        "cpu_milli": request.cpu_milli,
        "memory_mib": request.memory_mib,
        "gpu_memory_mib": request.gpu_memory_mib,
        "compute_percent": request.compute_percent,
        "gpu_model": request.gpu_model,
        "time_limit_s": request.time_limit_s,
        "priority": request.priority,
        "groups": json.dumps(request.groups),
    }


def life_values(session: Session) -> dict[str, Any]:
    """Return the columns that change in the life of a session."""
    return {
        "state": session.state.value,
        "submitted_at_s": session.submitted_at_s,
        "held": session.held,
        "attempt": session.attempt,
        "node_id": session.placement.node_id if session.placement else None,
        "wait_reason": session.wait_reason.value if session.wait_reason else None,
        "scheduled_at_s": session.scheduled_at_s,
        "started_at_s": session.started_at_s,
        "ended_at_s": session.ended_at_s,
        "end_cause": session.end_cause.value if session.end_cause else None,
        "message": session.message,
        "launched": session.launched,
        "replaces": session.replaces,
        "promised_at_s": session.promised_at_s,
        "ends_at_s": session.ends_at_s,
        "ends_cause": session.ends_cause.value if session.ends_cause else None,
        "idle_since_s": session.idle_since_s,
        "kept_until_s": session.kept_until_s,
        "place_of": session.place_of,
        "asked_priority": session.asked_priority,
        "queued_at_s": session.queued_at_s,
    }


def share_values(session: Session) -> list[dict[str, Any]]:
    """Return the rows of `shares` that the session's placement is."""
    found = session.placement.shares if session.placement else ()
    return [
        {
            "session_id": session.id,
            "position": position,
            "device_uuid": share.device_uuid,
            "fgpu_milli": share.fgpu_milli,
            "memory_mib": share.memory_mib,
            "compute_percent": share.compute_percent,
            "mode": share.mode.value,
        }
        for position, share in enumerate(found)
    ]


def quotas_of(quota_rows: Iterable[Sequence[Any]]) -> tuple[Quota, ...]:
    """Return the quotas of rows in the table's column order, by whom and what they are for."""
    found = (
        Quota(QuotaScope(scope), name, resource_group or None, *limits)
        for scope, name, resource_group, *limits in quota_rows
    )
    # Sorted here: each PostgreSQL database has its own idea of the order of texts.
    return tuple(sorted(found, key=quota_key))


def quota_key(quota: Quota) -> tuple[str, str, str]:
    """Return what only one quota is for: whom, and which resource group; "" is all of them."""
    return quota.scope.value, quota.name, quota.resource_group or ""


def nodes_of(node_rows: Iterable[Sequence[Any]], device_rows: Iterable[Sequence[Any]]) -> tuple[Node, ...]:
    """Return the nodes of rows in the tables' column order, by id; devices by index."""
    by_node: dict[str, list[Device]] = {}
    for uuid, node_id, index, model, memory_mib, capacity_milli, simulated, _, max_shares in device_rows:
        device = Device(uuid, node_id, index, model, memory_mib, capacity_milli, simulated, max_shares)
        by_node.setdefault(node_id, []).append(device)
    found = [
        Node(
            id_,
            group,
            cpu_milli,
            memory_mib,
            tuple(sorted(by_node.get(id_, ()), key=lambda d: (d.index, d.uuid))),
            NodeState(state),
        )
        for id_, group, cpu_milli, memory_mib, state in node_rows
    ]
    # Sorted here: each PostgreSQL database has its own idea of the order of texts.
    return tuple(sorted(found, key=lambda node: node.id))


def node_values(node: Node, state: NodeState) -> dict[str, Any]:
    """Return the row of `nodes` that the node is in ``state``."""
    return {
        "id": node.id,
        "resource_group": node.resource_group,
        "cpu_milli": node.cpu_milli,
        "memory_mib": node.memory_mib,
        "state": state.value,
    }


def device_values(device: Device, node_id: str) -> dict[str, Any]:
    """Return the row of `devices` that the device is on this node."""
    return {
        "uuid": device.uuid,
        "node_id": node_id,
        "device_index": device.index,
        "model": device.model,
        "memory_mib": device.memory_mib,
        "capacity_milli": device.capacity_milli,
        "simulated": device.simulated,
        "retired": False,
        "max_shares": device.max_shares,
    }
