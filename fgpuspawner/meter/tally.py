"""The counts over a session's whole life, small enough to save and continue after a restart. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from pydantic import TypeAdapter

from fgpu_scheduler import SessionMeasurements
from fgpuspawner.meter.reading import Lent, SessionReading

HIGHEST_MEMORY = 200
"""Percent of the limit: everything above is counted as this, as a session may exceed its limit for a while."""

LENDING = ("received", "borrowed", "lent")
"""The fields of `Lent` that are counted."""

_COUNTS = TypeAdapter(Mapping[str, Mapping[int, int]])


@dataclass(frozen=True, slots=True)
class Tally:
    """All readings of a session so far.

    ``memory`` counts readings by percent of the limit, rounded up, and ``sm`` by percent of a GPU, so percentiles are
    exact to one percent and never too low. ``lending`` counts the fields of `Lent` by rounded percent of a GPU; empty
    without lending.
    """

    session_id: int
    gpu_millionths: int
    limit_mib: int
    at_s: int = 0
    covered_s: int = 0
    peak_mib: int | None = None
    memory: Mapping[int, int] = field(default_factory=dict)
    sm: Mapping[int, int] = field(default_factory=dict)
    lending: Mapping[str, Mapping[int, int]] = field(default_factory=dict)
    energy_mj: int | None = None
    energy_estimated: bool = False

    def with_reading(
        self, at_s: int, covers_s: int, reading: SessionReading, lent: Lent | None = None
    ) -> Tally:
        """Return the tally with one more reading, which stands for ``covers_s`` seconds."""
        new = replace(self, at_s=at_s)
        if reading.memory_mib is not None:
            percent = min(HIGHEST_MEMORY, -(-100 * reading.memory_mib // self.limit_mib))
            new = replace(
                new,
                covered_s=self.covered_s + covers_s,
                peak_mib=max(self.peak_mib or 0, reading.memory_mib),
                memory=_with(self.memory, percent),
            )
        if reading.sm_percent is not None:
            new = replace(new, sm=_with(self.sm, -int(-reading.sm_percent // 1)))
        if lent is not None:
            counts = {n: _with(self.lending.get(n, {}), round(getattr(lent, n))) for n in LENDING}
            new = replace(new, lending=counts)
        if reading.energy_mj is not None:
            energy_mj = (self.energy_mj or 0) + reading.energy_mj
            estimated = self.energy_estimated or reading.energy_estimated
            new = replace(new, energy_mj=energy_mj, energy_estimated=estimated)
        return new

    def resized(self, gpu_millionths: int, limit_mib: int) -> Tally:
        """Return the tally of a resized session: the counts stay, in percent of the new limit."""
        memory: dict[int, int] = {}
        for percent, times in self.memory.items():
            now = min(HIGHEST_MEMORY, -(-percent * self.limit_mib // limit_mib))
            memory[now] = memory.get(now, 0) + times
        return replace(self, gpu_millionths=gpu_millionths, limit_mib=limit_mib, memory=memory)

    @property
    def p95_mib(self) -> int | None:
        """The most memory that it held during 95 % of the time; None if unknown."""
        percent = percentile(self.memory, 95)
        if percent is None or self.peak_mib is None:
            return None
        within = percent * self.limit_mib // 100
        return self.peak_mib if percent >= HIGHEST_MEMORY else min(self.peak_mib, within)

    def measured(self) -> SessionMeasurements:
        return SessionMeasurements(
            self.session_id,
            self.at_s,
            self.gpu_millionths,
            self.limit_mib,
            samples=sum(self.memory.values()),
            covered_s=self.covered_s,
            peak_mib=self.peak_mib,
            p95_mib=self.p95_mib,
            sm_p95_percent=percentile(self.sm, 95),
            energy_mj=self.energy_mj,
            energy_estimated=self.energy_estimated,
            counts=_COUNTS.dump_json({"memory": self.memory, "sm": self.sm, **self.lending}).decode(),
        )


def restored(measured: SessionMeasurements) -> Tally:
    try:
        counts = _COUNTS.validate_json(measured.counts)
        memory, sm = counts["memory"], counts["sm"]
    except (ValueError, KeyError):
        counts, memory, sm = {}, {}, {}
    return Tally(
        measured.session_id,
        measured.gpu_millionths,
        measured.limit_mib,
        at_s=measured.at_s,
        covered_s=measured.covered_s,
        peak_mib=measured.peak_mib,
        memory=memory,
        sm=sm,
        lending={name: counts[name] for name in LENDING if name in counts},
        energy_mj=measured.energy_mj,
        energy_estimated=measured.energy_estimated,
    )


def mean_sm_percent(counts: str) -> float | None:
    """Return the mean compute, in percent of a GPU, in the counts of a session's measurements; None without readings."""
    try:
        sm = _COUNTS.validate_json(counts)["sm"]
    except (ValueError, KeyError):
        return None
    return sum(percent * times for percent, times in sm.items()) / sum(sm.values()) if sm else None


def mean_lent(measured: SessionMeasurements) -> Lent | None:
    """Return the means of what a session received and lent; None without lending or readings."""
    if '"lent"' not in measured.counts:
        return None
    lending = restored(measured).lending
    if not all(lending.get(name) for name in LENDING):
        return None
    means = (
        sum(value * times for value, times in lending[n].items()) / sum(lending[n].values()) for n in LENDING
    )
    return Lent(*(round(mean, 1) for mean in means))


def percentile(counts: Mapping[int, int], percent: int) -> int | None:
    """Return the least value that at least ``percent`` percent of the counts do not exceed; None if there are none."""
    wanted, seen = -(-percent * sum(counts.values()) // 100), 0
    for value in sorted(counts):
        seen += counts[value]
        if seen >= wanted:
            return value
    return None


def _with(counts: Mapping[int, int], value: int) -> Mapping[int, int]:
    return {**counts, value: counts.get(value, 0) + 1}
