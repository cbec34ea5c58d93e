"""Programs as users have them, on the simulated driver alone: ctypes, cuda-bindings, numba-cuda, and tools on NVML."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Callable

import pytest
from simulatedmachine import Machine, needs

GPU = "gpu uuid=GPU-a memory_mib=1024 name=Simulated one\n"

Make = Callable[..., Machine]


@needs("cuda.bindings")
def test_cuda_bindings(simulated_machine: Make) -> None:
    said = simulated_machine(GPU).python("""
from cuda.bindings import driver as d
def ok(result):
    assert result[0] == d.CUresult.CUDA_SUCCESS, result
    return result[1] if len(result) == 2 else result[1:]
ok(d.cuInit(0))
device = ok(d.cuDeviceGet(0))
context = ok(d.cuDevicePrimaryCtxRetain(device))
ok(d.cuCtxSetCurrent(context))
print(ok(d.cuDeviceGetName(64, device)).split(b"\\0")[0].decode(), ok(d.cuDeviceTotalMem(device)) >> 20)
address = ok(d.cuMemAlloc(1 << 20))
print([n >> 20 for n in ok(d.cuMemGetInfo())])
data, back = bytes(range(256)) * 16, bytearray(4096)
ok(d.cuMemcpyHtoD(address, data, len(data)))
ok(d.cuMemcpyDtoH(back, address, len(back)))
print(back == data, d.cuMemAlloc(1 << 40)[0].name)
module = ok(d.cuModuleLoadData(b".version 8.0\\n.target sm_90\\n.visible .entry spin_5ms(.param .u64 a) { ret; }\\0"))
kernel = ok(d.cuModuleGetFunction(module, b"spin_5ms"))
stream, start, end = ok(d.cuStreamCreate(0)), ok(d.cuEventCreate(0)), ok(d.cuEventCreate(0))
ok(d.cuEventRecord(start, stream))
import ctypes
ok(d.cuLaunchKernel(kernel, 1, 1, 1, 32, 1, 1, 0, stream, ((int(address),), (ctypes.c_uint64,)), 0))
ok(d.cuEventRecord(end, stream))
ok(d.cuStreamSynchronize(stream))
print(ok(d.cuEventElapsedTime(start, end)) >= 5)
ok(d.cuMemFree(address))
""")
    assert said.splitlines() == [
        "Simulated one 1024",
        "[1023, 1024]",
        "True CUDA_ERROR_OUT_OF_MEMORY",
        "True",
    ]


NUMBA = """
import warnings
warnings.simplefilter("ignore")
import numpy
from numba import cuda
"""


@needs("numba.cuda", "cuda.bindings")
def test_numba_without_its_compiler(simulated_machine: Make) -> None:
    said = simulated_machine(GPU).python(
        NUMBA
        + """
print(cuda.is_available(), cuda.get_current_device().name)
print([n >> 20 for n in cuda.current_context().get_memory_info()])
data = numpy.arange(1000, dtype=numpy.float32)
there = cuda.to_device(data)
print((there.copy_to_host() == data).all())
try:
    cuda.device_array((1 << 40,), dtype=numpy.uint8)
except Exception as error:
    print(type(error).__name__, "CUDA_ERROR_OUT_OF_MEMORY" in str(error))
stream, start, end = cuda.stream(), cuda.event(), cuda.event()
start.record(stream)
end.record(stream)
end.synchronize()
print(cuda.event_elapsed_time(start, end) >= 0)
print(cuda.managed_array(10).size, cuda.pinned_array(10).size)
""",
        NUMBA_CUDA_USE_NVIDIA_BINDING="1",
    )
    assert said.splitlines() == [
        "True Simulated one",
        "[1024, 1024]",
        "True",
        "CudaAPIError True",
        "True",
        "10 10",
    ]


@needs("numba.cuda", "nvidia.cu13")
def test_numba_compiles_and_launches(simulated_machine: Make) -> None:
    machine = simulated_machine(GPU)
    machine.python(
        NUMBA
        + """
@cuda.jit
def spin_3ms(values):
    i = cuda.grid(1)
    if i < values.size:
        values[i] += 1
spin_3ms[10, 100](cuda.to_device(numpy.zeros(1000)))
cuda.synchronize()
"""
    )
    (entry,) = machine.entries()
    assert (entry.kernels, entry.busy_ns) == (1, 3_000_000)


@pytest.mark.parametrize(
    ("module", "words", "expected"),
    [
        ("gpustat", ["-p", "--no-color"], "Simulated one |"),
        ("nvitop", ["--once", "--no-unicode"], "Simulated one"),
    ],
)
def test_tools_on_nvml(simulated_machine: Make, module: str, words: list[str], expected: str) -> None:
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"{module} not installed: pip install '.[test-clients]'")
    machine = simulated_machine(GPU)
    with machine.running("sim_tool", "hold", 100) as holder:
        done = subprocess.run(
            [sys.executable, "-m", module, *words],
            env=machine.environment(TERM="dumb"),
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        assert expected in done.stdout
        assert str(holder.process.pid) in done.stdout
