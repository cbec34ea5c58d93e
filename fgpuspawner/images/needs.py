"""What an image needs, and what is recommended for it, against what there is; which GPUs it has code for. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence

from fgpu_scheduler import (
    MEMORY_GRAIN_MIB,
    Caps,
    Device,
    Node,
    Refusal,
    Request,
    accepts_model,
    format_milli,
    share_memory_mib,
)
from fgpuspawner.images.entry import amount_text, amounts_of, shown
from fgpuspawner.images.model import Image

CAPABILITIES = {
    r"RTX 50\d\d.*|RTX PRO \d+ Blackwell.*": "12.0",
    "B300|GB300": "10.3",
    "B200|B100|GB200": "10.0",
    "H100|H200|H20|H800|GH200": "9.0",
    r"L4|L40S?|RTX 40\d\d.*|RTX \d000 Ada.*": "8.9",
    r"A2|A10G?|A16|A40|RTX A\d\d\d\d|RTX 30\d\d.*": "8.6",
    "A100|A30|A800": "8.0",
    r"T4G?|RTX 20\d\d.*|Quadro RTX \d000|TITAN RTX|GTX 16\d\d.*": "7.5",
    "V100|TITAN V": "7.0",
    r"P4|P40|GTX 10\d\d.*|TITAN Xp?": "6.1",
    "P100": "6.0",
    "M4|M40|M60": "5.2",
    "K80": "3.7",
    "K40": "3.5",
}
"""The compute capability by the name that the driver gives a model, without maker and memory (NVIDIA's own list)."""


def never_held(image: Image, nodes: Sequence[Node], caps: Caps) -> str | None:
    """Return why no session of this image could ever start on these nodes, for administrators; None: it could.

    Where nothing is known of any device, or of any node, nothing is said of them.
    """
    devices = [device for node in nodes for device in node.devices]
    there: dict[str, tuple[str, list[int], int | None]] = {
        "fgpu": ("GPU", [d.capacity_milli for d in devices], caps.max_fgpu_milli),
        "gpu_memory_mib": ("GPU", [d.memory_mib for d in devices], None),
        "cpu": ("node", [n.cpu_milli for n in nodes], caps.max_cpu_milli),
        "memory_mib": ("node", [n.memory_mib for n in nodes], caps.max_memory_mib),
    }
    for key, least in amounts_of(image, "minimum").items():
        what, have, cap = there[key]
        for whose, most in (
            (f"the largest {what} has", max(have, default=None)),
            (f"c.FGPU.max_{key} is", cap),
        ):
            if most is not None and least > most:
                bound = amount_text(key, most)
                return (
                    f"image {shown(image.slug)}: minimum.{key}: {amount_text(key, least)} is more than {whose} ({bound}),"
                    f" so no user sees it; write at most {bound}"
                )
    models = list(dict.fromkeys(device.model for device in devices))
    if models and not models_for(image, models):
        return (
            f"image {shown(image.slug)}: gpu_architectures: it has code for {', '.join(image.gpu_architectures)}, and "
            f"for none of the GPUs ({', '.join(models)}); nobody is offered it"
        )
    return None


def between_steps(image: Image, amounts: Sequence[int]) -> str | None:
    """Return which fGPU of an image is not one of the amounts x 1000 that can be asked for, ascending; None: each is."""
    for table in ("minimum", "recommended"):
        said = amounts_of(image, table)["fgpu"]
        larger = next((amount for amount in amounts if amount >= said), said)
        if said and larger != said:
            choices = [
                format_milli(a) for a in (max((a for a in amounts if a < said), default=0), larger) if a
            ]
            return (
                f"image {shown(image.slug)}: {table}.fgpu: {format_milli(said)} cannot be asked for; "
                f"write {' or '.join(choices)}"
            )
    return None


def refusals(image: Image, request: Request, nodes: Sequence[Node], *, step_milli: int) -> list[Refusal]:
    """Return why this image cannot be started with these amounts on the nodes of the request's group."""
    devices = [d for n in nodes if n.resource_group == request.resource_group for d in n.devices]
    found = [
        _below(image, "cpu", request.cpu_milli, image.min_cpu_milli),
        _below(image, "memory_mib", request.memory_mib, image.min_memory_mib),
        _gpu(image, request, [d for d in devices if accepts_model(request, d.model)], step_milli),
        _model(image, request, devices),
    ]
    return [refusal for refusal in found if refusal is not None]


def _gpu(image: Image, request: Request, devices: Sequence[Device], step_milli: int) -> Refusal | None:
    """Refuse too small a slice. Of several kinds of device that it could be of, the least counts."""
    if request.gpu_memory_mib is not None:
        shares = [_share_mib(image.min_fgpu_milli, d) for d in devices] if image.min_fgpu_milli else []
        # What may be asked for are multiples.
        least_mib = max(image.min_gpu_memory_mib, min(shares, default=0))
        least_mib = -(-least_mib // MEMORY_GRAIN_MIB) * MEMORY_GRAIN_MIB
        return _below(image, "gpu_memory_mib", request.gpu_memory_mib, least_mib)
    short = _below(image, "fgpu", request.fgpu_milli, image.min_fgpu_milli)
    if short is not None or not image.min_gpu_memory_mib:
        return short
    fits = [d for d in devices if d.capacity_milli >= request.fgpu_milli] or devices
    gets_mib = min((_share_mib(request.fgpu_milli, d) for d in fits), default=image.min_gpu_memory_mib)
    if gets_mib >= image.min_gpu_memory_mib:
        return None
    enough = format_milli(_enough_on_all_milli(image.min_gpu_memory_mib, devices, step_milli))
    message = (
        f"fgpu: {format_milli(request.fgpu_milli)} comes with {gets_mib} MiB of GPU memory, below the least of "
        f"{image.min_gpu_memory_mib} MiB that {image.name} needs; {enough} has it"
    )
    return Refusal("fgpu", "below_image", message, enough, enough)


def _model(image: Image, request: Request, devices: Sequence[Device]) -> Refusal | None:
    models = list(dict.fromkeys(device.model for device in devices))
    usable = models_for(image, models)
    named = request.gpu_models
    if not models or len(usable) == len(models) or (named and set(named) <= set(usable)):
        return None
    has = f"{image.name} has code for compute capability {', '.join(image.gpu_architectures)} only"
    if not usable:
        message = (
            f"image: {has}, and none of the GPUs of {request.resource_group} ({', '.join(models)}) has that"
        )
        return Refusal("image", "other_architecture", message)
    message = f"gpu_models: {has}; choose {' or '.join(usable)}"
    return Refusal("gpu_models", "other_architecture", message, None, usable[0])


def _below(image: Image, field: str, asked: int, least: int) -> Refusal | None:
    if asked >= least:
        return None
    said, bound, unit = amount_text(field, asked), amount_text(field, least), " MiB" * field.endswith("_mib")
    message = f"{field}: {said}{unit} is below the least of {bound}{unit} that {image.name} needs"
    return Refusal(field, "below_image", message, bound, bound)


def fgpu_for(image: Image, usual_milli: int, devices: Sequence[Device], *, step_milli: int) -> int:
    """Return the fGPU in thousandths that an image is started with: the recommended, else the usual or its minimum."""
    wanted_mib = image.recommended_gpu_memory_mib or image.min_gpu_memory_mib
    return max(
        image.recommended_fgpu_milli or max(usual_milli, image.min_fgpu_milli),
        _enough_on_all_milli(wanted_mib, devices, step_milli),
    )


def beside_for(image: Image, cpu_milli: int, memory_mib: int) -> tuple[int, int]:
    """Return the CPU in thousandths and memory in MiB that an image is started with, by the same rule."""
    return (
        image.recommended_cpu_milli or max(cpu_milli, image.min_cpu_milli),
        image.recommended_memory_mib or max(memory_mib, image.min_memory_mib),
    )


def least_fgpu_milli(image: Image, devices: Sequence[Device], *, step_milli: int) -> int:
    """Return the least fGPU in thousandths that an image can be started with, whichever device it gets; 0: any."""
    enough = _enough_on_all_milli(image.min_gpu_memory_mib, devices, step_milli)
    return max(image.min_fgpu_milli, enough)


def nodes_for(fgpu_milli: int, nodes: Sequence[Node]) -> Sequence[Node]:
    """Return those of the nodes that could ever hold an amount; all where none could."""
    return [node for node in nodes if _could_hold(fgpu_milli, node)] or nodes


def _could_hold(fgpu_milli: int, node: Node) -> bool:
    capacities = [device.capacity_milli for device in node.devices]
    return any(
        fgpu_milli <= capacity
        or fgpu_milli in range(capacity, capacity * capacities.count(capacity) + 1, capacity)
        for capacity in set(capacities)
    )


def least_words(image: Image) -> str:
    """Return the least that a session of it may have, in words; "" where there is none."""
    units = ("fGPU", "MiB of GPU memory", "CPU", "MiB of memory")
    least = zip(amounts_of(image, "minimum").items(), units, strict=True)
    return ", ".join(f"{amount_text(key, amount)} {unit}" for (key, amount), unit in least if amount)


def _share_mib(fgpu_milli: int, device: Device) -> int:
    return share_memory_mib(
        fgpu_milli, capacity_milli=device.capacity_milli, device_memory_mib=device.memory_mib
    )


def _enough_on_all_milli(memory_mib: int, devices: Sequence[Device], step_milli: int) -> int:
    """Return the least amount that comes with so much memory on each of the devices; at most a whole one."""

    def enough_milli(device: Device) -> int:
        steps = range(step_milli, device.capacity_milli, step_milli)
        return next(
            (milli for milli in steps if _share_mib(milli, device) >= memory_mib), device.capacity_milli
        )

    # There are few kinds of device, however many devices.
    kinds = {(d.capacity_milli, d.memory_mib): d for d in devices if memory_mib}
    return max(map(enough_milli, kinds.values()), default=0)


def capability_of(model: str) -> str | None:
    """Return a GPU model's compute capability such as "8.0"; None where it is not known."""
    name = re.sub(r"^(NVIDIA |Tesla |GeForce )+", "", model)
    for names, capability in CAPABILITIES.items():
        # "A100-SXM4-40GB" and "H100 80GB HBM3" are what "A100" and "H100" come as.
        if re.fullmatch(rf"(?:{names})(?:[- ](?:SXM|PCIE|NVL|HBM|\d+ ?GB).*)?", name, re.IGNORECASE):
            return capability
    return None


def runs_on(image: Image, model: str) -> bool:
    """Return False where the image is known to have no code for this model of GPU."""
    capability = capability_of(model)
    if capability is None or not image.gpu_architectures:
        return True
    # Code for 8.0 runs on 8.6, and not the other way round, nor on another major version.
    major, minor = (int(part) for part in capability.split("."))
    listed = [tuple(int(part) for part in one.split(".")) for one in image.gpu_architectures]
    return any(one == major and least <= minor for one, least in listed)


def models_for(image: Image, models: Sequence[str]) -> tuple[str, ...]:
    """Return those of the models that the image may run on."""
    return tuple(model for model in models if runs_on(image, model))
