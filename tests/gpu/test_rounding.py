"""What the driver takes for many allocations of one size: not more than was charged for them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from slices import MIB, Gpu, Nvml, Slice

ALLOCATE = """
    import ctypes, sys
    cuda = ctypes.CDLL("libcuda.so.1")
    device, context, address = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_uint64()
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    assert cuda.cuInit(0) == cuda.cuDeviceGet(ctypes.byref(device), 0) == 0
    assert cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device) == cuda.cuCtxSetCurrent(context) == 0
    def charged():
        assert cuda.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total)) == 0
        assert total.value == int(sys.argv[3]), "libfgpu is not in force"
        return total.value - free.value
    print(charged(), flush=True)
    sys.stdin.readline()
    for _ in range(int(sys.argv[2])):
        assert cuda.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(int(sys.argv[1]))) == 0
    print(charged(), flush=True)
    sys.stdin.read()
"""
SLICE_MIB = 16384
PAGES_MIB = 4
"""A page for small ones, and one for large ones, may be begun and not full."""


@pytest.mark.parametrize(
    ("size", "count"),
    [
        (512, 100_000),
        (4096, 20_000),
        (65_536, 2000),
        (MIB - 512, 500),
        (MIB, 500),
        (MIB + 512, 500),
        (3 * MIB // 2, 500),
        (2 * MIB, 500),
        (2 * MIB + 512, 500),
        (3 * MIB, 500),
    ],
)
def test_the_driver_takes_no_more_than_is_charged(
    slice_of: Callable[..., Slice],
    gpu: Gpu,
    nvml: Nvml,
    record_property: Callable[..., None],
    size: int,
    count: int,
) -> None:
    with slice_of(SLICE_MIB).start(ALLOCATE, str(size), str(count), str(SLICE_MIB * MIB)) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        charged = -int(process.stdout.readline())
        used = -nvml.settled_mib(gpu.uuid)
        print(file=process.stdin, flush=True)
        charged += int(process.stdout.readline())
        used += nvml.settled_mib(gpu.uuid)
        process.kill()
    record_property("charged_each_bytes", charged / count)
    record_property("used_each_bytes", used * MIB / count)
    beyond = used - charged / MIB
    assert beyond <= PAGES_MIB + charged / MIB / 50, (
        f"{beyond:.1f} MiB more than charged: {used * MIB / count:.0f} bytes each"
    )
