"""What an amount of fGPU is, in words: which part of a GPU, with how much memory and compute. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from fractions import Fraction

from fgpu_scheduler import Device, memory_words, share_compute_percent, share_memory_mib

FINEST = 20
"""Parts of a GPU with a larger denominator are written in percent."""


def meaning(fgpu_milli: int, devices: Sequence[Device], lending: Collection[str] = ()) -> dict[str, str]:
    """Return what an amount is of each model that it can be cut from: "1/4 GPU: 2 GiB GPU memory, 25 % compute".

    ``devices`` are those of one resource group. On the nodes of ``lending`` it is "at least 25 % compute".
    """
    found: dict[str, list[str]] = {}
    kinds = {(d.model, d.capacity_milli, d.memory_mib, d.node_id in lending): d for d in devices}
    for device in kinds.values():
        if words := _of(fgpu_milli, device, lends=device.node_id in lending):
            if words in found.get(device.model, ()):
                continue
            found.setdefault(device.model, []).append(words)
    return {model: " or ".join(words) for model, words in found.items()}


def _of(fgpu_milli: int, device: Device, *, lends: bool) -> str:
    whole, rest = divmod(fgpu_milli, device.capacity_milli)
    if whole and rest:
        return ""
    if whole > 1:
        return f"{whole} GPUs: {memory_words(device.memory_mib)} GPU memory each"
    if whole == 1:
        return f"1 GPU: {memory_words(device.memory_mib)} GPU memory"
    part = Fraction(fgpu_milli, device.capacity_milli)
    percent = share_compute_percent(fgpu_milli, capacity_milli=device.capacity_milli)
    share_mib = share_memory_mib(
        fgpu_milli, capacity_milli=device.capacity_milli, device_memory_mib=device.memory_mib
    )
    name = f"{part} GPU" if part.denominator <= FINEST else f"{percent} % of a GPU"
    return f"{name}: {memory_words(share_mib)} GPU memory, {'at least ' if lends else ''}{percent} % compute"
