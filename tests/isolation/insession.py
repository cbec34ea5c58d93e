"""Running commands as processes of a session: in its environment, or as in its container."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from sessionfolders import preloaded

SYSTEM_PYTHON = "/usr/bin/python3"

HOLD = """
import ctypes, sys
cuda = ctypes.CDLL("libcuda.so.1")
context, pointer = ctypes.c_void_p(), ctypes.c_void_p()
assert cuda.cuInit(0) == 0
assert cuda.cuCtxCreate_v2(ctypes.byref(context), 0, int(sys.argv[2])) == 0
assert cuda.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(int(sys.argv[1]) << 20)) == 0
print("held", flush=True)
sys.stdin.read()
"""
"""A process that holds this number of MiB of a device until its standard input ends."""


@contextmanager
def holding(folder: Path, mib: int, *, device: int = 0, name: str | None = None) -> Iterator[int]:
    """Run a process of the session that holds memory; yields its id."""
    words = [name or sys.executable, "-c", HOLD, str(mib), str(device)]
    process = subprocess.Popen(
        words, executable=sys.executable, env=preloaded(folder), stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdin is not None
    assert process.stdout is not None
    with process:
        assert process.stdout.readline() == b"held\n"
        yield process.pid
        process.stdin.close()


def in_container(
    folder: Path, scratch: Path, *command: str, without: str | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command where the session's folder is mounted as a container has it; skips where that is not allowed.

    ``without`` is what likecontainer.py is to leave out.
    """
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")
    for tool in ("unshare", "setpriv", SYSTEM_PYTHON):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed")
    if platform.machine() not in ("x86_64", "aarch64"):
        pytest.skip(f"no system call numbers for {platform.machine()}")
    allowed = subprocess.run(["unshare", "-m", "mount", "--make-rprivate", "/"], capture_output=True)
    if allowed.returncode != 0:
        pytest.skip(f"mounting is not allowed here: {allowed.stderr.decode().strip()}")
    program = Path(__file__).with_name("likecontainer.py")
    env = {k: v for k, v in os.environ.items() if k not in ("LD_PRELOAD", "FGPU_LIMITS_FILE")}
    if without is not None:
        env["FGPU_TEST_WITHOUT"] = without
    words = ["unshare", "-m", SYSTEM_PYTHON, str(program), str(folder), str(scratch), *command]
    return subprocess.run(words, env=env, capture_output=True, text=True, timeout=300)
