"""Shares of a GPU with kernels of seconds, with kernels of changing length, and with a matrix product."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from shares import Tenant, run
from slices import Gpu, Slice, needs

LONG = [(Tenant("0-25", 1_000_000), 30), (Tenant("0-25", 3_000_000), 50)]
CHANGING = [
    (Tenant("0-25", 10, long_us=5000, every=5), 8),
    (Tenant("0-25", 10, long_us=20_000, every=20), 15),
    (Tenant("0-25", 10, long_us=1_000_000, every=100), 40),
]
PRODUCTS = """
    import time, torch
    a = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    def rate(seconds):
        count, began = 0, time.perf_counter()
        while time.perf_counter() < began + seconds:
            for _ in range(10):
                a @ a
            torch.cuda.synchronize()
            count += 10
        return count / (time.perf_counter() - began)
    rate(2)
    print(rate(6))
"""


@pytest.mark.parametrize(("tenant", "seconds"), [*LONG, *CHANGING], ids=str)
def test_kernels_that_cannot_be_foretold_keep_to_the_bound(
    bench: Any, gpu: Gpu, record_property: Callable[..., None], tenant: Tenant, seconds: int
) -> None:
    if tenant.long_us and gpu.simulated:
        pytest.skip("a simulated kernel cannot change its length")
    (percent,) = run(bench, (tenant,), seconds)
    bound = tenant.bound_points(seconds)
    record_property("percent", round(percent, 2))
    record_property("at_most", round(tenant.percent + bound, 2))
    assert percent <= tenant.percent + bound, f"{percent:.1f} %, at most {tenant.percent + bound:.1f}"


@needs("torch")
@pytest.mark.parametrize("percent", [25, 50])
def test_a_matrix_product_gets_its_share(
    slice_of: Callable[..., Slice], record_property: Callable[..., None], percent: int
) -> None:
    whole = float(slice_of(8192).run(PRODUCTS))
    part = float(slice_of(8192, slots=f"0-{percent}").run(PRODUCTS))
    record_property("percent", round(100 * part / whole, 2))
    assert abs(100 * part / whole - percent) <= 3, f"{100 * part / whole:.1f} % of the rate"
