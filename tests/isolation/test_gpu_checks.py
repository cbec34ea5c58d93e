"""The checks for real GPUs (tests/gpu) run, in their one command: on a simulated GPU that does not call itself one."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

from sessionfolders import ROOT

NEED_A_REAL_ONE = {"torch", "jax", "cupy", "nvidia-smi"}
"""What cannot run on a simulated driver, so that a machine for tests need not have it."""


def test_the_one_command_runs_what_can_run_and_says_what_it_did_not(
    isolation_build: Path, tmp_path: Path
) -> None:
    simulated = tmp_path / "simulated"
    simulated.mkdir()
    for name in ("libcuda.so.1", "libnvidia-ml.so.1"):
        (simulated / name).symlink_to(isolation_build / "simulated" / name)
    machine = (
        "gpu uuid=GPU-12345678-1234-1234-1234-123456789012 memory_mib=81920 context_mib=300 name=Like H100\n"
    )
    (simulated / "machine").write_text(machine)
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "FGPU_", "CUDA_", "LD_"))}
    done = subprocess.run(
        [str(ROOT / "tests" / "gpu" / "run.sh"), str(tmp_path / "results"), "-p", "no:xdist"],
        env={**env, "PYTHON": sys.executable, "LD_LIBRARY_PATH": str(simulated)},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    skipped = re.findall(r"^SKIPPED .*: (?:there is no )?(\S+)", done.stdout, flags=re.M)
    assert set(skipped) <= {*NEED_A_REAL_ONE, "cuda.bindings", "numba_cuda"}, done.stdout
    (results,) = (tmp_path / "results").glob("gpu-*.json")
    written = json.loads(results.read_text())
    assert written["machine"]["gpu"] == "Like H100"
    assert written["figures"]["context_mib"] == 300
