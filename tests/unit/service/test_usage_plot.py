"""The plot of the usage report."""

from __future__ import annotations

import pytest

from fgpuspawner.meter.usage_report import Line
from fgpuspawner.service.admin.usage import HEIGHT, number, plot, round_up


@pytest.mark.parametrize(
    ("value", "found"), [(0, 1), (0.003, 0.005), (1, 1), (1.2, 2), (3, 5), (7, 10), (10, 10), (99, 100)]
)
def test_plot_scale_ends_at_a_round_number(value: float, found: float) -> None:
    assert round_up(value) == found


def test_every_day_has_a_bar_inside_the_plot() -> None:
    lines = [Line(f"2026-05-{n:02}", 1, 1, float(n), 0, None, None) for n in range(1, 31)]
    found = plot(lines)
    assert len(found.bars) == 30
    assert all(bar.y >= 0 and bar.y + bar.height <= HEIGHT for bar in found.bars)
    heights = [bar.height for bar in found.bars]
    assert heights == sorted(heights)
    assert found.bars[-1].title == "2026-05-30: 30 GPU-hours"
    assert [text for _, text in found.marks] == ["0", "25", "50"]
    assert sum(bool(bar.label) for bar in found.bars) <= 8


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
