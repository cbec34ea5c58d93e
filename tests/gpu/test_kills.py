"""After a kill: a restart meets no false out-of-memory error, and nothing stays."""

from __future__ import annotations

import signal
from collections.abc import Callable

from slices import Gpu, Nvml, Slice, held, status_of

SOON_S = 0.5
"""How long libfgpu tries again."""
NEAR_MIB = 8
FORKED = """
    import ctypes, os, sys
    cuda = ctypes.CDLL("libcuda.so.1")
    device, context, address = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_uint64()
    assert cuda.cuInit(0) == cuda.cuDeviceGet(ctypes.byref(device), 0) == 0
    assert cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device) == cuda.cuCtxSetCurrent(context) == 0
    assert cuda.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(int(sys.argv[1]) << 20)) == 0
    child = os.fork()
    if child:
        print(child, flush=True)
    sys.stdin.read()
"""


def seconds_until_free(nvml: Nvml, gpu: Gpu, before: float, within_s: float) -> float | None:
    return nvml.seconds_until(lambda mib: mib <= before + NEAR_MIB, gpu.uuid, within_s=within_s)


def test_memory_is_free_soon_after_a_kill(
    slice_of: Callable[..., Slice], gpu: Gpu, nvml: Nvml, record_property: Callable[..., None]
) -> None:
    worst = 0.0
    for share in (16, 4, 2):
        before = nvml.settled_mib(gpu.uuid)
        process, status = held(slice_of(gpu.memory_mib), gpu.memory_mib // share)
        assert status == 0
        process.send_signal(signal.SIGKILL)
        process.wait()
        seconds = seconds_until_free(nvml, gpu, before, 20)
        process.communicate()
        record_property(f"seconds_of_1_{share}", seconds)
        assert seconds is not None, "not within 20 s"
        worst = max(worst, seconds)
    assert worst <= SOON_S


def test_a_restart_meets_no_false_out_of_memory_error(
    slice_of: Callable[..., Slice], gpu: Gpu, record_property: Callable[..., None]
) -> None:
    session = slice_of(gpu.memory_mib)
    statuses = [status_of(session, gpu.memory_mib * 7 // 10) for _ in range(5)]
    record_property("statuses", statuses)
    assert set(statuses) == {0}


def test_what_a_forked_child_keeps_is_free_when_it_ends(
    slice_of: Callable[..., Slice], gpu: Gpu, nvml: Nvml, record_property: Callable[..., None]
) -> None:
    before = nvml.settled_mib(gpu.uuid)
    process = slice_of(gpu.memory_mib).start(FORKED, str(gpu.memory_mib // 8))
    assert process.stdout is not None
    assert process.stdin is not None
    int(process.stdout.readline())
    process.send_signal(signal.SIGKILL)
    process.wait()
    record_property("seconds_while_the_child_lives", seconds_until_free(nvml, gpu, before, 5))
    process.stdin.close()  # the child's end
    seconds = seconds_until_free(nvml, gpu, before, 20)
    process.stdout.read()
    record_property("seconds_after_the_child", seconds)
    assert seconds is not None, "not within 20 s"
    assert seconds <= SOON_S
