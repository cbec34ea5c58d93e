"""The server environment: /opt/fgpu, which runs in any image because it needs nothing of it.

It has an interpreter, the C library, the loader and every shared library of its own. The interpreter names that loader,
and where the libraries are (DT_RPATH, which also holds for what is loaded later and comes before LD_LIBRARY_PATH); so
its processes take nothing from the image's /lib, and their children, which are the image's own programs, inherit
nothing.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

from debianfiles import PYTHON, CannotBuild, run, write

HERE = Path(__file__).resolve().parent
PREFIX = "opt/fgpu"
ENVIRONMENT = "opt/env"
OWN_PYTHON = f"{PREFIX}/python"
LIBRARIES = f"{OWN_PYTHON}/lib"
# Before everything else on the PATH of a session: what starts its server must not be something that a user installed.
COMMANDS = f"{PREFIX}/commands"
COMMAND = re.compile(r"jupyter(hub)?(-.*)?|fgpu-.*|jlpm")
# What kernels of any Python take from the server environment: this folder is on their search path, and nothing else.
FOR_KERNELS = f"{PREFIX}/kernel"
EXTENSION = "jupyterlab_fgpu"
SERVER_FILES = ("fgpu_lazy_imports.py", "fgpu_lazy_imports.pth")
UNWANTED = ("dist-packages", "ensurepip", "lib2to3", "pydoc_data", "site-packages", "tkinter", "__pycache__")
# Isolated: what an image sets for its own Python (PYTHONHOME, PYTHONPATH) is not for this one.
HEADER = f"#!/{PREFIX}/bin/python -I\n"


def make_server_environment(root: Path, *, uv: str, patchelf: str, wheel: Path | None, work: Path) -> None:
    """Make /opt/fgpu below ``root``, out of the Debian packages' files that are there.

    Raises:
        CannotBuild: something is missing, or cannot be installed.
    """
    _copy_python(root)
    _make_environment(root, uv, wheel, work)
    _make_own(root, patchelf)
    _make_commands(root)
    shutil.copy2(root / "usr/bin/tini-static", root / PREFIX / "bin/tini")
    bundle = "etc/ssl/certs/ca-certificates.crt"
    write(root / PREFIX / bundle, (root / bundle).read_text(encoding="ascii"))


def site_packages(root: Path) -> Path:
    """Return where the server environment's packages are."""
    return root / PREFIX / "lib" / PYTHON / "site-packages"


def _copy_python(root: Path) -> None:
    target = root / OWN_PYTHON
    (target / "bin").mkdir(parents=True)
    shutil.copy2(root / "usr/bin" / PYTHON, target / "bin" / PYTHON)
    source = root / "usr/lib" / PYTHON
    shutil.copytree(source, target / "lib" / PYTHON, symlinks=True, ignore=shutil.ignore_patterns(*UNWANTED))


def _make_environment(root: Path, uv: str, wheel: Path | None, work: Path) -> None:
    """Install the pinned requirements and the Lab extension."""
    prefix = root / PREFIX
    uv_quietly = [uv, "--no-config", "--quiet"]
    venv = ["venv", "--relocatable", "--allow-existing", "--no-python-downloads"]
    run([*uv_quietly, *venv, "--python", f"/usr/bin/{PYTHON}", str(prefix)])
    install = [*uv_quietly, "pip", "install", "--python", str(prefix / "bin/python")]
    requirements = str(HERE / "requirements.txt")
    run([*install, "--no-deps", "--require-hashes", "--requirement", requirements])
    if wheel is not None:
        # By name out of a folder: installed by path, its metadata would name this machine's path.
        folder = work / "wheels"
        folder.mkdir()
        shutil.copy2(wheel, folder)
        name = wheel.name.partition("-")[0]
        run([*install, "--no-deps", "--no-index", "--find-links", str(folder), name])
        _forget_when(site_packages(root), name)
        for_kernels = root / FOR_KERNELS
        for_kernels.mkdir()
        (for_kernels / EXTENSION).symlink_to(f"../lib/{PYTHON}/site-packages/{EXTENSION}")
    for file in SERVER_FILES:
        shutil.copy2(HERE / "server" / file, site_packages(root) / file)
    # So that a package with a front end, such as ipywidgets, is whole when a user installs it.
    lab = {"LabApp": {"extra_labextensions_path": [f"/{ENVIRONMENT}/share/jupyter/labextensions"]}}
    write(prefix / "etc/jupyter/jupyter_lab_config.json", json.dumps(lab) + "\n")
    # The sources of the Hub's own pages: a tenth of the image, and only the Hub serves them.
    shutil.rmtree(prefix / "share/jupyterhub/static/components", ignore_errors=True)
    for leftover in (".lock", ".gitignore", "CACHEDIR.TAG"):
        (prefix / leftover).unlink(missing_ok=True)
    for script in sorted((prefix / "bin").iterdir()):
        if script.name.startswith("activate") or script.name in ("deactivate.bat", "pydoc.bat"):
            script.unlink()


def _forget_when(site: Path, name: str) -> None:
    """Remove uv's note on when a wheel was made: the same wheel gives the same image."""
    (found,) = site.glob(f"{name}-*.dist-info")
    (found / "uv_cache.json").unlink(missing_ok=True)
    lines = (found / "RECORD").read_text(encoding="utf-8").splitlines(keepends=True)
    write(found / "RECORD", "".join(line for line in lines if "uv_cache.json" not in line))


def _make_own(root: Path, patchelf: str) -> None:
    """Have the environment run on its own interpreter, loader and libraries."""
    prefix, libraries = root / PREFIX, root / LIBRARIES
    interpreter = root / OWN_PYTHON / "bin" / PYTHON
    loader = Path(run([patchelf, "--print-interpreter", str(interpreter)]).strip())
    (folder,) = {path.parent for path in (root / "usr/lib").glob("*-linux-gnu/libc.so.6")}
    for library in sorted(folder.glob("*.so*")):
        beside = library.is_symlink() and "/" not in str(library.readlink())
        shutil.copy2(library, libraries / library.name, follow_symlinks=not beside)
    own_loader = f"/{LIBRARIES}/{loader.name}"
    if not (root / own_loader[1:]).exists():
        raise CannotBuild(f"{loader.name} is not among {folder.name}'s libraries")
    run(
        [
            patchelf,
            "--set-interpreter",
            own_loader,
            "--force-rpath",
            "--set-rpath",
            f"/{LIBRARIES}",
            str(interpreter),
        ]
    )
    for module in sorted((prefix / "lib").rglob("*.so*")):
        own = run([patchelf, "--print-rpath", str(module)]).strip()
        if own:
            # A file of its own first: what uv installs are hard links into its cache.
            linked = module.with_name(f"{module.name}.linked")
            module.rename(linked)
            shutil.copy2(linked, module)
            linked.unlink()
            # As DT_RUNPATH it would keep the interpreter's from being looked at, and the image's libraries be found.
            run([patchelf, "--force-rpath", "--set-rpath", f"{own}:/{LIBRARIES}", str(module)])
    for name in ("python", "python3", PYTHON):
        (prefix / "bin" / name).unlink(missing_ok=True)
        (prefix / "bin" / name).symlink_to(f"/{OWN_PYTHON}/bin/{PYTHON}" if name == "python" else "python")
    write(
        prefix / "pyvenv.cfg",
        f"home = /{OWN_PYTHON}/bin\ninclude-system-site-packages = false\nversion = {PYTHON[6:]}\n",
    )


def _make_commands(root: Path) -> None:
    """Point every script at the environment's interpreter, and collect what sessions call by name."""
    commands = root / COMMANDS
    commands.mkdir()
    for script in sorted((root / PREFIX / "bin").iterdir()):
        if script.is_symlink() or not script.is_file():
            continue
        text = script.read_text(encoding="utf-8")
        # As uv writes it for an environment that may be moved: through the image's sh, dirname and realpath.
        own = re.sub(r"\A#!/bin/sh\n'''exec' .*\n' '''\n", HEADER, text)
        if own == text:
            raise CannotBuild(f"{script.name} in the server environment does not begin as expected")
        write(script, own)
        script.chmod(0o755)
        if COMMAND.fullmatch(script.name):
            (commands / script.name).symlink_to(f"../bin/{script.name}")
