"""The banner's end."""

from __future__ import annotations

import pytest

from fgpuspawner.service.admin.banner import read_until


@pytest.mark.parametrize(
    ("text", "at_s"),
    [
        ("", None),
        ("2026-05-01T18:00", 1777658400),
        ("2026-05-01T18:00+00:00", 1777658400),
        ("2026-05-01T20:00+02:00", 1777658400),
    ],
)
def test_banner_end_is_utc_unless_it_names_a_zone(text: str, at_s: int | None) -> None:
    assert read_until(text) == at_s
