"""The scores of `simple` and `best_fit` for many ways to place at once, and which scores have such a form."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import numpy as np

from fgpu_scheduler.core.node_table import BatchScore, Ints, PlacementBatch
from fgpu_scheduler.core.placement import Score, best_fit
from fgpu_scheduler.core.scores.simple import first_fit, spread


@runtime_checkable
class HasBatchScore(Protocol):
    """A score that can judge many ways at once."""

    def batch(self, takes: PlacementBatch) -> tuple[Ints, ...]:
        """Return what the score itself returns, of every way."""


def batch_form(score: Score) -> BatchScore | None:
    """Return the form of ``score`` for many at once, or None if it has none."""
    if isinstance(score, HasBatchScore):
        return score.batch
    return _SIMPLE.get(score)


def batch_best_fit(takes: PlacementBatch) -> tuple[Ints, ...]:
    """Score as `best_fit` does."""
    rest = takes.devices_taken * (10**6 * takes.after // takes.capacity_milli)
    return rest, takes.whole_after()


def _first_fit(takes: PlacementBatch) -> tuple[Ints, ...]:
    return (np.zeros_like(takes.after),)


def _spread(takes: PlacementBatch) -> tuple[Ints, ...]:
    own = 10**6 * takes.after // takes.capacity_milli if takes.devices_taken else takes.after
    size = (takes.devices * takes.capacity_milli)[takes.row]
    return -own, -(10**6 * takes.sum_after() // size)


_SIMPLE: dict[Score, BatchScore] = {best_fit: batch_best_fit, first_fit: _first_fit, spread: _spread}
