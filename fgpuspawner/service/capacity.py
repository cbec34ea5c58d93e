"""A resource group's total, what is held of it, and what a viewer could still get. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fgpu_scheduler import (
    HOLDING,
    NodeState,
    Request,
    SessionState,
    free,
)
from fgpuspawner.service.model import Viewer, World, is_mine


@dataclass(frozen=True, slots=True)
class Amounts:
    """Sums of fGPU, CPU (both in thousandths) and memory."""

    fgpu_milli: int = 0
    cpu_milli: int = 0
    memory_mib: int = 0

    def __add__(self, other: Amounts) -> Amounts:
        return Amounts(
            self.fgpu_milli + other.fgpu_milli,
            self.cpu_milli + other.cpu_milli,
            self.memory_mib + other.memory_mib,
        )


def total_of(world: World, group: str) -> Amounts:
    """Return the total of a group's nodes, also of those that take no sessions."""
    nodes = [n for n in world.snapshot.nodes if n.resource_group == group]
    return Amounts(
        sum(d.capacity_milli for n in nodes for d in n.devices),
        sum(n.cpu_milli for n in nodes),
        sum(n.memory_mib for n in nodes),
    )


def used_of(world: World, group: str) -> Amounts:
    """Return what all sessions hold in a group."""
    left = [n for n in free(world.snapshot) if n.node.resource_group == group]
    total = total_of(world, group)
    return Amounts(
        total.fgpu_milli - sum(d.fgpu_milli for n in left for d in n.devices),
        total.cpu_milli - sum(n.cpu_milli for n in left),
        total.memory_mib - sum(n.memory_mib for n in left),
    )


def mine_in(world: World, viewer: Viewer, group: str) -> Amounts:
    """Return what the viewer's own sessions hold in a group."""
    own = [
        s
        for s in world.snapshot.sessions
        if s.state in HOLDING and is_mine(s, viewer) and s.request.resource_group == group
    ]
    return Amounts(
        # Summed over the shares: an exact amount was not asked for in fGPU.
        sum(share.fgpu_milli for s in own if s.placement for share in s.placement.shares),
        sum(s.request.cpu_milli for s in own),
        sum(s.request.memory_mib for s in own),
    )


def free_in(world: World, group: str) -> Amounts:
    """Return what is free in a group on nodes that take sessions; at least 0, also where nodes were made smaller."""
    left = [
        n for n in free(world.snapshot) if n.node.resource_group == group and n.node.state is NodeState.READY
    ]
    return Amounts(
        # A GPU with the most sessions that may share it has nothing to give.
        sum(max(0, d.fgpu_milli) for n in left for d in n.devices if d.shares > 0),
        sum(max(0, n.cpu_milli) for n in left),
        sum(max(0, n.memory_mib) for n in left),
    )


def allocatable_in(world: World, viewer: Viewer, group: str) -> Amounts:
    """Return what the viewer could still get in a group: what is free there, within their quotas; 0 if they may not use
    it.
    """
    if group not in viewer.groups:
        return Amounts()
    left = free_in(world, group)
    return replace(left, fgpu_milli=inside_quotas(left.fgpu_milli, world, viewer, group))


def inside_quotas(milli: int, world: World, viewer: Viewer, group: str, *, in_all: bool = False) -> int:
    asker = Request(viewer.user or "", "/", "", group, 0, 0, 0, groups=viewer.hub_groups)
    room = world.ledger.room_milli(asker, in_all=in_all)
    return milli if room is None else min(milli, room)


def waiting_in(world: World, group: str) -> int:
    return sum(
        1
        for s in world.snapshot.sessions
        if s.state is SessionState.PENDING and s.request.resource_group == group
    )
