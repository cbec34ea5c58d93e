"""Acceptance into the queue: what is valid, inside the administrator's limits, and could ever run.

A refused request never enters the queue. Each refusal names the field, the limit and the nearest value that works.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from fgpu_scheduler.core import placement
from fgpu_scheduler.core.model import Device, Node, Quota, Request
from fgpu_scheduler.core.quota import counted_names, least_milli, over_pending, quota_words
from fgpu_scheduler.core.shares import is_explicit
from fgpu_scheduler.core.units import COMPUTE_GRAIN_PERCENT, MEMORY_GRAIN_MIB, format_milli, share_memory_mib

#: With less, a session would be warned of its end while it starts.
MIN_TIME_LIMIT_S = 60
#: The least that a container engine can limit a container to.
MIN_CPU_MILLI = 10
#: With less, a Jupyter server does not start.
MIN_MEMORY_MIB = 128


@dataclass(frozen=True, slots=True)
class Caps:
    """The administrator's limits on one request. None is no limit but that of the largest node.

    ``max_priority`` is the highest that this user may request, ``min_priority`` the lowest for all users.
    """

    fgpu_step_milli: int
    max_fgpu_milli: int | None = None
    max_cpu_milli: int | None = None
    max_memory_mib: int | None = None
    max_count: int = 8
    max_pending_per_user: int = 16
    min_time_limit_s: int = MIN_TIME_LIMIT_S
    max_time_limit_s: int | None = None
    min_priority: int | None = None
    max_priority: int | None = None


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a request is not accepted. ``limit`` and ``nearest`` are in the field's own notation."""

    field: str
    code: str
    message: str
    limit: str | None = None
    nearest: str | None = None


def admit(
    request: Request, count: int, nodes: Iterable[Node], caps: Caps, quotas: Iterable[Quota] = ()
) -> tuple[Refusal, ...]:
    """Return every reason to refuse ``count`` sessions of ``request``; none means it may queue."""
    own = tuple(n for n in nodes if n.resource_group == request.resource_group)
    if not any(node.devices for node in own):
        message = f"group: resource group {request.resource_group!r} has no GPU; choose another"
        return (Refusal("group", "no_devices", message),)
    unknown = _models(request, own)
    if unknown is None:
        own = _of_models(request.gpu_models, own)
    asks = is_explicit(request)
    cpu, memory = max(n.cpu_milli for n in own), max(n.memory_mib for n in own)
    checks = (
        *(_explicit(request, own, caps) if asks else (_fgpu(request.fgpu_milli, own, caps),)),
        unknown,
        _of_machine(
            "cpu", request.cpu_milli, MIN_CPU_MILLI, caps.max_cpu_milli, most=cpu, words=format_milli
        ),
        _of_machine("memory_mib", request.memory_mib, MIN_MEMORY_MIB, caps.max_memory_mib, most=memory),
        _count(count, caps),
        _outside(
            "time_limit_s",
            request.time_limit_s,
            caps.min_time_limit_s,
            caps.max_time_limit_s,
            "short",
            "long",
        ),
        _outside("priority", request.priority, caps.min_priority, caps.max_priority, "low", "high"),
    )
    found = [refusal for refusal in checks if refusal is not None]
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
    """Return why ``count`` sessions of ``request`` may not queue beside the waiting ones, even to start at once."""
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


def _of_models(models: tuple[str, ...], nodes: tuple[Node, ...]) -> tuple[Node, ...]:
    """Return the nodes once per model, with only the devices of that model: all GPUs of a session are of one model.

    Nodes without such devices are left out. Without models the nodes are returned unchanged.
    """
    if not models:
        return nodes
    found = (replace(n, devices=tuple(d for d in n.devices if d.model == m)) for m in models for n in nodes)
    return tuple(node for node in found if node.devices)


def quota_refusals(
    request: Request, count: int, nodes: Sequence[Node], caps: Caps, quotas: Iterable[Quota]
) -> list[Refusal]:
    """Return the limits of these quotas that the request exceeds at any time, the strictest of each kind."""
    own = [quota for quota in quotas if counted_names(quota, request)]
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
    """Return the smallest value of a limit, and the name of its quota."""
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
    if is_explicit(request):
        field, nearest = "gpu_memory_mib", _most_gpu_memory_mib(request, nodes, milli=most)
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
    """Return in rising order each fGPU x 1000 that some node could ever hold, within the caps.

    These are the multiples of the step up to one device, and whole devices up to the number of a node.
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
                # A share needs some memory: it may round down to 0.
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
    below = [format_milli(a) for a in fitting if a < asked][-1:]
    above = [format_milli(a) for a in fitting if a > asked][:1]
    found = (*below, *above)
    return f"choose {' or '.join(found)}"


def _models(request: Request, nodes: Sequence[Node]) -> Refusal | None:
    """Refuse a GPU model that no node has, or that is named twice."""
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


def _explicit(request: Request, nodes: Sequence[Node], caps: Caps) -> list[Refusal]:
    """Return every reason to refuse explicit amounts on these nodes, which have only devices of the requested models."""
    if request.gpu_memory_mib is None:
        message = "compute_percent: give gpu_memory_mib, too"
        return [Refusal("compute_percent", "compute_alone", message)]
    if request.fgpu_milli:
        message = "gpu_memory_mib: give this or fgpu, not both"
        return [Refusal("gpu_memory_mib", "two_ways", message)]
    found = (_gpu_memory(request.gpu_memory_mib, nodes), _compute(request.compute_percent))
    refusals = [refusal for refusal in found if refusal is not None]
    if not refusals and caps.max_fgpu_milli is not None:
        asked_milli = least_milli(request, nodes)
        if asked_milli > caps.max_fgpu_milli:
            limit = format_milli(caps.max_fgpu_milli)
            worth = format_milli(asked_milli)
            message = f"gpu_memory_mib: this is worth {worth} fGPU, above the limit of {limit} per session"
            most = _most_gpu_memory_mib(request, nodes, milli=caps.max_fgpu_milli)
            refusals.append(Refusal("gpu_memory_mib", "above_cap", message, limit, most))
    return refusals


def _most_gpu_memory_mib(request: Request, nodes: Sequence[Node], *, milli: int) -> str | None:
    """Return the most memory, in the field's notation, that is worth at most ``milli`` beside the same compute.

    None if the compute alone is worth more.
    """
    # One device of each kind is enough.
    alike = {(d.model, d.memory_mib, d.capacity_milli): d for d in _devices(nodes)}
    few = (replace(nodes[0], devices=tuple(alike.values())),)
    largest = max(device.memory_mib for device in alike.values())
    for memory_mib in range(largest - largest % MEMORY_GRAIN_MIB, 0, -MEMORY_GRAIN_MIB):
        worth_milli = least_milli(replace(request, gpu_memory_mib=memory_mib), few)
        if 0 < worth_milli <= milli:
            return str(memory_mib)
    return None


def _gpu_memory(asked: int, nodes: Sequence[Node]) -> Refusal | None:
    name, totals = "gpu_memory_mib", sorted({device.memory_mib for device in _devices(nodes)})
    largest = totals[-1]
    if asked > largest:
        message = f"{name}: {asked} is more than one GPU has; choose at most {largest}"
        return Refusal(name, "never_fits", message, str(largest), str(largest))
    if asked < MEMORY_GRAIN_MIB:
        return _outside(name, asked, MEMORY_GRAIN_MIB, None)
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


def _count(asked: int, caps: Caps) -> Refusal | None:
    if 1 <= asked <= caps.max_count:
        return None
    nearest = "1" if asked < 1 else str(caps.max_count)
    message = f"count: {asked} isn't possible; choose 1 to {caps.max_count} sessions"
    return Refusal("count", "out_of_range", message, str(caps.max_count), nearest)


def _of_machine(
    field: str, asked: int, least: int, cap: int | None, *, most: int, words: Callable[[int], str] = str
) -> Refusal | None:
    """Refuse an amount below the least, above the cap, or above the largest machine."""
    small = _outside(field, asked, least, None, words=words)
    if small is not None:
        return small
    if cap is not None and asked > cap:
        limit = words(cap) + (" MiB" if field == "memory_mib" else "")
        message = f"{field}: {words(asked)} is above the limit of {limit} per session"
        return Refusal(field, "above_cap", message, words(cap), words(min(most, cap)))
    if asked > most:
        message = f"{field}: {words(asked)} is more than any machine has; choose at most {words(most)}"
        return Refusal(field, "never_fits", message, words(most), words(most))
    return None


def _outside(
    field: str,
    asked: int | None,
    least: int | None,
    most: int | None,
    low: str = "small",
    high: str = "large",
    *,
    words: Callable[[int], str] = str,
) -> Refusal | None:
    if asked is None:
        return None
    if most is not None and asked > most:
        message = f"{field}: {words(asked)} is too {high}; choose at most {words(most)}"
        return Refusal(field, "above_cap", message, words(most), words(most))
    if least is not None and asked < least:
        message = f"{field}: {words(asked)} is too {low}; choose at least {words(least)}"
        return Refusal(field, "too_small", message, words(least), words(least))
    return None
