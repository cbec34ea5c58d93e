"""Measure a CUDA context: make one, then read this process's memory from NVML. Standard library only.

context_child.py UUID    prints MiB; or prints why it cannot be measured, and exits with 1
"""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

MIB = 2**20


def main() -> int:
    # Before CUDA is loaded: this process must see only this device, as number 0.
    os.environ["CUDA_VISIBLE_DEVICES"] = sys.argv[1]
    sys.path.insert(0, str(Path(__file__).parent))
    from nvml_child import Nvml, NvmlFailed  # type: ignore[import-not-found]

    try:
        cuda = ctypes.CDLL("libcuda.so.1")
        device, context = ctypes.c_int(), ctypes.c_void_p()
        for name, *arguments in (
            ("cuInit", ctypes.c_uint(0)),
            ("cuDeviceGet", ctypes.byref(device), ctypes.c_int(0)),
            ("cuDevicePrimaryCtxRetain", ctypes.byref(context), device),
            ("cuCtxSetCurrent", context),
        ):
            status = getattr(cuda, name)(*arguments)
            if status != 0:
                print(f"{name} failed with {status}")
                return 1
        nvml = Nvml("libnvidia-ml.so.1")
        nvml.begin()
        used = nvml.processes(nvml.handle(sys.argv[1])).get(os.getpid())
    except (OSError, NvmlFailed) as e:
        print(e)
        return 1
    if not used:
        print("NVML does not say what this process holds; is the Hub in a PID namespace of its own?")
        return 1
    print(-(-used // MIB))
    return 0


if __name__ == "__main__":
    sys.exit(main())
