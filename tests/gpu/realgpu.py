"""The driver of this machine, asked without libfgpu. Standard library only."""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

MIB = 2**20
ROOT = Path(__file__).resolve().parents[2]
# This file alone: the machine need not have the project's packages.
sys.path.append(str(ROOT / "fgpuspawner" / "isolation"))
import nvml_child  # noqa: E402

sys.path.pop()


@dataclass(frozen=True)
class Gpu:
    """A GPU as its driver describes it; ``memory_mib`` is what CUDA can allocate of it."""

    uuid: str
    name: str
    driver: str
    memory_mib: int
    simulated: bool


class NoGpu(Exception):
    """There is no GPU to be tried; the message says why."""


class Memory(ctypes.Structure):
    """nvmlMemory_v2_t."""

    _fields_ = [
        ("version", ctypes.c_uint),
        *((n, ctypes.c_ulonglong) for n in ("total", "reserved", "free", "used")),
    ]


class Nvml(nvml_child.Nvml):
    """The driver's own figures, asked from a process without libfgpu."""

    def __init__(self) -> None:
        try:
            super().__init__("libnvidia-ml.so.1")
            self.begin()
        except nvml_child.NvmlFailed as e:
            raise NoGpu(f"no NVIDIA driver answers ({e})") from e

    def gpus(self) -> list[Gpu]:
        """Return the GPUs."""
        # The driver's words about itself could be anything: the loaded library has the mark of the simulated ledger.
        with open("/proc/self/maps") as maps:
            paths = {line.split()[-1] for line in maps if "libnvidia-ml" in line}
        simulated = any(b"simledg1" in Path(path).read_bytes() for path in paths)
        driver, found = self.facts({})["driver"], []
        for device in self.devices({})["devices"]:
            memory = self._memory(device["uuid"])
            mib = (memory.total - memory.reserved) // MIB
            found.append(Gpu(device["uuid"], device["model"], driver, mib, simulated))
        return found

    def _memory(self, uuid: str) -> Memory:
        memory = Memory(version=ctypes.sizeof(Memory) | 2 << 24)
        self.call("nvmlDeviceGetMemoryInfo_v2", self.handle(uuid), ctypes.byref(memory))
        return memory

    def used_bytes(self, uuid: str) -> int:
        """Return what all processes use of this GPU."""
        return int(self._memory(uuid).used)

    def process_bytes(self, uuid: str) -> dict[int, int]:
        """Return what each process uses of this GPU, by its id."""
        return {pid: used or 0 for pid, used in self.processes(self.handle(uuid)).items()}

    def settled_mib(self, uuid: str, *, within_s: float = 5) -> float:
        """Return what all processes use, once two looks in a row say the same. Another container's count too."""
        deadline, last = time.monotonic() + within_s, -1
        while (now := self.used_bytes(uuid)) != last and time.monotonic() < deadline:
            last = now
            time.sleep(0.2)
        return now / MIB

    def seconds_until(self, wanted: Callable[[float], bool], uuid: str, *, within_s: float) -> float | None:
        """Return how long it took until ``wanted`` was true of the MiB in use; None if it never was."""
        began = time.monotonic()
        while (passed := time.monotonic() - began) < within_s:
            if wanted(self.used_bytes(uuid) / MIB):
                return passed
            time.sleep(0.005)
        return None


def context_mib(gpu: Gpu) -> int | str:
    """Return the size of a CUDA context in MiB as `nvml_child.py` measures it, or why it cannot be measured."""
    command = [sys.executable, nvml_child.__file__, "libnvidia-ml.so.1"]
    question = json.dumps({"do": "context", "uuid": gpu.uuid}) + "\n"
    done = subprocess.run(command, input=question, capture_output=True, text=True, timeout=60, check=False)
    answer = json.loads(done.stdout) if done.stdout else {"error": done.stderr.strip()}
    return answer["mib"] if "mib" in answer else str(answer["error"])
