"""A session's GPUs are all that there are: as NVML counts and finds them, and as CUDA_VISIBLE_DEVICES numbers them."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import pynvml
import pytest
from sessionfolders import MakePath, run_in

MACHINE = "".join(f"gpu uuid=GPU-{name} memory_mib=8192 name=Simulated GPU {name}\n" for name in "abcd")
MIG = """
driver=570.10
gpu uuid=GPU-a memory_mib=8192 name=Simulated GPU a
gpu uuid=GPU-b memory_mib=81920 name=NVIDIA H100
mig parent=GPU-b uuid=MIG-b0 memory_mib=9728 name=1g.10gb
mig parent=GPU-b uuid=MIG-b1 memory_mib=9728 name=1g.10gb
"""
NVML = """
import json, pynvml as n
n.nvmlInit()
def found(name, *key):
    try: return n.nvmlDeviceGetUUID(getattr(n, name)(*key))
    except n.NVMLError as error: return str(error)
own = [n.nvmlDeviceGetHandleByIndex(i) for i in range(n.nvmlDeviceGetCount())]
print(json.dumps({
    "uuids": [n.nvmlDeviceGetUUID(device) for device in own],
    "indices": [n.nvmlDeviceGetIndex(device) for device in own],
    "next": found("nvmlDeviceGetHandleByIndex", len(own)),
    "GPU-a": found("nvmlDeviceGetHandleByUUID", "GPU-a"),
    "its bus": found("nvmlDeviceGetHandleByPciBusId", "00000000:01:00.0"),
}))
"""
CUDA = """
import ctypes
cuda, count, total = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(), ctypes.c_size_t()
print(cuda.cuInit(0), end="")
cuda.cuDeviceGetCount(ctypes.byref(count))
for device in range(count.value):
    assert cuda.cuDeviceTotalMem_v2(ctypes.byref(total), device) == 0
    print("", total.value >> 20, end="")
"""


def run(folder: Path, *command: str, visible: str | None = None) -> str:
    """Return what a program in the session prints, with what its user has set CUDA_VISIBLE_DEVICES to."""
    chosen = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    done = run_in(folder, sys.executable, *command, **chosen)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def two_of_four(session_folder: MakePath) -> Path:
    """A session of two slices, on a machine of four GPUs."""
    return session_folder(devices=[("GPU-d", 1024), ("GPU-b", 2048)], machine=MACHINE)


def test_nvml_counts_and_finds_the_sessions_gpus_alone(two_of_four: Path) -> None:
    assert json.loads(run(two_of_four, "-c", NVML)) == {
        "uuids": ["GPU-d", "GPU-b"],
        "indices": [0, 1],
        "next": "Invalid Argument",
        "GPU-a": "Not Found",
        "its bus": "Not Found",
    }


def test_no_function_of_nvml_finds_a_gpu_past_the_hooks() -> None:
    functions = set(re.findall(r'"(nvmlDeviceGetHandleBy\w+)"', Path(pynvml.__file__).read_text()))
    hooks = (Path(__file__).parents[2] / "isolation/libfgpu/hooks.h").read_text()
    assert functions - set(re.findall(r"HOOK\(NVML, (\w+)", hooks)) == set()


def test_an_instance_is_counted_as_the_gpu_that_it_is_a_part_of(session_folder: MakePath) -> None:
    folder = session_folder(devices=[("MIG-b1", 1024)], machine=MIG)
    told = json.loads(run(folder, "-c", NVML))
    assert (told["uuids"], told["indices"], told["GPU-a"]) == (["GPU-b"], [0], "Not Found")
    assert run(folder, "-c", CUDA) == "0 1024"


@pytest.mark.parametrize(
    "program", [("gpustat", "--no-color"), ("nvitop", "--once", "--ascii", "--no-unicode")]
)
def test_peoples_monitors_list_the_sessions_gpus_alone(
    session_folder: MakePath, program: Sequence[str]
) -> None:
    folder = session_folder(devices=[("GPU-c", 1024)], machine=MACHINE)
    said = run(folder, "-m", *(word for word in program if word != "--no-unicode"))
    assert "Simulated GPU c" in said
    assert [name for name in "abd" if f"GPU {name}" in said] == []


@pytest.mark.parametrize(
    ("visible", "said"),
    [
        (None, "0 1024 2048"),
        ("0", "0 1024"),
        ("1", "0 2048"),
        ("1,0", "0 2048 1024"),
        ("GPU-b", "0 2048"),
        ("GPU-d, GPU-b", "0 1024 2048"),
        ("1,GPU-a,0", "0 2048"),
        ("2", "100"),
        ("GPU-a", "100"),
        ("-1", "100"),
        ("", "100"),
        ("0,0", "100"),
    ],
)
def test_cuda_visible_devices_numbers_the_sessions_gpus(
    two_of_four: Path, visible: str | None, said: str
) -> None:
    assert run(two_of_four, "-c", CUDA, visible=visible) == said


def test_a_gpu_that_the_machine_has_not_is_not_replaced_by_another(session_folder: MakePath) -> None:
    assert run(session_folder(devices=[("GPU-lost", 1024)], machine=MACHINE), "-c", CUDA) == "100"


def test_a_simulated_gpu_says_once_that_cudas_runtime_needs_a_real_one(session_folder: MakePath) -> None:
    program = """
import ctypes
cuda = ctypes.CDLL("libcuda.so.1")
print([cuda.cuGetExportTable(ctypes.byref(ctypes.c_void_p()), bytes(16)) for _ in range(2)])
"""
    folder = session_folder(devices=[("GPU-c", 1024)], machine=MACHINE)
    done = run_in(folder, sys.executable, "-c", program)
    assert (done.stdout, done.returncode) == ("[500, 500]\n", 0)
    assert done.stderr == (
        "fgpu: This GPU is simulated: programs that use CUDA's runtime (PyTorch, CuPy, TensorFlow) "
        "need a real GPU and fail here with error 500.\n"
    )
