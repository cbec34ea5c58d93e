"""The rate of a large matrix product in a slice, against the rate on the whole GPU.

This is a rate, and not a share of the time: on the whole GPU such a product is held back by the GPU's power limit, in
a slice less so. An H100 (700 W) gave 28.1 % of the rate in a quarter of the time, and 56.9 % in half of it.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from check import NATIVE
from slices import Gpu, Slice, needs

pytestmark = needs("torch")

BELOW, ABOVE = 0.95, 1.2
"""Of the share: what waiting for slots may cost, and what higher clocks may give."""
RATE = """
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
    print(rate(4))
"""


@pytest.fixture(scope="module")
def whole_rate(gpu: Gpu, tmp_path_factory: pytest.TempPathFactory) -> float:
    """Products per second with all of the compute."""
    return float(Slice(tmp_path_factory.mktemp("whole") / "session", NATIVE, gpu, memory_mib=8192).run(RATE))


@pytest.mark.parametrize("percent", [25, 50])
def test_a_matrix_product_has_the_rate_of_its_share_or_more(
    slice_of: Callable[..., Slice], whole_rate: float, record_property: Callable[..., None], percent: int
) -> None:
    found = 100 * float(slice_of(8192, slots=f"0-{percent}").run(RATE)) / whole_rate
    record_property("percent_of_the_rate", round(found, 2))
    record_property("percent_of_the_time", percent)
    assert BELOW * percent <= found <= ABOVE * percent, (
        f"{found:.1f} % of the rate in {percent} % of the time"
    )
