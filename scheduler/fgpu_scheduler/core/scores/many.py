"""The scores of `simple` and `best_fit` for many ways to place at once, and which scores have such a form."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import numpy as np

from fgpu_scheduler.core.columns import Ints, Many, Takes
from fgpu_scheduler.core.placement import Score, best_fit
from fgpu_scheduler.core.scores.simple import first_fit, spread


@runtime_checkable
class ManyScore(Protocol):
    """A score that can judge many ways at once."""

    def many(self, takes: Takes) -> tuple[Ints, ...]:
        """Return what the score itself returns, of every way."""


def many_of(score: Score) -> Many | None:
    """Return the form of ``score`` for many at once, or None if it has none."""
    if isinstance(score, ManyScore):
        return score.many
    return _SIMPLE.get(score)


def many_best_fit(takes: Takes) -> tuple[Ints, ...]:
    """Score as `best_fit` does."""
    rest = takes.devices_taken * (10**6 * takes.after // takes.capacity_milli)
    return rest, takes.whole_after()


def _first_fit(takes: Takes) -> tuple[Ints, ...]:
    return (np.zeros_like(takes.after),)


def _spread(takes: Takes) -> tuple[Ints, ...]:
    own = 10**6 * takes.after // takes.capacity_milli if takes.devices_taken else takes.after
    size = (takes.devices * takes.capacity_milli)[takes.row]
    return -own, -(10**6 * takes.sum_after() // size)


_SIMPLE: dict[Score, Many] = {best_fit: many_best_fit, first_fit: _first_fit, spread: _spread}
