"""The part of a snapshot that one resource group's queue depends on."""

from __future__ import annotations

from dataclasses import replace

from fgpu_scheduler.core.lifecycle import WAITING
from fgpu_scheduler.core.model import Snapshot


def of_group(snapshot: Snapshot, group: str) -> Snapshot:
    """Return what a forecast of this resource group depends on: its nodes, and its sessions.

    Groups share nothing but their users' quotas: where there are any, the sessions that hold something elsewhere count,
    and who waits elsewhere is left out.
    """
    own = tuple(s for s in snapshot.sessions if s.request.resource_group == group)
    nodes = tuple(n for n in snapshot.nodes if n.resource_group == group)
    usage = tuple(u for u in snapshot.usage if u.resource_group == group)
    if not snapshot.quotas:
        return replace(snapshot, nodes=nodes, sessions=own, usage=usage)
    counted = tuple(
        s for s in snapshot.sessions if s.request.resource_group == group or s.state not in WAITING
    )
    return replace(snapshot, sessions=counted, usage=usage)
