"""The GPUs of this machine as NVML reports them."""

from __future__ import annotations

import pynvml

from fgpu_scheduler.errors import ProbeFailed
from fgpu_scheduler.ports import FoundDevice

MIB = 2**20


class NvmlProbe:
    """A `DeviceProbe` that asks NVML, once per call, and leaves it shut down."""

    def devices(self) -> tuple[FoundDevice, ...]:
        """Return the GPUs in order of their index.

        A machine without the NVIDIA library has none, as has one whose library counts no device. Any
        other NVML error is raised: a broken driver is not "no GPU".

        Raises:
            ProbeFailed: with NVML's own text.
        """
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as e:
            if getattr(e, "value", None) == pynvml.NVML_ERROR_LIBRARY_NOT_FOUND:
                return ()
            raise ProbeFailed(f"NVML cannot be used: {e}") from e
        try:
            return tuple(_device(index) for index in range(pynvml.nvmlDeviceGetCount()))
        except pynvml.NVMLError as e:
            raise ProbeFailed(f"NVML cannot list the GPUs: {e}") from e
        finally:
            pynvml.nvmlShutdown()


def _device(index: int) -> FoundDevice:
    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    return FoundDevice(
        uuid=_text(pynvml.nvmlDeviceGetUUID(handle)),
        index=index,
        model=_text(pynvml.nvmlDeviceGetName(handle)),
        memory_mib=int(pynvml.nvmlDeviceGetMemoryInfo(handle).total) // MIB,
    )


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
