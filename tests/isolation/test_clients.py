"""The libraries that people use, unchanged, on the simulated driver: they see the slice and run out of it."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
from sessionfolders import UUID, MakePath, output_of
from simulatedmachine import Machine, needs

MIB = 2**20
LIMITS_MIB = [128, 81920]
DEVICE_MIB = 98304

CUDA_BINDINGS = """
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
    held, step = 0, 1 << 40
    while step >= 1 << 20:  # Halving the step until a last MiB does not fit any more.
        error, _ = driver.cuMemAlloc(step)
        assert int(error) in (0, 2), error
        if error == 0:
            held += step
        else:
            step //= 2
    print(held, int(error))
"""

NUMBA = """
    from numba import cuda
    print(cuda.current_context().get_memory_info().total)
    held, step, refused, kept = 0, 1 << 40, "", []
    while step >= 1 << 20:
        try:
            kept.append(cuda.current_context().memalloc(step))
            held += step
        except Exception as e:
            refused = str(e)
            step //= 2
    assert "OUT_OF_MEMORY" in refused, refused
    print(held, 2)
"""

NVML = """
    import pynvml, sys
    pynvml.nvmlInit()
    device = pynvml.nvmlDeviceGetHandleByUUID(sys.argv[1])
    print(pynvml.nvmlDeviceGetMemoryInfo(device).total)
    print(pynvml.nvmlDeviceGetMemoryInfo(device, version=pynvml.nvmlMemory_v2).total)
"""


SPIN = """
import warnings
warnings.simplefilter("ignore")
import numpy
from numba import cuda
@cuda.jit
def spin_3ms(values):
    i = cuda.grid(1)
    if i < values.size:
        values[i] += 1
spin_3ms[10, 100](cuda.to_device(numpy.zeros(1000)))
cuda.synchronize()
"""

LIBRARIES = [
    pytest.param(CUDA_BINDINGS, marks=needs("cuda.bindings"), id="cuda-bindings"),
    pytest.param(NUMBA, marks=needs("numba_cuda"), id="numba-cuda"),
    pytest.param(NVML, id="nvidia-ml-py"),
]


def run(folder: Path, code: str, **environment: str) -> list[int]:
    """Run a program in a session and return the numbers that it prints."""
    output = output_of(folder, sys.executable, "-c", textwrap.dedent(code), UUID, **environment)
    return [int(word) for word in output.split()]


@pytest.mark.parametrize("limit_mib", LIMITS_MIB)
@pytest.mark.parametrize("code", LIBRARIES[:2])
def test_it_sees_the_limit_and_runs_out_of_it(session_folder: MakePath, code: str, limit_mib: int) -> None:
    folder = session_folder(devices=[(UUID, limit_mib)], device_mib=DEVICE_MIB)
    *totals, held, error = run(folder, code)
    assert set(totals) == {limit_mib * MIB}
    assert limit_mib * MIB - 2 * MIB <= held <= limit_mib * MIB
    assert error == 2


@pytest.mark.parametrize("code", LIBRARIES)
def test_without_libfgpu_it_sees_the_whole_device(session_folder: MakePath, code: str) -> None:
    folder = session_folder(devices=[(UUID, 5120)], device_mib=DEVICE_MIB)
    numbers = run(folder, code, LD_PRELOAD="")
    assert numbers[0] == DEVICE_MIB * MIB
    assert max(numbers) > 5120 * MIB


@needs("numba.cuda", "nvidia.cu13")
def test_numba_compiles_and_launches(simulated_machine: Callable[..., Machine]) -> None:
    machine = simulated_machine("gpu uuid=GPU-a memory_mib=1024 name=Simulated one\n")
    machine.python(SPIN)
    (entry,) = machine.entries()
    assert (entry.kernels, entry.busy_ns) == (1, 3_000_000)
