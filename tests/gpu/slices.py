"""Programs in a slice of a GPU: plain processes with libfgpu preloaded.

The machine with the GPU need not have this project installed: Python and pytest, and what check.py --carry makes.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path

import pytest
from realgpu import MIB, ROOT, Gpu, Nvml
from sessionfolders import REGION_BYTES, limits_text, write_for_all, write_read_only

__all__ = ["HOLD", "MIB", "ROOT", "Gpu", "Nvml", "Slice", "held", "needs", "status_of"]

HOLD = """
    import ctypes, sys
    cuda = ctypes.CDLL("libcuda.so.1")
    device, context, address = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_uint64()
    assert cuda.cuInit(0) == 0
    assert cuda.cuDeviceGet(ctypes.byref(device), 0) == 0
    status = cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
    if status == 0:
        assert cuda.cuCtxSetCurrent(context) == 0
        for size in sys.argv[1:]:
            status = cuda.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(int(size) << 20))
            if status:
                break
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    cuda.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total))
    print(status, total.value - free.value, flush=True)
    sys.stdin.read()
"""
"""Holds these sizes in MiB until its input ends. Prints the last call's status, and what it was charged."""


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
        for name in ("libfgpu.so", "probe", "probe-static"):
            (folder / name).symlink_to(built / name)
        limits = limits_text(
            [(gpu.uuid, memory_mib)],
            managed=managed,
            device_mib=gpu.memory_mib,
            context_mib=context_mib,
            compute_percent=sum(_hundredths(part) for part in slots.split(",")) if slots else 100,
            mode="memory+compute" if slots else "memory",
            slots=slots or "-",
            # As the Hub does: where contexts are free, they would be counted as code.
            code_mib=0 if context_mib else None,
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


def held(session: Slice, *sizes_mib: int) -> tuple[subprocess.Popen[str], int]:
    """Start a process that holds these sizes; return it, and the status of the last call."""
    process = session.start(HOLD, *map(str, sizes_mib))
    assert process.stdout is not None
    line = process.stdout.readline().split()
    assert line, process.communicate()[1] + session.log()
    return process, int(line[0])


def status_of(session: Slice, *sizes_mib: int) -> int:
    """Have a process hold these sizes and kill it; return the status of the last call."""
    process, status = held(session, *sizes_mib)
    process.kill()
    process.communicate()
    return status


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
