"""A matrix product in a slice with all of the compute is as fast as without libfgpu."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable

import pytest
from check import NATIVE
from slices import Gpu, Slice, needs

pytestmark = needs("torch")

TURNS = 4
RATES = """
    import json, time, torch
    def rate(size, count):
        a = torch.randn(size, size, device="cuda", dtype=torch.bfloat16)
        for _ in range(10):
            a @ a
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(count):
            a @ a
        torch.cuda.synchronize()
        return count / (time.perf_counter() - began)
    print(json.dumps({"large": rate(4096, 200), "small": rate(64, 20000)}))
"""


@pytest.fixture(scope="module")
def ratios(gpu: Gpu, tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    """By the size of the product, its rate with libfgpu as a part of that without; in turns."""
    folder = tmp_path_factory.mktemp("speed") / "session"
    session = Slice(folder, NATIVE, gpu, memory_mib=gpu.memory_mib // 2)
    rates: dict[str, list[dict[str, float]]] = {"direct": [], "libfgpu": []}
    for turn in range(TURNS):
        for way in ("direct", "libfgpu") if turn % 2 else ("libfgpu", "direct"):
            said = session.run(RATES, env={"LD_PRELOAD": ""} if way == "direct" else {})
            rates[way].append(json.loads(said))
    middle = {
        way: {size: statistics.median(each[size] for each in found) for size in found[0]}
        for way, found in rates.items()
    }
    return {size: middle["libfgpu"][size] / middle["direct"][size] for size in middle["direct"]}


@pytest.mark.parametrize("size", ["large", "small"])
def test_a_matrix_product_costs_less_than_a_hundredth_more(
    ratios: dict[str, float], record_property: Callable[..., None], size: str
) -> None:
    record_property("ratio", round(ratios[size], 4))
    assert ratios[size] >= 0.99
