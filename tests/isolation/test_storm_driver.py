"""The storm on the whole: eight processes of one session take and give back memory through the hooked driver, plain,
pitched and of pools, and are killed at random instants. What the device really holds is the driver's own ledger, summed
inside the driver's lock."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import accountreader
import pytest
from sessionfolders import UUID, MakePath, preloaded
from simulatedmachine import Machine
from test_hooks_accounting import run
from test_nvml_in_python import look, reading

MIB = 2**20
LIMIT_MIB = 1024
WORKERS = 8


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
    (truth,) = Machine(folder / "simulated", compile_c).entries()
    assert truth.grants > kills
    # It was full, or nearly: else nothing was shown.
    assert LIMIT_MIB * MIB * 0.9 < truth.peak <= LIMIT_MIB * MIB, truth
    assert truth.over == 0
    # A new process finds the whole slice free, and so does the driver, without libfgpu.
    assert run(folder, "print(cuda.info()[0] // MIB)") == f"{LIMIT_MIB - 32}\n"
    with reading(folder / "simulated") as host:
        assert look(host, UUID) == {UUID: {}}
    assert log == ""
    assert accountreader.read(folder / "accounting").processes == ()
