"""What sessions get of a GPU's time, in windows of some seconds: near the share, as docs/isolation.md bounds it."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import pytest
from shares import KERNELS_US, PAIRS, SHARES, Tenant, line, row, run

QUARTERS = ("0-25", "25-50", "50-75", "75-100")
SECONDS = 5
ROWS = [
    *[(Tenant(slots, us),) for us in KERNELS_US for slots in SHARES],
    *[tuple(Tenant(slots, us) for slots in pair) for us in (50, 5000) for pair in PAIRS],
    *[tuple(Tenant(slots, us) for slots in QUARTERS) for us in (50, 5000)],
    (Tenant("0-25", 50), Tenant("25-100", 5000)),
    (Tenant("0-25", 5000), Tenant("25-100", 50)),
    (Tenant("0-50", 1000, processes=3),),
]


@pytest.mark.parametrize("tenants", ROWS, ids=lambda row: "+".join(map(str, row)))
def test_a_session_gets_its_share(
    bench: Any, record_property: Callable[..., None], tenants: tuple[Tenant, ...]
) -> None:
    windows = [run(bench, tenants, SECONDS)]
    found = row(tenants, windows[0], SECONDS)
    if not found["holds"]:
        windows += [run(bench, tenants, SECONDS) for _ in range(2)]
        found = row(tenants, [statistics.median(each) for each in zip(*windows, strict=True)], SECONDS)
    record_property("windows", [[round(percent, 2) for percent in window] for window in windows])
    assert found["holds"], line(found)
    assert bench.complaints() == ""
