"""Run as root while an image is built on a base (images/Dockerfile), by the server environment's own Python.

Makes the user and the home folder, byte code for the users' environment, and certificates where there are none.
"""

from __future__ import annotations

import os
import py_compile
import re
import shutil
import subprocess
import sysconfig
from importlib.util import cache_from_source
from pathlib import Path

USER, UID, HOME = "jovyan", 1000, Path("/home/jovyan")
ENVIRONMENT = Path("/opt/env")
OWN_CERTIFICATES = Path("/opt/fgpu/etc/ssl/certs/ca-certificates.crt")
CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")


def make_account() -> None:
    """Have user and group 1000 be ours: some bases keep an account of their own there, and one number has one name."""
    for file, entry in (
        ("/etc/passwd", f"{USER}:x:{UID}:{UID}:{USER}:{HOME}:/bin/bash"),
        ("/etc/group", f"{USER}:x:{UID}:"),
    ):
        path = Path(file)
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        kept = [line for line in lines if not re.match(rf"({USER}:.*|[^:]*:[^:]*:{UID}:.*)$", line)]
        if not kept:
            kept = ["root:x:0:0:root:/root:/bin/sh"] if file == "/etc/passwd" else ["root:x:0:"]
        path.write_text("\n".join([*kept, entry]) + "\n", encoding="utf-8")
    HOME.mkdir(parents=True, exist_ok=True)
    for skeleton in Path("/etc/skel").glob(".*"):
        if skeleton.is_file():
            shutil.copy(skeleton, HOME / skeleton.name)
    for path in (HOME, *HOME.iterdir(), ENVIRONMENT):
        os.chown(path, UID, UID, follow_symlinks=False)


def make_certificates() -> None:
    """Have the authorities where the server environment's OpenSSL looks; a base's own stay."""
    if not CERTIFICATES.exists():
        CERTIFICATES.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(OWN_CERTIFICATES, CERTIFICATES)
    openssl = Path("/usr/lib/ssl")
    openssl.mkdir(parents=True, exist_ok=True)
    for name, goal in (("cert.pem", CERTIFICATES), ("certs", CERTIFICATES.parent)):
        if not os.path.lexists(openssl / name):
            (openssl / name).symlink_to(goal)


def compile_environment() -> None:
    """Compile the kernel's modules with the Python that imports them, as the user who owns them."""
    subprocess.run(
        [ENVIRONMENT / "bin/python", "-m", "compileall", "-q", ENVIRONMENT / "lib"],
        check=False,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        user=UID,
        group=UID,
        env={"HOME": str(HOME), "PATH": "/usr/bin:/bin"},
    )


def compile_extensions() -> None:
    """Compile what was added to the server environment. Sessions cannot write there, and would compile at each start."""
    for file in Path(sysconfig.get_path("purelib")).rglob("*.py"):
        if not Path(cache_from_source(str(file))).exists():
            # Packages have templates and samples that are no Python of this version.
            py_compile.compile(
                str(file), invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH, quiet=2
            )


def make_temporary_folders() -> None:
    """Have the folders that programs expect; some small bases lack them."""
    for path in (Path("/tmp"), Path("/var/tmp")):
        if not path.exists():
            path.mkdir(parents=True)
            path.chmod(0o1777)


make_account()
make_certificates()
make_temporary_folders()
compile_environment()
compile_extensions()
Path(__file__).unlink()
