"""The storm on the whole: eight processes of one session take and give back memory through the hooked driver, plain,
pitched and of pools, and are killed at random instants. What the device really holds is the driver's own ledger, summed
inside the driver's lock."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import accountreader
import pytest
from sessionfolders import UUID, MakePath, preloaded

MIB = 2**20
LIMIT_MIB = 1024
WORKERS = 8


def device_ledger(folder: Path) -> dict[str, int]:
    """Return the device's figures in the simulated driver's ledger (isolation/simulated/machine.h)."""
    with (folder / "simulated" / "ledger").open("rb") as file:
        file.seek(4096 + 96)
        names = ("bytes", "peak", "over", "grants")
        return dict(zip(names, struct.unpack("<4Q", file.read(32)), strict=True))


def used_by_all(folder: Path) -> int:
    """Return what is used of the whole device, as the driver without libfgpu says."""
    code = "import pynvml as n, sys; n.nvmlInit(); device = n.nvmlDeviceGetHandleByUUID(sys.argv[1]);"
    code += "print(n.nvmlDeviceGetMemoryInfo(device).used)"
    env = preloaded(folder)
    del env["LD_PRELOAD"]
    done = subprocess.run(
        [sys.executable, "-c", code, UUID], env=env, capture_output=True, text=True, check=True
    )
    return int(done.stdout)


@pytest.mark.parametrize(
    ("kills", "seed"),
    [(600, 1), pytest.param(10_000, 2, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])],
)
def test_no_kill_leaks_and_nothing_is_ever_over_the_limit(
    session_folder: MakePath, compile_c: MakePath, tmp_path: Path, kills: int, seed: int
) -> None:
    folder = session_folder(devices=[(UUID, LIMIT_MIB)], device_mib=65536, context_mib=32)
    storm = compile_c("tests/storm.c", "tests/storm_ledger.c")
    worker = compile_c("tests/storm_cuda.c", "-ldl")
    command = [storm, tmp_path / "ledger", LIMIT_MIB * MIB, WORKERS, kills, seed, worker]
    done = subprocess.run(
        [str(word) for word in command], env=preloaded(folder), capture_output=True, text=True, check=False
    )
    log = (folder / "log").read_text()
    assert done.returncode == 0, done.stdout + done.stderr + log
    assert json.loads(done.stdout)["kills"] == kills + WORKERS
    truth = device_ledger(folder)
    assert truth["grants"] > kills
    # It was full, or nearly: else nothing was shown.
    assert LIMIT_MIB * MIB * 0.9 < truth["peak"] <= LIMIT_MIB * MIB, truth
    assert truth["over"] == 0
    assert used_by_all(folder) == 0
    # A new process finds the whole slice free, and so does who looks from outside.
    free = subprocess.run(
        [sys.executable, "-c", FREE], env=preloaded(folder), capture_output=True, text=True, check=True
    )
    assert int(free.stdout) == (LIMIT_MIB - 32) * MIB
    assert log == ""
    assert [
        process
        for process in accountreader.read(folder / "accounting").processes
        if process.pid == os.getpid()
    ] == []


FREE = """
import ctypes
cuda = ctypes.CDLL("libcuda.so.1")
device, context, free, total = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_size_t(), ctypes.c_size_t()
assert cuda.cuInit(0) == cuda.cuDeviceGet(ctypes.byref(device), 0) == 0
assert cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device) == cuda.cuCtxSetCurrent(context) == 0
assert cuda.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total)) == 0
print(free.value)
"""
