"""What sessions get of a GPU's time in a window, and whether it is as near to the share as docs/isolation.md says."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

from shares import Tenant, line, row, run

SECONDS = 3


def check_shares(bench: Any, record_property: Callable[..., None], tenants: tuple[Tenant, ...]) -> None:
    """Measure once, and where that misses twice more: then the median counts.

    Raises:
        AssertionError: a share is missed.
    """
    windows = [run(bench, tenants, SECONDS)]
    found = row(tenants, windows[0], SECONDS)
    if not found["holds"]:
        windows += [run(bench, tenants, SECONDS) for _ in range(2)]
        found = row(tenants, [statistics.median(each) for each in zip(*windows, strict=True)], SECONDS)
    record_property("windows", [[round(percent, 2) for percent in window] for window in windows])
    assert found["holds"], line(found)
    assert bench.complaints() == ""
