"""The API's capacity and queues: each resource group's total, use, waiting requests, and what the caller could get."""

from __future__ import annotations

from dataclasses import astuple, dataclass, replace

from fgpu_scheduler import (
    HOLDING,
    Device,
    DeviceFree,
    Forecast,
    NodeState,
    Request,
    Session,
    SessionState,
    format_milli,
    free,
    holds_shares,
    wants_shares,
)
from fgpuspawner.service import objects
from fgpuspawner.service.api.base import Api
from fgpuspawner.service.model import Viewer, World, groups_of, is_mine, is_visible
from fgpuspawner.service.problems import Problem
from fgpuspawner.text.sessions import amount_words, fgpu_of


@dataclass(frozen=True, slots=True)
class ResourceAmounts:
    """Sums of fGPU, CPU (both in thousandths) and memory."""

    fgpu_milli: int = 0
    cpu_milli: int = 0
    memory_mib: int = 0

    def __add__(self, other: ResourceAmounts) -> ResourceAmounts:
        return ResourceAmounts(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))


def total_of(world: World, group: str) -> ResourceAmounts:
    """Return the total of a group's nodes, also of those that take no sessions."""
    nodes = [n for n in world.snapshot.nodes if n.resource_group == group]
    return ResourceAmounts(
        sum(d.capacity_milli for n in nodes for d in n.devices),
        sum(n.cpu_milli for n in nodes),
        sum(n.memory_mib for n in nodes),
    )


def used_of(world: World, group: str) -> ResourceAmounts:
    """Return what all sessions hold in a group."""
    left = [n for n in free(world.snapshot) if n.node.resource_group == group]
    total = total_of(world, group)
    return ResourceAmounts(
        sum(_held_milli(d.device, world) for n in left for d in n.devices),
        total.cpu_milli - sum(n.cpu_milli for n in left),
        total.memory_mib - sum(n.memory_mib for n in left),
    )


def mine_in(world: World, viewer: Viewer, group: str) -> ResourceAmounts:
    """Return what the viewer's own sessions hold in a group."""
    own = [
        s
        for s in world.snapshot.sessions
        if s.state in HOLDING and is_mine(s, viewer) and s.request.resource_group == group
    ]
    return ResourceAmounts(
        # Summed over the shares: an exact amount was not asked for in fGPU.
        sum(s.placement.fgpu_milli for s in own if s.placement and holds_shares(s)),
        sum(s.request.cpu_milli for s in own),
        sum(s.request.memory_mib for s in own),
    )


def free_in(world: World, group: str) -> ResourceAmounts:
    """Return what is free in a group on nodes that take sessions; at least 0, also where nodes were made smaller."""
    left = [
        n for n in free(world.snapshot) if n.node.resource_group == group and n.node.state is NodeState.READY
    ]
    return ResourceAmounts(
        # A GPU with the most sessions that may share it has nothing to give.
        sum(max(0, d.fgpu_milli) for n in left for d in n.devices if d.shares > 0),
        sum(max(0, n.cpu_milli) for n in left),
        sum(max(0, n.memory_mib) for n in left),
    )


def allocatable_in(world: World, viewer: Viewer, group: str) -> ResourceAmounts:
    """Return what the viewer could still get in a group: what is free there, within their quotas; 0 if they may not use
    it.
    """
    if group not in viewer.groups:
        return ResourceAmounts()
    left = free_in(world, group)
    return replace(left, fgpu_milli=within_quotas(left.fgpu_milli, world, viewer, group))


def within_quotas(milli: int, world: World, viewer: Viewer, group: str, *, in_all: bool = False) -> int:
    asker = Request(viewer.user or "", "/", "", group, 0, 0, 0, groups=viewer.hub_groups)
    left = world.ledger.left(asker, in_all=in_all)
    if left.sessions == 0:
        return 0
    return milli if left.fgpu_milli is None else min(milli, left.fgpu_milli)


class Capacity(Api):
    async def get(self) -> None:
        self.answer(capacity_object(await self.service.reader.world(), self.viewer))


def capacity_object(world: World, viewer: Viewer) -> objects.Capacity:
    """Return totals, use, the viewer's own use, and what they could still get.

    Administrators also get each node's state and isolation.
    """
    groups = groups_of(viewer, world)
    mine, allocatable = ResourceAmounts(), ResourceAmounts()
    for group in groups:
        mine += mine_in(world, viewer, group)
        allocatable += allocatable_in(world, viewer, group)
    for group in groups[:1]:
        most = within_quotas(allocatable.fgpu_milli, world, viewer, group, in_all=True)
        allocatable = replace(allocatable, fgpu_milli=most)
    found = objects.Capacity(
        groups=[_group_object(g, world, viewer) for g in groups],
        mine_overall=objects.Amounts.of(mine),
        allocatable_overall=objects.Amounts.of(allocatable),
        simulated=world.simulated(groups),
    )
    if not viewer.admin:
        return found
    chosen = {own.node_id: own for own in world.isolation}
    nodes = [
        objects.NodeIsolation(
            name=node.id,
            group=node.resource_group,
            state=node.state,
            isolation=own.backend if own else None,
            reason=own.reason if own else None,
        )
        for node in world.snapshot.nodes
        for own in [chosen.get(node.id)]
    ]
    return objects.CapacityForAdmins.of(found, nodes=nodes)


def _group_object(group: str, world: World, viewer: Viewer) -> objects.Group:
    largest = world.largest_now.get(group)
    nodes = [node for node in world.snapshot.nodes if node.resource_group == group]
    sessions = [s for s in world.snapshot.sessions if s.request.resource_group == group]
    return objects.Group.of(
        name=group,
        nodes=len(nodes),
        nodes_lost=sum(node.state in (NodeState.LOST, NodeState.GONE) for node in nodes),
        total=total_of(world, group),
        used=used_of(world, group),
        free=free_in(world, group),
        mine=mine_in(world, viewer, group),
        allocatable=allocatable_in(world, viewer, group),
        largest_fgpu_now=None if largest is None else format_milli(largest),
        fgpu_step=format_milli(world.step_milli),
        waiting=sum(s.state is SessionState.PENDING or wants_shares(s) for s in sessions),
        devices=[
            _device_object(left, node.node.id, world, viewer)
            for node in free(world.snapshot)
            if node.node.resource_group == group
            for left in node.devices
        ],
    )


def _device_object(left: DeviceFree, node: str, world: World, viewer: Viewer) -> objects.SharedDevice:
    held = world.held.get(left.device.uuid, ())
    return objects.SharedDevice.of(
        left.device,
        **device_fields(left.device, world),
        node=node,
        shares=[
            objects.HeldShare.of(
                share,
                mine=is_mine(session, viewer),
                session_id=session.id if is_visible(session, viewer) else None,
            )
            for session, share in held
        ],
    )


def device_fields(device: Device, world: World) -> dict[str, str]:
    used_milli = _held_milli(device, world)
    return {"fgpu_total": format_milli(device.capacity_milli), "fgpu_used": format_milli(used_milli)}


def _held_milli(device: Device, world: World) -> int:
    # A parked session that wants its shares holds none yet.
    return sum(share.fgpu_milli for _, share in world.held.get(device.uuid, ()))


def queue_object(group: str, world: World, viewer: Viewer) -> objects.Queue:
    """Return a resource group's queue, next one first; ordinary users see others without names."""
    entries = [_entry(*waiting, viewer) for waiting in world.queues.get(group, ())]
    simulated = world.simulated([group])
    return objects.Queue(group=group, length=len(entries), entries=entries, simulated=simulated)


def _entry(found: Forecast, session: Session, viewer: Viewer) -> objects.QueueEntry:
    known = is_visible(session, viewer)
    return objects.QueueEntry.of(
        found,
        session,
        mine=is_mine(session, viewer),
        id=session.id if known else None,
        user=session.request.user if known else None,
        amount=amount_words(session.request),
        fgpu=fgpu_of(session),
        wait_reason=found.reason,
        early_start_at_s=found.early_at_s,
        late_start_at_s=found.late_at_s,
    )


class Queue(Api):
    async def get(self) -> None:
        world = await self.service.reader.world()
        viewer = self.viewer
        known = world.groups if viewer.admin else tuple(dict.fromkeys((*viewer.groups, *viewer.administers)))
        group = self.get_query_argument("group", known[0] if known else "")
        if group not in known:
            message = f"group: there is no such group; choose one of {', '.join(known) or 'none'}"
            raise Problem(404, "no_such_group", message, field="group")
        self.answer(queue_object(group, world, self.viewer))
