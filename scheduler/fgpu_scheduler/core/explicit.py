"""Acceptance of explicit GPU memory and compute, and of GPU models (product H2 to H5)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fgpu_scheduler.core.caps import Caps, Refusal
from fgpu_scheduler.core.model import Device, Node, Request
from fgpu_scheduler.core.quota import least_milli
from fgpu_scheduler.core.units import COMPUTE_GRAIN_PERCENT, MEMORY_GRAIN_MIB, format_milli


def models_refusal(request: Request, nodes: Sequence[Node]) -> Refusal | None:
    """Refuse a GPU model that the nodes do not have, and one that is named twice."""
    asked, models = request.gpu_models, sorted({device.model for node in nodes for device in node.devices})
    unknown = next((model for model in asked if model not in models), None)
    if unknown is not None:
        message = f"gpu_models: there is no {unknown!r} here; the models are {', '.join(models)}"
        return Refusal("gpu_models", "unknown_model", message, None, models[0])
    twice = next((model for at, model in enumerate(asked) if model in asked[:at]), None)
    if twice is not None:
        message = f"gpu_models: {twice!r} is named twice; name each model once"
        return Refusal("gpu_models", "named_twice", message, None, ",".join(dict.fromkeys(asked)))
    return None


def explicit_refusals(request: Request, nodes: Sequence[Node], caps: Caps) -> list[Refusal]:
    """Return every reason to refuse explicit amounts on these nodes, whose devices are all of models asked for."""
    if request.gpu_memory_mib is None:
        message = "compute_percent: give gpu_memory_mib, too"
        return [Refusal("compute_percent", "compute_alone", message)]
    if request.fgpu_milli:
        message = "gpu_memory_mib: give this or fgpu, not both"
        return [Refusal("gpu_memory_mib", "two_ways", message)]
    found = (_memory(request.gpu_memory_mib, nodes), _compute(request.compute_percent))
    refusals = [refusal for refusal in found if refusal is not None]
    if not refusals and caps.max_fgpu_milli is not None:
        asked_milli = least_milli(request, nodes)
        if asked_milli > caps.max_fgpu_milli:
            limit = format_milli(caps.max_fgpu_milli)
            worth = format_milli(asked_milli)
            message = f"gpu_memory_mib: this is worth {worth} fGPU, above the limit of {limit} per session"
            most = most_memory_mib(request, nodes, milli=caps.max_fgpu_milli)
            refusals.append(Refusal("gpu_memory_mib", "above_cap", message, limit, most))
    return refusals


def most_memory_mib(request: Request, nodes: Sequence[Node], *, milli: int) -> str | None:
    """Return the most memory, in the field's notation, that beside the same compute is worth at most ``milli``.

    None where no amount is: the compute alone is worth more.
    """
    # Of alike devices, which are most of a cluster, one is enough.
    alike = {(d.model, d.memory_mib, d.capacity_milli): d for d in _devices(nodes)}
    few = (replace(nodes[0], devices=tuple(alike.values())),)
    largest = max(device.memory_mib for device in alike.values())
    for memory_mib in range(largest - largest % MEMORY_GRAIN_MIB, 0, -MEMORY_GRAIN_MIB):
        worth_milli = least_milli(replace(request, gpu_memory_mib=memory_mib), few)
        if 0 < worth_milli <= milli:
            return str(memory_mib)
    return None


def _memory(asked: int, nodes: Sequence[Node]) -> Refusal | None:
    name, totals = "gpu_memory_mib", sorted({device.memory_mib for device in _devices(nodes)})
    largest = totals[-1]
    if asked > largest:
        message = f"{name}: {asked} is more than one GPU has; choose at most {largest}"
        return Refusal(name, "never_fits", message, str(largest), str(largest))
    if asked < MEMORY_GRAIN_MIB:
        message = f"{name}: {asked} is too small; choose at least {MEMORY_GRAIN_MIB}"
        return Refusal(name, "too_small", message, str(MEMORY_GRAIN_MIB), str(MEMORY_GRAIN_MIB))
    if asked % MEMORY_GRAIN_MIB and asked not in totals:
        below = asked - asked % MEMORY_GRAIN_MIB
        near = sorted({below, min(below + MEMORY_GRAIN_MIB, largest), *totals})
        nearest = str(min(near, key=lambda a: (abs(a - asked), a)))
        message = f"{name}: {asked} isn't possible; choose {nearest} (a multiple of {MEMORY_GRAIN_MIB}, or all of a GPU)"
        return Refusal(name, "not_a_step", message, str(MEMORY_GRAIN_MIB), nearest)
    return None


def _compute(asked: int | None) -> Refusal | None:
    name, grain = "compute_percent", COMPUTE_GRAIN_PERCENT
    if asked is None:
        return None
    nearest = str(max(grain, min(100, (asked + grain // 2) // grain * grain)))
    if not grain <= asked <= 100:
        limit = "100" if asked > 100 else str(grain)
        message = f"{name}: {asked} isn't possible; choose {grain} to 100"
        return Refusal(name, "out_of_range", message, limit, nearest)
    if asked % grain:
        message = f"{name}: {asked} isn't possible; choose {nearest} (a multiple of {grain})"
        return Refusal(name, "not_a_step", message, str(grain), nearest)
    return None


def _devices(nodes: Sequence[Node]) -> list[Device]:
    return [device for node in nodes for device in node.devices]
