"""A user's own Python environment for kernels and terminals: what they install goes there, not into the Hub's.

It is a virtual environment below ``data_dir``, one for each user and image, that sees the image's packages behind its
own. It is not in the home, where the server looks for no kernels. Only a few small files are written, so it takes about
as long as one start of Python.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
import threading
from contextlib import suppress
from pathlib import Path
from urllib.parse import quote

from fgpuspawner.engines.marks import user_part
from fgpuspawner.isolation.files import write_whole

FOLDER = "packages"
KERNELS = "share/jupyter/kernels"
ASK = """import json, os, site, sys
print(json.dumps([os.path.realpath(sys.executable), *sys.version_info[:2], site.getsitepackages()]))"""
ASK_WITHIN_S = 30
MOST_ERRORS = 4096
IMAGE = "image"
MODULE = '#!/bin/sh\nexec "${{0%/*}}/python" -m {} "$@"\n'
PROGRAM = f'#!/bin/sh\nexec "${{0%/*}}/python" "${{0%/*}}/../{IMAGE}/bin/${{0##*/}}" "$@"\n'
"""Runs a program of the image, such as ipython or jupyter, in this environment."""


class PythonFailed(Exception):
    """An image's Python does not run; the message is for the log."""


# Two sessions of a user share the environment.
_one_at_a_time = threading.Lock()


def folder_name(user: str) -> str:
    """Return a user's name as that of one folder."""
    return user_part(quote(user, safe="").replace(".", "%2E"), ".")


def own_environment(base: Path, folder: Path) -> Path | None:
    """Make this folder the environment over ``base`` and return it; None if ``base`` has no Python. Blocks.

    Raises:
        OSError: it cannot be written.
        PythonFailed: the image's Python does not run.
    """
    names = (base / "bin/python", base / "bin/python3")
    own_python = next((path for path in names if path.exists()), None)
    if own_python is None:
        return None
    program, major, minor, sites = _ask(own_python)
    python = f"python{major}.{minor}"
    with _one_at_a_time:
        folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        settings = f"home = {os.path.dirname(program)}\ninclude-system-site-packages = false\nversion = {major}.{minor}\n"
        _write(folder / "pyvenv.cfg", settings)
        for name in ("python", f"python{major}", python):
            _link(folder / "bin" / name, program)
        # Jupyter's would look for its parts beside itself.
        for name, module in (("pip", "pip"), (f"pip{major}", "pip"), ("jupyter", "jupyter")):
            _write(folder / "bin" / name, MODULE.format(module), mode=0o755)
        _link(folder / IMAGE, str(base))
        for script in (base / "bin").iterdir():
            # What the user has installed stays.
            if not (folder / "bin" / script.name).exists() and _is_python(script):
                (folder / "bin" / script.name).write_text(PROGRAM)
                (folder / "bin" / script.name).chmod(0o755)
        for settings_file in base.glob("etc/ipython/ipython*_config.*"):
            # IPython reads those of its own environment; among them is what adds `%fgpu`.
            _write(folder / settings_file.relative_to(base), settings_file.read_text())
        see = "".join(f"import site; site.addsitedir({each!r})\n" for each in sites)
        _write(folder / "lib" / python / "site-packages/fgpu_image.pth", see)
        for spec in base.glob(f"{KERNELS}/*/kernel.json"):
            # Jupyter leaves out one that it cannot read.
            with suppress(ValueError, LookupError, TypeError):
                kernel, own = json.loads(spec.read_text()), folder / KERNELS / spec.parent.name
                # Jupyter takes "python" for the server's own.
                if kernel["argv"][0] in ("python", f"python{major}", python, *map(str, names)):
                    kernel["argv"][0] = str(folder / "bin/python")
                    _write(own / spec.name, json.dumps(kernel, indent=1))
                    for logo in spec.parent.glob("logo-*"):
                        # Not a link: the server shows no file through one.
                        shutil.copyfile(logo, own / logo.name)
    return folder


def _ask(python: Path) -> tuple[str, int, int, list[str]]:
    """Return the path, the version and the package folders of a Python."""
    # Not through pipes, which a program that it leaves running would keep open.
    with tempfile.TemporaryFile() as said, tempfile.TemporaryFile() as errors:
        asked = [str(python), "-I", "-c", ASK]
        try:
            subprocess.run(asked, stdout=said, stderr=errors, check=True, timeout=ASK_WITHIN_S, env={})
            said.seek(0)
            path, major, minor, sites = json.load(said)
        except (OSError, subprocess.SubprocessError, TypeError, ValueError) as e:
            errors.seek(0)
            told = errors.read(MOST_ERRORS).decode(errors="replace").strip()
            raise PythonFailed(f"{python} does not run: {e}\n{told}") from None
    return path, major, minor, sites


def variables(folder: Path, environment: dict[str, str]) -> dict[str, str]:
    """Return the variables with which programs find this environment first."""
    before = {"PATH": folder / "bin", "JUPYTER_PATH": folder / "share/jupyter"}
    found = {
        name: os.pathsep.join(filter(None, (str(path), environment.get(name))))
        for name, path in before.items()
    }
    return {**found, "VIRTUAL_ENV": str(folder)}


def _is_python(script: Path) -> bool:
    if not script.is_file() or script.is_symlink():
        return False
    try:
        with script.open("rb") as file:
            start = file.read(200)
    except PermissionError:
        # Such as sudo on some systems, where the image is the whole of /usr.
        return False
    return start.startswith(b"#!") and b"python" in start


def _write(path: Path, text: str, *, mode: int = 0o644) -> None:
    try:
        if path.read_text() == text:
            return
    except (FileNotFoundError, UnicodeDecodeError):
        path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, text.encode(), mode=mode)


def _link(path: Path, target: str) -> None:
    if not path.is_symlink() or os.readlink(path) != target:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        path.symlink_to(target)
