"""Several processes of one session share its slice; what is charged is what the driver says is used."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from typing import Any

from slices import MIB, Gpu, Nvml, Slice

HOLD = """
    import ctypes, sys
    cuda = ctypes.CDLL("libcuda.so.1")
    device, context, address = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_uint64()
    assert cuda.cuInit(0) == 0
    assert cuda.cuDeviceGet(ctypes.byref(device), 0) == 0
    status = cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
    if status == 0:
        assert cuda.cuCtxSetCurrent(context) == 0
        for size in sys.argv[1:]:
            status = cuda.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(int(size) << 20))
            if status:
                break
    print(status, flush=True)
    sys.stdin.read()
"""


def held(session: Slice, *sizes_mib: int) -> tuple[Any, int]:
    """Start a process that holds these sizes; return it, and the status of the last call."""
    process = session.start(HOLD, *map(str, sizes_mib))
    assert process.stdout is not None
    line = process.stdout.readline().strip()
    assert line, process.communicate()[1] + session.log()
    return process, int(line)


def test_the_limit_is_of_all_processes_together_and_survives_kills(slice_of: Callable[..., Slice]) -> None:
    session = slice_of(4096)
    first, status = held(session, 3072)
    assert status == 0
    second, status = held(session, 2048)
    assert status == 2
    second.kill()
    second.communicate()
    first.send_signal(signal.SIGKILL)
    first.communicate()
    third, status = held(session, 4096)
    assert status == 0, "what a killed process held was not given back"
    third.kill()
    third.communicate()


def test_what_is_charged_is_what_the_driver_says_is_used(
    slice_of: Callable[..., Slice], nvml: Nvml, gpu: Gpu, results: dict[str, Any]
) -> None:
    """One process's context, and the difference between NVML's figure and ours beyond it."""
    empty, status = held(slice_of(16384))
    assert status == 0
    time.sleep(1)
    context = nvml.process_bytes(gpu.uuid).get(empty.pid)
    empty.kill()
    empty.communicate()
    assert context is not None, "NVML does not list our own process; is this a container?"
    sizes = [1, 3, 17, 100, 1000, 4096, *[2] * 200]
    full, status = held(slice_of(16384), *sizes)
    assert status == 0
    time.sleep(1)
    used = nvml.process_bytes(gpu.uuid)[full.pid]
    full.kill()
    full.communicate()
    charged = sum(sizes) * MIB
    results["context_mib"] = context / MIB
    results["used_beyond_charged_mib"] = (used - context - charged) / MIB
    results["used_beyond_charged_percent"] = 100 * (used - context - charged) / charged
    assert abs(used - context - charged) <= max(64 * MIB, charged // 50)


def test_a_context_is_charged_what_the_limits_say(slice_of: Callable[..., Slice]) -> None:
    session = slice_of(2048, context_mib=512)
    full, status = held(session, 1536)
    assert status == 0
    full.kill()
    full.communicate()
    over, status = held(session, 1537)
    assert status == 2
    over.kill()
    over.communicate()
