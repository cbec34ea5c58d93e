"""Acceptance into the queue: what is valid, inside the caps, and could ever run.

What is refused here never enters the queue; each refusal names the field, the limit and what would work.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from fgpu_scheduler.core import placement
from fgpu_scheduler.core.model import Node, Request
from fgpu_scheduler.core.units import format_milli, share_memory_mib


@dataclass(frozen=True, slots=True)
class Caps:
    """The administrator's limits on one request. None is no limit but the largest node's."""

    fgpu_step_milli: int
    max_fgpu_milli: int | None = None
    max_cpu_milli: int | None = None
    max_memory_mib: int | None = None
    max_count: int = 8
    max_pending_per_user: int = 16


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a request is not accepted. ``limit`` and ``nearest`` are in the field's own notation."""

    field: str
    code: str
    message: str
    limit: str | None = None
    nearest: str | None = None


def admit(request: Request, count: int, nodes: Iterable[Node], caps: Caps) -> tuple[Refusal, ...]:
    """Return every reason to refuse ``count`` sessions of ``request``; none means it may queue."""
    own = tuple(n for n in nodes if n.resource_group == request.resource_group)
    if not any(node.devices for node in own):
        return (
            Refusal(
                "group",
                "no_devices",
                f"group: resource group {request.resource_group!r} has no GPU",
            ),
        )
    found = [
        refusal
        for refusal in (
            _fgpu(request.fgpu_milli, own, caps),
            _cpu(request.cpu_milli, own, caps),
            _memory(request.memory_mib, own, caps),
            _count(count, caps),
        )
        if refusal is not None
    ]
    if not found and not placement.could_ever_fit(request, own):
        found.append(
            Refusal(
                "fgpu",
                "never_fits_together",
                f"fgpu: no node has {format_milli(request.fgpu_milli)} fGPU together with "
                f"{format_milli(request.cpu_milli)} CPU and {request.memory_mib} MiB memory; ask for less of one",
            )
        )
    return tuple(found)


def amounts_that_fit(nodes: Iterable[Node], caps: Caps) -> tuple[int, ...]:
    """Return, ascending, each fGPU amount in milli that some node could ever hold, within the caps.

    These are the multiples of the step up to one device, and whole devices up to a node's number.
    """
    found: set[int] = set()
    for node in nodes:
        by_capacity: dict[int, int] = {}
        for device in node.devices:
            by_capacity[device.capacity_milli] = by_capacity.get(device.capacity_milli, 0) + 1
        for capacity, number in by_capacity.items():
            found.update(capacity * n for n in range(1, number + 1))
        for capacity, memory_mib in sorted({(d.capacity_milli, d.memory_mib) for d in node.devices}):
            found.update(
                amount
                for amount in range(caps.fgpu_step_milli, capacity + 1, caps.fgpu_step_milli)
                # A slice so thin that its memory rounds down to nothing is no slice.
                if share_memory_mib(amount, capacity_milli=capacity, device_memory_mib=memory_mib)
            )
    most = caps.max_fgpu_milli
    return tuple(sorted(a for a in found if most is None or a <= most))


def _fgpu(asked: int, nodes: tuple[Node, ...], caps: Caps) -> Refusal | None:
    fitting = amounts_that_fit(nodes, caps)
    if not fitting:
        return Refusal("fgpu", "no_amount_fits", "fgpu: no amount is possible here; ask an administrator")
    if asked in fitting:
        return None
    shown = format_milli(asked)
    largest = format_milli(fitting[-1])
    nearest = format_milli(min(fitting, key=lambda a: (abs(a - asked), a)))
    step = format_milli(caps.fgpu_step_milli)
    if asked < fitting[0]:
        message = f"fgpu: {shown} is below the smallest amount, {format_milli(fitting[0])}"
        return Refusal("fgpu", "too_small", message, format_milli(fitting[0]), nearest)
    if caps.max_fgpu_milli is not None and asked > caps.max_fgpu_milli:
        message = f"fgpu: {shown} is above the limit of {format_milli(caps.max_fgpu_milli)} per session"
        return Refusal("fgpu", "above_cap", message, format_milli(caps.max_fgpu_milli), nearest)
    if asked > fitting[-1]:
        message = f"fgpu: {shown} is more than any node has; the largest possible is {largest}"
        return Refusal("fgpu", "never_fits", message, largest, nearest)
    one_gpu = max(d.capacity_milli for n in nodes for d in n.devices)
    if asked > one_gpu:
        message = (
            f"fgpu: {shown} is more than one GPU ({format_milli(one_gpu)} fGPU) and not a whole number of "
            f"GPUs; {_nearest(asked, fitting)}"
        )
        return Refusal("fgpu", "straddles", message, format_milli(one_gpu), nearest)
    message = f"fgpu: {shown} is not a multiple of {step}; {_nearest(asked, fitting)}"
    return Refusal("fgpu", "not_a_step", message, step, nearest)


def _nearest(asked: int, fitting: tuple[int, ...]) -> str:
    """Name the amounts next to ``asked`` on both sides."""
    below = [format_milli(a) for a in fitting if a < asked][-1:]
    above = [format_milli(a) for a in fitting if a > asked][:1]
    found = (*below, *above)
    return f"the nearest possible {'are' if len(found) > 1 else 'is'} {' and '.join(found)}"


def _cpu(asked: int, nodes: tuple[Node, ...], caps: Caps) -> Refusal | None:
    most = max(n.cpu_milli for n in nodes)
    if asked <= 0:
        return Refusal("cpu", "too_small", "cpu: must be above 0", "0", "1")
    if caps.max_cpu_milli is not None and asked > caps.max_cpu_milli:
        limit = format_milli(caps.max_cpu_milli)
        message = f"cpu: {format_milli(asked)} is above the limit of {limit} per session"
        return Refusal("cpu", "above_cap", message, limit, format_milli(min(most, caps.max_cpu_milli)))
    if asked > most:
        limit = format_milli(most)
        message = f"cpu: {format_milli(asked)} is more than any node has; the most is {limit}"
        return Refusal("cpu", "never_fits", message, limit, limit)
    return None


MIN_MEMORY_MIB = 128
"""Below this a Jupyter server does not even start."""


def _memory(asked: int, nodes: tuple[Node, ...], caps: Caps) -> Refusal | None:
    most = max(n.memory_mib for n in nodes)
    if asked < MIN_MEMORY_MIB:
        message = f"memory_mib: {asked} is below the least of {MIN_MEMORY_MIB} MiB"
        return Refusal("memory_mib", "too_small", message, str(MIN_MEMORY_MIB), str(MIN_MEMORY_MIB))
    if caps.max_memory_mib is not None and asked > caps.max_memory_mib:
        message = f"memory_mib: {asked} is above the limit of {caps.max_memory_mib} MiB per session"
        nearest = str(min(most, caps.max_memory_mib))
        return Refusal("memory_mib", "above_cap", message, str(caps.max_memory_mib), nearest)
    if asked > most:
        message = f"memory_mib: {asked} is more than any node has; the most is {most} MiB"
        return Refusal("memory_mib", "never_fits", message, str(most), str(most))
    return None


def _count(asked: int, caps: Caps) -> Refusal | None:
    if 1 <= asked <= caps.max_count:
        return None
    nearest = "1" if asked < 1 else str(caps.max_count)
    message = f"count: {asked} is not between 1 and {caps.max_count} sessions"
    return Refusal("count", "out_of_range", message, str(caps.max_count), nearest)
