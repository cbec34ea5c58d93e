"""What the simulated NVML says, asked through nvidia-ml-py (isolation/simulated/nvml*.c)."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from simulatedmachine import Machine

MIB = 1 << 20
GPU = "gpu uuid=GPU-a memory_mib=1024 context_mib=24 name=Simulated one\n"

Make = Callable[..., Machine]

ASK = """
import json, sys
import pynvml as n
n.nvmlInit()
say = {}
def device(name): return n.nvmlDeviceGetHandleByUUID(name)
def memory(h):
    v1, v2 = n.nvmlDeviceGetMemoryInfo(h), n.nvmlDeviceGetMemoryInfo(h, version=n.nvmlMemory_v2)
    return [[m.total >> 20, m.used >> 20, m.free >> 20] for m in (v1, v2)]
def processes(h, v=""):
    found = getattr(n, "nvmlDeviceGetComputeRunningProcesses" + v)(h)
    return [[p.pid, p.usedGpuMemory >> 20] for p in found]
"""


def ask(machine: Machine, text: str, **more: Any) -> dict[str, Any]:
    said: dict[str, Any] = json.loads(machine.python(f"{ASK}\n{text}\nprint(json.dumps(say))", **more))
    return said


def test_a_device_is_found_in_every_way_and_described(simulated_machine: Make) -> None:
    machine = simulated_machine(GPU + "gpu uuid=GPU-b memory_mib=50 compute_capability=8.6\n")
    said = ask(
        machine,
        """
h = n.nvmlDeviceGetHandleByIndex(1)
bus = n.nvmlDeviceGetPciInfo(h).busId
say["count"] = n.nvmlDeviceGetCount()
say["uuids"] = [n.nvmlDeviceGetUUID(n.nvmlDeviceGetHandleByIndex(i)) for i in range(2)]
say["by"] = [n.nvmlDeviceGetIndex(x) for x in (h, device("GPU-b"), n.nvmlDeviceGetHandleByPciBusId(bus))]
say["name"] = n.nvmlDeviceGetName(device("GPU-a"))
say["capability"] = n.nvmlDeviceGetCudaComputeCapability(h)
say["versions"] = [n.nvmlSystemGetDriverVersion(), n.nvmlSystemGetCudaDriverVersion()]
say["memory"] = memory(h)
say["mig"] = n.nvmlDeviceGetMigMode(h)
for name in ("Temperature", "PowerUsage"):
    try: getattr(n, "nvmlDeviceGet" + name)(h, *([0] if name == "Temperature" else []))
    except n.NVMLError_NotSupported: say[name] = "not supported"
""",
    )
    assert said == {
        "count": 2,
        "uuids": ["GPU-a", "GPU-b"],
        "by": [1, 1, 1],
        "name": "Simulated one",
        "capability": [8, 6],
        "versions": ["580.95.05", 13000],
        "memory": [[50, 0, 50], [50, 0, 50]],
        "mig": [0, 0],
        "Temperature": "not supported",
        "PowerUsage": "not supported",
    }


def test_opening_nvml_takes_nothing_from_the_process(simulated_machine: Make) -> None:
    # All of a process's locks on the ledger would end with any descriptor of it that either library closed.
    machine = simulated_machine(GPU)
    said = machine.python(
        """
import ctypes, subprocess, sys
cuda = ctypes.CDLL("libcuda.so.1")
context, address = ctypes.c_void_p(), ctypes.c_uint64()
assert cuda.cuInit(0) == 0 and cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
assert cuda.cuCtxSetCurrent(context) == 0
assert cuda.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(900 << 20)) == 0
import pynvml
pynvml.nvmlInit()
pynvml.nvmlShutdown()
print(subprocess.run([sys.argv[1], "hold", "200"], stdin=subprocess.DEVNULL, capture_output=True, text=True).stdout)
""",
        machine.program("sim_tool"),
    )
    assert said.strip() == "held 0"


# ---- PID namespaces -------------------------------------------------------------------------------------------


@contextmanager
def in_a_pid_namespace(machine: Machine, *words: object) -> Iterator[tuple[int, str]]:
    """Start a program as process 1 of a PID namespace of its own; its pid outside, and its first line."""
    before = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
    with machine.running("sim_tool", *words, before=before) as found:
        pid = found.process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        yield int(children[0]), found.line


def may_unshare() -> bool:
    tool = shutil.which("unshare")
    return (
        tool is not None
        and subprocess.run(
            [tool, "--pid", "--fork", "--mount-proc", "true"], check=False, capture_output=True
        ).returncode
        == 0
    )


@pytest.mark.skipif(not may_unshare(), reason="may not make PID namespaces: run as root")
def test_pids_are_those_of_the_namespace_that_asks(simulated_machine: Make) -> None:
    machine = simulated_machine(GPU)
    question = 'import os; say["own"] = os.getpid(); say["processes"] = processes(device("GPU-a"))'
    with (
        in_a_pid_namespace(machine, "hold", 10) as (pid, line),
        machine.running("sim_tool", "hold", 20) as out,
    ):
        assert line == "held 1"
        seen = ask(machine, question)
        assert sorted(seen["processes"]) == sorted([[pid, 34], [out.process.pid, 44]])
        # Neither is in a namespace next door; the memory is the device's none the less.
        inside = ask(
            machine,
            question + '; say["memory"] = memory(device("GPU-a"))[0]',
            before=("unshare", "--pid", "--fork", "--mount-proc"),
        )
        assert inside == {"own": 1, "processes": [], "memory": [1024, 78, 946]}
        text = """
import ctypes
cuda = ctypes.CDLL("libcuda.so.1")
context = ctypes.c_void_p()
assert cuda.cuInit(0) == 0 and cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
"""
        own = ask(machine, text + question, before=("unshare", "--pid", "--fork", "--mount-proc"))
        assert own == {"own": 1, "processes": [[1, 24]]}
    assert ask(machine, question)["processes"] == []


# ---- MIG ------------------------------------------------------------------------------------------------------

MIG = (
    "gpu uuid=GPU-c memory_mib=1000 name=cut\n"
    "mig parent=GPU-c uuid=MIG-1 memory_mib=300 name=part one\n"
    "mig parent=GPU-c uuid=MIG-2 memory_mib=400 name=part two\n"
)


def test_mig_instances_are_devices_of_their_own(simulated_machine: Make) -> None:
    machine = simulated_machine(MIG)
    with machine.running("sim_tool", "hold", 350, CUDA_VISIBLE_DEVICES="MIG-2") as holder:
        assert holder.line == "held 1"
        said = ask(
            machine,
            """
gpu = device("GPU-c")
say["mode"] = n.nvmlDeviceGetMigMode(gpu)
say["most"] = n.nvmlDeviceGetMaxMigDeviceCount(gpu)
parts = []
for i in range(7):
    try: parts.append(n.nvmlDeviceGetMigDeviceHandleByIndex(gpu, i))
    except n.NVMLError_NotFound: break
say["uuids"] = [n.nvmlDeviceGetUUID(p) for p in parts]
say["memory"] = [memory(p)[0] for p in parts]
say["whole"] = memory(gpu)[0]
say["is"] = [n.nvmlDeviceIsMigDeviceHandle(p).value for p in (gpu, *parts)]
say["parent"] = n.nvmlDeviceGetUUID(n.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(parts[1]))
say["processes"] = [[p.pid, p.gpuInstanceId] for p in n.nvmlDeviceGetComputeRunningProcesses(gpu)]
say["count"] = n.nvmlDeviceGetCount()
""",
        )
        assert said == {
            "mode": [1, 1],
            "most": 7,
            "uuids": ["MIG-1", "MIG-2"],
            "memory": [[300, 0, 300], [400, 350, 50]],
            "whole": [1000, 350, 650],
            "is": [0, 1, 1],
            "parent": "GPU-c",
            "processes": [[holder.process.pid, 1]],
            "count": 1,
        }
        assert machine.run("sim_tool", "info", CUDA_VISIBLE_DEVICES="MIG-1") == "300 300\n"


# ---- limits of cgroups, as from driver 615 on ------------------------------------------------------------------

LIMIT = """
limits = n.c_nvmlSetMemoryLimits_v1_t()
limits.nameSpace = sys.argv[1].encode()
limits.softLimit, limits.hardLimit = int(sys.argv[2]) << 20, int(sys.argv[3]) << 20
try:
    n.nvmlDeviceSetMemoryLimits_v1(device("GPU-a"), limits)
    got = n.c_nvmlGetMemoryLimits_v1_t()
    got.nameSpace = sys.argv[1].encode()
    n.nvmlDeviceGetMemoryLimits_v1(device("GPU-a"), got)
    say["limits"] = [got.softLimit >> 20, got.hardLimit >> 20, got.currentUsed >> 20]
except n.NVMLError as error:
    say["error"] = type(error).__name__
"""


def limit(machine: Machine, path: str, soft: int, hard: int) -> dict[str, Any]:
    text = f"{ASK}\n{LIMIT}\nprint(json.dumps(say))"
    said: dict[str, Any] = json.loads(machine.python(text, path, soft, hard))
    return said


def cgroup_mount() -> Path | None:
    for folder in (Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/unified")):
        if (folder / "cgroup.procs").exists() and os.access(folder, os.W_OK):
            return folder
    return None


@pytest.fixture
def cgroup() -> Iterator[str]:
    """The path of a cgroup (v2) of this test's, with one below it."""
    mount = cgroup_mount()
    if mount is None:
        pytest.skip("no cgroup v2 that may be written: run as root")
    path = f"/fgpu-test-{os.getpid()}"
    made = mount / path.strip("/")
    try:
        (made / "below").mkdir(parents=True)
    except OSError as error:
        pytest.skip(f"cannot make cgroups: {error}")
    yield path
    (made / "below").rmdir()
    made.rmdir()


def within(path: str) -> tuple[str, ...]:
    mount = cgroup_mount()
    return ("sh", "-c", f'echo $$ > {mount}{path}/cgroup.procs; exec "$@"', "sh")


def test_a_cgroups_limit_holds_at_and_below_it_and_is_told_at_it(
    simulated_machine: Make, cgroup: str
) -> None:
    machine = simulated_machine(f"driver=615.71\n{GPU}")
    assert limit(machine, cgroup, 0, 200) == {"limits": [0, 200, 0]}
    info = ("sim_tool", "info")
    assert machine.run(*info) == "1000 1024\n"
    assert machine.run(*info, before=within(cgroup)) == "176 200\n"
    assert machine.run(*info, before=within(f"{cgroup}/below")) == "1000 1024\n"
    told = 'say["memory"] = memory(device("GPU-a"))[1]'
    assert ask(machine, told, before=within(cgroup))["memory"] == [200, 0, 200]
    with machine.running("sim_tool", "hold", 300) as outside:
        assert outside.line == "held 1"
        for path in (cgroup, f"{cgroup}/below"):
            held = machine.run(
                "sim_tool", "hold", 100, 77, 76, before=(*within(path), "sh", "-c", '"$@" < /dev/null', "sh")
            )
            assert held == "held 2\n"
    assert limit(machine, cgroup, 0, 2**44 - 1)["limits"][:2] == [0, 2**44 - 1]
    assert machine.run(*info, before=within(cgroup)) == "1000 1024\n"
