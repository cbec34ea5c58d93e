"""Acceptance into the queue: what is valid, inside the caps, and could ever run.

What is refused here never enters the queue; each refusal names the field, the limit and what would work.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from fgpu_scheduler.core import placement
from fgpu_scheduler.core.caps import Caps as Caps
from fgpu_scheduler.core.caps import Refusal as Refusal
from fgpu_scheduler.core.explicit import explicit_refusals, models_refusal, most_memory_mib
from fgpu_scheduler.core.model import Node, Quota, Request
from fgpu_scheduler.core.quota import counted_as, least_milli, over_pending, quota_words
from fgpu_scheduler.core.shares import explicit
from fgpu_scheduler.core.units import format_milli, share_memory_mib


def admit(
    request: Request, count: int, nodes: Iterable[Node], caps: Caps, quotas: Iterable[Quota] = ()
) -> tuple[Refusal, ...]:
    """Return every reason to refuse ``count`` sessions of ``request``; none means it may queue."""
    own = tuple(n for n in nodes if n.resource_group == request.resource_group)
    if not any(node.devices for node in own):
        return (
            Refusal(
                "group",
                "no_devices",
                f"group: resource group {request.resource_group!r} has no GPU; choose another",
            ),
        )
    unknown = models_refusal(request, own)
    if unknown is None:
        own = _of_models(request.gpu_models, own)
    asks = explicit(request)
    found = [
        *(explicit_refusals(request, own, caps) if asks else _one(_fgpu(request.fgpu_milli, own, caps))),
        *_one(unknown),
        *_one(_cpu(request.cpu_milli, own, caps)),
        *_one(_memory(request.memory_mib, own, caps)),
        *_one(_count(count, caps)),
        *_one(_time_limit(request.time_limit_s, caps)),
        *_one(_priority(request.priority, caps)),
    ]
    if not found:
        found += quota_refusals(request, count, own, caps, quotas)
    if not found and not placement.could_ever_fit(request, own):
        field, gpu = "fgpu", f"{format_milli(request.fgpu_milli)} fGPU"
        if asks:
            field, gpu = "gpu_memory_mib", f"{request.gpu_memory_mib} MiB GPU memory"
        message = (
            f"{field}: no machine has {gpu} together with "
            f"{format_milli(request.cpu_milli)} CPU and {request.memory_mib} MiB memory; ask for less of one"
        )
        found.append(Refusal(field, "never_fits_together", message))
    return tuple(found)


def pending_refusals(
    request: Request, count: int, waiting: Iterable[Request], caps: Caps, quotas: Iterable[Quota]
) -> tuple[Refusal, ...]:
    """Return why ``count`` sessions of ``request`` may not queue beside what waits, even to start at once."""
    there = tuple(waiting)
    own = sum(1 for other in there if other.user == request.user)
    most = caps.max_pending_per_user
    found = []
    if own + count > most:
        left = str(most - own) if most > own else None
        message = f"count: at most {most} of your requests may wait at a time; {own} wait already"
        found.append(Refusal("count", "too_many_pending", message, str(most), left))
    over = over_pending(quotas, there, (request,) * count)
    if over is not None:
        left = str(over.limit - over.waiting) if over.limit > over.waiting else None
        found.append(Refusal("count", "over_quota", f"count: {over.message}", str(over.limit), left))
    return tuple(found)


def _one(refusal: Refusal | None) -> tuple[Refusal, ...]:
    return () if refusal is None else (refusal,)


def _of_models(models: tuple[str, ...], nodes: tuple[Node, ...]) -> tuple[Node, ...]:
    """Return the nodes once for each model with only their devices of it, as all GPUs of a session are of one.

    Those that have none are left out; with no model the nodes are as they are.
    """
    if not models:
        return nodes
    found = (replace(n, devices=tuple(d for d in n.devices if d.model == m)) for m in models for n in nodes)
    return tuple(node for node in found if node.devices)


def quota_refusals(
    request: Request, count: int, nodes: Sequence[Node], caps: Caps, quotas: Iterable[Quota]
) -> list[Refusal]:
    """Return what could never be inside these quotas, however long it waited; the strictest of each limit."""
    own = [quota for quota in quotas if counted_as(quota, request)]
    return [
        refusal
        for refusal in (
            _over_fgpu(request, nodes, caps, own),
            _over_number(own, "max_sessions", 1),
            _over_number(own, "max_pending", count),
        )
        if refusal is not None
    ]


def _strictest(quotas: Sequence[Quota], limit: str) -> tuple[int, str] | None:
    """Return the smallest of a limit, and the name of its quota."""
    found = [(value, quota_words(q)) for q in quotas if (value := getattr(q, limit)) is not None]
    return min(found, default=None)


def _over_fgpu(
    request: Request, nodes: Sequence[Node], caps: Caps, quotas: Sequence[Quota]
) -> Refusal | None:
    strictest = _strictest(quotas, "max_fgpu_milli")
    asked = least_milli(request, nodes)
    if strictest is None or asked <= strictest[0]:
        return None
    most, whose = strictest
    if explicit(request):
        field, nearest = "gpu_memory_mib", most_memory_mib(request, nodes, milli=most)
    else:
        field = "fgpu"
        inside = [a for a in amounts_that_fit(nodes, caps) if a <= most]
        nearest = format_milli(inside[-1]) if inside else None
    message = f"{field}: {format_milli(asked)} fGPU is above {format_milli(most)}, the quota of {whose}"
    return Refusal(field, "above_quota", message, format_milli(most), nearest)


def _over_number(quotas: Sequence[Quota], limit: str, count: int) -> Refusal | None:
    strictest = _strictest(quotas, limit)
    if strictest is None or count <= strictest[0]:
        return None
    most, whose = strictest
    what = "sessions" if limit == "max_sessions" else "requests waiting at once"
    message = f"count: {count} is above {most} {what}, the quota of {whose}"
    return Refusal("count", "above_quota", message, str(most), str(most) if most else None)


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
    asked_words = format_milli(asked)
    largest = format_milli(fitting[-1])
    nearest = format_milli(min(fitting, key=lambda a: (abs(a - asked), a)))
    step = format_milli(caps.fgpu_step_milli)
    if asked < fitting[0]:
        message = f"fgpu: {asked_words} is too small; choose at least {format_milli(fitting[0])}"
        return Refusal("fgpu", "too_small", message, format_milli(fitting[0]), nearest)
    if caps.max_fgpu_milli is not None and asked > caps.max_fgpu_milli:
        message = f"fgpu: {asked_words} is above the limit of {format_milli(caps.max_fgpu_milli)} per session"
        return Refusal("fgpu", "above_cap", message, format_milli(caps.max_fgpu_milli), nearest)
    if asked > fitting[-1]:
        message = f"fgpu: {asked_words} is more than any machine has; choose at most {largest}"
        return Refusal("fgpu", "never_fits", message, largest, nearest)
    one_gpu = max(d.capacity_milli for n in nodes for d in n.devices)
    if asked > one_gpu:
        message = (
            f"fgpu: {asked_words} isn't possible; {_nearest(asked, fitting)} (above one GPU, "
            f"{format_milli(one_gpu)} fGPU, only whole GPUs)"
        )
        return Refusal("fgpu", "straddles", message, format_milli(one_gpu), nearest)
    message = f"fgpu: {asked_words} isn't possible; {_nearest(asked, fitting)} (in steps of {step})"
    return Refusal("fgpu", "not_a_step", message, step, nearest)


def _nearest(asked: int, fitting: tuple[int, ...]) -> str:
    """Name the amounts next to ``asked`` on both sides."""
    below = [format_milli(a) for a in fitting if a < asked][-1:]
    above = [format_milli(a) for a in fitting if a > asked][:1]
    found = (*below, *above)
    return f"choose {' or '.join(found)}"


MIN_CPU_MILLI = 10
"""Less a container's engine cannot give."""


def _cpu(asked: int, nodes: tuple[Node, ...], caps: Caps) -> Refusal | None:
    most = max(n.cpu_milli for n in nodes)
    if asked < MIN_CPU_MILLI:
        least = format_milli(MIN_CPU_MILLI)
        message = f"cpu: {format_milli(asked)} is too small; choose at least {least}"
        return Refusal("cpu", "too_small", message, least, least)
    if caps.max_cpu_milli is not None and asked > caps.max_cpu_milli:
        limit = format_milli(caps.max_cpu_milli)
        message = f"cpu: {format_milli(asked)} is above the limit of {limit} per session"
        return Refusal("cpu", "above_cap", message, limit, format_milli(min(most, caps.max_cpu_milli)))
    if asked > most:
        limit = format_milli(most)
        message = f"cpu: {format_milli(asked)} is more than any machine has; choose at most {limit}"
        return Refusal("cpu", "never_fits", message, limit, limit)
    return None


MIN_MEMORY_MIB = 128
"""Below this a Jupyter server does not even start."""


def _memory(asked: int, nodes: tuple[Node, ...], caps: Caps) -> Refusal | None:
    most = max(n.memory_mib for n in nodes)
    if asked < MIN_MEMORY_MIB:
        message = f"memory_mib: {asked} is too small; choose at least {MIN_MEMORY_MIB}"
        return Refusal("memory_mib", "too_small", message, str(MIN_MEMORY_MIB), str(MIN_MEMORY_MIB))
    if caps.max_memory_mib is not None and asked > caps.max_memory_mib:
        message = f"memory_mib: {asked} is above the limit of {caps.max_memory_mib} MiB per session"
        nearest = str(min(most, caps.max_memory_mib))
        return Refusal("memory_mib", "above_cap", message, str(caps.max_memory_mib), nearest)
    if asked > most:
        message = f"memory_mib: {asked} is more than any machine has; choose at most {most}"
        return Refusal("memory_mib", "never_fits", message, str(most), str(most))
    return None


def _count(asked: int, caps: Caps) -> Refusal | None:
    if 1 <= asked <= caps.max_count:
        return None
    nearest = "1" if asked < 1 else str(caps.max_count)
    message = f"count: {asked} is not between 1 and {caps.max_count} sessions"
    return Refusal("count", "out_of_range", message, str(caps.max_count), nearest)


def _time_limit(asked: int | None, caps: Caps) -> Refusal | None:
    if asked is None:
        return None
    if asked < caps.min_time_limit_s:
        least = str(caps.min_time_limit_s)
        message = f"time_limit_s: {asked} is too short; choose at least {least}"
        return Refusal("time_limit_s", "too_small", message, least, least)
    if caps.max_time_limit_s is not None and asked > caps.max_time_limit_s:
        most = str(caps.max_time_limit_s)
        message = f"time_limit_s: {asked} is too long; choose at most {most}"
        return Refusal("time_limit_s", "above_cap", message, most, most)
    return None


def _priority(asked: int, caps: Caps) -> Refusal | None:
    if caps.max_priority is not None and asked > caps.max_priority:
        most = str(caps.max_priority)
        message = f"priority: {asked} is too high; choose at most {most}"
        return Refusal("priority", "above_cap", message, most, most)
    if caps.min_priority is not None and asked < caps.min_priority:
        least = str(caps.min_priority)
        message = f"priority: {asked} is too low; choose at least {least}"
        return Refusal("priority", "too_small", message, least, least)
    return None
