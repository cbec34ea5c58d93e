"""Sums on the page Usage."""

from __future__ import annotations

import pytest

from fgpuspawner.service.admin.usage import number


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (0.5, "0.5"),
        (36.0, "36"),
        (1000.0, "1,000"),
        (123456.789, "123,456.789"),
        (1_095_000.0, "1,095,000"),
    ],
)
def test_large_sums_keep_their_digits(value: float, text: str) -> None:
    assert number(value) == text
