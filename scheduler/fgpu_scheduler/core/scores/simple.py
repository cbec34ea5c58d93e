"""Scores that look at nothing but the node."""

from __future__ import annotations

from fgpu_scheduler.core.placement import NodeAmounts


def first_fit(before: NodeAmounts, after: NodeAmounts, taken: tuple[int, ...]) -> tuple[int, ...]:
    """Score every fit alike, so that the lowest node id and the lowest uuids are taken."""
    return (0,)


def spread(before: NodeAmounts, after: NodeAmounts, taken: tuple[int, ...]) -> tuple[int, ...]:
    """Score by how full the fullest device taken gets, then the node, in millionths: [-10^6, 0] each.

    Sessions disturb each other least that way, and whole devices run out soonest.
    """
    devices = tuple(zip(after.free_milli, after.capacity_milli, strict=True))
    own = min((10**6 * devices[i][0] // devices[i][1] for i in taken), default=0)
    whole = sum(after.capacity_milli)
    return -own, -(10**6 * sum(after.free_milli) // whole) if whole else 0
