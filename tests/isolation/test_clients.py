"""The libraries that people use, unchanged, on the simulated driver: they see the slice and run out of it."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from sessionfolders import UUID, MakePath, preloaded

MIB = 2**20
LIMITS_MIB = [128, 1024, 5120, 16384, 81920]
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


def needs(module: str) -> None:
    """Skip without this package. In CI it is installed, and missing would be a mistake of the set-up."""
    try:
        found = importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        found = False
    if not found:
        reason = f"{module} is not installed; `make test` installs it"
        pytest.skip(reason)


def run(folder: Path, code: str, *, preload: bool = True) -> list[int]:
    """Run a program in a session and return the numbers that it prints."""
    env = preloaded(folder)
    if not preload:
        del env["LD_PRELOAD"]
    command = [sys.executable, "-c", textwrap.dedent(code), UUID]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr + (folder / "log").read_text()
    return [int(word) for word in done.stdout.split()]


@pytest.mark.parametrize("limit_mib", LIMITS_MIB)
@pytest.mark.parametrize(
    ("module", "code"),
    [("cuda.bindings", CUDA_BINDINGS), ("numba_cuda", NUMBA)],
    ids=["cuda-bindings", "numba-cuda"],
)
def test_it_sees_the_limit_and_runs_out_of_it(
    session_folder: MakePath, module: str, code: str, limit_mib: int
) -> None:
    needs(module)
    folder = session_folder(devices=[(UUID, limit_mib)], device_mib=DEVICE_MIB)
    *totals, held, error = run(folder, code)
    assert set(totals) == {limit_mib * MIB}
    assert limit_mib * MIB - 2 * MIB <= held <= limit_mib * MIB
    assert error == 2


@pytest.mark.parametrize("limit_mib", LIMITS_MIB)
def test_nvidia_ml_py_sees_the_limit(session_folder: MakePath, limit_mib: int) -> None:
    folder = session_folder(devices=[(UUID, limit_mib)], device_mib=DEVICE_MIB)
    assert set(run(folder, NVML)) == {limit_mib * MIB}


@pytest.mark.parametrize(
    ("module", "code"),
    [("cuda.bindings", CUDA_BINDINGS), ("numba_cuda", NUMBA), ("pynvml", NVML)],
    ids=["cuda-bindings", "numba-cuda", "nvidia-ml-py"],
)
def test_without_libfgpu_it_sees_the_whole_device(session_folder: MakePath, module: str, code: str) -> None:
    needs(module)
    folder = session_folder(devices=[(UUID, 5120)], device_mib=DEVICE_MIB)
    numbers = run(folder, code, preload=False)
    assert numbers[0] == DEVICE_MIB * MIB
    assert max(numbers) > 5120 * MIB
