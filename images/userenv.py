"""The users' environment: /opt/env, over the framework's own Python.

It is a virtual environment that sees the framework's packages, and belongs to the session's user: `pip install` and
`%pip` put packages there, so they stay in an image that is made of the session. It is written by hand because old
bases lack the venv module, and because nothing of the base has to run for it. Kernels run its interpreter.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

from debianfiles import HOME, run, write
from serverenv import COMMANDS, ENVIRONMENT, EXTENSION, FOR_KERNELS, PREFIX

HERE = Path(__file__).resolve().parent
SCRIPTS = {
    "pip": "pip._internal.cli.main",
    "pip3": "pip._internal.cli.main",
    "ipython": "IPython:start_ipython",
}
# Kernels have `%fgpu` from the start; an image that was built without the Lab extension has none.
KERNEL_CONFIG = f"""import importlib.util

if importlib.util.find_spec("{EXTENSION}") is not None:
    c.InteractiveShellApp.extensions = ["{EXTENSION}"]
"""
# What PyPI's wheels say that they run on: the C library of 2014, or of 2018.
OLD_LIBC, NEW_LIBC = "manylinux2014", "manylinux_2_28"


@dataclass(frozen=True, slots=True)
class Framework:
    """The Python of a base: its program and version there, its C library's version, and what to call it."""

    program: str
    version: str
    libc: str
    name: str
    machine: str = "x86_64"

    @property
    def minor(self) -> str:
        """The version that names folders, such as 3.7."""
        return ".".join(self.version.split(".")[:2])


def make_user_environment(prefix: Path, framework: Framework, *, uv: str) -> None:
    """Make in this folder the future /opt/env.

    Raises:
        CannotBuild: the kernel's packages are not available for this Python.
    """
    site = prefix / "lib" / f"python{framework.minor}" / "site-packages"
    major, _, minor = framework.libc.partition(".")
    libc = NEW_LIBC if (int(major), int(minor)) >= (2, 28) else OLD_LIBC
    target = [
        *("--target", str(site), "--python-version", framework.version),
        *("--python-platform", f"{framework.machine}-{libc}"),
    ]
    pinned = [
        "--only-binary",
        ":all:",
        "--no-deps",
        "--require-hashes",
        "--requirement",
        str(HERE / "kernel.txt"),
    ]
    run([uv, "--no-config", "--quiet", "pip", "install", *target, *pinned])
    for folder in ("bin", "share", "etc"):
        shutil.rmtree(site / folder, ignore_errors=True)
    (site / ".lock").unlink(missing_ok=True)
    write(site / "fgpu.pth", f"/{FOR_KERNELS}\n")
    write(prefix / "etc/ipython/ipython_kernel_config.py", KERNEL_CONFIG)
    write(
        prefix / "pyvenv.cfg",
        f"home = {Path(framework.program).parent}\ninclude-system-site-packages = true\nversion = {framework.version}\n",
    )
    programs = prefix / "bin"
    programs.mkdir()
    (programs / "python").symlink_to(framework.program)
    for name in ("python3", f"python{framework.minor}"):
        (programs / name).symlink_to("python")
    for name, function in SCRIPTS.items():
        module, _, called = function.partition(":")
        called = called or "main"
        write(
            programs / name,
            f"#!/{ENVIRONMENT}/bin/python\nimport sys\nfrom {module} import {called}\nsys.exit({called}())\n",
        )
        (programs / name).chmod(0o755)


def make_kernel(root: Path, framework: Framework) -> None:
    """Have notebooks open on the framework: it is the server's kernel ``python3``, named after what it runs."""
    folder = root / PREFIX / "share/jupyter/kernels/python3"
    spec = {
        "argv": [f"/{ENVIRONMENT}/bin/python", "-m", "ipykernel_launcher", "-f", "{connection_file}"],
        "display_name": framework.name,
        "language": "python",
        # Its packages for Python 3.6 have no debugger.
        "metadata": {"debugger": not framework.version.startswith("3.6.")},
    }
    write(folder / "kernel.json", json.dumps(spec, indent=1) + "\n")


def search_path(path: str) -> str:
    """Return an image's PATH, from its base's."""
    return f"/{COMMANDS}:/{ENVIRONMENT}/bin:{path}:/{HOME}/.local/bin"
