"""Amounts are exact, bad ones are named, and shares never sum above their device."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fgpu_scheduler.core.model import MAX_SHARES
from fgpu_scheduler.core.units import (
    LARGEST_MILLI,
    MEMORY_GRAIN_MIB,
    format_milli,
    parse_milli,
    share_compute_percent,
    share_memory_mib,
)
from fgpu_scheduler.errors import BadAmount

exact = settings(derandomize=True, database=None, deadline=None)


@pytest.mark.parametrize(
    ("text", "milli"),
    [
        ("0.5", 500),
        ("0.9", 900),
        (".1", 100),
        ("1", 1000),
        ("1.", 1000),
        ("2.50", 2500),
        ("0.001", 1),
        ("0.1000", 100),
        (" 0.5\n", 500),
        ("+0.5", 500),
        ("1e-3", 1),
        ("1E2", 100_000),
        ("0", 0),
        ("-0", 0),
        ("0e999999999", 0),
        ("0." + "5".ljust(40, "0"), 500),
        ("1000000", LARGEST_MILLI),
    ],
)
def test_a_decimal_is_read_exactly(text: str, milli: int) -> None:
    assert parse_milli(text, field="fgpu") == milli


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "fgpu: '' is not a number such as 0.5"),
        ("half", "fgpu: 'half' is not a number such as 0.5"),
        ("0,5", "fgpu: '0,5' is not a number such as 0.5"),
        ("1/2", "fgpu: '1/2' is not a number such as 0.5"),
        ("0.5 0.5", "fgpu: '0.5 0.5' is not a number such as 0.5"),
        ("0x1", "fgpu: '0x1' is not a number such as 0.5"),
        ("nan", "fgpu: 'nan' is not a number such as 0.5"),
        ("sNaN", "fgpu: 'sNaN' is not a number such as 0.5"),
        ("inf", "fgpu: 'inf' is not a number such as 0.5"),
        ("-Infinity", "fgpu: '-Infinity' is not a number such as 0.5"),
        ("-0.5", "fgpu: -0.5 is negative; it must be above 0"),
        ("0.0001", "fgpu: 0.0001 has more than three decimals"),
        ("1.2345", "fgpu: 1.2345 has more than three decimals"),
        ("1000000.001", "fgpu: 1000000.001 is too large; at most 1000000 is possible"),
        ("1e99", "fgpu: 1e99 is too large; at most 1000000 is possible"),
        ("x" * 50, f"fgpu: '{'x' * 40}...' is not a number such as 0.5"),
    ],
)
def test_a_bad_amount_is_refused_in_exactly_these_words(text: str, words: str) -> None:
    with pytest.raises(BadAmount) as raised:
        parse_milli(text, field="fgpu")
    assert str(raised.value) == words


def test_the_refusal_names_the_field_that_was_given() -> None:
    with pytest.raises(BadAmount, match=r"^cpu: "):
        parse_milli("many", field="cpu")


@pytest.mark.parametrize(
    "text", ["1e999999999", "1e-999999999", "9" * 10_000, "0." + "3" * 10_000, "0.5" + "0" * 30 + "1"]
)
def test_an_absurd_amount_is_refused_in_a_short_line(text: str) -> None:
    with pytest.raises(BadAmount) as raised:
        parse_milli(text, field="fgpu")
    assert len(str(raised.value)) < 120


@exact
@given(st.text(max_size=60))
def test_any_text_is_an_amount_within_range_or_a_bad_amount(text: str) -> None:
    try:
        milli = parse_milli(text, field="fgpu")
    except BadAmount:
        return
    assert 0 <= milli <= LARGEST_MILLI


@pytest.mark.parametrize(
    ("milli", "text"),
    [
        (900, "0.9"),
        (500, "0.5"),
        (1, "0.001"),
        (10, "0.01"),
        (1000, "1"),
        (2500, "2.5"),
        (0, "0"),
        (100_000, "100"),
    ],
)
def test_an_amount_is_shown_exactly_and_without_trailing_zeros(milli: int, text: str) -> None:
    assert format_milli(milli) == text


@exact
@given(st.integers(0, LARGEST_MILLI))
def test_what_is_shown_reads_back_as_the_same(milli: int) -> None:
    assert parse_milli(format_milli(milli), field="fgpu") == milli


@st.composite
def sliced_devices(draw: st.DrawFn) -> tuple[int, int, list[int]]:
    """A device's capacity and memory, and amounts that together are at most its capacity."""
    capacity = draw(st.integers(1, 100_000))
    memory_mib = draw(st.integers(1, 400_000))
    left, slices = capacity, []
    for _ in range(draw(st.integers(1, MAX_SHARES))):
        if left == 0:
            break
        slices.append(draw(st.integers(1, left)))
        left -= slices[-1]
    return capacity, memory_mib, slices


@exact
@given(sliced_devices())
def test_memory_shares_never_sum_above_the_device(device: tuple[int, int, list[int]]) -> None:
    capacity, memory_mib, slices = device
    shares = [share_memory_mib(s, capacity_milli=capacity, device_memory_mib=memory_mib) for s in slices]
    assert sum(shares) <= memory_mib
    for milli, share in zip(slices, shares, strict=True):
        assert share % MEMORY_GRAIN_MIB == 0 or milli == capacity
        assert share * capacity <= memory_mib * milli


@exact
@given(sliced_devices())
def test_compute_shares_sum_above_the_device_only_by_their_floor_of_one(
    device: tuple[int, int, list[int]],
) -> None:
    capacity, _, slices = device
    shares = [share_compute_percent(s, capacity_milli=capacity) for s in slices]
    assert all(1 <= share <= 100 for share in shares)
    floored = sum(1 for s in slices if 100 * s < capacity)
    assert sum(shares) <= 100 + floored


@pytest.mark.parametrize(
    ("milli", "memory_mib", "percent"),
    [(1000, 81_559, 100), (500, 40_704, 50), (333, 27_136, 33), (100, 8_064, 10), (5, 384, 1)],
)
def test_a_share_is_rounded_down_and_a_whole_device_has_all(
    milli: int, memory_mib: int, percent: int
) -> None:
    assert share_memory_mib(milli, capacity_milli=1000, device_memory_mib=81_559) == memory_mib
    assert share_compute_percent(milli, capacity_milli=1000) == percent
