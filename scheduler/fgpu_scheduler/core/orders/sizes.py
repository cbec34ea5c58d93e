"""How much a request is, as far as an order has to know."""

from __future__ import annotations

from fgpu_scheduler.core.order import Line
from fgpu_scheduler.core.quota import least_milli

UNLIMITED_S = 4 * 3600
"""What a session without a time limit is taken to run."""


def asked_milli(line: Line) -> list[int]:
    """Return the fGPU x 1000 that each in the line asks for; of GPU memory and compute the least they are worth."""
    found = [s.request.fgpu_milli for s in line.waiting]
    if 0 not in found:
        return found
    nodes = line.snapshot.nodes
    worth: dict[tuple[int | None, int | None, tuple[str, ...]], int] = {}
    for at, session in enumerate(line.waiting):
        asked = session.request
        if asked.gpu_memory_mib is not None:
            shape = asked.gpu_memory_mib, asked.compute_percent, asked.gpu_models
            if shape not in worth:
                worth[shape] = least_milli(asked, nodes)
            found[at] = worth[shape]
    return found
