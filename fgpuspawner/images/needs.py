"""What an image needs at least, and what is recommended for it, against what there is. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fgpu_scheduler import Caps, Device, Node, Refusal, Request, format_milli
from fgpu_scheduler.core.units import MEMORY_GRAIN_MIB, share_memory_mib
from fgpuspawner.images.architectures import models_for
from fgpuspawner.images.model import Image
from fgpuspawner.images.saying import shown


def never_held(image: Image, nodes: Sequence[Node], caps: Caps) -> str | None:
    """Return why no session of this image could ever start on these nodes, for administrators; None: it could.

    Where nothing is known of any device, or of any node, nothing is said of them.
    """
    devices = [device for node in nodes for device in node.devices]
    for key, least, most, text, whose in (
        (
            "fgpu",
            image.min_fgpu_milli,
            [d.capacity_milli for d in devices],
            format_milli,
            "the largest GPU has",
        ),
        (
            "gpu_memory_mib",
            image.min_gpu_memory_mib,
            [d.memory_mib for d in devices],
            str,
            "the largest GPU has",
        ),
        ("cpu", image.min_cpu_milli, [n.cpu_milli for n in nodes], format_milli, "the largest node has"),
        ("memory_mib", image.min_memory_mib, [n.memory_mib for n in nodes], str, "the largest node has"),
    ):
        if most and least > max(most):
            return _too_much(image, key, text(least), whose, text(max(most)))
    for key, least, cap, text in (
        ("fgpu", image.min_fgpu_milli, caps.max_fgpu_milli, format_milli),
        ("cpu", image.min_cpu_milli, caps.max_cpu_milli, format_milli),
        ("memory_mib", image.min_memory_mib, caps.max_memory_mib, str),
    ):
        if cap and least > cap:
            return _too_much(image, key, text(least), f"c.FGPU.max_{key} is", text(cap))
    models = list(dict.fromkeys(device.model for device in devices))
    if models and not models_for(image, models):
        return (
            f"image {shown(image.slug)}: gpu_architectures: it has code for {', '.join(image.gpu_architectures)}, and "
            f"for none of the GPUs ({', '.join(models)}); nobody is offered it"
        )
    return None


def _too_much(image: Image, key: str, least: str, whose: str, most: str) -> str:
    return (
        f"image {shown(image.slug)}: minimum.{key}: {least} is more than {whose} ({most}), so nobody is offered it; "
        f"write at most {most}"
    )


def refusals(image: Image, request: Request, nodes: Sequence[Node], *, step_milli: int) -> list[Refusal]:
    """Return why this image cannot be started with these amounts on the nodes of the request's group."""
    own = [node for node in nodes if node.resource_group == request.resource_group]
    found = [
        _below(image, "cpu", request.cpu_milli, image.min_cpu_milli, format_milli),
        _below(image, "memory_mib", request.memory_mib, image.min_memory_mib, lambda mib: f"{mib} MiB"),
        _gpu(image, request, _candidates(own, request.gpu_model), step_milli),
        _model(image, request, own),
    ]
    return [refusal for refusal in found if refusal is not None]


def _gpu(image: Image, request: Request, devices: Sequence[Device], step_milli: int) -> Refusal | None:
    """Refuse too small a slice. Of several kinds of device that it could be of, the least counts."""
    if request.gpu_memory_mib is not None:
        shares = [_share_mib(image.min_fgpu_milli, d) for d in devices] if image.min_fgpu_milli else []
        # What may be asked for are multiples.
        least_mib = (
            -(-max(image.min_gpu_memory_mib, min(shares, default=0)) // MEMORY_GRAIN_MIB) * MEMORY_GRAIN_MIB
        )
        return _below(image, "gpu_memory_mib", request.gpu_memory_mib, least_mib, lambda mib: f"{mib} MiB")
    short = _below(image, "fgpu", request.fgpu_milli, image.min_fgpu_milli, format_milli)
    if short is not None or not image.min_gpu_memory_mib:
        return short
    fits = [d for d in devices if d.capacity_milli >= request.fgpu_milli] or devices
    gets_mib = min((_share_mib(request.fgpu_milli, d) for d in fits), default=image.min_gpu_memory_mib)
    if gets_mib >= image.min_gpu_memory_mib:
        return None
    enough = _enough_on_all_milli(image.min_gpu_memory_mib, devices, step_milli)
    message = (
        f"fgpu: {format_milli(request.fgpu_milli)} comes with {gets_mib} MiB of GPU memory, below the least of "
        f"{image.min_gpu_memory_mib} MiB that {image.name} needs; {format_milli(enough)} has it"
    )
    return Refusal("fgpu", "below_image", message, format_milli(enough), format_milli(enough))


def _model(image: Image, request: Request, nodes: Sequence[Node]) -> Refusal | None:
    models = list(dict.fromkeys(device.model for node in nodes for device in node.devices))
    usable = models_for(image, models)
    if not models or len(usable) == len(models) or request.gpu_model in usable:
        return None
    has = f"{image.name} has code for compute capability {', '.join(image.gpu_architectures)} only"
    if not usable:
        message = (
            f"image: {has}, and none of the GPUs of {request.resource_group} ({', '.join(models)}) has that"
        )
        return Refusal("image", "other_architecture", message)
    message = f"gpu_model: {has}; choose {' or '.join(usable)}"
    return Refusal("gpu_model", "other_architecture", message, None, usable[0])


def _below(image: Image, field: str, asked: int, least: int, text: Callable[[int], str]) -> Refusal | None:
    if asked >= least:
        return None
    bare = text(least).removesuffix(" MiB")
    message = f"{field}: {text(asked)} is below the least of {text(least)} that {image.name} needs"
    return Refusal(field, "below_image", message, bare, bare)


def amounts_for(
    image: Image, usual: tuple[int, int, int], devices: Sequence[Device], *, step_milli: int
) -> tuple[int, int, int]:
    """Return the fGPU in thousandths, CPU in thousandths and memory in MiB that an image is started with.

    That is what is recommended; where nothing is, the usual of these three, but never below the minimum.
    """
    fgpu, cpu, memory_mib = usual
    fgpu = image.recommended_fgpu_milli or max(fgpu, image.min_fgpu_milli)
    wanted_mib = image.recommended_gpu_memory_mib or image.min_gpu_memory_mib
    if wanted_mib:
        fgpu = max(fgpu, _enough_on_all_milli(wanted_mib, devices, step_milli))
    return (
        fgpu,
        image.recommended_cpu_milli or max(cpu, image.min_cpu_milli),
        image.recommended_memory_mib or max(memory_mib, image.min_memory_mib),
    )


def least_fgpu_milli(image: Image, devices: Sequence[Device], *, step_milli: int) -> int:
    """Return the least fGPU in thousandths that an image can be started with, whichever device it gets; 0: any."""
    least = image.min_fgpu_milli
    if image.min_gpu_memory_mib:
        least = max(least, _enough_on_all_milli(image.min_gpu_memory_mib, devices, step_milli))
    return least


def inside_a_node(fgpu_milli: int, cpu_milli: int, memory_mib: int, nodes: Sequence[Node]) -> tuple[int, int]:
    """Return so much of the CPU and memory as one node has that could hold the fGPU; all where no node is known."""
    able = [node for node in nodes if _could_hold(fgpu_milli, node)] or nodes
    inside = [(min(cpu_milli, node.cpu_milli), min(memory_mib, node.memory_mib)) for node in able]
    return max(inside, default=(cpu_milli, memory_mib))


def _could_hold(fgpu_milli: int, node: Node) -> bool:
    capacities = [device.capacity_milli for device in node.devices]
    return any(
        fgpu_milli <= capacity
        or fgpu_milli in range(capacity, capacity * capacities.count(capacity) + 1, capacity)
        for capacity in set(capacities)
    )


def least_words(image: Image) -> str:
    """Return the least that a session of it may have, in words; "" where there is none."""
    parts = {
        f"{format_milli(image.min_fgpu_milli)} fGPU": image.min_fgpu_milli,
        f"{image.min_gpu_memory_mib} MiB of GPU memory": image.min_gpu_memory_mib,
        f"{format_milli(image.min_cpu_milli)} CPU": image.min_cpu_milli,
        f"{image.min_memory_mib} MiB of memory": image.min_memory_mib,
    }
    return ", ".join(text for text, least in parts.items() if least)


def _candidates(nodes: Sequence[Node], model: str | None) -> list[Device]:
    return [d for node in nodes for d in node.devices if model in (None, d.model)]


def _share_mib(fgpu_milli: int, device: Device) -> int:
    return share_memory_mib(
        fgpu_milli, capacity_milli=device.capacity_milli, device_memory_mib=device.memory_mib
    )


def _enough_on_all_milli(memory_mib: int, devices: Sequence[Device], step_milli: int) -> int:
    # There are few kinds of device, however many devices.
    kinds = {(d.capacity_milli, d.memory_mib): d for d in devices}
    return max((_enough_milli(memory_mib, d, step_milli) for d in kinds.values()), default=0)


def _enough_milli(memory_mib: int, device: Device, step_milli: int) -> int:
    """Return the least amount that comes with so much of the device's memory; at most the whole device."""
    for fgpu_milli in range(step_milli, device.capacity_milli, step_milli):
        if _share_mib(fgpu_milli, device) >= memory_mib:
            return fgpu_milli
    return device.capacity_milli
