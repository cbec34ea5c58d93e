"""fgpuspawner's own ways of asking NVML, of the simulated one: the list of devices, and the watchdog's child."""

from __future__ import annotations

import contextlib
import ctypes
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from simulatedmachine import Machine
from test_simulated_nvml import GPU, Make, in_a_pid_namespace, may_unshare

from fgpuspawner.isolation import facts, nvml_child, nvml_reader
from fgpuspawner.isolation.nvml_reader import DeviceUse, NvmlReader

MIB = 2**20
MACHINE = """
driver=615.10
gpu uuid=GPU-a memory_mib=8192 name=Plain
gpu uuid=GPU-b memory_mib=81920 name=NVIDIA H100
mig parent=GPU-b uuid=MIG-b0 memory_mib=9728 name=1g.10gb
mig parent=GPU-b uuid=MIG-b1 memory_mib=20480 name=2g.20gb
"""
PROBE = """
import json
from fgpu_scheduler import NvmlProbe
print(json.dumps([[d.uuid, d.index, d.model, d.memory_mib] for d in NvmlProbe().devices()]))
"""


@pytest.fixture
def machine(simulated_machine: Make) -> Machine:
    """A simulated machine with a driver of r615, a whole GPU and a partitioned one."""
    return simulated_machine(MACHINE)


@contextlib.contextmanager
def reading(folder: Path) -> Iterator[NvmlReader]:
    """Ask the driver in a folder as the Hub does."""
    reader = NvmlReader(f"{folder}/libnvidia-ml.so.1")
    try:
        yield reader
    finally:
        reader.close()


def test_the_probe_lists_instances_in_place_of_the_gpu_that_they_are_of(machine: Machine) -> None:
    found = [(uuid, index, mib) for uuid, index, _, mib in json.loads(machine.python(PROBE))]
    assert found == [("GPU-a", 0, 8192), ("MIG-b0", 1, 9728), ("MIG-b1", 2, 20480)]


def test_the_drivers_facts_are_read_in_a_child(machine: Machine) -> None:
    assert facts.driver_facts(str(machine.folder / "libnvidia-ml.so.1")) == {
        "driver": "615.10",
        "memory_limits": True,
    }
    # None of it is in this process, where it would be taken for the driver's.
    with open("/proc/self/maps") as maps:
        assert "libnvidia-ml" not in maps.read()


def test_a_driver_that_cannot_be_asked_has_no_abilities_and_the_log_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert facts.driver_facts("/no/such/libnvidia-ml.so.1") == {}
    assert "could not be read" in caplog.text


def look(reader: NvmlReader, *uuids: str) -> dict[str, Any]:
    found = reader.device_uses(uuids, {})
    return {
        uuid: use if isinstance(use, str) else {p.pid: p.used_bytes for p in use.processes}
        for uuid, use in found.items()
    }


def test_the_watchdogs_child_sees_what_each_process_holds_of_each_device(machine: Machine) -> None:
    with contextlib.ExitStack() as stack:
        reader = stack.enter_context(reading(machine.folder))
        first, second, third = (
            stack.enter_context(machine.running("sim_tool", "hold", mib, CUDA_VISIBLE_DEVICES=uuid)).process
            for uuid, mib in (("GPU-a", 3000), ("GPU-a", 500), ("MIG-b1", 700))
        )
        expected = {
            "GPU-a": {first.pid: 3000 << 20, second.pid: 500 << 20},
            "MIG-b0": {},
            "MIG-b1": {third.pid: 700 << 20},
        }
        assert look(reader, "GPU-a", "MIG-b0", "MIG-b1") == expected
        first.kill()
        first.wait()
        del expected["GPU-a"][first.pid]
        assert look(reader, "GPU-a", "MIG-b0", "MIG-b1") == expected


def test_a_device_that_is_not_there_is_unknown_and_the_others_are_told(machine: Machine) -> None:
    with reading(machine.folder) as reader:
        found = look(reader, "GPU-a", "GPU-none")
    assert found["GPU-a"] == {}
    assert isinstance(found["GPU-none"], str)


def test_what_a_context_takes_is_measured_by_making_one(
    simulated_machine: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = simulated_machine("gpu uuid=GPU-a memory_mib=8192 context_mib=311 name=Plain\n")
    monkeypatch.setattr(nvml_reader, "clean_environment", machine.environment)
    assert facts.measure_context("GPU-a") == 311
    said = facts.measure_context("GPU-none")
    assert isinstance(said, str)
    assert "cuDeviceGet failed" in said or "cuInit failed" in said


def test_the_layouts_are_those_of_nvml() -> None:
    assert ctypes.sizeof(nvml_child.Process) == 24
    assert nvml_child.Process.used.offset == 8
    assert nvml_child.Process.gpu_instance.offset == 16
    assert ctypes.sizeof(nvml_child.OldProcess) == 16
    assert ctypes.sizeof(nvml_child.MemoryLimits) == 32


def use(reader: NvmlReader, **since_us: int) -> DeviceUse:
    found = reader.device_uses(["GPU-a"], since_us)["GPU-a"]
    assert isinstance(found, DeviceUse)
    return found


def test_processes_are_listed_with_name_use_and_memory(simulated_machine: Make) -> None:
    machine = simulated_machine(GPU)
    with reading(machine.folder) as reader:
        assert (use(reader)).processes == ()
        with machine.running("sim_tool", "hold", "100") as holds:
            (process,) = (use(reader)).processes
            assert (process.pid, process.inner_pid) == (holds.process.pid,) * 2
            assert str(process.name).startswith("sim_tool")
            assert process.sm_percent == 0
            assert process.used_bytes is not None
            assert process.used_bytes >= 100 * MIB
        with machine.running("sim_tool", "queue", "spin_500ms", 200) as busy:
            # The second before has begun without it: ask until it is all within its work.
            found = use(reader)
            until = time.monotonic() + 60
            while [p.sm_percent for p in found.processes] != [100]:
                assert time.monotonic() < until
                found = use(reader)
            assert [(p.pid, p.sm_percent, p.busy_percent) for p in found.processes] == [
                (busy.process.pid, 100, 100)
            ]
            assert found.seen_us > 0
            assert found.energy_mj is None, "a simulated GPU uses none"


@pytest.mark.skipif(not may_unshare(), reason="may not make PID namespaces: run as root")
def test_a_process_is_numbered_as_its_session_sees_it(simulated_machine: Make) -> None:
    machine = simulated_machine(GPU)
    with reading(machine.folder) as reader, in_a_pid_namespace(machine, "hold", "10") as (pid, _):
        (process,) = (use(reader)).processes
        assert (process.pid, process.inner_pid) == (pid, 1)


async def test_how_a_simulated_gpu_is_is_told_as_far_as_it_is_simulated(simulated_machine: Make) -> None:
    machine = simulated_machine(GPU)
    with reading(machine.folder) as reader, machine.running("sim_tool", "hold", "100"):
        found = (await reader.ask({"do": "health", "uuids": ["GPU-a", "GPU-b"]}))["devices"]
        assert found["GPU-a"]["memory_used_bytes"] >= 100 * MIB
        assert found["GPU-a"]["use_percent"] is not None
        unknown = ("temperature_c", "power_mw", "power_limit_mw", "ecc_errors", "xid")
        assert [found["GPU-a"][name] for name in unknown] == [None] * 5
        assert "error" in found["GPU-b"]
