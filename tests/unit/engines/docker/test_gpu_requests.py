from __future__ import annotations

from typing import Any

import pytest

from fgpu_scheduler import Device
from fgpuspawner.engines.docker.create import all_gpus, some_gpus

NVIDIA: dict[str, Any] = {"Runtimes": {"runc": {}, "nvidia": {"path": "nvidia-container-runtime"}}}
PLAIN: dict[str, Any] = {"Runtimes": {"runc": {}}, "DiscoveredDevices": None}


def cdi(*names: str) -> dict[str, Any]:
    devices = [{"Source": "cdi", "ID": f"nvidia.com/gpu={name}"} for name in names]
    return {**PLAIN, "DiscoveredDevices": [*devices, {"Source": "cdi", "ID": "vendor.example/gpu=1"}]}


@pytest.mark.parametrize(
    ("info", "indices", "driver", "asked"),
    [
        (NVIDIA, [1], "nvidia", ["GPU-1f"]),
        (cdi("GPU-1f", "1", "all"), [1], "cdi", ["nvidia.com/gpu=GPU-1f"]),
        (cdi("0", "1"), [1], "cdi", ["nvidia.com/gpu=1"]),
        (cdi("0", "1"), [1, 0], "cdi", ["nvidia.com/gpu=1", "nvidia.com/gpu=0"]),
        (cdi("0", "all"), [1], None, None),
        (cdi("0"), [0, 1], None, None),
        (PLAIN, [0], None, None),
    ],
)
def test_gpu_request_names_exactly_the_sessions_devices(
    info: dict[str, Any], indices: list[int], driver: str | None, asked: list[str] | None
) -> None:
    devices = [Device(f"GPU-{index}f", "a", index, "A100", 40960, 2000) for index in indices]
    request = some_gpus(info, devices)
    assert (request and request.driver, request and request.device_ids) == (driver, asked)


def test_monitoring_sees_all_gpus() -> None:
    everything, named = all_gpus(NVIDIA), all_gpus(cdi("0", "all"))
    assert everything is not None
    assert (everything.driver, everything.count) == ("nvidia", -1)
    assert named is not None
    assert named.device_ids == ["nvidia.com/gpu=all"]
    assert all_gpus(PLAIN) is None
