"""Builds isolation/ into fgpuspawner/native/: libfgpu, the probes and the simulated driver.

build_isolation.py          build
build_isolation.py --check  only say what is missing to build with
"""

from __future__ import annotations

import filecmp
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NATIVE = ROOT / "fgpuspawner" / "native"
COMMANDS = ROOT / "labextension" / "jupyterlab_fgpu"
PARTS = (
    "libfgpu.so",
    "probe",
    "probe-static",
    "simulated/libcuda.so.1",
    "simulated/libnvidia-ml.so.1",
)
INSTALL = "apt-get install gcc make libc6-dev"


class CannotCompile(Exception):
    """A compiler is here, and fails; the message has its words."""


def missing() -> str | None:
    """Return what is not here to build with, None if nothing is missing."""
    if sys.platform != "linux":
        return "GPU isolation is for Linux"
    compiler = shlex.split(os.environ.get("CC") or "gcc")
    if shutil.which(compiler[0]) is None:
        return f"there is no C compiler ({compiler[0]}): {INSTALL}"
    if shutil.which("make") is None:
        return f"there is no make: {INSTALL}"
    program = '#include <stdio.h>\nint main(void) { return puts("") < 0; }\n'
    with tempfile.TemporaryDirectory() as scratch:
        done = subprocess.run(
            [*compiler, "-xc", "-", "-static", "-o", str(Path(scratch) / "a.out")],
            input=program.encode(),
            capture_output=True,
            check=False,
        )
    if done.returncode != 0:
        return f"the C library's headers, or its static library, are missing: {INSTALL}"
    return None


def build(native: Path = NATIVE) -> None:
    """Build everything and put it into ``native``, whole files in place of the old ones.

    Raises:
        CannotCompile: it does not compile.
    """
    with tempfile.TemporaryDirectory() as scratch:
        isolation, compiler = str(ROOT / "isolation"), os.environ.get("CC") or "gcc"
        command = ["make", "--no-print-directory", "-j4", "-C", isolation, f"OUT={scratch}", f"CC={compiler}"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise CannotCompile(f"{shlex.join(command)} failed:\n{done.stdout}{done.stderr}")
        for part in PARTS:
            _put(Path(scratch) / part, native / part, 0o755)
    put_commands(native)


def put_commands(native: Path = NATIVE) -> None:
    """Put the sources of the commands for sessions into ``native``; they need no compiler."""
    for name, source in (("fgpu-smi", "smi.py"), ("fgpu-verify", "verify.py")):
        if (COMMANDS / source).is_file():
            _put(COMMANDS / source, native / "commands" / name, 0o644)


def _put(source: Path, path: Path, mode: int) -> None:
    if path.is_file() and filecmp.cmp(source, path, shallow=False) and path.stat().st_mode & 0o777 == mode:
        # A Hub that runs knows the library by its inode.
        os.utime(path)
        return
    # Renamed into place: what runs now keeps the old file.
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f"{path.name}.new")
    shutil.copyfile(source, draft)
    draft.chmod(mode)
    draft.replace(path)


def main() -> int:
    """Build, or say why not."""
    reason = missing()
    if reason is None and sys.argv[1:] != ["--check"]:
        try:
            build()
        except CannotCompile as e:
            reason = str(e)
    if reason is not None:
        print(reason, file=sys.stderr)
    return 1 if reason else 0


if __name__ == "__main__":
    sys.exit(main())
