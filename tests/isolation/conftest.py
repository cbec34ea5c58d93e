from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from sessionfolders import (
    ISOLATION,
    REGION_BYTES,
    UUID,
    Device,
    limits_text,
    machine_text,
    output_of,
    write_for_all,
    write_read_only,
)
from simulatedmachine import Machine, machine_at
from throttleworlds import World, build_world

from fgpuspawner.isolation import native

WARNINGS = ("-std=c11", "-Wall", "-Wextra", "-Werror", "-Wshadow", "-Wstrict-prototypes")


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of what is compiled for this run, one for all of xdist's workers. Needs a compiler."""
    missing = [tool for tool in ("gcc", "make") if shutil.which(tool) is None]
    if missing:
        reason = f"{' and '.join(missing)} not found: apt-get install gcc make libc6-dev"
        pytest.skip(reason)
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if os.environ.get("PYTEST_XDIST_WORKER") else base
    folder = shared / "isolation"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def isolation_build(built: Path) -> Path:
    """A finished ``make -C isolation``: libfgpu.so, simulated/, probe, probe-static."""
    out = built / "out"
    with _alone(out):
        # Once and for all: a file replaced under the tests that use it would be a riddle.
        if not (out / ".finished").exists():
            if _is_newer_than_sources(native.FOLDER):
                shutil.copytree(native.FOLDER, out, dirs_exist_ok=True)
            else:
                _run("make", "-j4", "-C", ISOLATION, f"OUT={out}")
            (out / ".finished").touch()
    return out


def _is_newer_than_sources(folder: Path) -> bool:
    parts = native.Native(folder).parts
    folders = ("include", "libfgpu", "probe", "simulated")
    sources = [ISOLATION / "Makefile", *(path for name in folders for path in (ISOLATION / name).iterdir())]
    newest = max(source.stat().st_mtime for source in sources)
    return all(part.is_file() and part.stat().st_mtime > newest for part in parts)


@pytest.fixture(scope="session")
def compile_c(built: Path) -> Callable[..., Path]:
    """Compile a C file with flags, once for each combination, and return the program.

    A relative path is one below isolation/; further sources, ``-shared`` and ``-l`` are flags like any other.
    """

    def compile_c(source: Path | str, *flags: Path | str) -> Path:
        path = ISOLATION / source
        words = [str(ISOLATION / f) if str(f).endswith(".c") else str(f) for f in flags]
        digest = hashlib.sha256("\0".join([str(path), *words]).encode()).hexdigest()[:12]
        program = built / f"{path.stem}-{digest}"
        with _alone(program):
            if not program.exists():
                draft = program.with_suffix(".draft")
                includes = [
                    f"-iquote{ISOLATION / name}" for name in ("libfgpu", "include", "tests", "simulated")
                ]
                _run("gcc", *WARNINGS, "-O2", "-g", "-D_GNU_SOURCE", *includes, "-o", draft, path, *words)
                draft.rename(program)
        return program

    return compile_c


@pytest.fixture(scope="session")
def counting_library(compile_c: Callable[..., Path]) -> Path:
    """A libfgpu.so of its accounting alone."""
    parts = (f"libfgpu/{name}.c" for name in ("folder", "limits", "region"))
    return compile_c(*parts, "-shared", "-fPIC", "-Wl,-soname,libfgpu.so")


@pytest.fixture(scope="session")
def world(compile_c: Callable[..., Path]) -> World:
    """Run a world in which time is simulated; `throttleworlds` says how."""
    return build_world(compile_c)


@pytest.fixture
def session_folder(tmp_path: Path, request: pytest.FixtureRequest) -> Callable[..., Path]:
    """Make folders of sessions as isolation/README.md describes them.

    ``session_folder(devices=[(uuid, memory_mib)], context_mib=64, mode=..., slots=...)`` writes limits by
    `limits_text`, which takes all further names; ``session_folder(text)`` takes them as they are, str or bytes.
    ``library`` is linked in place of the built libfgpu.so. ``machine`` is the text of the simulated machine, or
    the folder of another session, to share its machine with the ledger.
    """

    def session_folder(
        limits: str | bytes | None = None,
        *,
        devices: Sequence[Device] = ((UUID, 2048),),
        simulated: bool = True,
        library: Path | None = None,
        machine: str | Path | None = None,
        **more: Any,
    ) -> Path:
        folder = tmp_path / f"session{len(list(tmp_path.glob('session*')))}"
        folder.mkdir(mode=0o755)
        (folder / "libfgpu.so").symlink_to(library or _built(request) / "libfgpu.so")
        write_read_only(folder / "limits", limits_text(devices, **more) if limits is None else limits)
        write_for_all(folder / "accounting", REGION_BYTES)
        write_for_all(folder / "log", 0)
        if isinstance(machine, Path):
            (folder / "simulated").symlink_to(machine / "simulated")
        elif simulated:
            (folder / "simulated").mkdir()
            for name in ("libcuda.so.1", "libnvidia-ml.so.1"):
                (folder / "simulated" / name).symlink_to(_built(request) / "simulated" / name)
            of_machine = {k: v for k, v in more.items() if k in ("device_mib", "context_mib")}
            text = machine_text(devices, **of_machine) if machine is None else machine
            write_read_only(folder / "simulated" / "machine", text)
        for name in ("probe", "probe-static"):
            if library is None:
                (folder / name).symlink_to(_built(request) / name)
        return folder

    return session_folder


@pytest.fixture
def folder(session_folder: Callable[..., Path]) -> Path:
    """A session with 2048 MiB of a device of 8192."""
    return session_folder(devices=[(UUID, 2048)])


@pytest.fixture
def launches(
    compile_c: Callable[..., Path], isolation_build: Path
) -> Callable[[Path, str, int], tuple[int, int]]:
    """In a session, launch kernels of 1 ms for some ms in a way; return how many, and how many ms it took in the end."""
    program = compile_c(
        "tests/throttle_launches.c", isolation_build / "simulated" / "libcuda.so.1", "-pthread"
    )

    def launches(folder: Path, way: str, ms: int) -> tuple[int, int]:
        count, took_ms = map(int, output_of(folder, program, way, str(ms)).split())
        return count, took_ms

    return launches


@pytest.fixture
def simulated_machine(
    tmp_path: Path, isolation_build: Path, compile_c: Callable[..., Path]
) -> Callable[..., Machine]:
    """Make simulated machines of a text, each with a ledger of its own, in no session."""
    return lambda text, name="machine": machine_at(tmp_path / name, isolation_build, compile_c, text)


def _built(request: pytest.FixtureRequest) -> Path:
    path: Path = request.getfixturevalue("isolation_build")
    return path


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Keep other workers from making ``path`` at the same time."""
    with path.with_name(f".{path.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _run(*command: str | Path) -> None:
    done = subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, check=False, timeout=600
    )
    if done.returncode != 0:
        pytest.fail(f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}", pytrace=False)
