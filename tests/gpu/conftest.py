"""The parts of check.py as tests: each result becomes a line of its file. Not collected without it: `make gpu-check`."""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest
from check import CARRIED, NATIVE, NOT_RUN, PROVED, REFUTED, Results
from lenders import Start
from realgpu import ROOT, Gpu, Nvml, context_mib
from slices import HOLD, Slice

sys.path.append(str(ROOT / "bench" / "isolation"))

RESULTS = os.environ.get("FGPU_GPU_RESULTS")
LONGEST = 400

if RESULTS is None:
    collect_ignore_glob = ["test_*.py"]


SET_CHILD_SUBREAPER = 36


def pytest_sessionstart() -> None:
    """End these checks, with all that they have started, once check.py has ended, in whatever way."""
    if "FGPU_GPU_WATCHED" in os.environ:
        # A Hub's sessions leave its process group, and outlive it: they become children of this process.
        ctypes.CDLL(None).prctl(SET_CHILD_SUBREAPER, 1)
        threading.Thread(target=_end_with, args=[int(os.environ["FGPU_GPU_WATCHED"])], daemon=True).start()


ENDING = threading.Event()


def _end_with(watched: int) -> None:
    os.read(watched, 1)
    ENDING.set()
    end_children()
    os.killpg(0, signal.SIGKILL)


def end_children() -> None:
    """Kill all that descended from this process, until nothing new turns up."""
    while found := _descendants():
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def _descendants() -> list[int]:
    parents = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
            if state != "Z":
                parents[int(folder.name)] = int(parent)
    found = [os.getpid()]
    for pid in found:
        found += [child for child, parent in parents.items() if parent == pid]
    return found[1:]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave to a part what belongs to it, and of that what was asked for."""
    if RESULTS is None:
        return
    items[:] = [item for item in items if os.environ["FGPU_GPU_OF_PART"] in _name(item)]
    left_out = [item for item in items if os.environ["FGPU_GPU_WORD"] not in _name(item)]
    items[:] = [item for item in items if item not in left_out]
    if left_out and items:
        config.hook.pytest_deselected(items=left_out)


def _name(item: pytest.Item) -> str:
    # A word of the command line has no spaces.
    return item.name.replace(" ", "-")


def pytest_deselected(items: list[pytest.Item]) -> None:
    """Write down what was left out."""
    for item in items if RESULTS is not None else ():
        _add(item, NOT_RUN, why="left out")


def _add(item: pytest.Item, verdict: str, **more: Any) -> None:
    if ENDING.is_set():
        return  # What it uses has just been ended.
    results = Results(Path(os.environ["FGPU_GPU_RESULTS"]), json.loads(os.environ["FGPU_GPU_MACHINE"]))
    results.add(os.environ["FGPU_GPU_PART"], item.name, verdict, **more)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Write a result as soon as it is known."""
    report = yield
    if RESULTS is not None and (report.when == "call" or not report.passed):
        more: dict[str, Any] = {"figures": dict(item.user_properties), "seconds": round(report.duration, 2)}
        if report.passed:
            verdict = PROVED
        elif report.skipped:
            verdict = NOT_RUN
            more["why"] = str(call.excinfo.value) if call.excinfo else "skipped"
        else:
            error = call.excinfo.value if call.excinfo else None
            # A check that breaks refutes nothing; only one that looked and saw otherwise does.
            verdict = REFUTED if isinstance(error, AssertionError) else NOT_RUN
            why = f"{'' if verdict == REFUTED else 'the check broke: '}{error!s}"
            more["why"] = why if len(why) <= LONGEST else f"{why[: LONGEST // 2]} ... {why[-LONGEST // 2 :]}"
            more |= {} if verdict == REFUTED else {"broken": True}
        _add(item, verdict, **more)
    return report


@pytest.fixture(scope="session")
def nvml() -> Nvml:
    """The driver's own figures."""
    return Nvml()


@pytest.fixture(scope="session")
def gpu(nvml: Nvml) -> Gpu:
    """The first GPU."""
    return nvml.gpus()[0]


@pytest.fixture(scope="session")
def a_context_mib(gpu: Gpu, nvml: Nvml) -> int:
    """What a context takes; where NVML does not say it of a process, by what is used more."""
    found = context_mib(gpu)
    if isinstance(found, int):
        return found
    before = nvml.settled_mib(gpu.uuid)
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(HOLD)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        taken = nvml.settled_mib(gpu.uuid) - before
        process.kill()
    return math.ceil(taken)


@pytest.fixture
def slice_of(gpu: Gpu, tmp_path: Path) -> Callable[..., Slice]:
    """Makes slices of the GPU; every call makes another session."""
    made: list[Slice] = []

    def make(memory_mib: int = 4096, **settings: Any) -> Slice:
        made.append(Slice(tmp_path / f"session-{len(made)}", NATIVE, gpu, memory_mib=memory_mib, **settings))
        return made[-1]

    return make


@pytest.fixture(scope="module")
def bench(gpu: Gpu, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What the benches of bench/isolation measure with, on this GPU."""
    from sessions import Bench

    scratch = tmp_path_factory.mktemp("bench")
    for name in ("cells", "share", "launch", "memory"):
        (scratch / name).symlink_to(CARRIED / name)
    kept = {k: v for k, v in os.environ.items() if k != "CUDA_VISIBLE_DEVICES"}
    environment = kept | {"CUDA_VISIBLE_DEVICES": gpu.uuid}
    return Bench(scratch, NATIVE, gpu.uuid, gpu.memory_mib, gpu.name, gpu.driver, environment)


@pytest.fixture
def started(bench: Any, tmp_path: Path) -> Start:
    """Starts programs in sessions; `lenders.Start` says how."""
    words = tmp_path / "words"
    words.mkdir()

    def start(slots: str, lends: bool | None, command: list[str]) -> subprocess.Popen[str]:
        name = f"lender{len(list(bench.scratch.glob('lender*')))}"
        environment = bench.environment
        if lends is not None:
            environment = bench.session(name, slots, words=words if lends else None)
        command = [str(bench.scratch / command[0]), *command[1:]]
        return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)

    return start
