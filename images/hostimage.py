"""Images made of this machine's own Debian packages, without a registry.

    images/hostimage.py check PART                         ends well if this machine can make it
    images/hostimage.py inputs PART [OPTION]...            prints a hash of all that goes in
    images/hostimage.py write PART [OPTION]... --out FILE  writes the archive that `docker load` reads
    images/hostimage.py folder PART ... --out FOLDER       leaves the files there, as a Dockerfile wants them

PART is `server` (the server environment and nothing else), `base` (the default image), or `system` (what a registry's
image would be: a system, with --python a CPython of this machine and --package what it has).

The same inputs give the same bytes, so the same image id, on any day: paths are sorted, times are fixed, owners are
ours, and byte code is compiled here with hashes for times. It runs under Debian's own interpreter because that one goes
into the image. Standard library only; images/build.sh is the command for people.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from archive import ARCHITECTURES, write_image
from debianfiles import (
    HOME,
    PYTHON,
    TOOLS,
    UID,
    CannotBuild,
    Package,
    closure,
    copy_packages,
    installed,
    make_loader_cache,
    make_system_files,
    run,
)
from localpython import copy_python, find_python
from serverenv import ENVIRONMENT, OWN_PYTHON, PREFIX, SERVER_FILES, make_server_environment, site_packages
from userenv import Framework, make_kernel, make_user_environment, search_path

HERE = Path(__file__).resolve().parent
SYSTEM_PATH = "/usr/local/bin:/usr/bin:/bin"
PARTS = ("server", "base", "system")
# Fixed, not the number of cores: what shares a compiler process can change the byte code's bytes.
COMPILERS = 4
COMPILER = """
import os, py_compile, sys
for line in sys.stdin:
    file, cached, shown, mode = line.rstrip("\\n").split("\\t")
    os.makedirs(os.path.dirname(cached), exist_ok=True)
    try:
        py_compile.compile(
            file, cached, shown, doraise=True,
            invalidation_mode=py_compile.PycInvalidationMode[mode],
        )
    except (py_compile.PyCompileError, ValueError, UnicodeError):
        pass  # templates and samples for other Pythons: nobody imports them
"""


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line asked for."""

    part: str
    uv: str
    patchelf: str
    wheel: Path | None
    labels: Mapping[str, str]
    python: Path | None
    packages: Sequence[str]


def compile_all(root: Path) -> None:
    """Compile every module, as it will be named in the image.

    A start that finds stale byte code loses 1.5 s compiling what a read-only folder cannot keep. What belongs to root is
    trusted unchecked; in the users' environment a file that its user edits must count.
    """
    lines = []
    for folder, mode in (
        (root / "usr/lib" / PYTHON, "UNCHECKED_HASH"),
        (root / OWN_PYTHON / "lib" / PYTHON, "UNCHECKED_HASH"),
        (site_packages(root), "UNCHECKED_HASH"),
        (root / ENVIRONMENT, "CHECKED_HASH"),
    ):
        for file in sorted(folder.rglob("*.py")):
            if file.is_symlink():
                continue
            cached = file.parent / "__pycache__" / f"{file.stem}.{sys.implementation.cache_tag}.pyc"
            lines.append(f"{file}\t{cached}\t/{file.relative_to(root)}\t{mode}\n")
    environment = {**os.environ, "PYTHONHASHSEED": "0"}

    def compile_part(part: list[str]) -> int:
        command = [sys.executable, "-S", "-c", COMPILER]
        return subprocess.run(
            command, check=False, input="".join(part), text=True, env=environment
        ).returncode

    with ThreadPoolExecutor(min(COMPILERS, os.cpu_count() or 1)) as pool:
        parts = [lines[start::COMPILERS] for start in range(COMPILERS)]
        if any(pool.map(compile_part, parts)):
            raise CannotBuild("compiling the Python modules failed")


def check_machine() -> None:
    """Refuse machines that cannot make an image from their own files."""
    needed = "--base host needs Debian 12, Ubuntu 24.04 or newer; give --base a registry's image"
    if shutil.which("dpkg-query") is None:
        raise CannotBuild(f"no dpkg-query here: {needed}")
    if Path(sys.executable).resolve() != Path("/usr/bin", PYTHON):
        raise CannotBuild("run it with /usr/bin/python3, Debian's own interpreter")
    if sys.version_info < (3, 11) or not Path("/bin").is_symlink():
        raise CannotBuild(f"this release is too old: {needed}")
    if platform.machine() not in ARCHITECTURES:
        known = ", ".join(sorted(ARCHITECTURES))
        raise CannotBuild(f"machine type {platform.machine()}: only {known} are known")


def inputs_hash(packages: Sequence[Package], options: Options) -> str:
    """Return a hash that changes whenever the image would."""
    seen = hashlib.sha256(f"{options.part}\n".encode())
    files = [*sorted(HERE.glob("*.py")), HERE / "requirements.txt", HERE / "kernel.txt"]
    files += [HERE / "server" / name for name in SERVER_FILES]
    files += [options.wheel] if options.wheel is not None else []
    for file in files:
        seen.update(f"{file.name} {hashlib.sha256(file.read_bytes()).hexdigest()}\n".encode())
    for package in packages:
        seen.update(f"{package.name} {package.version}\n".encode())
    seen.update(json.dumps(dict(options.labels), sort_keys=True).encode())
    seen.update(f"{options.python} {options.packages}\n".encode())
    for tool in (options.uv, options.patchelf):
        seen.update(run([tool, "--version"]).encode())
    return seen.hexdigest()


def build(packages: Sequence[Package], options: Options, out: Path, *, as_folder: bool) -> None:
    """Write the archive, or the files, to `out`, beside which the work folder lives for a while."""
    labels = {**options.labels, "fgpu.inputs": inputs_hash(packages, options)}
    with tempfile.TemporaryDirectory(prefix="fgpu-image.", dir=out.parent) as folder:
        work = Path(folder)
        root = work / "root"
        root.mkdir()
        copy_packages(packages, root)
        make_system_files(root)
        config: dict[str, object] = {"Env": [f"PATH={SYSTEM_PATH}"]}
        if options.part == "system":
            if options.python is not None:
                copy_python(options.python, root, uv=options.uv, packages=options.packages)
        else:
            make_server_environment(
                root, uv=options.uv, patchelf=options.patchelf, wheel=options.wheel, work=work
            )
            if options.wheel is not None:
                # It brings fgpu-start, which takes a session's identity over standard input.
                labels["fgpu.handover"] = "1"
        if options.part == "base":
            framework = _debian_python(options.labels)
            make_user_environment(root / ENVIRONMENT, framework, uv=options.uv)
            make_kernel(root, framework)
            config = _session_config()
        compile_all(root)
        if options.part == "server":
            root = _only(root, PREFIX, work / "only")
        else:
            make_loader_cache(root)
        if as_folder:
            root.rename(out)
            return
        write_image(root, out, config={**config, "Labels": labels}, owned=(HOME, ENVIRONMENT), owner=UID)


def _debian_python(labels: Mapping[str, str]) -> Framework:
    version = platform.python_version()
    libc = platform.libc_ver()[1]
    name = labels.get("fgpu.name") or f"Python {PYTHON[6:]}"
    return Framework(f"/usr/bin/{PYTHON}", version, libc, name, platform.machine())


def _session_config() -> dict[str, object]:
    return {
        "User": f"{UID}:{UID}",
        "WorkingDir": f"/{HOME}",
        "Entrypoint": [f"/{PREFIX}/bin/tini", "--"],
        "Cmd": ["jupyterhub-singleuser"],
        "Env": [f"PATH={search_path(SYSTEM_PATH)}", f"HOME=/{HOME}", "LANG=C.UTF-8", "SHELL=/bin/bash"],
    }


def _only(root: Path, kept: str, target: Path) -> Path:
    """Return a root that has nothing but one folder of this one."""
    (target / kept).parent.mkdir(parents=True)
    (root / kept).rename(target / kept)
    return target


def label(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is no NAME=VALUE")
    return name, value


def main() -> int:
    parser = argparse.ArgumentParser(prog="hostimage.py", description=__doc__.splitlines()[0])
    parser.add_argument("action", choices=("check", "inputs", "write", "folder"))
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--uv", default="uv")
    parser.add_argument("--patchelf", default="patchelf")
    parser.add_argument("--wheel", type=Path, help="the Lab extension's wheel")
    parser.add_argument("--label", type=label, action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--python", metavar="X.Y", help="with system: this CPython of the machine")
    parser.add_argument("--package", action="append", default=[], help="with --python: what it has")
    parser.add_argument("--out", type=Path, help="the archive to write")
    given = parser.parse_args()
    if given.action in ("write", "folder") and given.out is None:
        parser.error(f"{given.action} needs --out")
    try:
        check_machine()
        options = Options(
            part=given.part,
            uv=given.uv,
            patchelf=given.patchelf,
            wheel=given.wheel,
            labels=dict(given.label),
            python=find_python(given.python) if given.python else None,
            packages=given.package,
        )
        tools = given.part != "server"
        packages = closure(tools=tools)
        if given.action == "inputs":
            print(inputs_hash(packages, options))
        elif given.action != "check":
            lacking = [name for name in TOOLS if tools and name not in installed()]
            if lacking:
                print(
                    f"images: not in the image, as it is not installed here: {', '.join(lacking)}",
                    file=sys.stderr,
                )
            build(packages, options, given.out.resolve(), as_folder=given.action == "folder")
    except CannotBuild as error:
        print(f"images: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
