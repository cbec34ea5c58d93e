"""Checks of libfgpu that need a real GPU, part by part: `make gpu-check`. Standard library only.

check.py [PART ...]         run these parts, or all, on this machine's first GPU
check.py PART::WORD ...     of a part, only the tests whose name has this word: hub::memory, overhead::eager-modules
check.py --minutes 10       the parts that fit into this time, in order of worth
check.py --list             the parts with their times, and what to carry to a machine without network
check.py --carry            make what must be carried: needs gcc, make and pip
check.py --simulated        a rehearsal on the simulated driver; its results are marked and count for nothing

Each result is a line of JSON in bench/results/gpu-check-DATE-MODEL.jsonl (`--out FOLDER`), written at once, so
an interrupted run keeps its results. No part takes more than 100 s. What is missing for a part is said at the start,
a line for each thing, and only that part is left out. The GPU's settings stay as they are. The exit status is 0 if
nothing was refuted, 1 if a check was refuted or broke, 2 if nothing can run at all.

To add a part: an entry in PARTS, a file test_NAME.py, and its name in the table of docs/isolation.md.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import importlib.metadata
import importlib.util
import json
import math
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
HUB_WHEELS = (
    "jupyterhub>=6.1,<7",
    "jupyter-server>=2.4,<3",
    "ipykernel>=6.29",
    "SQLAlchemy>=2.1,<2.2",
    "alembic>=1.16,<2",
    "pydantic>=2.9,<3",
    "psutil>=6",
    "docker>=7.1,<8",
    "dockerspawner>=14,<15",
    "lazy-loader>=0.4,<1",
    "click>=8.2,<9",
    "truststore>=0.10,<1",
)
"""What the part `hub` needs, with their dependencies: the Hub, the scheduler, and the server of a session. The machine
must have numpy: PyTorch comes with it, and two would be in each other's way."""
HUB_ARCHIVE = CARRIED / "hub.zip"
NEEDLESS = re.compile(
    r"^debugpy/|/(static/(components|lab)|tests?|docs?)/|\.(map|pyi|exe|dll)$|^(bin|share/jupyter/lab)/"
)
"""In the packages of the part `hub`: what is never read there."""
CARRIED_PYTHON = "3.12"
LIMIT_S = 100
PROVED, REFUTED, NOT_RUN = "PROVED", "REFUTED", "NOT RUN"
WHOLE = "the whole part"
WIPE_ON_FORK, OFD_SETLK = 18, 37


@dataclass(frozen=True)
class Part:
    """Tests of one file, test_NAME.py unless ``file`` names another; of these, those that have ``word`` in their name.

    ``seconds`` is for planning, as measured on an H100. ``needs`` are modules without which it cannot run.
    """

    seconds: int
    about: str
    file: str = ""
    word: str = ""
    needs: tuple[str, ...] = ()


HUB_NEEDS = (
    "numpy",
    "jupyterhub",
    "jupyter_server",
    "ipykernel",
    "sqlalchemy",
    "alembic",
    "pydantic",
    "psutil",
)
PARTS = {
    "facts": Part(3, "kernel, driver and tools; what a context takes"),
    "addresses": Part(2, "every hooked address is one that the driver exports"),
    "reports": Part(6, "CUDA, NVML, nvidia-smi, nvidia-ml-py and cuda-bindings see the slice"),
    "processes": Part(5, "sums over processes; what is charged against what NVML counts"),
    "kills": Part(11, "how long the driver keeps memory after a kill"),
    "verify": Part(13, "fgpu-verify behind a read-only preload"),
    "hub": Part(90, "the whole product: sizes, out of memory, shares, a queue, meters", needs=HUB_NEEDS),
    "shares": Part(65, "shares of 10 to 75 %, alone, with kernels of one length"),
    "elastic": Part(30, "compute that is lent: an owner who comes back"),
    "frameworks": Part(70, "PyTorch, JAX, CuPy: out of memory at the slice, and they go on"),
    "park": Part(95, "parked sessions: 2 and 16 GiB to the host and back, and their calls meanwhile"),
    "mixed": Part(75, "shares beside others: kernels of other lengths, several processes"),
    "cells": Part(85, "cells of notebooks with work for 10 % of the time, compute lent", word="[10]"),
    "overhead": Part(50, "memory that nobody charged: programs, frameworks, stacks"),
    "product": Part(36, "the rate of a large matrix product in a quarter and in half of the time"),
    "cost": Part(40, "launch, alloc and free, start of a process"),
    "changing": Part(75, "kernels of one function that take now short, now long", file="long", word="change"),
    "speed": Part(55, "a matrix product in a slice with all of the compute", file="product_speed"),
    "long": Part(80, "kernels of seconds", word="seconds"),
    "storm": Part(75, "200 processes killed at random instants"),
    "mps": Part(4, "NVIDIA's MPS daemon: its caps of memory and SMs, a killed client"),
    "rounding": Part(12, "allocations of 512 B to 3 MiB"),
    "cells19": Part(65, "cells with work for 19 % of the time", file="cells", word="[19]"),
    "cells5": Part(65, "cells with work for 5 % of the time", file="cells", word="[5]"),
}
"""In order of worth: a short loan runs the first ones."""


def main() -> int:
    """Run what is asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", metavar="PART[::WORD]", help=" ".join(PARTS))
    parser.add_argument("--minutes", type=float, help="run only what fits into this time")
    parser.add_argument("--list", action="store_true", help="say what there is, and what to carry")
    parser.add_argument("--carry", action="store_true", help="make what is to be carried")
    parser.add_argument("--simulated", action="store_true", help="rehearse on the simulated driver")
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results", help="folder of the results")
    given = parser.parse_args()
    for ended_by in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(ended_by, lambda number, _: sys.exit(128 + number))
    parts = [(name, word) for name, _, word in (each.partition("::") for each in given.parts or PARTS)]
    if unknown := [name for name, _ in parts if name not in PARTS]:
        parser.error(f"no part is called {unknown[0]!r}; there are: {' '.join(PARTS)}")
    if given.minutes is not None and given.minutes <= 0:
        parser.error(f"--minutes is {given.minutes:g}; it must be more than 0, for example 10 or 4")
    ends_at = None if given.minutes is None else time.monotonic() + 60 * given.minutes
    if given.list:
        print(listing([name for name, _ in parts], given.minutes))
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
        return run(parts, given.out, ends_at)


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


def run(parts: list[tuple[str, str]], out: Path, ends_at: float | None) -> int:
    """Run parts one after another, each with a word that chooses tests; return the exit status."""
    try:
        machine = machine_facts()
    except LookupError as e:
        print(f"gpu-check: nothing is run. {e}", file=sys.stderr)
        return 2
    results = Results(results_file(out, machine), machine)
    print(f"{machine['model']}, driver {machine['driver']}; results in {results.path}", flush=True)
    with prepared() as environment:
        lacking = missing_things([name for name, _ in parts], environment)
        for thing, names in lacking.items():
            print(f"gpu-check: {thing} is missing, so not run: {', '.join(names)}", flush=True)
        for name, word in parts:
            left_s = math.inf if ends_at is None else ends_at - time.monotonic()
            if without := [thing for thing, names in lacking.items() if name in names]:
                why = f"{without[0]} is missing"
                results.add(name, WHOLE, NOT_RUN, why=why, seconds=0, broken=True)
            elif not fits(name, word, left_s):
                print(
                    f"== {name}: left out, as it takes {PARTS[name].seconds} s and {left_s:.0f} s are left",
                    flush=True,
                )
            else:
                run_part(name, word, results, environment, min(LIMIT_S, left_s))
    own = [line for line in results.lines() if line["name"] != WHOLE or line.get("broken")]
    wrong = [line for line in own if line["verdict"] == REFUTED or line.get("broken")]
    for line in wrong:
        print(f"{line['verdict']}: {line['part']}: {line['name']}: {line['why']}")
    for line in results.lines():
        if line["name"] == WHOLE:
            print(f"{line['part']:12} {line['verdict']:8} {line['seconds']:6.1f} s  {line['why']}")
    print(f"{'nothing' if not wrong else len(wrong)} refuted or broken")
    return 1 if wrong else 0


def fits(name: str, word: str, left_s: float) -> bool:
    """Return whether a part can be run to its end in this time. Single tests are tried while there is any."""
    return left_s >= (PARTS[name].seconds if not word else 1)


def missing_things(parts: list[str], environment: dict[str, str]) -> dict[str, list[str]]:
    """Return what is not on this machine, with the parts that cannot run without it."""
    modules = {"pytest": parts, **{need: [] for name in parts for need in PARTS[name].needs}}
    for name in parts:
        for need in PARTS[name].needs:
            modules[need].append(name)
    code = (
        "import importlib.util, sys; print(*[m for m in sys.argv[1:] if importlib.util.find_spec(m) is None])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *modules],
        env=with_hub(environment),
        capture_output=True,
        text=True,
        check=True,
    )
    found = {f"the Python package {m}": modules[m] for m in done.stdout.split() if m in ("pytest", "numpy")}
    if packages := [m for m in done.stdout.split() if m not in ("pytest", "numpy")]:
        thing = str(HUB_ARCHIVE.relative_to(ROOT))
        if HUB_ARCHIVE.exists():
            thing = f"of the packages for this Python, which is not {CARRIED_PYTHON}, {' '.join(packages)}"
        found[thing] = modules[packages[0]]
    for path in (NATIVE / name for name in ("libfgpu.so", "probe", "probe-static")):
        if not path.exists():
            found[str(path.relative_to(ROOT))] = parts
    for program in PROGRAMS:
        if not (CARRIED / program).exists():
            found[f"{(CARRIED / program).relative_to(ROOT)}, and gcc to compile it,"] = parts
    return found


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
        own = f"{sys.version_info[0]}.{sys.version_info[1]}"
        if own == CARRIED_PYTHON and HUB_ARCHIVE.exists() and importlib.util.find_spec("jupyterhub") is None:
            zipfile.ZipFile(HUB_ARCHIVE).extractall(Path(site) / "hub")
            # The tree itself is not installed there, and the Hub asks for its version.
            version = json.loads((ROOT / "labextension" / "package.json").read_text())["version"]
            about = Path(site) / "hub" / f"fgpuspawner-{version}.dist-info" / "METADATA"
            about.parent.mkdir()
            about.write_text(f"Metadata-Version: 2.1\nName: fgpuspawner\nVersion: {version}\n")
        paths = [site, *filter(None, [os.environ.get("PYTHONPATH")])]
        yield {k: v for k, v in os.environ.items() if k not in ("LD_PRELOAD", "FGPU_LIMITS_FILE")} | {
            "PYTHONPATH": os.pathsep.join(paths),
            "FGPU_GPU_HUB_SITE": str(Path(site) / "hub"),
        }


def with_hub(environment: dict[str, str]) -> dict[str, str]:
    """Return the environment with the packages for the part `hub`, if they were carried."""
    return environment | {"PYTHONPATH": f"{environment['PYTHONPATH']}:{environment['FGPU_GPU_HUB_SITE']}"}


def run_part(name: str, word: str, results: Results, environment: dict[str, str], limit_s: float) -> None:
    """Run one part; its tests write their lines, and a line for the whole ends it."""
    part = PARTS[name]
    print(f"== {name}: {part.about}", flush=True)
    began = time.monotonic()
    command = [sys.executable, "-m", "pytest", "-c", str(HERE / "pytest.ini"), "--rootdir", str(HERE)]
    command += [
        "--confcutdir",
        str(HERE),
        "-p",
        "no:cacheprovider",
        "-ra",
        "-q",
        str(HERE / f"test_{part.file or name}.py"),
    ]
    more = {"FGPU_GPU_RESULTS": str(results.path), "FGPU_GPU_PART": name}
    more |= {"FGPU_GPU_OF_PART": part.word, "FGPU_GPU_WORD": word}
    more |= {"FGPU_GPU_MACHINE": json.dumps(results.machine), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    # The checks end when the other end is closed, as it is when this process is killed.
    watched, held = os.pipe()
    more["FGPU_GPU_WATCHED"] = str(watched)
    process = subprocess.Popen(
        command,
        env=(with_hub(environment) if part.needs else environment) | more,
        cwd=ROOT,
        start_new_session=True,
        pass_fds=[watched],
    )
    os.close(watched)
    broken, why = True, ""
    try:
        if (status := process.wait(timeout=limit_s)) not in (0, 1):
            why = f"pytest ended with {status}"
        else:
            broken = False
    except subprocess.TimeoutExpired:
        why = f"it did not end within {limit_s:.0f} s"
    finally:
        os.close(held)
        process.wait()
    lines = [line for line in results.lines() if line["part"] == name]
    if not lines and not why:
        broken, why = (
            True,
            f"no check was begun: no test has {word!r} in its name" if word else "no check was begun",
        )
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
    platform = ["--only-binary=:all:", "--python-version", CARRIED_PYTHON, "--implementation", "cp"]
    for number in (35, 34, 31, 28, 27, 24, 17):
        platform += ["--platform", f"manylinux_2_{number}_x86_64"]
    platform += ["--platform", "manylinux2014_x86_64"]
    pip = [sys.executable, "-m", "pip"]
    subprocess.run(
        [*pip, "download", "-q", "--no-deps", *platform, "-d", str(CARRIED / "wheels"), *WHEELS], check=True
    )
    with tempfile.TemporaryDirectory() as site:
        subprocess.run(
            [*pip, "install", "-q", "--no-compile", *platform, "--target", site, *HUB_WHEELS], check=True
        )
        draft = HUB_ARCHIVE.with_suffix(f".{os.getpid()}")
        with zipfile.ZipFile(draft, "w", zipfile.ZIP_DEFLATED) as archive:
            for path in sorted(Path(site).rglob("*")):
                name = str(path.relative_to(site))
                if path.is_file() and not NEEDLESS.search(name):
                    archive.write(path, name)
        draft.replace(HUB_ARCHIVE)
    print(listing(list(PARTS), None))


def listing(parts: list[str], minutes: float | None) -> str:
    """Return the parts with their times, those that fit into the minutes marked, and the files to carry."""
    lines, left_s = [], math.inf if minutes is None else 60 * minutes
    for name in parts:
        taken = fits(name, "", left_s)
        left_s -= PARTS[name].seconds if taken else 0
        lines.append(
            f"{name:12} {PARTS[name].seconds:3} s  {'' if taken else '(no time) '}{PARTS[name].about}"
        )
    lines += [
        "",
        "To carry to a machine without network (beside the tracked files): made by make gpu-check CARRY=1",
    ]
    for path, about in (
        (NATIVE, "libfgpu, probes, commands"),
        *((CARRIED / name, "a program in C") for name in PROGRAMS),
        (CARRIED / "wheels", f"packages for Python {CARRIED_PYTHON}: {', '.join(WHEELS)}"),
        (HUB_ARCHIVE, f"packages for Python {CARRIED_PYTHON}, for the part hub"),
    ):
        files = path.rglob("*") if path.is_dir() else [path]
        size = sum(each.stat().st_size for each in files if each.is_file())
        made = f"{size / 2**20:.1f} MiB" if size else "not made yet"
        lines.append(f"{path.relative_to(ROOT)!s:30} {made:>12}  {about}")
    lines.append("Packages are used for what that Python lacks.")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
