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
NVML_CHILD = ROOT / "fgpuspawner" / "isolation" / "nvml_child.py"


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


class Nvml:
    """The driver's own figures, asked from a process without libfgpu."""

    def __init__(self) -> None:
        try:
            self._lib = ctypes.CDLL("libnvidia-ml.so.1")
        except OSError as e:
            raise NoGpu(f"no NVIDIA driver is installed ({e})") from e
        self._call("nvmlInit_v2")

    def _call(self, name: str, *args: object) -> None:
        status = getattr(self._lib, name)(*args)
        if status != 0:
            self._lib.nvmlErrorString.restype = ctypes.c_char_p
            raise NoGpu(f"{name}: {self._lib.nvmlErrorString(status).decode()}")

    def gpus(self) -> list[Gpu]:
        """Return the GPUs."""
        count = ctypes.c_uint()
        self._call("nvmlDeviceGetCount_v2", ctypes.byref(count))
        found = []
        text = ctypes.create_string_buffer(96)
        self._call("nvmlSystemGetDriverVersion", text, 96)
        driver = text.value.decode()
        for index in range(count.value):
            device = self._device(index)
            self._call("nvmlDeviceGetUUID", device, text, 96)
            uuid = text.value.decode()
            self._call("nvmlDeviceGetName", device, text, 96)
            name = text.value.decode()
            total, reserved, _ = self._memory(device)
            found.append(Gpu(uuid, name, driver, (total - reserved) // MIB, self._is_simulated()))
        return found

    @staticmethod
    def _is_simulated() -> bool:
        # What the driver calls itself could be anything: what is loaded has the mark of the simulated driver's ledger.
        with open("/proc/self/maps") as maps:
            paths = {line.split()[-1] for line in maps if "libnvidia-ml" in line}
        return any(b"simledg1" in Path(path).read_bytes() for path in paths)

    def _device(self, index: int) -> ctypes.c_void_p:
        device = ctypes.c_void_p()
        self._call("nvmlDeviceGetHandleByIndex_v2", index, ctypes.byref(device))
        return device

    def _memory(self, device: ctypes.c_void_p) -> tuple[int, int, int]:
        class Memory(ctypes.Structure):
            _fields_ = [("version", ctypes.c_uint)] + [
                (name, ctypes.c_ulonglong) for name in ("total", "reserved", "free", "used")
            ]

        memory = Memory(version=ctypes.sizeof(Memory) | 2 << 24)
        self._call("nvmlDeviceGetMemoryInfo_v2", device, ctypes.byref(memory))
        return memory.total, memory.reserved, memory.used

    def used_bytes(self, uuid: str) -> int:
        """Return what all processes use of this GPU."""
        device = ctypes.c_void_p()
        self._call("nvmlDeviceGetHandleByUUID", uuid.encode(), ctypes.byref(device))
        return self._memory(device)[2]

    def process_bytes(self, uuid: str) -> dict[int, int]:
        """Return what each process uses of this GPU, by its id."""

        class Process(ctypes.Structure):
            _fields_ = [
                ("pid", ctypes.c_uint),
                ("used", ctypes.c_ulonglong),
                ("gpu", ctypes.c_uint),
                ("compute", ctypes.c_uint),
            ]

        device = ctypes.c_void_p()
        self._call("nvmlDeviceGetHandleByUUID", uuid.encode(), ctypes.byref(device))
        count, processes = ctypes.c_uint(256), (Process * 256)()
        self._call("nvmlDeviceGetComputeRunningProcesses_v3", device, ctypes.byref(count), processes)
        return {p.pid: p.used for p in processes[: count.value]}

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
    command = [sys.executable, str(NVML_CHILD), "libnvidia-ml.so.1"]
    question = json.dumps({"do": "context", "uuid": gpu.uuid}) + "\n"
    done = subprocess.run(command, input=question, capture_output=True, text=True, timeout=60, check=False)
    answer = json.loads(done.stdout) if done.stdout else {"error": done.stderr.strip()}
    return answer["mib"] if "mib" in answer else str(answer["error"])
