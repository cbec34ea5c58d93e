"""Shares of a GPU with kernels of seconds, and with kernels of changing length."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from shares import Tenant, run
from slices import Gpu

LONG = [(Tenant("0-25", 1_000_000), 20), (Tenant("0-25", 2_000_000), 24)]
"""After its window a program still waits for what it owes, about as long again."""
CHANGING = [
    (Tenant("0-25", 10, long_us=5000, every=5), 8),
    (Tenant("0-25", 10, long_us=20_000, every=20), 12),
    (Tenant("0-25", 10, long_us=1_000_000, every=100), 36),
]


@pytest.mark.parametrize(("tenant", "seconds"), LONG, ids=str)
def test_kernels_of_seconds_keep_to_the_bound(
    bench: Any, record_property: Callable[..., None], tenant: Tenant, seconds: int
) -> None:
    check_bound(bench, record_property, tenant, seconds)


@pytest.mark.parametrize(("tenant", "seconds"), CHANGING, ids=str)
def test_kernels_that_change_keep_to_the_bound(
    bench: Any, gpu: Gpu, record_property: Callable[..., None], tenant: Tenant, seconds: int
) -> None:
    if gpu.simulated:
        pytest.skip("a simulated kernel cannot change its length")
    check_bound(bench, record_property, tenant, seconds)


def check_bound(bench: Any, record_property: Callable[..., None], tenant: Tenant, seconds: int) -> None:
    (percent,) = run(bench, (tenant,), seconds)
    bound = tenant.bound_points(seconds)
    record_property("percent", round(percent, 2))
    record_property("at_most", round(tenant.percent + bound, 2))
    assert percent <= tenant.percent + bound, f"{percent:.1f} %, at most {tenant.percent + bound:.1f}"
