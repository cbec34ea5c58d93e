"""Quantities are read exactly, in whatever way the API writes them; what is none is never taken for 0."""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fgpuspawner.engines.kubernetes.dialects.base import count, mebibytes, quantity

UNITS = {"": 0, "n": -9, "u": -6, "m": -3, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}
BINARY = {"Ki": 10, "Mi": 20, "Gi": 30, "Ti": 40, "Pi": 50, "Ei": 60}


@given(st.integers(0, 10**9), st.sampled_from([*UNITS, *BINARY]))
def test_quantity_is_exact(thousandths: int, suffix: str) -> None:
    number = Decimal(thousandths).scaleb(-3)
    unit = Fraction(2) ** BINARY[suffix] if suffix in BINARY else Fraction(10) ** UNITS[suffix]
    assert Fraction(quantity(f"{number:f}{suffix}")) == Fraction(thousandths, 1000) * unit


@pytest.mark.parametrize(
    ("text", "value"),
    [("10k", 10_000), ("1e3", 1000), ("12E2", 1200), (5, 5), ("0", 0), ("2.0", 2), ("1500m", None)],
)
def test_pieces_are_whole(text: object, value: int | None) -> None:
    if value is None:
        with pytest.raises(ValueError, match="no whole number of pieces"):
            count(text)
    else:
        assert count(text) == value


@pytest.mark.parametrize(
    ("text", "value"), [("5Gi", 5120), ("5120Mi", 5120), ("16945905664", 16160), ("1048575", 0), ("1G", 953)]
)
def test_bytes_are_rounded_down_to_mib(text: str, value: int) -> None:
    assert mebibytes(text) == value


@pytest.mark.parametrize(
    "text",
    ["", "Gi", "5 Gi", "5gi", "1e", "0x10", "NaN", "Infinity", "1_000", "5Gi\n", "--1", "\u0663", None],
)
def test_other_text_is_no_quantity(text: object) -> None:
    for reader in (quantity, count, mebibytes):
        with pytest.raises(ValueError, match="is no quantity such as"):
            reader(text)


@pytest.mark.parametrize("reader", [count, mebibytes])
def test_negative_quantity_is_refused(reader: object) -> None:
    assert callable(reader)
    with pytest.raises(ValueError, match="-1"):
        reader("-1")
