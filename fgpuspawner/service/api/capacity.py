"""The API's capacity: each resource group's total, use, and what the caller could still get."""

from __future__ import annotations

from dataclasses import replace

from fgpu_scheduler import DeviceFree, NodeState, format_milli, free
from fgpuspawner.service import objects
from fgpuspawner.service.api.base import Api
from fgpuspawner.service.capacity import (
    Amounts,
    allocatable_in,
    free_in,
    inside_quotas,
    mine_in,
    total_of,
    used_of,
    waiting_in,
)
from fgpuspawner.service.model import Viewer, World, groups_of, is_mine, is_visible


class Capacity(Api):
    async def get(self) -> None:
        step = self.service.settings.caps().fgpu_step_milli
        world = await self.service.reader.world()
        self.answer(capacity_object(world, self.viewer, fgpu_step_milli=step))


def capacity_object(world: World, viewer: Viewer, *, fgpu_step_milli: int) -> objects.Capacity:
    """Return totals, use, the viewer's own use, and what they could still get.

    Administrators also get each node's state and isolation.
    """
    groups = groups_of(viewer, world)
    mine, allocatable = Amounts(), Amounts()
    for group in groups:
        mine += mine_in(world, viewer, group)
        allocatable += allocatable_in(world, viewer, group)
    for group in groups[:1]:
        most = inside_quotas(allocatable.fgpu_milli, world, viewer, group, in_all=True)
        allocatable = replace(allocatable, fgpu_milli=most)
    found = objects.Capacity(
        groups=[_group_object(g, world, viewer, fgpu_step_milli) for g in groups],
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
            isolation=chosen[node.id].backend if node.id in chosen else None,
            reason=chosen[node.id].reason if node.id in chosen else None,
        )
        for node in world.snapshot.nodes
    ]
    return objects.CapacityForAdmins.of(found, nodes=nodes)


def _group_object(group: str, world: World, viewer: Viewer, fgpu_step_milli: int) -> objects.Group:
    largest = world.largest_now.get(group)
    nodes = [node for node in world.snapshot.nodes if node.resource_group == group]
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
        fgpu_step=format_milli(fgpu_step_milli),
        waiting=waiting_in(world, group),
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
        **device_fields(left),
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


def device_fields(left: DeviceFree) -> dict[str, str]:
    """Return a GPU's fGPU, and how much of it is used."""
    worth_milli = left.device.capacity_milli
    # An administrator may have made the unit smaller since.
    used_milli = max(0, worth_milli - left.fgpu_milli)
    return {"fgpu_total": format_milli(worth_milli), "fgpu_used": format_milli(used_milli)}
