"""What programs are told: the slice, in every way of asking."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable

import pytest
from slices import MIB, Gpu, Slice, needs

ASK_DRIVER = """
    import ctypes, sys
    cuda = ctypes.CDLL("libcuda.so.1")
    def call(name, *args):
        status = getattr(cuda, name)(*args)
        assert status == 0, (name, status)
    call("cuInit", 0)
    device, context = ctypes.c_int(), ctypes.c_void_p()
    call("cuDeviceGet", ctypes.byref(device), 0)
    total, free = ctypes.c_size_t(), ctypes.c_size_t()
    call("cuDeviceTotalMem_v2", ctypes.byref(total), device)
    print(total.value)
    call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    call("cuCtxSetCurrent", context)
    call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
    print(total.value)
    address, status = ctypes.c_void_p(), ctypes.c_int()
    for flag in (0, 1, 2):  # default, legacy and per-thread streams
        for name in (b"cuMemGetInfo", b"cuDeviceTotalMem"):
            call("cuGetProcAddress_v2", name, ctypes.byref(address), 13000, ctypes.c_uint64(flag), ctypes.byref(status))
            found = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)(address.value)
            total.value = 0
            if name == b"cuMemGetInfo":
                assert found(ctypes.addressof(free), ctypes.addressof(total)) == 0
            else:
                assert found(ctypes.addressof(total), device.value) == 0
            print(total.value)
"""


@pytest.mark.parametrize("memory_mib", [128, 5120, 16384, 81920])
def test_every_way_of_asking_the_driver_says_the_limit(
    slice_of: Callable[..., Slice], gpu: Gpu, memory_mib: int
) -> None:
    if memory_mib > gpu.memory_mib:
        pytest.skip(f"the GPU has only {gpu.memory_mib} MiB")
    assert set(slice_of(memory_mib).run(ASK_DRIVER).split()) == {str(memory_mib * MIB)}


def test_a_whole_device_is_what_the_driver_says_it_is(slice_of: Callable[..., Slice], gpu: Gpu) -> None:
    whole = {int(line) for line in slice_of(gpu.memory_mib).run(ASK_DRIVER).split()}
    assert len(whole) == 1
    assert whole.pop() <= gpu.memory_mib * MIB


@needs("pynvml")
def test_nvidia_ml_py_says_the_limit(slice_of: Callable[..., Slice], gpu: Gpu) -> None:
    code = f"""
        import pynvml
        pynvml.nvmlInit()
        device = pynvml.nvmlDeviceGetHandleByUUID({gpu.uuid!r})
        print(pynvml.nvmlDeviceGetMemoryInfo(device).total)
        print(pynvml.nvmlDeviceGetMemoryInfo(device, version=pynvml.nvmlMemory_v2).total)
    """
    assert set(slice_of(5120).run(code).split()) == {str(5120 * MIB)}


@pytest.mark.skipif(shutil.which("nvidia-smi") is None, reason="there is no nvidia-smi")
def test_nvidia_smi_says_the_limit(slice_of: Callable[..., Slice], gpu: Gpu) -> None:
    done = subprocess.run(
        ["nvidia-smi", f"--id={gpu.uuid}", "--query-gpu=memory.total", "--format=csv,noheader,nounits"],
        env=slice_of(5120).environment(),
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert done.stdout.strip() == "5120"


@needs("cuda.bindings")
def test_cuda_bindings_say_the_limit(slice_of: Callable[..., Slice]) -> None:
    code = """
        from cuda.bindings import driver
        def ok(answer):
            assert answer[0] == 0, answer
            return answer[1:]
        ok(driver.cuInit(0))
        (device,) = ok(driver.cuDeviceGet(0))
        print(*ok(driver.cuDeviceTotalMem(device)))
        (context,) = ok(driver.cuDevicePrimaryCtxRetain(device))
        ok(driver.cuCtxSetCurrent(context))
        print(ok(driver.cuMemGetInfo())[1])
        error, _ = driver.cuMemAlloc(5121 << 20)
        print(int(error))
    """
    assert slice_of(5120).run(code).split() == [str(5120 * MIB), str(5120 * MIB), "2"]


@needs("numba")
def test_numba_says_the_limit_and_goes_on_after_running_out(slice_of: Callable[..., Slice]) -> None:
    code = """
        import numpy
        from numba import cuda
        print(cuda.current_context().get_memory_info().total)
        try:
            cuda.device_array(6 << 30, dtype=numpy.uint8)
        except Exception as e:
            assert "OUT_OF_MEMORY" in str(e), e
        else:
            raise SystemExit("6 GiB were granted")
        a = cuda.to_device(numpy.arange(1 << 20))
        assert a.copy_to_host().sum() == (1 << 20) * ((1 << 20) - 1) // 2
    """
    assert slice_of(5120).run(code).split() == [str(5120 * MIB)]
