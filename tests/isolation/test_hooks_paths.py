"""Every way of taking memory ends at the limit, and every way of asking for the total says the limit."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from sessionfolders import ISOLATION, UUID, MakePath, output_of

MIB = 2**20
LIMITS_MIB = [128, 1024, 81920]
DEVICE_MIB = 98304
WAYS = ["direct", "dlsym", "proc", "proc1"]
SOURCE = "tests/hooks_paths.c"
PATHS = re.findall(r'^    \{"(\w+)", take_', (ISOLATION / SOURCE).read_text(), flags=re.M)
NARROW = {path for path in PATHS if path.endswith("_v1")}
"""First versions, with addresses and sizes of 32 bits: these cannot fill more than 4 GiB."""


def committed(folder: Path) -> int:
    """Return what the processes of a session have left charged; the dead ones are not cleared by reading."""
    region = (folder / "accounting").read_bytes()
    return sum(
        struct.unpack_from("<QQ", region, 0x100000 + 64 * (1024 * device + slot))[1]
        for device in range(16)
        for slot in range(1024)
    )


def numbers(output: str) -> dict[str, int]:
    return {name: int(value) for name, value in map(str.split, output.splitlines())}


class Session:
    """A folder with the clients of the four ways."""

    def __init__(self, folder: Path, compile_c: MakePath) -> None:
        self.folder = folder
        self._compile_c = compile_c

    def program(self, way: str) -> Path:
        simulated = self.folder / "simulated"
        libraries = [(simulated / name).resolve() for name in ("libcuda.so.1", "libnvidia-ml.so.1")]
        return (
            self._compile_c(SOURCE, "-DDIRECT", *libraries)
            if way == "direct"
            else self._compile_c(SOURCE, "-ldl")
        )

    def run(self, way: str, *words: str, preload: bool = True) -> dict[str, int]:
        """Run the client and return the numbers it prints, by name."""
        without = {} if preload else {"LD_PRELOAD": ""}
        return numbers(output_of(self.folder, self.program(way), way, *words, **without))


@pytest.fixture
def session(session_folder: MakePath, compile_c: MakePath) -> Callable[..., Session]:
    def session(limit_mib: int, **more: object) -> Session:
        return Session(session_folder(devices=[(UUID, limit_mib)], device_mib=DEVICE_MIB, **more), compile_c)

    return session


def totals(reports: dict[str, int]) -> dict[str, int]:
    return {name: value for name, value in reports.items() if name.startswith(("cu", "nvmlD"))}


@pytest.mark.parametrize("limit_mib", LIMITS_MIB)
@pytest.mark.parametrize("way", WAYS)
def test_each_report_says_the_limit(session: Callable[..., Session], way: str, limit_mib: int) -> None:
    reports = session(limit_mib).run(way, "reports")
    limit = limit_mib * MIB
    narrow = min(limit, 2**32 - 1)
    assert totals(reports) == {
        "cuDeviceTotalMem_v2": limit,
        "cuDeviceTotalMem": narrow,
        "cuMemGetInfo_v2": limit,
        "cuMemGetInfo": narrow,
        "nvmlDeviceGetMemoryInfo": limit,
        "nvmlDeviceGetMemoryInfo_v2": limit,
    }
    assert reports["free"] == limit
    assert reports["free_v1"] == narrow
    assert reports["nvml_sum"] == reports["nvml_sum_v2"] == limit


@pytest.mark.parametrize("way", WAYS)
def test_without_libfgpu_no_report_says_the_limit(session: Callable[..., Session], way: str) -> None:
    reports = totals(session(1024).run(way, "reports", preload=False))
    assert len(reports) == 6
    assert min(reports.values()) > 1024 * MIB


def check_fill(filled: dict[str, int], limit: int, folder: Path) -> None:
    assert limit - 2 * MIB <= filled["held"] <= limit
    assert filled["refused"] == 2
    assert filled["used"] == 0
    assert committed(folder) == 0


@pytest.mark.parametrize(
    ("path", "limit_mib"),
    [(path, limit) for path in PATHS for limit in LIMITS_MIB if path not in NARROW or limit <= 1024],
)
def test_each_path_ends_at_the_limit_and_gives_everything_back(
    session: Callable[..., Session], path: str, limit_mib: int
) -> None:
    world = session(limit_mib)
    check_fill(world.run("dlsym", "fill", path), limit_mib * MIB, world.folder)


@pytest.mark.parametrize("way", ["direct", "proc", "proc1"])
@pytest.mark.parametrize("path", PATHS)
def test_each_path_ends_at_the_limit_however_it_was_found(
    session: Callable[..., Session], path: str, way: str
) -> None:
    world = session(128)
    check_fill(world.run(way, "fill", path), 128 * MIB, world.folder)


@pytest.mark.parametrize("path", PATHS)
def test_without_libfgpu_no_path_ends_at_the_limit(session: Callable[..., Session], path: str) -> None:
    filled = session(128).run("dlsym", "fill", path, preload=False)
    assert filled["held"] > 128 * MIB


def test_threads_at_the_limit_leave_nothing_behind(session_folder: MakePath, compile_c: MakePath) -> None:
    folder = session_folder(devices=[(UUID, 128)], device_mib=DEVICE_MIB)
    program = compile_c(
        "tests/hooks_threads.c", (folder / "simulated" / "libcuda.so.1").resolve(), "-pthread"
    )
    result = numbers(output_of(folder, program))
    assert result["refused"] > 0
    assert result["used"] == 0
    assert committed(folder) == 0
    assert (folder / "log").read_text() == ""
    (peak,) = struct.unpack_from("<Q", (folder / "accounting").read_bytes(), 0x40)
    assert 100 * MIB < peak <= 128 * MIB
