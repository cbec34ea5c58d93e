"""What this machine offers for isolation, asked once when the Hub starts. Everything here blocks."""

from __future__ import annotations

import json
import logging
import os
import stat
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fgpu_scheduler import Device
from fgpuspawner.isolation.files import write_whole

log = logging.getLogger("fgpu.isolation")

HERE = Path(__file__).parent
NVML = "libnvidia-ml.so.1"
CHILD_TIMEOUT_S = 60
"""An idle driver takes seconds to initialise."""
CONTEXT_GUESS_MIB = 512
"""Used where a context cannot be measured; today's contexts take 200 to 500 MiB."""
CGROUP_V2 = Path("/sys/fs/cgroup/cgroup.controllers")


def clean_environment() -> dict[str, str]:
    """Return this process's environment without variables that would load other code into a child."""
    return {k: v for k, v in os.environ.items() if not k.startswith(("LD_", "CUDA_", "FGPU_", "PYTHON"))}


def child_command(name: str, *arguments: str) -> list[str]:
    """Return the command of a child program in this folder: isolated Python without site packages."""
    return [sys.executable, "-I", "-S", str(HERE / name), *arguments]


def driver_facts(library: str = NVML) -> dict[str, Any]:
    """Return the driver's version and abilities; empty, with a warning in the log, if it does not answer."""
    try:
        done = subprocess.run(
            child_command("nvml_child.py", library),
            input='{"do": "facts"}\n',
            capture_output=True,
            text=True,
            check=True,
            timeout=CHILD_TIMEOUT_S,
            env=clean_environment(),
        )
        answer: dict[str, Any] = json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as e:
        log.warning("The driver's version and abilities could not be read: %s", e)
        return {}
    if "error" in answer:
        log.warning("The driver's version and abilities could not be read: %s", answer["error"])
        return {}
    return answer


def measure_contexts(devices: Iterable[Device], *, driver: str, cache: Path) -> dict[str, int]:
    """Return the size of a CUDA context in MiB, by UUID: measured once for each model and driver, then cached.

    A context that cannot be measured is guessed, with a warning, and measured again at the next start.
    """
    known = _read_cache(cache)
    found: dict[str, int] = {}
    failed: set[str] = set()
    for device in devices:
        key = f"{device.model}, driver {driver}"
        if key not in known and key not in failed:
            measured = measure_context(device.uuid)
            if isinstance(measured, int):
                known[key] = measured
                log.info("A CUDA context takes %d MiB of %s", measured, key)
                write_whole(cache, json.dumps(known, indent=2).encode(), mode=0o644)
            else:
                failed.add(key)
                log.warning(
                    "What a CUDA context takes of %s could not be measured (%s); %d MiB are charged for each, "
                    "unless c.FGPU.context_mib says otherwise",
                    key,
                    measured,
                    CONTEXT_GUESS_MIB,
                )
        found[device.uuid] = known.get(key, CONTEXT_GUESS_MIB)
    return found


def measure_context(uuid: str) -> int | str:
    """Return the size of a CUDA context on a device, in MiB, or why it cannot be measured."""
    try:
        done = subprocess.run(
            child_command("context_child.py", uuid),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=CHILD_TIMEOUT_S,
            env=clean_environment(),
        )
    except (OSError, subprocess.SubprocessError) as e:
        return str(e)
    said = done.stdout.strip()
    if done.returncode != 0 or not said.isdigit():
        lines = (said or done.stderr.strip() or f"status {done.returncode}").splitlines()
        return lines[-1][:300]
    return int(said)


def _read_cache(cache: Path) -> dict[str, int]:
    try:
        found = json.loads(cache.read_text())
        return {str(k): v for k, v in found.items() if type(v) is int and v > 0}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, AttributeError) as e:
        log.warning("%s cannot be read and is measured again: %s", cache, e)
        return {}


def mps_trouble(pipe: Path) -> str | None:
    """Return why no MPS daemon uses this pipe directory, or None if one does."""
    start = "start it with nvidia-cuda-mps-control -d"
    control = pipe / "control"
    try:
        kind = control.stat().st_mode
        if not (stat.S_ISFIFO(kind) or stat.S_ISSOCK(kind)):
            return f"{control} is no pipe of an MPS daemon; {start}"
        pid = int((pipe / "nvidia-cuda-mps-control.pid").read_text())
    except (OSError, ValueError):
        return f"no MPS daemon has its pipes in {pipe}; {start}"
    return None if Path(f"/proc/{pid}").exists() else f"the MPS daemon of {pipe} has ended; {start}"


def memory_place(installation: str, given: str) -> Path | None:
    """Return the folder in memory for files that sessions write all the time; None: use the session's own folder."""
    if given:
        return Path(given).absolute() / f"fgpu-{installation}"
    shm = Path("/dev/shm")
    return shm / f"fgpu-{installation}" if shm.is_dir() and os.access(shm, os.W_OK) else None
