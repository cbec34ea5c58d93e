"""Programs in a slice of a real GPU: plain processes with libfgpu preloaded.

The machine with the GPU need not have this project installed: only gcc, make, Python and pytest.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
from sessionfolders import REGION_BYTES, limits_text, write_for_all, write_read_only

MIB = 2**20
ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Gpu:
    """A real GPU as the driver itself describes it; ``memory_mib`` is what CUDA can allocate of it."""

    uuid: str
    name: str
    driver: str
    memory_mib: int


class NoGpu(Exception):
    """There is no real GPU to be tried; the message says why."""


def build(out: Path) -> Path:
    """Build libfgpu and what goes with it into ``out``."""
    subprocess.run(["make", "-s", "-C", str(ROOT / "isolation"), f"OUT={out}"], check=True)
    return out


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
        """Return the GPUs; those of a simulated driver do not count."""
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
            if not name.startswith("Simulated GPU"):
                total, reserved, _ = self._memory(device)
                found.append(Gpu(uuid, name, driver, (total - reserved) // MIB))
        return found

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


class Slice:
    """A session's folder, and programs run in it."""

    def __init__(
        self,
        folder: Path,
        built: Path,
        gpu: Gpu,
        *,
        memory_mib: int,
        slots: str | None = None,
        context_mib: int = 0,
        managed: str = "charge",
    ) -> None:
        self.folder = folder
        self.gpu = gpu
        self.memory_mib = memory_mib
        folder.mkdir(parents=True)
        (folder / "libfgpu.so").symlink_to(built / "libfgpu.so")
        limits = limits_text(
            [(gpu.uuid, memory_mib)],
            managed=managed,
            device_mib=gpu.memory_mib,
            context_mib=context_mib,
            compute_percent=sum(_hundredths(part) for part in slots.split(",")) if slots else 100,
            mode="memory+compute" if slots else "memory",
            slots=slots or "-",
        )
        write_read_only(folder / "limits", limits)
        write_for_all(folder / "accounting", REGION_BYTES)
        write_for_all(folder / "log", 0)

    def environment(self, more: Mapping[str, str] = {}) -> dict[str, str]:
        """Return the environment of a program in this slice."""
        kept = {k: v for k, v in os.environ.items() if k not in ("LD_PRELOAD", "CUDA_VISIBLE_DEVICES")}
        return {
            **kept,
            "LD_PRELOAD": str(self.folder / "libfgpu.so"),
            "CUDA_VISIBLE_DEVICES": self.gpu.uuid,
            **more,
        }

    def start(self, code: str, *args: str, env: Mapping[str, str] = {}) -> subprocess.Popen[str]:
        """Start a Python program in this slice; its output is a pipe, and so is its input."""
        return subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(code), *args],
            env=self.environment(env),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, code: str, *args: str, env: Mapping[str, str] = {}, timeout_s: float = 240) -> str:
        """Run a Python program in this slice to its end; return its output.

        Raises:
            AssertionError: it failed; with what it and libfgpu's log said.
        """
        with self.start(code, *args, env=env) as process:
            try:
                output, errors = process.communicate(timeout=timeout_s)
            except subprocess.TimeoutExpired:
                process.kill()
                output, errors = process.communicate()
                raise AssertionError(f"no end within {timeout_s} s\n{output}{errors}{self.log()}") from None
        assert process.returncode == 0, f"status {process.returncode}\n{output}{errors}{self.log()}"
        return output

    def log(self) -> str:
        """Return what libfgpu has logged."""
        return "libfgpu's log: " + ((self.folder / "log").read_text() or "empty")


def _hundredths(part: str) -> int:
    since, _, to = part.partition("-")
    return int(to) - int(since)


def needs(module: str) -> pytest.MarkDecorator:
    """Skip where this Python has no such package: what a machine has is tried, nothing is installed."""
    try:
        found = importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        found = False
    return pytest.mark.skipif(not found, reason=f"{module} is not installed")
