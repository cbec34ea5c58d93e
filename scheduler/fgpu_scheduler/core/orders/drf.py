"""Dominant resource fairness (Ghodsi et al., NSDI 2011): who holds least, of what they hold most, comes first."""

from __future__ import annotations

from collections.abc import Sequence

from fgpu_scheduler.core.lifecycle import HOLDING
from fgpu_scheduler.core.order import Line
from fgpu_scheduler.core.orders.sizes import asked_milli
from fgpu_scheduler.core.usage import held_milli

MILLION = 10**6


def drf(line: Line) -> Sequence[float]:
    """Rank by the user's dominant share, in millionths of the resource group: of fGPU, CPU or memory the largest.

    It counts what the user holds now and their own requests ahead.
    """
    snapshot, group = line.snapshot, line.resource_group
    nodes = [n for n in snapshot.nodes if n.resource_group == group]
    fgpu = MILLION / max(1, sum(d.capacity_milli for n in nodes for d in n.devices))
    cpu = MILLION / max(1, sum(n.cpu_milli for n in nodes))
    memory = MILLION / max(1, sum(n.memory_mib for n in nodes))
    held: dict[str, list[float]] = {}
    """Of each user the share of fGPU, CPU and memory."""
    for session in snapshot.sessions:
        asked = session.request
        if session.state in HOLDING and asked.resource_group == group:
            own = held.setdefault(asked.user, [0, 0, 0])
            own[0] += held_milli(session) * fgpu
            own[1] += asked.cpu_milli * cpu
            own[2] += asked.memory_mib * memory
    ranks = []
    for session, milli in zip(line.waiting, asked_milli(line), strict=True):
        asked = session.request
        own = held.get(asked.user) or held.setdefault(asked.user, [0, 0, 0])
        # Rounded: sums that differ only by the order in which they were made are equal.
        ranks.append(int(max(own) + 0.5))
        own[0] += milli * fgpu
        own[1] += asked.cpu_milli * cpu
        own[2] += asked.memory_mib * memory
    return ranks
