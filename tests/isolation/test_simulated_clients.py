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


NUMBA = """
import warnings
warnings.simplefilter("ignore")
import numpy
from numba import cuda
"""


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
