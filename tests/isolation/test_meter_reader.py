"""What a driver is asked: who holds and computes how much, by the number that their session sees."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import pytest
from test_simulated_nvml import GPU, Make, in_a_pid_namespace, may_unshare

from fgpuspawner.isolation.nvml_reader import DeviceUse, NvmlReader

MIB = 2**20


@contextlib.contextmanager
def reading(folder: object) -> Iterator[NvmlReader]:
    reader = NvmlReader(f"{folder}/libnvidia-ml.so.1")
    try:
        yield reader
    finally:
        reader.close()


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
