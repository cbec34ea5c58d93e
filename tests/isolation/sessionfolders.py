"""What the tests of isolation/ share: the folder of a session, built as isolation/README.md describes it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
ISOLATION = ROOT / "isolation"
REGION_BYTES = 2 << 20
"""``FGPU_REGION_BYTES``; test_region.py compares the two."""

UUID = "GPU-simulated-test-0"
"""The device of a folder for which no other is asked."""

MakePath = Callable[..., Path]
"""A fixture that makes a folder or file: `session_folder`, `compile_c`."""

Device = tuple[str, int]
"""A device's UUID and its limit in MiB."""


def limits_text(
    devices: Sequence[Device],
    *,
    session: int | str = 17,
    managed: str = "charge",
    device_mib: int | None = None,
    context_mib: int = 0,
    compute_percent: int = 100,
    mode: str = "memory",
    slots: str = "-",
    lending: int = 0,
    code_mib: int | None = None,
) -> str:
    """Return a limits file. What stands on a device's line is the same for all ``devices`` but UUID and limit.

    ``device_mib`` is 8192 unless told, or the limit where that is more. ``lending``: the session's number, if it lends.
    ``code_mib``: what the host counted for the code of kernels, if that is charged.
    """
    lines = ["fgpu-limits 1", f"session={session}", f"managed={managed}"]
    lines.extend(
        f"device={uuid} memory_mib={memory_mib} device_mib={device_mib or max(8192, memory_mib)}"
        f" context_mib={context_mib} compute_percent={compute_percent} mode={mode} slots={slots}"
        + (f" lending={lending} most_percent=100" if lending else "")
        + ("" if code_mib is None else f" code_mib={code_mib}")
        for uuid, memory_mib in devices
    )
    return "\n".join([*lines, "end", ""])


def machine_text(devices: Sequence[Device], *, device_mib: int | None = None, context_mib: int = 0) -> str:
    """Return a simulated machine that has ``devices``, each as large as `limits_text` says."""
    return "".join(
        f"gpu uuid={uuid} memory_mib={whole} context_mib={context_mib} name=Simulated GPU {whole} MiB\n"
        for uuid, memory_mib in devices
        for whole in [device_mib or max(8192, memory_mib)]
    )


def write_read_only(path: Path, text: str | bytes) -> None:
    """Write a file that its owner may only read, replacing what was there."""
    path.unlink(missing_ok=True)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    path.chmod(0o444)


def write_for_all(path: Path, size: int) -> None:
    """Make a file of zero bytes that each process of the session may write, whatever its user."""
    with path.open("wb") as file:
        file.truncate(size)
    path.chmod(0o666)


def preloaded(folder: Path, **more: str) -> dict[str, str]:
    """Return the environment of a process of the session: libfgpu preloaded, the simulated driver in the path."""
    return os.environ | {
        "LD_PRELOAD": str(folder / "libfgpu.so"),
        "LD_LIBRARY_PATH": str(folder / "simulated"),
        **more,
    }


def run_in(folder: Path, *command: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a program as a process of the session to its end, for two minutes at most."""
    env = preloaded(folder, **environment)
    words = [str(word) for word in command]
    return subprocess.run(words, env=env, capture_output=True, text=True, check=False, timeout=120)


def output_of(folder: Path, *command: str | Path, **environment: str) -> str:
    """Return what a process of the session prints; it has to succeed, and to say nothing as an error."""
    done = run_in(folder, *command, **environment)
    log = (folder / "log").read_text()
    assert (done.returncode, done.stderr) == (0, ""), (command, done.stdout, log)
    return done.stdout


def renamed(library: Path, folder: Path, name: str) -> Path:
    """Return a copy of a library that has another DT_SONAME, of the same length."""
    image = library.read_bytes()
    old = b"\0" + library.name.encode() + b"\0"
    assert image.count(old) == 1
    copy = folder / name
    assert len(name) == len(library.name)
    copy.write_bytes(image.replace(old, b"\0" + name.encode() + b"\0"))
    return copy
