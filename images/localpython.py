"""A CPython of this machine, and packages of the package index, as a registry's image would have them in /usr/local."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from archive import FIXED_TIME_S
from debianfiles import CannotBuild, run

PREFIX = "usr/local"
# Modules that no session imports, and files made for the original folder.
UNWANTED = (
    *(
        "__pycache__",
        "test",
        "tests",
        "idlelib",
        "turtledemo",
        "tkinter",
        "lib2to3",
        "site-packages",
    ),
    *("config-*", "pkgconfig", "*.a"),
)


def find_python(version: str) -> Path:
    """Return the program of a CPython of this version, such as 3.7: of pyenv, or on the PATH.

    Raises:
        CannotBuild: there is none.
    """
    if not re.fullmatch(r"[0-9]+\.[0-9]+", version):
        raise CannotBuild(f"--python {version!r}: a version such as 3.7 is wanted")
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    found = sorted(pyenv.glob(f"versions/{version}.*/bin/python{version}"))
    on_path = shutil.which(f"python{version}")
    if not found and on_path is not None:
        found = [Path(on_path).resolve()]
    if not found:
        raise CannotBuild(
            f"no CPython {version} is here: pyenv install {version}, or put python{version} on the PATH"
        )
    return found[-1]


def copy_python(program: Path, root: Path, *, uv: str, packages: Sequence[str]) -> None:
    """Copy a CPython into /usr/local below ``root``, and install packages into it.

    Raises:
        CannotBuild: a package is not available for it.
    """
    source = Path(run([str(program), "-c", "import sys; print(sys.base_prefix)"]).strip())
    name = re.sub(r".*(python[0-9]+\.[0-9]+)$", r"\1", program.name)
    target = root / PREFIX
    (target / "bin").mkdir(parents=True, exist_ok=True)
    shutil.copy2((source / "bin" / name).resolve(), target / "bin" / name)
    for link in ("python3", "python"):
        (target / "bin" / link).symlink_to(name)
    ignore = shutil.ignore_patterns(*UNWANTED)
    shutil.copytree(source / "lib" / name, target / "lib" / name, symlinks=True, ignore=ignore)
    for library in sorted((source / "lib").glob("libpython*.so*")):
        shutil.copy2(library, target / "lib" / library.name, follow_symlinks=False)
    install_packages(program, target / "lib" / name / "site-packages", uv=uv, packages=packages)
    _compile(program, target / "lib" / name)


def install_packages(program: Path, site: Path, *, uv: str, packages: Sequence[str]) -> None:
    """Install packages for this CPython into a folder."""
    site.mkdir(exist_ok=True)
    if not packages:
        return
    # Not as hard links into uv's cache: their times are set below.
    environment = {
        "UV_LINK_MODE": "copy",
        "UV_FIND_LINKS": os.environ.get("UV_FIND_LINKS") or os.environ.get("PIP_FIND_LINKS", ""),
    }
    run(
        [
            uv,
            "--no-config",
            "--quiet",
            "pip",
            "install",
            "--python",
            str(program),
            "--target",
            str(site),
            *packages,
        ],
        **environment,
    )
    # What is beside the modules in a wheel: kernels, front ends and their settings, where Jupyter looks for them.
    for folder in ("etc", "share"):
        if (site / folder).is_dir():
            shutil.copytree(site / folder, site.parents[2] / folder, dirs_exist_ok=True)
            shutil.rmtree(site / folder)
    for leftover in (".lock", "bin"):
        path = site / leftover
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def _compile(program: Path, folder: Path) -> None:
    """Compile what is there; old Pythons know no byte code but that which goes by its source's time."""
    for file in folder.rglob("*.py"):
        if not file.is_symlink():
            os.utime(file, (FIXED_TIME_S, FIXED_TIME_S))
    # Its status tells only of templates and samples that are for other Pythons.
    subprocess.run(
        [str(program), "-m", "compileall", "-q", "-j", "0", str(folder)],
        check=False,
        stdin=subprocess.DEVNULL,
        capture_output=True,
    )
