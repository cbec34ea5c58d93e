"""Why a request does not fit now, in plain words."""

from __future__ import annotations

from dataclasses import replace

from fgpu_scheduler.core import placement
from fgpu_scheduler.core.model import NodeState, Request, ShareMode
from fgpu_scheduler.core.shares import devices_needed, is_explicit
from fgpu_scheduler.core.units import format_milli, memory_words


def shortage(request: Request, left: placement.Free) -> str:
    """Return in plain words why ``request`` does not fit now, or that it waits for its turn."""
    if any(placement.fits_on(node, request) for node in left):
        return "waits for its turn"
    group = [n for n in left if n.node.resource_group == request.resource_group]
    own = [
        replace(n, devices=tuple(d for d in n.devices if not d.device.cordoned))
        for n in group
        if n.node.state is NodeState.READY
    ]
    if group and all(n.node.state is NodeState.LOST for n in group):
        return f"no machine of resource group {request.resource_group!r} answers now"
    if not own:
        return f"no machine of resource group {request.resource_group!r} takes sessions now"
    if request.gpu_models:
        # Each model separately, because all GPUs of a session are of one model.
        own = [_of_model(n, model) for model in request.gpu_models for n in own]
        if not any(n.devices for n in own):
            models = " or ".join(map(repr, request.gpu_models))
            return f"no machine with a GPU of model {models} takes sessions now"
    if is_explicit(request):
        return _explicit_shortage(request, own)
    asked = format_milli(request.fgpu_milli)
    shared = [_of_mode(n, ShareMode.MEMORY_COMPUTE) for n in own]
    enough = [n for n in shared if _has_fgpu(n, request.fgpu_milli)]
    if not enough and any(_has_fgpu(n, request.fgpu_milli) for n in own):
        return (
            f"{asked} fGPU is free, but only beside sessions with GPU memory and no limit of compute: "
            "fGPU cannot share a GPU with them"
        )
    if not enough:
        return _fgpu_shortage(request.fgpu_milli, shared)
    roomy = [n for n in enough if n.cpu_milli >= request.cpu_milli and n.memory_mib >= request.memory_mib]
    if not roomy:
        return (
            f"{asked} fGPU is free, but not with {format_milli(request.cpu_milli)} CPU and "
            f"{memory_words(request.memory_mib)} of memory on the same machine"
        )
    free_there = [d for n in roomy for d in n.devices if d.fgpu_milli >= request.fgpu_milli]
    if all(d.shares < 1 for d in free_there):
        most = max((d.device.max_shares for d in free_there), default=0)
        return f"{asked} fGPU is free, but {most} sessions share that GPU already"
    return f"{asked} fGPU is free, but earlier sessions still hold its GPU memory or compute"


def _of_model(left: placement.NodeFree, model: str) -> placement.NodeFree:
    return replace(left, devices=tuple(d for d in left.devices if d.device.model == model))


def _of_mode(left: placement.NodeFree, mode: ShareMode) -> placement.NodeFree:
    """Return a node with the GPUs that a share of this mode may be on: all shares of a GPU are of one mode."""
    return replace(left, devices=tuple(d for d in left.devices if d.mode in (None, mode)))


def _explicit_shortage(request: Request, own: list[placement.NodeFree]) -> str:
    percent = request.compute_percent
    asked = f"{memory_words(request.gpu_memory_mib or 0)} of GPU memory" + (
        "" if percent is None else f" with {percent} % compute"
    )
    mode = ShareMode.MEMORY if percent is None else ShareMode.MEMORY_COMPUTE
    usable = [d for n in own for d in _of_mode(n, mode).devices if d.shares > 0]
    if not usable:
        return f"{asked} is not free: each GPU is full, or its sessions limit compute in another way"
    most = max(max(0, d.memory_mib) for d in usable)
    if most < (request.gpu_memory_mib or 0):
        return f"{asked} is not free: at most {memory_words(most)} is free on one GPU"
    return f"{asked} is free, but other sessions hold the compute, CPU or memory that goes with it"


def _has_fgpu(left: placement.NodeFree, asked: int) -> bool:
    if any(asked <= d.fgpu_milli for d in left.devices):
        return True
    untouched, needed = _whole(left, asked)
    return 0 < needed <= untouched


def _whole(left: placement.NodeFree, asked: int) -> tuple[int, int]:
    """Return the untouched devices of a node and the number of whole devices that the amount needs.

    (0, 0) if the node cannot give the amount as whole devices. With several capacities, that with the fewest missing.
    """
    found = []
    for capacity in sorted({d.device.capacity_milli for d in left.devices}):
        needed = devices_needed(asked, capacity_milli=capacity)
        alike = [d for d in left.devices if d.device.capacity_milli == capacity]
        if needed is not None and 1 < needed <= len(alike):
            found.append((sum(1 for d in alike if d.untouched), needed))
    return max(found, key=lambda f: (f[0] - f[1], f[1]), default=(0, 0))


def _fgpu_shortage(asked_milli: int, own: list[placement.NodeFree]) -> str:
    asked = format_milli(asked_milli)
    per_device = [d.fgpu_milli for n in own for d in n.devices]
    most, total = max(0, max(per_device, default=0)), sum(m for m in per_device if m > 0)
    if asked_milli > max((d.device.capacity_milli for n in own for d in n.devices), default=0):
        wholes = [w for n in own if (w := _whole(n, asked_milli))[1]]
        if not wholes:
            return f"no machine that takes sessions now has {asked} fGPU"
        untouched, needed = max(wholes, key=lambda w: w[0] - w[1])
        most_free = f"{untouched} is" if untouched == 1 else f"{untouched} are"
        return f"{asked} fGPU needs {needed} free GPUs on one machine: at most {most_free} free on one"
    if asked_milli <= total:
        return (
            f"no GPU has {asked} fGPU free: {format_milli(total)} fGPU is free in all, "
            f"but at most {format_milli(most)} on one GPU"
        )
    if not most:
        return "all GPUs are busy"
    return f"{asked} fGPU is not free, only {format_milli(most)} is"
