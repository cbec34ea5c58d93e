from __future__ import annotations

from typing import Any

import pytest

from fgpu_scheduler import Device
from fgpuspawner.engines.docker.create import all_gpus, cdi_devices, some_gpus

NVIDIA: dict[str, Any] = {"Runtimes": {"runc": {}, "nvidia": {"path": "nvidia-container-runtime"}}}
PLAIN: dict[str, Any] = {"Runtimes": {"runc": {}}, "DiscoveredDevices": None}


def cdi(*names: str) -> dict[str, Any]:
    return {**PLAIN, "DiscoveredDevices": [{"Source": "cdi", "ID": name} for name in names]}


def device(index: int) -> Device:
    return Device(f"GPU-{index}f", "a", index, "A100", 40960, 2000)


def test_the_nvidia_runtime_is_asked_for_devices_by_uuid() -> None:
    request = some_gpus(NVIDIA, [device(1)])
    assert request is not None
    assert (request.driver, request.device_ids) == ("nvidia", ["GPU-1f"])
    everything = all_gpus(NVIDIA)
    assert everything is not None
    assert (everything.driver, everything.count) == ("nvidia", -1)


@pytest.mark.parametrize(
    ("names", "asked"),
    [
        (["nvidia.com/gpu=GPU-1f", "nvidia.com/gpu=1", "nvidia.com/gpu=all"], ["nvidia.com/gpu=GPU-1f"]),
        (["nvidia.com/gpu=0", "nvidia.com/gpu=1"], ["nvidia.com/gpu=1"]),
        (["nvidia.com/gpu=0", "nvidia.com/gpu=all"], None),
        (["vendor.example/gpu=1"], None),
    ],
)
def test_cdi_request_names_the_known_device(names: list[str], asked: list[str] | None) -> None:
    request = some_gpus(cdi(*names), [device(1)])
    assert (request.device_ids if request is not None else None) == asked
    if request is not None:
        assert request.driver == "cdi"


def test_gpu_request_has_all_devices_or_none() -> None:
    assert some_gpus(cdi("nvidia.com/gpu=0"), [device(0), device(1)]) is None
    request = some_gpus(cdi("nvidia.com/gpu=0", "nvidia.com/gpu=1"), [device(1), device(0)])
    assert request is not None
    assert request.device_ids == ["nvidia.com/gpu=1", "nvidia.com/gpu=0"]


def test_an_engine_without_either_gives_none() -> None:
    assert all_gpus(PLAIN) is None
    assert some_gpus(PLAIN, [device(0)]) is None
    assert cdi_devices({}) == []
    named = all_gpus(cdi("nvidia.com/gpu=0", "nvidia.com/gpu=all"))
    assert named is not None
    assert named.device_ids == ["nvidia.com/gpu=all"]
