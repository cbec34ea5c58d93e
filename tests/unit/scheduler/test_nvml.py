"""What NVML reports becomes the devices that are shared: what CUDA can allocate, and MIG instances for GPUs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from fgpu_scheduler import NvmlProbe, ProbeFailed
from fgpu_scheduler.probes import nvml as probe

MIB = 2**20


def refuse(code: int) -> Callable[..., Any]:
    def call(*arguments: Any, **more: Any) -> Any:
        raise pynvml.NVMLError(code)

    return call


@dataclass
class Gpu:
    """A GPU or an instance, as NVML knows it; ``mig`` is None for a model that cannot be partitioned."""

    uuid: str
    name: str = "NVIDIA A100-SXM4-40GB"
    total: int = 40960
    reserved: int = 0
    mig: list[Gpu] | None = None
    slices: int = 1
    holes: int = field(default=0)


class Library:
    """pynvml, as far as the probe uses it."""

    def __init__(self, *gpus: Gpu, no_v2: int | None = None) -> None:
        self.gpus = gpus
        self.no_v2 = no_v2

    def memory(self, gpu: Gpu, version: int | None = None) -> Any:
        if version is None:
            return SimpleNamespace(total=gpu.total * MIB)
        assert version == pynvml.nvmlMemory_v2
        if self.no_v2 is not None:
            raise pynvml.NVMLError(self.no_v2)
        return SimpleNamespace(total=gpu.total * MIB, reserved=gpu.reserved * MIB)

    def mig_mode(self, gpu: Gpu) -> list[int]:
        if gpu.mig is None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return [int(bool(gpu.mig)), 1]

    def instance(self, gpu: Gpu, index: int) -> Gpu:
        assert gpu.mig is not None
        if index < gpu.holes:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        if index - gpu.holes < len(gpu.mig):
            return gpu.mig[index - gpu.holes]
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)

    def replace(self, patch: pytest.MonkeyPatch) -> None:
        known: dict[str, Any] = {
            "nvmlInit": lambda: None,
            "nvmlShutdown": lambda: None,
            "nvmlDeviceGetCount": lambda: len(self.gpus),
            "nvmlDeviceGetHandleByIndex": lambda index: self.gpus[index],
            "nvmlDeviceGetUUID": lambda gpu: gpu.uuid,
            "nvmlDeviceGetName": lambda gpu: gpu.name,
            "nvmlDeviceGetMemoryInfo": self.memory,
            "nvmlDeviceGetMigMode": self.mig_mode,
            "nvmlDeviceGetMaxMigDeviceCount": lambda gpu: 7,
            "nvmlDeviceGetMigDeviceHandleByIndex": self.instance,
            "nvmlDeviceGetAttributes": lambda gpu: SimpleNamespace(
                gpuInstanceSliceCount=gpu.slices, memorySizeMB=gpu.total
            ),
        }
        for name, function in known.items():
            patch.setattr(probe.pynvml, name, function)


def found(patch: pytest.MonkeyPatch, library: Library) -> list[tuple[str, int, str, int]]:
    library.replace(patch)
    return [(d.uuid, d.index, d.model, d.memory_mib) for d in NvmlProbe().devices()]


def test_what_the_driver_keeps_to_itself_is_not_to_be_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    library = Library(Gpu("GPU-1", total=40960, reserved=597))
    assert found(monkeypatch, library) == [("GPU-1", 0, "NVIDIA A100-SXM4-40GB", 40363)]


@pytest.mark.parametrize(
    "code",
    [
        pynvml.NVML_ERROR_FUNCTION_NOT_FOUND,
        pynvml.NVML_ERROR_NOT_SUPPORTED,
        pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH,
    ],
)
def test_an_old_driver_tells_the_whole_memory_only(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    library = Library(Gpu("GPU-1", total=16160, reserved=300), no_v2=code)
    assert found(monkeypatch, library)[0][3] == 16160


def test_any_other_error_is_not_taken_for_an_old_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ProbeFailed, match="NVML cannot list the GPUs"):
        found(monkeypatch, Library(Gpu("GPU-1"), no_v2=pynvml.NVML_ERROR_GPU_IS_LOST))


def test_of_a_gpu_in_mig_mode_its_instances_are_listed_with_their_profiles(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    small = Gpu("MIG-a", total=4864)
    # Newer drivers name the profile themselves.
    large = Gpu("MIG-b", name="NVIDIA A100-SXM4-40GB MIG 2g.10gb", total=9856, slices=2)
    split = Gpu("GPU-2", mig=[small, large], holes=2)
    library = Library(Gpu("GPU-1"), split, Gpu("GPU-3", mig=[]))
    assert found(monkeypatch, library) == [
        ("GPU-1", 0, "NVIDIA A100-SXM4-40GB", 40960),
        ("MIG-a", 1, "NVIDIA A100-SXM4-40GB MIG 1g.5gb", 4864),
        ("MIG-b", 2, "NVIDIA A100-SXM4-40GB MIG 2g.10gb", 9856),
        ("GPU-3", 3, "NVIDIA A100-SXM4-40GB", 40960),
    ]


def test_a_gpu_in_mig_mode_without_instances_has_nothing_to_share(monkeypatch: pytest.MonkeyPatch) -> None:
    library = Library(Gpu("GPU-1", mig=[Gpu("MIG-a")]))
    library.replace(monkeypatch)
    monkeypatch.setattr(
        probe.pynvml, "nvmlDeviceGetMigDeviceHandleByIndex", refuse(pynvml.NVML_ERROR_NOT_FOUND)
    )
    assert NvmlProbe().devices() == ()


@pytest.mark.parametrize("name", ["nvmlDeviceGetMigMode", "nvmlDeviceGetMigDeviceHandleByIndex"])
def test_a_driver_that_fails_on_mig_is_not_taken_for_one_without(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    Library(Gpu("GPU-1", mig=[Gpu("MIG-a")])).replace(monkeypatch)
    monkeypatch.setattr(probe.pynvml, name, refuse(pynvml.NVML_ERROR_UNKNOWN))
    with pytest.raises(ProbeFailed):
        NvmlProbe().devices()
