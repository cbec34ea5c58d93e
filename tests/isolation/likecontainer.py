"""Run a command as in a session's container: `likecontainer.py FOLDER SCRATCH COMMAND...`, under `unshare -m`.

What the spawner mounts is mounted, in a mount namespace of its own: /run/fgpu file by file, /etc/ld.so.preload. As
Docker does unless told otherwise, CAP_SYS_ADMIN is taken away and user namespaces are denied. With
``FGPU_TEST_WITHOUT`` in the environment one thing is left out: ``preload`` (an empty file lies there) or ``seccomp``.
"""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import struct
import subprocess
import sys
from pathlib import Path

INSIDE = Path("/run/fgpu")
WRITABLE = ("accounting", "log")
NO_NEW_PRIVILEGES, SECCOMP, FILTER = 38, 22, 2
NEW_USER_NAMESPACE = 0x10000000


def mount(*words: str | Path) -> None:
    """Call mount(8)."""
    subprocess.run(["mount", *map(str, words)], check=True)


def bind(source: Path, target: Path, *, writable: bool = False) -> None:
    """Mount one file or folder over another."""
    mount("--bind", source, target)
    if not writable:
        mount("-o", "remount,bind,ro", target)


def mount_all(folder: Path, scratch: Path, *, preload: bool) -> None:
    """Put the session's folder where a container has it."""
    mount("--make-rprivate", "/")
    # The preload file needs a place to be mounted on, which this machine's /etc is not to be given.
    shutil.copytree("/etc", scratch / "etc", symlinks=True, ignore_dangling_symlinks=True, dirs_exist_ok=True)
    mount("--bind", scratch / "etc", "/etc")
    mount("-t", "tmpfs", "fgpu-test", "/run")
    INSIDE.mkdir(parents=True)
    for path in sorted(folder.iterdir()):
        if path.name != "simulated":
            (INSIDE / path.name).touch()
            bind(path.resolve(), INSIDE / path.name, writable=path.name in WRITABLE)
    if (folder / "simulated").exists():
        mount_machine(folder, scratch)
    listed = scratch / "ld.so.preload"
    listed.write_text(f"{INSIDE}/libfgpu.so\n")
    Path("/etc/ld.so.preload").touch()
    if preload:
        bind(listed, Path("/etc/ld.so.preload"))


def mount_machine(folder: Path, scratch: Path) -> None:
    """Put the simulated machine where the session's folder has it."""
    machine = INSIDE / "simulated"
    machine.mkdir()
    inside = scratch / "machine"
    inside.mkdir()
    for path in (folder / "simulated").iterdir():
        shutil.copy(path, inside / path.name)
    for name in ("ledger", "log"):
        (inside / name).touch()
        (inside / name).chmod(0o666)
    bind(inside, machine)
    for name in ("ledger", "log"):
        bind(inside / name, machine / name, writable=True)
    os.environ["LD_LIBRARY_PATH"] = str(machine)


def deny_user_namespaces() -> None:
    """Have unshare(CLONE_NEWUSER) fail with EPERM."""
    number = {"x86_64": 272, "aarch64": 97}[platform.machine()]
    filter_calls(
        [
            (0x20, 0, 0, 0),  # load the call's number
            (0x15, 0, 3, number),
            (0x20, 0, 0, 16),  # load the first argument
            (0x45, 0, 1, NEW_USER_NAMESPACE),
            (0x06, 0, 0, 0x00050001),  # EPERM
            (0x06, 0, 0, 0x7FFF0000),  # allow
        ]
    )


def filter_calls(instructions_of: list[tuple[int, int, int, int]]) -> None:
    """Have a program of BPF decide on each system call of this process from now on."""
    program = b"".join(struct.pack("HBBI", *instruction) for instruction in instructions_of)
    instructions = ctypes.create_string_buffer(program)
    header = ctypes.create_string_buffer(
        struct.pack("HxxxxxxP", len(instructions_of), ctypes.addressof(instructions))
    )
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0) or libc.prctl(SECCOMP, FILTER, header, 0, 0):
        raise OSError(ctypes.get_errno(), "seccomp")


if __name__ == "__main__":
    left_out = os.environ.pop("FGPU_TEST_WITHOUT", None)
    mount_all(Path(sys.argv[1]), Path(sys.argv[2]), preload=left_out != "preload")
    if left_out != "seccomp":
        deny_user_namespaces()
    without = ["setpriv", "--bounding-set=-sys_admin", "--inh-caps=-sys_admin"]
    os.execvp(without[0], [*without, *sys.argv[3:]])
