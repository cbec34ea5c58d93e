"""The charts of the administrators' pages: their data for static/charts.js, and the same in words."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from fgpuspawner.text.times import duration


@dataclass(frozen=True, slots=True)
class Series:
    """One line of a chart. ``colour`` is a CSS variable. None is a gap."""

    name: str
    colour: Literal["accent", "second", "warn"]
    values: Sequence[float | None]


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart over periods of equal length; ``starts_at_s`` has their beginnings. ``top`` is the least end of its scale.

    ``utc``: its periods are days in UTC, else the reader's time zone counts.
    """

    title: str
    kind: Literal["steps", "bars"]
    unit: Literal["", "s"]
    starts_at_s: Sequence[int]
    length_s: int
    series: Sequence[Series]
    top: float = 0
    utc: bool = False

    @property
    def is_empty(self) -> bool:
        return all(value is None for one in self.series for value in one.values)

    @property
    def words(self) -> str:
        """The chart for readers who do not see it."""
        return f"{self.title}. {'; '.join(self._range(one) for one in self.series)}"

    def _range(self, one: Series) -> str:
        known = [value for value in one.values if value is not None]
        if not known:
            return f"{one.name}: unknown"
        low, high, last = (self._number(value) for value in (min(known), max(known), known[-1]))
        return f"{one.name}: from {low} to {high}, last {last}"

    def _number(self, value: float) -> str:
        return duration(round(value)) if self.unit == "s" else f"{value:,.2f}".rstrip("0").rstrip(".")

    @property
    def data(self) -> str:
        """What charts.js draws, as JSON."""
        return json.dumps(
            {
                "kind": self.kind,
                "unit": self.unit,
                "starts": list(self.starts_at_s),
                "length": self.length_s,
                "top": self.top,
                "utc": self.utc,
                "series": [
                    {"name": one.name, "colour": one.colour, "values": list(one.values)}
                    for one in self.series
                ],
            }
        )
