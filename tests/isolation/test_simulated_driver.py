"""What the simulated CUDA driver does, call by call, and over several processes (isolation/simulated/cuda_*.c)."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from sessionfolders import ISOLATION
from simulatedmachine import Machine

MIB = 1 << 20
GPU = "gpu uuid=GPU-a memory_mib=1024\n"

Make = Callable[..., Machine]

GROUPS = re.findall(
    r'^    \{"(\w+)", \w+\},$', (ISOLATION / "tests" / "sim_calls.c").read_text(), re.MULTILINE
)


@pytest.mark.parametrize("group", GROUPS)
def test_calls(simulated_machine: Make, group: str) -> None:
    machine = simulated_machine(GPU)
    machine.run("sim_calls", group)
    (entry,) = machine.entries()
    assert entry.over == 0
    assert entry.peak <= entry.bytes
    assert machine.log() == ""


# ---- memory of several processes --------------------------------------------------------------------------


def test_a_process_that_was_there_before_gets_what_a_killed_one_held(simulated_machine: Make) -> None:
    machine = simulated_machine(GPU)
    with machine.running("sim_tool", "steps") as survivor:
        assert survivor.tell(100) == "0"
        with machine.running("sim_tool", "hold", 900) as holder:
            assert holder.line == "held 1"
            assert survivor.tell(100) == "2"
        assert survivor.tell(100) == "0"
        assert survivor.tell(824) == "0"
    (entry,) = machine.entries()
    assert (entry.peak, entry.over) == (1024 * MIB, 0)


CODE = """
import ctypes, sys
cuda, context, module = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p(), ctypes.c_void_p()
image = b".version 8.0\\n.target sm_90\\n.visible .entry one()\\n{ ret; }\\n"
assert cuda.cuInit(0) == cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == cuda.cuCtxSetCurrent(context) == 0
def left():
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    assert cuda.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total)) == 0
    return free.value >> 20
"""


def test_code_takes_memory_for_as_long_as_it_is_loaded(simulated_machine: Make) -> None:
    machine = simulated_machine("gpu uuid=GPU-a memory_mib=1024 context_mib=100 code_mib=400\n")
    loads = """
found = [left()]
for call, last in ((cuda.cuModuleLoadData, cuda.cuModuleUnload), (cuda.cuLibraryLoadData, cuda.cuLibraryUnload)):
    more = (None, None, 0, None, None, 0) if call is cuda.cuLibraryLoadData else ()
    assert call(ctypes.byref(module), image, *more) == 0
    found.append(left())
    other = ctypes.c_void_p()
    assert call(ctypes.byref(other), image, *more) == 0
    assert call(ctypes.byref(other), image, *more) == 2
    assert last(other) == last(module) == 0
    found.append(left())
assert cuda.cuModuleLoadData(ctypes.byref(module), image) == 0
assert cuda.cuDevicePrimaryCtxReset_v2(0) == 0
assert cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == cuda.cuCtxSetCurrent(context) == 0
print(*found, left())
"""
    assert machine.python(CODE + loads) == "924 524 924 524 924 924\n"


# ---- time of several processes ------------------------------------------------------------------------------


def test_kernels_of_all_processes_are_served_one_after_another(simulated_machine: Make) -> None:
    machine = simulated_machine(GPU)
    with machine.running("sim_tool", "queue", "spin_1000ms", 100) as first:
        assert first.line == "queued"
        before = machine.entries()[0].busy_until
        with machine.running("sim_tool", "queue", "spin_20ms", 10) as second:
            assert second.line == "queued"
            (entry,) = machine.entries()
    assert entry.busy_until == before + 200 * 1_000_000
    assert entry.kernels == 110
    assert entry.busy_ns == (100 * 1000 + 10 * 20) * 1_000_000


def test_a_kernel_takes_what_its_name_says(simulated_machine: Make) -> None:
    machine = simulated_machine(GPU + "kernel_us=70\n")
    for name, ns in (
        ("spin_0us", 0),
        ("spin_50us", 50_000),
        ("_Z9spin_2msPf", 2_000_000),
        ("other", 70_000),
        ("spin_up", 70_000),
        ("spin_5s", 70_000),
    ):
        before = machine.entries()[0].busy_ns if (machine.folder / "ledger").exists() else 0
        assert int(machine.run("sim_tool", "run", name, 3)) * 1000 >= 3 * ns - 1000
        assert machine.entries()[0].busy_ns - before == 3 * ns


def test_the_queue_of_a_killed_process_is_dropped(simulated_machine: Make) -> None:
    machine = simulated_machine(GPU)
    with machine.running("sim_tool", "queue", "spin_1000ms", 100) as killed:
        assert killed.line == "queued"
        queued_until = machine.entries()[0].busy_until
    machine.run("sim_tool", "run", "spin_1ms", 1)
    assert machine.entries()[0].busy_until < queued_until - 50 * 1_000_000_000


# ---- the library --------------------------------------------------------------------------------------------


def test_the_library_is_found_through_the_folder_that_it_was_loaded_from(simulated_machine: Make) -> None:
    machine = simulated_machine(GPU)
    other = simulated_machine("gpu uuid=GPU-z memory_mib=77", name="elsewhere")
    assert machine.run("sim_tool", "info") == "1024 1024\n"
    assert machine.run("sim_tool", "info", FGPU_SIMULATED_MACHINE=str(other.folder)) == "77 77\n"
    assert [entry.uuid for entry in other.entries()] == ["GPU-z"]


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become somebody else")
def test_processes_of_several_users_share_the_ledger(simulated_machine: Make) -> None:
    made = simulated_machine(GPU)
    with tempfile.TemporaryDirectory() as name:
        # Not below pytest's folders, which are closed to others.
        folder = Path(name)
        folder.chmod(0o755)
        for file in (*made.folder.iterdir(), made.program("sim_tool")):
            shutil.copy(file, folder)
        program = folder / made.program("sim_tool").name
        machine = Machine(folder, lambda *_: program)
        other = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups")
        with machine.running("sim_tool", "hold", 100):
            assert machine.run("sim_tool", "info", before=other) == "924 1024\n"
