"""What an amount of fGPU is, in words."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fgpu_scheduler import Device
from fgpuspawner.form.image_cards import meaning

T4 = Device("GPU-0", "n1", 0, "T4", 16384, 4000)
A100 = replace(T4, uuid="GPU-1", index=1, model="A100", memory_mib=40960)
ODD = replace(T4, uuid="GPU-2", index=2, model="H100", memory_mib=81559)


@pytest.mark.parametrize(
    ("fgpu_milli", "words"),
    [
        (1000, "1/4 GPU: 4 GiB GPU memory, 25 % compute"),
        (100, "2 % of a GPU: 384 MiB GPU memory, 2 % compute"),
        (1200, "3/10 GPU: 4.75 GiB GPU memory, 30 % compute"),
        (4000, "1 GPU: 16 GiB GPU memory"),
        (8000, "2 GPUs: 16 GiB GPU memory each"),
    ],
)
def test_amount_is_described_as_part_of_a_gpu(fgpu_milli: int, words: str) -> None:
    assert meaning(fgpu_milli, [T4, replace(T4, uuid="GPU-9", index=9)]) == {"T4": words}


def test_each_model_has_its_own_description() -> None:
    assert meaning(2000, [T4, A100, ODD]) == {
        "T4": "1/2 GPU: 8 GiB GPU memory, 50 % compute",
        "A100": "1/2 GPU: 20 GiB GPU memory, 50 % compute",
        "H100": "1/2 GPU: 39.75 GiB GPU memory, 50 % compute",
    }
    assert meaning(6000, [T4, replace(A100, capacity_milli=6000)]) == {"A100": "1 GPU: 40 GiB GPU memory"}
    assert meaning(1000, []) == {}


def test_lent_compute_reads_at_least() -> None:
    strict = replace(T4, uuid="GPU-4", node_id="n2")
    least = "1/4 GPU: 4 GiB GPU memory, at least 25 % compute"
    assert meaning(1000, [T4], {"n1"}) == {"T4": least}
    assert meaning(1000, [T4, strict], {"n1"}) == {
        "T4": f"{least} or 1/4 GPU: 4 GiB GPU memory, 25 % compute"
    }
    assert meaning(4000, [T4, strict], {"n1"}) == {"T4": "1 GPU: 16 GiB GPU memory"}


def test_model_with_two_sizes_shows_both() -> None:
    larger = replace(A100, uuid="GPU-3", memory_mib=81920)
    assert meaning(4000, [A100, larger]) == {"A100": "1 GPU: 40 GiB GPU memory or 1 GPU: 80 GiB GPU memory"}
