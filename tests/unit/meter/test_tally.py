"""What is counted of a session's looks: percentiles never below what they stand for, and nothing lost by a restart."""

from __future__ import annotations

import math
from dataclasses import replace

from hypothesis import example, given
from hypothesis import strategies as st

from fgpuspawner.meter.reading import SessionReading
from fgpuspawner.meter.tally import HIGHEST_MEMORY, Tally, mean_sm_percent, restored

LIMIT_MIB = 4000


def tally(*memory_mib: int | None, sm: float | None = None) -> Tally:
    found = Tally(7, 500, LIMIT_MIB)
    for at_s, amount in enumerate(memory_mib, start=1):
        found = found.with_reading(10 * at_s, 10, SessionReading(amount, sm))
    return found


def test_what_is_not_known_counts_neither_as_a_sample_nor_as_nothing() -> None:
    measured = tally(None, 1000, None).measured()
    assert (measured.samples, measured.covered_s, measured.peak_mib) == (1, 10, 1000)
    assert measured.p95_mib == 1000
    assert measured.sm_p95_percent is None
    assert measured.energy_mj is None
    empty = tally(None).measured()
    assert (empty.samples, empty.peak_mib, empty.p95_mib) == (0, None, None)


def test_a_short_peak_is_no_p95() -> None:
    measured = tally(*[1000] * 99, 3900).measured()
    assert (measured.peak_mib, measured.p95_mib) == (3900, 1000)


def test_memory_above_the_limit_is_counted_in_full() -> None:
    assert tally(3 * LIMIT_MIB, 3 * LIMIT_MIB).measured().p95_mib == 3 * LIMIT_MIB


def test_energy_is_a_sum_and_one_estimate_makes_it_one() -> None:
    found = Tally(7, 500, LIMIT_MIB)
    found = found.with_reading(10, 10, SessionReading(1, 1.0, energy_mj=500))
    found = found.with_reading(20, 10, SessionReading(1, 1.0, energy_mj=None))
    assert (found.energy_mj, found.energy_estimated) == (500, False)
    found = found.with_reading(30, 10, SessionReading(1, 1.0, energy_mj=70, energy_estimated=True))
    assert (found.energy_mj, found.energy_estimated) == (570, True)


amounts = st.lists(st.integers(0, 3 * LIMIT_MIB), min_size=1, max_size=60)


@given(amounts, st.integers(0, 60))
def test_a_restart_loses_nothing_of_what_was_kept(memory: list[int], at: int) -> None:
    whole = tally(*memory, sm=33.3)
    part = restored(tally(*memory[:at], sm=33.3).measured())
    for number, amount in enumerate(memory[at:], start=len(memory[:at]) + 1):
        part = part.with_reading(10 * number, 10, SessionReading(amount, 33.3))
    assert part.measured() == whole.measured()


@given(amounts)
@example([LIMIT_MIB * 199 // 100 + 1, LIMIT_MIB * 2 + 50])
def test_the_p95_is_not_below_95_percent_of_the_samples_and_near_them(memory: list[int]) -> None:
    found = tally(*memory).measured().p95_mib
    exact = sorted(memory)[math.ceil(0.95 * len(memory)) - 1]
    assert found is not None
    assert exact <= found <= max(memory)
    # Beyond 199 % of the limit it is told as the highest amount.
    if 100 * exact <= (HIGHEST_MEMORY - 1) * LIMIT_MIB:
        assert found - exact <= LIMIT_MIB / 100 + 1


def test_counts_that_make_no_sense_are_begun_again() -> None:
    broken = replace(tally(1000, 2000).measured(), counts='{"memory": 5}')
    assert restored(broken).memory == {}
    assert restored(broken).peak_mib == 2000


def test_mean_compute_is_of_all_readings_and_unknown_without_any() -> None:
    some = (
        tally(1, sm=10.0)
        .with_reading(20, 10, SessionReading(1, 40.0))
        .with_reading(30, 10, SessionReading(1, None))
    )
    assert mean_sm_percent(some.measured().counts) == 25
    assert mean_sm_percent(tally(1).measured().counts) is None
    assert mean_sm_percent("{}") is None
