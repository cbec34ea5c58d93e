"""Reference for placement: tries every device, and checks and scores each try from scratch."""

from __future__ import annotations

from fgpu_scheduler.core.model import Device, Placement, Request
from fgpu_scheduler.core.placement import (
    DeviceFree,
    Free,
    NodeAmounts,
    NodeFree,
    Score,
    claimed,
    claimed_if_fits,
)
from fgpu_scheduler.core.shares import devices_needed, per_preferred_model, shares_of


def plain_place(request: Request, left: Free, *, score: Score) -> tuple[Placement, Free] | None:
    """Return what `placement.place` must return."""
    for asked in per_preferred_model(request):
        found = [
            (score(_room(node), _room(leaves), taken), node.node.id, taken, at, where, leaves)
            for at, node in enumerate(left)
            for taken, where, leaves in _tries(node, asked)
        ]
        if found:
            *_, at, where, leaves = min(found, key=lambda one: one[:3])
            return where, (*left[:at], leaves, *left[at + 1 :])
    return None


def _tries(node: NodeFree, asked: Request) -> list[tuple[tuple[int, ...], Placement, NodeFree]]:
    devices = [d.device for d in _in_order(node)]
    sets: list[tuple[int, ...]] = [(), *((at,) for at in range(len(devices)))]
    for capacity in {d.capacity_milli for d in devices}:
        needed = devices_needed(asked.fgpu_milli, capacity_milli=capacity) or 0
        whole = [at for at, device in enumerate(devices) if _is_whole(node, device, capacity, asked)]
        sets += [tuple(whole[:needed])] if needed > 1 else []
    found = []
    for taken in sets:
        shares = shares_of(asked, [devices[at] for at in taken])
        where = None if shares is None else Placement(node.node.id, shares)
        if where is not None and claimed_if_fits(node, asked, where) is not None:
            found.append((taken, where, claimed(node, asked, where)))
    return found


def _is_whole(node: NodeFree, device: Device, capacity: int, asked: Request) -> bool:
    free = next(d for d in node.devices if d.device is device)
    liked_model = not asked.gpu_models or device.model in asked.gpu_models
    return device.capacity_milli == capacity and liked_model and free.untouched


def _in_order(node: NodeFree) -> list[DeviceFree]:
    return sorted(node.devices, key=lambda d: d.device.uuid)


def _room(node: NodeFree) -> NodeAmounts:
    devices = _in_order(node)
    free, whole = (tuple(d.fgpu_milli for d in devices), tuple(d.device.capacity_milli for d in devices))
    return NodeAmounts(node.cpu_milli, node.memory_mib, free, whole, tuple(d.device.model for d in devices))
