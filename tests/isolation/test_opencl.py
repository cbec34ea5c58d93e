"""NVIDIA's OpenCL, which libfgpu could not hold, is not found by programs; the platforms of others are."""

from __future__ import annotations

import ctypes.util
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from sessionfolders import UUID, MakePath, run_in

NVIDIAS, OTHERS = "libnvidia-opencl.so.1", "libpocl.so.2"
WHOLE = {"devices": [(UUID, 8192)], "device_mib": 8192}


@pytest.fixture
def platforms(compile_c: MakePath, tmp_path: Path) -> dict[str, Path]:
    """A library of each vendor by its DT_SONAME, under a file name that does not name the vendor."""
    found = {}
    for soname in (NVIDIAS, OTHERS):
        words = (
            "-shared",
            "-fPIC",
            "-Wl,-Bsymbolic",
            "-Wl,--default-symver",
            f'-DNAME="platform of {soname}"',
            f"-Wl,-soname,{soname}",
        )
        found[soname] = tmp_path / f"vendor{len(found)}.so"
        found[soname].symlink_to(compile_c("tests/opencl_platform.c", *words))
    return found


@pytest.fixture
def run(compile_c: MakePath) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run the client in a session."""
    program = compile_c("tests/opencl_client.c", "-ldl")
    return lambda folder, *words, **environment: run_in(folder, program, *words, **environment)


@pytest.mark.parametrize("way", ["handle", "all", ""], ids=["handle", "all", "version"])
def test_nvidias_functions_are_missing_with_the_reason(
    session_folder: MakePath,
    platforms: dict[str, Path],
    run: Callable[..., subprocess.CompletedProcess[str]],
    way: str,
) -> None:
    folder = session_folder()
    done = run(folder, "find", way or NVIDIAS, platforms[NVIDIAS])
    assert (done.returncode, done.stderr) == (0, "")
    assert "refused by libfgpu: NVIDIA's OpenCL is not held to a slice" in done.stdout
    assert "NVIDIA's OpenCL is hidden from this session" in (folder / "log").read_text()
    assert run(folder, "find", way or OTHERS, platforms[OTHERS]).stdout == "found\n"


@pytest.mark.parametrize(
    ("limits", "allowed", "found"),
    [
        ({}, False, [OTHERS]),
        ({}, True, [NVIDIAS, OTHERS]),
        (WHOLE, False, [NVIDIAS, OTHERS]),
        ({**WHOLE, "compute_percent": 50, "mode": "memory+compute", "slots": "0-50"}, False, [OTHERS]),
        ({"limits": "fgpu-limits 0"}, False, [OTHERS]),
    ],
    ids=["part", "allowed", "whole", "all-memory-half-compute", "no-limits"],
)
def test_a_real_loader_finds_the_platforms_that_the_session_may_use(
    session_folder: MakePath,
    platforms: dict[str, Path],
    run: Callable[..., subprocess.CompletedProcess[str]],
    tmp_path: Path,
    limits: dict[str, object],
    allowed: bool,
    found: list[str],
) -> None:
    loader = os.environ.get("FGPU_TEST_OPENCL") or ctypes.util.find_library("OpenCL")
    if loader is None:
        pytest.skip("needs a loader of OpenCL (Debian: ocl-icd-libopencl1), or its path in FGPU_TEST_OPENCL")
    folder = session_folder(**limits)
    if allowed:
        (folder / "opencl").touch(mode=0o444)
    vendors = tmp_path / "vendors"
    vendors.mkdir()
    for number, library in enumerate(platforms.values()):
        (vendors / f"{number}.icd").write_text(f"{library}\n")
    done = run(folder, "platforms", loader, OCL_ICD_VENDORS=str(vendors))
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(done.stdout.splitlines()) == [f"platform of {soname}" for soname in found]


def test_a_program_that_is_linked_with_it_is_ended_before_it_begins(
    session_folder: MakePath, platforms: dict[str, Path], compile_c: MakePath
) -> None:
    program = compile_c("tests/opencl_client.c", "-Wl,--no-as-needed", platforms[NVIDIAS].resolve(), "-ldl")
    folder = session_folder()
    place = folder / "loaded"
    place.mkdir()
    (place / NVIDIAS).symlink_to(platforms[NVIDIAS].resolve())

    def start() -> subprocess.CompletedProcess[str]:
        return run_in(folder, program, "find", "handle", platforms[OTHERS], LD_LIBRARY_PATH=str(place))

    done = start()
    assert (done.returncode, done.stdout) == (127, "")
    assert "linked with NVIDIA's OpenCL" in done.stderr
    (folder / "opencl").touch(mode=0o444)
    assert start().stdout == "found\n"
