"""Folders of sessions for the benches: on the simulated driver here, on a GPU in tests/gpu."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE.parent), str(ROOT / "tests" / "isolation")]

from sessionfolders import (  # noqa: E402
    REGION_BYTES,
    limits_text,
    machine_text,
    write_for_all,
    write_read_only,
)


@dataclass(frozen=True, slots=True)
class Bench:
    """What is built, and the device."""

    scratch: Path
    built: Path
    uuid: str
    device_mib: int
    device_name: str
    driver: str
    environment: dict[str, str]
    """Of a program that uses the device without libfgpu."""

    def program(self, source: str) -> Path:
        """Compile bench/isolation/SOURCE, if it is not there."""
        path = self.scratch / Path(source).stem
        include = ROOT / "isolation" / "include"
        if not path.exists():
            subprocess.run(["gcc", "-O2", f"-I{include}", "-o", path, HERE / source, "-ldl"], check=True)
        return path

    def session(self, name: str, slots: str = "-", *, words: Path | None = None) -> dict[str, str]:
        """Make a session's folder, with the time slots if there are any; return its programs' environment.

        Sessions with the same folder of ``words`` lend each other their slots.
        """
        folder = self.scratch / name
        folder.mkdir()
        (folder / "libfgpu.so").symlink_to(self.built / "libfgpu.so")
        spans = [slot.split("-") for slot in slots.split(",")] if slots != "-" else []
        percent = sum(int(to) - int(since) for since, to in spans)
        limits = limits_text(
            [(self.uuid, self.device_mib // 4)],
            device_mib=self.device_mib,
            compute_percent=percent or 100,
            mode="memory+compute" if spans else "memory",
            slots=slots,
            lending=join_lenders(words, folder, spans) if words else 0,
        )
        write_read_only(folder / "limits", limits)
        write_for_all(folder / "accounting", REGION_BYTES)
        write_for_all(folder / "log", 0)
        return self.environment | {"LD_PRELOAD": str(folder / "libfgpu.so")}

    def complaints(self) -> str:
        """Return what libfgpu has logged."""
        return "".join(log.read_text() for log in sorted(self.scratch.glob("*/log")))


def join_lenders(words: Path, folder: Path, spans: list[list[str]]) -> int:
    """Show a session the words of those that lend, make its own, and return its number."""
    number = len(list(words.glob("[0-9]*"))) + 1
    (folder / "lending").mkdir()
    (folder / "lending" / "0").symlink_to(words)
    write_for_all(words / str(number), 8)
    (folder / "lending" / "own-0").hardlink_to(words / str(number))
    owners = bytearray((words / "owners").read_bytes() if number > 1 else 100)
    for since, to in spans:
        owners[int(since) : int(to)] = bytes([number]) * (int(to) - int(since))
    write_read_only(words / "owners", bytes(owners))
    return number


def prepare(scratch: Path) -> Bench:
    """Build libfgpu and a simulated device."""
    built = scratch / "built"
    subprocess.run(
        ["make", "-s", "-C", str(ROOT / "isolation"), f"OUT={built}"], check=True, stderr=subprocess.DEVNULL
    )
    kept = {k: v for k, v in os.environ.items() if k not in ("LD_PRELOAD", "CUDA_VISIBLE_DEVICES")}
    uuid, device_mib = "GPU-simulated-bench-0", 8192
    simulated = scratch / "simulated"
    simulated.mkdir()
    for name in ("libcuda.so.1", "libnvidia-ml.so.1"):
        (simulated / name).symlink_to(built / "simulated" / name)
    write_read_only(simulated / "machine", machine_text([(uuid, device_mib)], device_mib=device_mib))
    return Bench(
        scratch, built, uuid, device_mib, "simulated", "simulated", kept | {"LD_LIBRARY_PATH": str(simulated)}
    )


def surroundings(bench: Bench) -> dict[str, Any]:
    """Return what the figures depend on: device, driver, machine, commit, date."""
    found: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "device": bench.device_name,
        "driver": bench.driver,
    }
    try:
        from machine import machine, source
    except ModuleNotFoundError:  # A machine lent for its GPU has not all that the other benches need.
        return found | {"machine": {"kernel": platform.release(), "cores": os.cpu_count()}}
    return found | {"machine": machine(), "source": source()}


def load() -> list[float]:
    """Return the load averages of 1, 5 and 15 minutes."""
    return [round(value, 2) for value in os.getloadavg()]
