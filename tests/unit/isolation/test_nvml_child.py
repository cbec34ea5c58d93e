"""How samples of a real driver are read: several of a process, some that are no percentage, and its energy counter."""

from __future__ import annotations

import ctypes
import subprocess
import time
from types import SimpleNamespace
from typing import Any

from fgpuspawner.isolation.nvml_child import INSUFFICIENT_SIZE, NOT_FOUND, XID_ERRORS, Nvml, Utilization

MIB = 2**20


def nvml(
    *samples: tuple[int, int, int],
    status: int = 0,
    energy_mj: int | None = None,
    pids: tuple[int, ...] = (1, 2),
) -> tuple[Nvml, list[int]]:
    """Return NVML on a driver with samples (process, microseconds, percent), and the instants that it is asked for."""
    asked: list[int] = []

    def utilization(handle: Any, array: Any, count: Any, since: Any) -> int:
        asked.append(since.value)
        newer = [s for s in samples if s[1] > since.value]
        fits = count._obj.value
        count._obj.value = len(newer)
        if status or not newer:
            return status or NOT_FOUND
        if len(newer) > fits:
            return INSUFFICIENT_SIZE
        for i, (pid, at_us, sm) in enumerate(newer):
            array[i] = Utilization(pid, at_us, sm)
        return 0

    def energy(handle: Any, counted: Any) -> int:
        counted._obj.value = energy_mj or 0
        return 0 if energy_mj is not None else 3

    def processes(handle: Any, count: Any, array: Any) -> int:
        count._obj.value = len(pids)
        for i, pid in enumerate(pids):
            array[i].pid, array[i].used = pid, 100 * MIB
        return 0

    found = Nvml.__new__(Nvml)
    found.named = {}
    found.library = SimpleNamespace(  # type: ignore[assignment]
        nvmlDeviceGetProcessUtilization=utilization,
        nvmlDeviceGetTotalEnergyConsumption=energy,
        nvmlDeviceGetComputeRunningProcesses_v3=processes,
    )
    return found, asked


def told(found: Nvml, since_us: int = 0) -> tuple[list[tuple[int, int, float | None]], int, int | None]:
    answer = found.device_use(ctypes.c_void_p(), since_us)
    processes = [(pid, used // MIB, percent) for pid, used, percent, _, *_ in answer["processes"]]
    return processes, answer["seen_us"], answer["energy_mj"]


def test_process_use_is_the_mean_of_its_samples_and_zero_without_samples() -> None:
    found, asked = nvml((1, 10, 30), (1, 20, 40), (1, 30, 32), energy_mj=12345)
    assert told(found) == ([(1, 100, 34.0), (2, 100, 0)], 30, 12345)
    assert told(found, since_us=20) == ([(1, 100, 32.0), (2, 100, 0)], 30, 12345)
    assert told(found, since_us=30) == ([(1, 100, 0), (2, 100, 0)], 30, 12345)
    assert asked == [0, 20, 30]


def test_ended_process_keeps_its_pid_and_name() -> None:
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as child:
        found, _ = nvml((child.pid, 10, 30), pids=(child.pid,))
        while (alive := found.device_use(ctypes.c_void_p(), 0)["processes"])[0][5] != "cat":
            pass  # It is not executed yet.
    assert found.device_use(ctypes.c_void_p(), 0)["processes"] == alive


def test_samples_above_100_percent_are_dropped() -> None:
    found, _ = nvml((1, 10, 30), (1, 20, 2**32 - 1))
    # Its time may be as little of one.
    assert told(found) == ([(1, 100, 30.0), (2, 100, 0)], 10, None)


def test_samples_are_read_again_after_the_clock_was_set_back() -> None:
    found, asked = nvml((1, 10, 30))
    tomorrow_us = int((time.time() + 86400) * 1e6)
    assert told(found, since_us=tomorrow_us) == ([(1, 100, 30.0), (2, 100, 0)], 10, None)
    assert asked == [0]


def test_ended_process_holds_no_memory() -> None:
    found, _ = nvml((9, 10, 30))
    assert told(found)[0] == [(1, 100, 0), (2, 100, 0), (9, 0, 30.0)]


def test_use_is_unknown_without_driver_support() -> None:
    found, _ = nvml(status=3)
    assert told(found) == ([(1, 100, None), (2, 100, None)], 0, None)
    del found.library.nvmlDeviceGetProcessUtilization
    del found.library.nvmlDeviceGetTotalEnergyConsumption
    assert told(found) == ([(1, 100, None), (2, 100, None)], 0, None)


def test_sample_buffer_grows() -> None:
    found, asked = nvml(*((1, 1 + i, 50) for i in range(1000)))
    assert told(found) == ([(1, 100, 50.0), (2, 100, 0)], 1000, None)
    assert len(asked) == 2


def test_busiest_part_of_the_gpu_is_reported() -> None:
    found, _ = nvml((1, 10, 0), (1, 20, 3), pids=(1, 2))
    utilization = found.library.nvmlDeviceGetProcessUtilization

    def encodes(handle: Any, array: Any, count: Any, since: Any) -> int:
        status = utilization(handle, array, count, since)
        array[0].encoder = 40
        return int(status)

    found.library.nvmlDeviceGetProcessUtilization = encodes
    answer = found.device_use(ctypes.c_void_p(), 0)
    assert [(pid, most) for pid, _, _, most, *_ in answer["processes"]] == [(1, 40), (2, 0)]


def healthy(**calls: Any) -> Nvml:
    """Return NVML on a driver that has these functions alone."""
    found = Nvml.__new__(Nvml)
    found.named = {}
    found.watched, found.failing, found.begun, found.begun_s = {}, set(), False, 0.0

    def words(status: int) -> bytes:
        return b"GPU is lost"

    found.library = SimpleNamespace(
        nvmlDeviceGetHandleByUUID=lambda uuid, handle: 0, nvmlErrorString=words, **calls
    )  # type: ignore[assignment]
    return found


def gives(number: int, status: int = 0) -> Any:
    """Return a function of NVML that puts a number into its last argument."""

    def call(*arguments: Any) -> int:
        arguments[-1]._obj.value = number
        return status

    return call


def test_unsupported_health_values_are_null() -> None:
    found = healthy(
        nvmlDeviceGetTemperature=gives(45),
        nvmlDeviceGetPowerUsage=gives(0, status=3),
        nvmlDeviceGetTotalEccErrors=gives(0),
    )
    assert found.health({"uuids": ["GPU-a"]})["devices"]["GPU-a"] == {
        "use_percent": None,
        "memory_used_bytes": None,
        "temperature_c": 45,
        "power_mw": None,
        "power_limit_mw": None,
        "ecc_errors": 0,
        "xid": None,
    }


def with_errors(*xids: int) -> Nvml:
    """Return NVML that tells of these errors of a device, one after the other."""
    coming = list(xids)

    def wait(events: Any, event: Any, timeout_ms: Any) -> int:
        if not coming:
            return 10
        event._obj.kind, event._obj.data = XID_ERRORS, coming.pop(0)
        return 0

    return healthy(
        nvmlEventSetCreate=gives(7), nvmlDeviceRegisterEvents=lambda *a: 0, nvmlEventSetWait_v2=wait
    )


def test_each_xid_is_reported_once() -> None:
    found = with_errors(79)
    told = [found.health({"uuids": ["GPU-a"]})["devices"]["GPU-a"]["xid"] for _ in range(3)]
    assert told == [None, 79, 0]


def test_failing_gpu_is_an_error_not_healthy() -> None:
    found = healthy(nvmlDeviceGetTemperature=gives(0, status=15))
    assert found.health({"uuids": ["GPU-a"]})["devices"]["GPU-a"] == {
        "error": "nvmlDeviceGetTemperature: GPU is lost"
    }


def test_program_xid_does_not_hide_a_gpu_xid() -> None:
    found = with_errors(43, 79, 45)
    assert [found.health({"uuids": ["GPU-a"]})["devices"]["GPU-a"]["xid"] for _ in range(3)] == [None, 79, 0]


def test_lost_gpu_does_not_reset_nvml_every_time() -> None:
    ends: list[int] = []
    found = healthy(nvmlShutdown=lambda: ends.append(1), nvmlInit_v2=lambda: 0)
    found.library.nvmlDeviceGetHandleByUUID = lambda uuid, handle: 15
    for _ in range(5):
        found.begin()
        found.uses({"uuids": ["GPU-a"], "since_us": {}})
    assert len(ends) == 1
