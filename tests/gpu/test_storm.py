"""The storm on a GPU: eight processes of one session are killed at random instants; NVML is the judge."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

from check import CARRIED
from slices import MIB, Gpu, Nvml, Slice, status_of

LIMIT_MIB, WORKERS, KILLS = 8192, 8, 200
PACE = 150
"""A kill each 0.3 s: a real driver takes long to begin, and a worker that is killed before shows nothing."""
ENDING_MIB = 2048
"""What a process that was just killed may still hold while its slot is another's already: one after another."""


def test_no_kill_leaks_and_the_session_stays_in_its_slice(
    slice_of: Callable[..., Slice],
    gpu: Gpu,
    nvml: Nvml,
    a_context_mib: int,
    tmp_path: Path,
    record_property: Callable[..., None],
) -> None:
    session = slice_of(LIMIT_MIB, context_mib=a_context_mib)
    before = most = nvml.settled_mib(gpu.uuid)
    words = [
        CARRIED / "storm",
        tmp_path / "ledger",
        LIMIT_MIB * MIB,
        WORKERS,
        KILLS,
        1,
        CARRIED / "storm_cuda",
    ]
    with subprocess.Popen(
        [str(word) for word in words],
        env=session.environment({"STORM_PACE": str(PACE)}),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as storm:
        while storm.poll() is None:
            most = max(most, nvml.used_bytes(gpu.uuid) / MIB)
        output, errors = storm.communicate()
    assert storm.returncode == 0, output + errors + session.log()
    record_property("kills", json.loads(output)["kills"])
    record_property("most_mib", most - before)
    if most - before < LIMIT_MIB / 2:
        raise RuntimeError(f"at most {most - before:.0f} MiB were held at once, which shows nothing")
    assert most - before <= LIMIT_MIB + ENDING_MIB, f"{most - before:.0f} MiB were held at once"
    after = nvml.seconds_until(lambda mib: mib <= before + 8, gpu.uuid, within_s=10)
    record_property("seconds_until_free", after)
    assert after is not None, "something is still held 10 s after the last one"
    status = status_of(session, LIMIT_MIB - a_context_mib)
    assert status == 0, f"what killed processes held was not given back {os.linesep}{session.log()}"
