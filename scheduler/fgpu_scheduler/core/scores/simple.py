"""Scores that look at nothing but the node, and their batch forms for many placements at once."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import numpy as np

from fgpu_scheduler.core.node_table import BatchScore, Ints, PlacementBatch
from fgpu_scheduler.core.placement import NodeAmounts, Score, best_fit


def first_fit(before: NodeAmounts, after: NodeAmounts, taken: tuple[int, ...]) -> tuple[int, ...]:
    """Score every placement alike, so that the lowest node id and the lowest uuids are taken."""
    return (0,)


def spread(before: NodeAmounts, after: NodeAmounts, taken: tuple[int, ...]) -> tuple[int, ...]:
    """Score by how full the fullest device taken gets, then the node, in millionths: [-10^6, 0] each.

    Sessions then disturb each other least, and whole devices run out soonest.
    """
    devices = tuple(zip(after.free_milli, after.capacity_milli, strict=True))
    own = min((10**6 * devices[i][0] // devices[i][1] for i in taken), default=0)
    whole = sum(after.capacity_milli)
    return -own, -(10**6 * sum(after.free_milli) // whole) if whole else 0


@runtime_checkable
class HasBatchScore(Protocol):
    """A score that can judge many placements at once."""

    def batch(self, takes: PlacementBatch) -> tuple[Ints, ...]:
        """Return what the score itself returns, for every placement."""


def batch_form(score: Score) -> BatchScore | None:
    """Return the form of ``score`` for many placements at once, or None if it has none."""
    return score.batch if isinstance(score, HasBatchScore) else _SIMPLE.get(score)


def batch_best_fit(takes: PlacementBatch) -> tuple[Ints, ...]:
    """Score as `best_fit` does."""
    rest = takes.devices_taken * (10**6 * takes.after // takes.capacity_milli)
    return rest, takes.whole_after()


def _batch_first_fit(takes: PlacementBatch) -> tuple[Ints, ...]:
    return (np.zeros_like(takes.after),)


def _batch_spread(takes: PlacementBatch) -> tuple[Ints, ...]:
    own = 10**6 * takes.after // takes.capacity_milli if takes.devices_taken else takes.after
    size = (takes.devices * takes.capacity_milli)[takes.row]
    return -own, -(10**6 * takes.sum_after() // size)


_SIMPLE: dict[Score, BatchScore] = {
    best_fit: batch_best_fit,
    first_fit: _batch_first_fit,
    spread: _batch_spread,
}
