"""What this machine offers for isolation, asked once when the Hub starts. Everything here blocks."""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fgpu_scheduler import Device
from fgpuspawner.isolation.files import HubFile
from fgpuspawner.isolation.nvml_reader import NVML, NvmlReader, NvmlUnknown

log = logging.getLogger("fgpu.isolation")

INITIALISED_WITHIN_S = 60.0
"""An idle driver takes seconds to initialise."""
CONTEXT_GUESS_MIB = 512
"""Used where a context cannot be measured; today's contexts take 200 to 500 MiB."""
CONTEXTS = HubFile("context.json", dict[str, int], mode=0o644)
"""The measured size of a CUDA context, by model and driver."""
CGROUP_V2 = Path("/sys/fs/cgroup/cgroup.controllers")


def driver_facts(library: str = NVML) -> dict[str, Any]:
    """Return the driver's version and abilities; empty, with a warning in the log, if it does not answer."""
    try:
        return _ask(library, {"do": "facts"})
    except NvmlUnknown as e:
        log.warning("The driver's version and abilities could not be read: %s", e)
        return {}


def measure_contexts(devices: Iterable[Device], *, driver: str, data: Path) -> dict[str, int]:
    """Return the size of a CUDA context in MiB, by UUID: measured once for each model and driver, then stored.

    A context that cannot be measured is guessed, with a warning, and measured again at the next start.
    """
    known = {name: mib for name, mib in CONTEXTS.read(data).items() if mib > 0}
    found: dict[str, int] = {}
    failed: set[str] = set()
    for device in devices:
        key = f"{device.model}, driver {driver}"
        if key not in known and key not in failed:
            measured = measure_context(device.uuid)
            if isinstance(measured, int):
                known[key] = measured
                log.info("A CUDA context takes %d MiB of %s", measured, key)
                CONTEXTS.write(data, known)
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
        return int(_ask(NVML, {"do": "context", "uuid": uuid})["mib"])
    except NvmlUnknown as e:
        return str(e)[:300]


def _ask(library: str, question: dict[str, str]) -> dict[str, Any]:
    reader = NvmlReader(library, within_s=INITIALISED_WITHIN_S)
    try:
        return reader.ask_here(question)
    finally:
        reader.close()


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
    """Return the folder in memory for files that sessions write all the time; None if there is no such place."""
    if given:
        return Path(given).absolute() / f"fgpu-{installation}"
    shm = Path("/dev/shm")
    return shm / f"fgpu-{installation}" if shm.is_dir() and os.access(shm, os.W_OK) else None
