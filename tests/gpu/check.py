"""Checks of libfgpu that need a real GPU, part by part: `make gpu-check`. Standard library only.

check.py [PART ...]         run these parts, or all, on this machine's first GPU
check.py --list             the parts with their times, and what to carry to a machine without network
check.py --carry            make what must be carried: needs gcc, make and pip
check.py --simulated        a rehearsal on the simulated driver; its results are marked and count for nothing

Each result is a line of JSON in bench/results/gpu-check-DATE-MODEL.jsonl (`--out FOLDER`), written at once, so
an interrupted run keeps its results. The GPU's settings stay as they are. The exit status is 0 if nothing was refuted,
1 if a check was refuted or broke, 2 if nothing can run at all.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import importlib.metadata
import json
import mmap
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
NATIVE = ROOT / "fgpuspawner" / "native"
CARRIED = ROOT / "build" / "gpu-check"
"""Programs and wheels for a machine that can neither compile nor fetch."""

PROGRAMS = {
    "share": ("bench/isolation/share.c",),
    "cells": ("bench/isolation/cells.c",),
    "launch": ("bench/isolation/launch.c",),
    "memory": ("bench/isolation/memory.c",),
    "storm": ("isolation/tests/storm.c", "isolation/tests/storm_ledger.c"),
    "storm_cuda": ("isolation/tests/storm_cuda.c",),
}
WHEELS = (
    "pytest",
    "iniconfig",
    "packaging",
    "pluggy",
    "pygments",
    "nvidia-ml-py",
    "cuda-bindings",
    "cuda-pathfinder",
)
LIMIT_S = 540
PROVED, REFUTED, NOT_RUN = "PROVED", "REFUTED", "NOT RUN"
WHOLE = "the whole part"
WIPE_ON_FORK, OFD_SETLK = 18, 37


@dataclass(frozen=True)
class Part:
    """Tests of one file, `test_NAME.py`; ``minutes`` is for planning."""

    minutes: float
    about: str


PARTS = {
    "facts": Part(1, "kernel, driver and tools; what a context takes"),
    "addresses": Part(1, "every hooked address is one that the driver exports"),
    "reports": Part(1, "CUDA, NVML, nvidia-smi, nvidia-ml-py and cuda-bindings see the slice"),
    "processes": Part(1, "sums over processes; what is charged against what NVML counts"),
    "frameworks": Part(6, "PyTorch, JAX, CuPy: out of memory at the slice, and they go on"),
    "overhead": Part(4, "memory that nobody charged: programs, frameworks, stacks"),
    "rounding": Part(1, "allocations of 512 B to 3 MiB"),
    "kills": Part(2, "how long the driver keeps memory after a kill"),
    "shares": Part(8, "shares of 10 to 75 %, alone and beside others"),
    "long": Part(6, "kernels of seconds, functions that change, a matrix product at a share"),
    "elastic": Part(6, "compute that is lent: an owner who comes back, cells of notebooks"),
    "storm": Part(2, "300 processes killed at random instants"),
    "cost": Part(3, "launch, alloc and free, start of a process, a matrix product"),
    "verify": Part(1, "fgpu-verify behind a read-only preload"),
    "mps": Part(1, "NVIDIA's MPS daemon: its caps of memory and SMs, a killed client"),
}


def main() -> int:
    """Run what is asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=" ".join(PARTS))
    parser.add_argument("--list", action="store_true", help="say what there is, and what to carry")
    parser.add_argument("--carry", action="store_true", help="make what is to be carried")
    parser.add_argument("--simulated", action="store_true", help="rehearse on the simulated driver")
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results", help="folder of the results")
    given = parser.parse_args()
    for ended_by in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(ended_by, lambda number, _: sys.exit(128 + number))
    if unknown := [name for name in given.parts if name not in PARTS]:
        parser.error(f"no part is called {unknown[0]!r}; there are: {' '.join(PARTS)}")
    if given.list:
        print(listing())
        return 0
    if given.carry:
        carry()
        return 0
    if missing := missing_features():
        print(f"gpu-check: nothing is run. {missing}", file=sys.stderr)
        return 2
    with contextlib.ExitStack() as stack:
        if given.simulated:
            stack.enter_context(simulated_machine())
        return run(given.parts or list(PARTS), given.out)


def missing_features() -> str:
    """Return what this kernel lacks that libfgpu lives on; nothing if it has all. The features themselves are tried."""
    about = f"The kernel {os.uname().release}"
    with tempfile.TemporaryFile() as one:
        lock = struct.pack("hhqqi", fcntl.F_WRLCK, os.SEEK_SET, 0, 1, 0)
        try:
            fcntl.fcntl(one, OFD_SETLK, lock)
            with open(f"/proc/self/fd/{one.fileno()}", "r+b") as two:
                try:
                    fcntl.fcntl(two, OFD_SETLK, lock)
                except BlockingIOError:
                    pass
                else:
                    return f"{about} grants one open-file-description lock to two."
        except OSError as e:
            return f"{about} has no open-file-description locks ({e.strerror}). gVisor, for one, has none."
    page = mmap.mmap(-1, mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        page.madvise(WIPE_ON_FORK)
    except OSError as e:
        return f"{about} has no MADV_WIPEONFORK ({e.strerror}). Linux has it since 4.14; gVisor has not."
    page[0] = 1
    if (child := os.fork()) == 0:
        os._exit(page[0])
    if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0:
        return f"{about} says that it has MADV_WIPEONFORK, but a forked child sees the page."
    return ""


@contextlib.contextmanager
def simulated_machine() -> Iterator[None]:
    """Put a simulated driver before this machine's own, for this process's children and for itself."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for library in (NATIVE / "simulated").iterdir():
            (folder / library.name).symlink_to(library)
        uuid = "GPU-12345678-1234-1234-1234-123456789012"
        (folder / "machine").write_text(
            f"gpu uuid={uuid} memory_mib=81920 context_mib=300 name=Simulated H100\n"
        )
        os.environ["LD_LIBRARY_PATH"] = name
        yield


def run(parts: list[str], out: Path) -> int:
    """Run parts one after another; return the exit status."""
    try:
        machine = machine_facts()
    except LookupError as e:
        print(f"gpu-check: nothing is run. {e}", file=sys.stderr)
        return 2
    results = Results(results_file(out, machine), machine)
    print(f"{machine['model']}, driver {machine['driver']}; results in {results.path}", flush=True)
    with prepared() as environment:
        for name in parts:
            run_part(name, results, environment)
    own = [line for line in results.lines() if line["name"] != WHOLE or line.get("broken")]
    wrong = [line for line in own if line["verdict"] == REFUTED or line.get("broken")]
    for line in wrong:
        print(f"{line['verdict']}: {line['part']}: {line['name']}: {line['why']}")
    print(f"{'nothing' if not wrong else len(wrong)} refuted or broken")
    return 1 if wrong else 0


def machine_facts() -> dict[str, Any]:
    """Return what each line says of the machine.

    Raises:
        LookupError: it has no GPU; with the reason.
    """
    # In a process of its own: this one's libraries were found before a rehearsal's driver was there.
    code = "import json; from realgpu import *\ntry: print(json.dumps(vars(Nvml().gpus()[0])))\n"
    code += "except (NoGpu, IndexError) as e: print(json.dumps({'none': str(e)}))"
    done = subprocess.run([sys.executable, "-c", code], cwd=HERE, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    if "none" in found:
        raise LookupError(f"This machine has no NVIDIA GPU: {found['none']}")
    return {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "model": found["name"],
        "driver": found["driver"],
        "simulated": found["simulated"],
        "run": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def results_file(out: Path, machine: dict[str, Any]) -> Path:
    """Return where a machine's results of a day go."""
    model = re.sub(r"[^A-Za-z0-9]+", "-", machine["model"]).strip("-")
    marked = "rehearsal-" if machine["simulated"] else ""
    return out / f"gpu-check-{marked}{machine['date']}-{model}.jsonl"


class Results:
    """A file of results, to which this run adds."""

    def __init__(self, path: Path, machine: dict[str, Any]) -> None:
        self.path, self.machine = path, machine
        path.parent.mkdir(parents=True, exist_ok=True)
        self._start = path.stat().st_size if path.exists() else 0

    def add(self, part: str, name: str, verdict: str, **more: Any) -> None:
        """Write one result so that no end of this process, or of the machine, takes it away."""
        line = json.dumps({"part": part, "name": name, "verdict": verdict, **more, **self.machine})
        with self.path.open("a+b") as file:
            # What a run that was killed left unfinished must not spoil this line.
            if file.tell() and os.pread(file.fileno(), 1, file.tell() - 1) != b"\n":
                file.write(b"\n")
            file.write(line.encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())

    def lines(self) -> list[dict[str, Any]]:
        """Return what this run has written."""
        with self.path.open("rb") as file:
            file.seek(self._start)
            return [json.loads(line) for line in file if line.strip()]


@contextlib.contextmanager
def prepared() -> Iterator[dict[str, str]]:
    """Make what the parts need where it was not carried; yield their environment."""
    if not (NATIVE / "libfgpu.so").exists():
        subprocess.run([sys.executable, str(ROOT / "scripts" / "build_isolation.py")], check=True)
    sources = [path for part in ("libfgpu", "include") for path in (ROOT / "isolation" / part).iterdir()]
    if max(path.stat().st_mtime for path in sources) > (NATIVE / "libfgpu.so").stat().st_mtime:
        print(
            "gpu-check: libfgpu.so may be older than its sources; `make isolation` builds it again",
            flush=True,
        )
    compile_programs()
    with tempfile.TemporaryDirectory() as site:
        for wheel in sorted((CARRIED / "wheels").glob("*.whl")):
            name, _, python, *_ = wheel.name.split("-")
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                importlib.metadata.version(name)
                continue
            if python in ("py3", f"cp{sys.version_info[0]}{sys.version_info[1]}"):
                zipfile.ZipFile(wheel).extractall(site)
        paths = [site, *filter(None, [os.environ.get("PYTHONPATH")])]
        yield {k: v for k, v in os.environ.items() if k not in ("LD_PRELOAD", "FGPU_LIMITS_FILE")} | {
            "PYTHONPATH": os.pathsep.join(paths)
        }


def run_part(name: str, results: Results, environment: dict[str, str]) -> None:
    """Run one part; its tests write their lines, and a line for the whole ends it."""
    print(f"== {name}: {PARTS[name].about}", flush=True)
    began = time.monotonic()
    command = [sys.executable, "-m", "pytest", "-c", str(HERE / "pytest.ini"), "--rootdir", str(HERE)]
    command += [
        "--confcutdir",
        str(HERE),
        "-p",
        "no:cacheprovider",
        "-ra",
        "-q",
        str(HERE / f"test_{name}.py"),
    ]
    more = {"FGPU_GPU_RESULTS": str(results.path), "FGPU_GPU_PART": name}
    more |= {"FGPU_GPU_MACHINE": json.dumps(results.machine), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    # The checks end when the other end is closed, as it is when this process is killed.
    watched, held = os.pipe()
    more["FGPU_GPU_WATCHED"] = str(watched)
    process = subprocess.Popen(
        command, env=environment | more, cwd=ROOT, start_new_session=True, pass_fds=[watched]
    )
    os.close(watched)
    broken, why = True, ""
    try:
        if (status := process.wait(timeout=LIMIT_S)) not in (0, 1):
            why = f"pytest ended with {status}"
        else:
            broken = False
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        why = f"it did not end within {LIMIT_S} s"
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise
    finally:
        os.close(held)
    lines = [line for line in results.lines() if line["part"] == name]
    if not lines and not why:
        broken, why = True, "no check was begun; where pytest is missing, carry it (--list)"
    verdicts = [line["verdict"] for line in lines]
    if REFUTED in verdicts:
        verdict = REFUTED
    elif why or PROVED not in verdicts or any(line.get("broken") for line in lines):
        verdict = NOT_RUN
    else:
        verdict = PROVED
    if not why:
        why = ", ".join(
            f"{verdicts.count(each)} {each}" for each in (PROVED, REFUTED, NOT_RUN) if each in verdicts
        )
    seconds = round(time.monotonic() - began, 1)
    results.add(name, WHOLE, verdict, why=why, seconds=seconds, **({"broken": True} if broken else {}))
    print(f"== {name}: {verdict} in {seconds} s ({why})", flush=True)


def compile_programs() -> None:
    """Compile the C programs; without a compiler what was carried has to do."""
    includes = [f"-I{ROOT / 'isolation' / name}" for name in ("include", "libfgpu", "tests")]
    CARRIED.mkdir(parents=True, exist_ok=True)
    if shutil.which("gcc") is None:
        if lacking := [name for name in PROGRAMS if not (CARRIED / name).exists()]:
            raise SystemExit(
                f"gpu-check: there is no gcc, and {', '.join(lacking)} was not carried: see --list"
            )
        return
    for name, sources in PROGRAMS.items():
        paths = [ROOT / source for source in sources]
        program = CARRIED / name
        draft = program.with_suffix(f".{os.getpid()}")
        command: list[Any] = ["gcc", "-O2", "-D_GNU_SOURCE=", *includes, "-o", draft, *paths, "-ldl"]
        subprocess.run(command, check=True)
        draft.replace(program)


def carry() -> None:
    """Make the files that `listing` names for the other machine."""
    subprocess.run([sys.executable, str(ROOT / "scripts" / "build_isolation.py")], check=True)
    compile_programs()
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:"]
    command += ["--python-version", "3.12", "--implementation", "cp", "-d", str(CARRIED / "wheels")]
    for number in (35, 34, 31, 28, 27, 24, 17):
        command += ["--platform", f"manylinux_2_{number}_x86_64"]
    subprocess.run([*command, "--platform", "manylinux2014_x86_64", *WHEELS], check=True)
    print(listing())


def listing() -> str:
    """Return the parts with their times, and the files to carry to another machine."""
    lines = [f"{name:12} {part.minutes:3g} min  {part.about}" for name, part in PARTS.items()]
    lines += [
        "",
        "To carry to a machine without network (beside the tracked files): made by make gpu-check CARRY=1",
    ]
    for folder, about in (
        (NATIVE, "libfgpu, probes, commands"),
        (CARRIED, "programs, and wheels for Python 3.12"),
    ):
        size = (
            sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) if folder.exists() else 0
        )
        made = f"{size / 2**20:.1f} MiB" if size else "not made yet"
        lines.append(f"{folder.relative_to(ROOT)!s:22} {made:>12}  {about}")
    lines.append(f"Wheels are used for what that Python lacks: {', '.join(WHEELS)}.")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
