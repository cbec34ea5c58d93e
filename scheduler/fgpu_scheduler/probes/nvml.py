"""The GPUs of this machine as NVML reports them."""

from __future__ import annotations

from typing import Any

import pynvml

from fgpu_scheduler.errors import ProbeFailed
from fgpu_scheduler.ports import FoundDevice

MIB = 2**20


class NvmlProbe:
    """Lists the GPUs of this machine by NVML; each call initialises it and shuts it down."""

    def devices(self) -> tuple[FoundDevice, ...]:
        """Return the GPUs by index; a GPU in MIG mode is listed as its instances.

        A machine without the NVIDIA library, or with a library that counts no device, has none. Any other NVML error is
        raised: a broken driver is not "no GPU".

        Raises:
            ProbeFailed: with NVML's own text.
        """
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as e:
            if _is(e, pynvml.NVML_ERROR_LIBRARY_NOT_FOUND):
                return ()
            raise ProbeFailed(f"NVML cannot be used: {e}") from e
        try:
            gpus = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
            parts = [part for gpu in gpus for part in (_instances(gpu) if _is_mig(gpu) else [gpu])]
            return tuple(_device(index, handle) for index, handle in enumerate(parts))
        except pynvml.NVMLError as e:
            raise ProbeFailed(f"NVML cannot list the GPUs: {e}") from e
        finally:
            pynvml.nvmlShutdown()


def _is_mig(gpu: Any) -> bool:
    """Return whether MIG mode is on. Most models do not support MIG, and NVML returns an error for them."""
    try:
        current, _ = pynvml.nvmlDeviceGetMigMode(gpu)
    except pynvml.NVMLError as e:
        if _is(e, pynvml.NVML_ERROR_NOT_SUPPORTED, pynvml.NVML_ERROR_FUNCTION_NOT_FOUND):
            return False
        raise
    return bool(current == pynvml.NVML_DEVICE_MIG_ENABLE)


def _instances(gpu: Any) -> list[Any]:
    """Return the handles of a GPU's MIG instances in the driver's order; there may be none yet."""
    found = []
    for index in range(pynvml.nvmlDeviceGetMaxMigDeviceCount(gpu)):
        try:
            found.append(pynvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu, index))
        except pynvml.NVMLError as e:
            if not _is(e, pynvml.NVML_ERROR_NOT_FOUND):
                raise
    return found


def _device(index: int, handle: Any) -> FoundDevice:
    return FoundDevice(
        uuid=pynvml.nvmlDeviceGetUUID(handle),
        index=index,
        model=_model(handle),
        memory_mib=_memory_bytes(handle) // MIB,
    )


def _model(handle: Any) -> str:
    """Return the model's name, for a MIG instance with its profile: ``NVIDIA A100 MIG 1g.5gb``."""
    name: str = pynvml.nvmlDeviceGetName(handle)
    if not pynvml.nvmlDeviceGetUUID(handle).startswith("MIG-") or " MIG " in name:
        return name
    # Older drivers return only the GPU's name.
    try:
        has = pynvml.nvmlDeviceGetAttributes(handle)
    except pynvml.NVMLError as e:
        if not _is(e, pynvml.NVML_ERROR_FUNCTION_NOT_FOUND, pynvml.NVML_ERROR_NOT_SUPPORTED):
            raise
        return f"{name} MIG"
    return f"{name} MIG {has.gpuInstanceSliceCount}g.{round(has.memorySizeMB / 1024)}gb"


def _memory_bytes(handle: Any) -> int:
    """Return what CUDA can allocate: without the driver's reserved memory, if NVML reports it."""
    try:
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
    except pynvml.NVMLError as e:
        if not _is(
            e,
            pynvml.NVML_ERROR_FUNCTION_NOT_FOUND,
            pynvml.NVML_ERROR_NOT_SUPPORTED,
            pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH,
        ):
            raise
        return int(pynvml.nvmlDeviceGetMemoryInfo(handle).total)
    return int(memory.total) - int(memory.reserved)


def _is(error: pynvml.NVMLError, *codes: int) -> bool:
    return getattr(error, "value", None) in codes
