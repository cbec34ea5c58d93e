"""The address-equality test: what cuGetProcAddress gives is always an exported function of the real driver."""

from __future__ import annotations

from collections.abc import Callable

from slices import Slice

EVERY_HOOK = """
    import ctypes
    cuda = ctypes.CDLL("libcuda.so.1")
    assert cuda.cuInit(0) == 0
    checked, ours = 0, 0
    with open("/proc/self/maps") as maps:
        ranges = [
            tuple(int(end, 16) for end in line.split()[0].split("-")) for line in maps if "libfgpu.so" in line
        ]
    names = [
        b"cuMemAlloc", b"cuMemAllocPitch", b"cuMemAllocManaged", b"cuMemAllocAsync", b"cuMemAllocFromPoolAsync",
        b"cuMemCreate", b"cuMemMap", b"cuMemUnmap", b"cuMemRelease", b"cuMemFree", b"cuMemFreeAsync",
        b"cuArrayCreate", b"cuArray3DCreate", b"cuMipmappedArrayCreate", b"cuGraphAddMemAllocNode", b"cuGraphAddNode",
        b"cuMemGetInfo", b"cuDeviceTotalMem", b"cuCtxCreate", b"cuDevicePrimaryCtxRetain", b"cuLaunchKernel",
        b"cuLaunchKernelEx", b"cuLaunchCooperativeKernel", b"cuGraphLaunch", b"cuGetProcAddress",
    ]
    address, status = ctypes.c_void_p(), ctypes.c_int()
    for name in names:
        for version in (11000, 11030, 12000, 12080, 13000):
            for flag in (0, 1, 2):
                found = cuda.cuGetProcAddress_v2(
                    name, ctypes.byref(address), version, ctypes.c_uint64(flag), ctypes.byref(status)
                )
                if found == 0 and address.value:
                    checked += 1
                    ours += any(start <= address.value < end for start, end in ranges)
                    if not any(start <= address.value < end for start, end in ranges):
                        print("not hooked:", name.decode(), version, flag)
    print(checked, ours)
"""


def test_every_name_version_and_stream_mode_is_hooked(slice_of: Callable[..., Slice]) -> None:
    *missed, last = slice_of(4096).run(EVERY_HOOK).splitlines()
    checked, ours = map(int, last.split())
    assert not missed
    assert checked == ours > 100
