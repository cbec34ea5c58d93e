"""The checks for real GPUs (tests/gpu) in their one command: rehearsed on a simulated GPU, cut off, refuted."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import psutil
import pytest
from likecontainer import filter_calls
from sessionfolders import ROOT, MakePath

CHECK = ("tests", "gpu", "check.py")
NEEDED = (
    "tests/gpu",
    "tests/isolation",
    "bench/isolation",
    "isolation",
    "fgpuspawner/isolation",
    "fgpuspawner/native",
)


def start(
    out: Path, *parts: str, root: Path = ROOT, env_more: Mapping[str, str] = MappingProxyType({}), **more: Any
) -> subprocess.Popen[str]:
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "FGPU_", "CUDA_", "LD_"))}
    env |= env_more
    command = [sys.executable, str(root.joinpath(*CHECK)), *parts, "--simulated", "--out", str(out)]
    return subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **more
    )


def rehearse(out: Path, *parts: str, status: int = 0, **more: Any) -> str:
    """Return what a run says to its end."""
    process = start(out, *parts, **more)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == status, output
    return output


def lines(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for path in out.glob("*.jsonl") for line in path.read_text().splitlines()]


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_a_rehearsal_runs_parts_by_name_and_marks_what_it_writes(built: Path, tmp_path: Path) -> None:
    rehearse(tmp_path, "facts", "processes")
    found = lines(tmp_path)
    assert {line["simulated"] for line in found} == {True}
    assert [line["part"] for line in found if line["name"] == "the whole part"] == ["facts", "processes"]
    assert {line["verdict"] for line in found if line["name"] == "the whole part"} == {"PROVED"}
    assert {"NOT RUN"} == {line["verdict"] for line in found if "why" in line and "whole" not in line["name"]}
    figures = {name: value for line in found for name, value in line.get("figures", {}).items()}
    assert figures["context_mib"] == 300
    (path,) = tmp_path.glob("*.jsonl")
    assert path.name.startswith("gpu-check-rehearsal-")


@pytest.mark.parametrize("ended_by", [signal.SIGTERM, signal.SIGKILL], ids=lambda ended_by: ended_by.name)
def test_a_run_that_a_signal_ends_ends_its_checks_keeps_its_lines_and_the_next_adds_to_them(
    built: Path, tmp_path: Path, ended_by: signal.Signals
) -> None:
    process = start(tmp_path, "rounding", start_new_session=True)
    deadline = time.monotonic() + 120
    while len(list(tmp_path.glob("*.jsonl"))) == 0 or not lines(tmp_path):
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.02)
    (checks,) = children(process.pid)
    process.send_signal(ended_by)
    process.communicate()
    while Path(f"/proc/{checks}").exists():
        time.sleep(0.02)
    assert len(lines(tmp_path)) < 10, "the checks went on to their end"
    (path,) = tmp_path.glob("*.jsonl")
    kept = path.read_bytes()
    assert all(line["part"] == "rounding" and line["name"] != "the whole part" for line in lines(tmp_path))
    with path.open("ab") as file:
        file.write(b'{"part": "cut')
    rehearse(tmp_path, "facts")
    assert path.read_bytes().startswith(kept + b'{"part": "cut\n{')


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A tree that has only what is carried."""
    root = tmp_path / "carried"
    for name in NEEDED:
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__", "build"))
    return root


def test_a_limit_that_is_not_held_is_refuted(compile_c: MakePath, root: Path, tmp_path: Path) -> None:
    """With an empty library in libfgpu's place."""
    empty = tmp_path / "empty.c"
    empty.write_text("typedef int nothing;\n")
    (root / "fgpuspawner/native/libfgpu.so").unlink()
    shutil.copy(compile_c(empty, "-shared", "-fPIC"), root / "fgpuspawner/native/libfgpu.so")
    output = rehearse(tmp_path / "out", "processes", root=root, status=1)
    verdicts = {line["name"]: line["verdict"] for line in lines(tmp_path / "out")}
    assert verdicts["the whole part"] == "REFUTED"
    assert verdicts["test_the_limit_is_of_all_processes_together_and_survives_kills"] == "REFUTED"
    assert "REFUTED: processes: " in output


@pytest.mark.parametrize(
    ("call", "argument", "value", "words"),
    [(72, 1, 37, "no open-file-description locks"), (28, 2, 18, "no MADV_WIPEONFORK")],
    ids=["fcntl", "madvise"],
)
def test_it_stops_at_once_on_a_kernel_that_cannot_do_what_libfgpu_lives_on(
    tmp_path: Path, call: int, argument: int, value: int, words: str
) -> None:
    if os.uname().machine != "x86_64":
        pytest.skip("numbers of system calls for x86-64")
    program = [
        (0x20, 0, 0, 0),
        (0x15, 0, 3, call),
        (0x20, 0, 0, 16 + 8 * argument),
        (0x15, 0, 1, value),
        (0x06, 0, 0, 0x00050016),  # EINVAL
        (0x06, 0, 0, 0x7FFF0000),
    ]
    process = start(tmp_path, "facts", preexec_fn=lambda: filter_calls(program))
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 2
    assert words in output
    assert list(tmp_path.iterdir()) == []


def listed(*settings: str) -> str:
    command = ["make", "-s", "gpu-check", "LIST=1", *settings]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


def test_the_list_says_what_to_carry_and_which_parts_there_are() -> None:
    said = listed()
    for path in ("fgpuspawner/native", "build/gpu-check/storm", "build/gpu-check/hub.zip"):
        assert path in said
    files = re.findall(r"file=\"(\w+)\"", ROOT.joinpath(*CHECK).read_text())
    for test in (ROOT / "tests" / "gpu").glob("test_*.py"):
        name = test.stem.removeprefix("test_")
        assert name in files or f"{name} " in said


@pytest.mark.parametrize(("minutes", "parts"), [(4, {"hub", "shares"}), (10, {"hub", "mixed", "cells"})])
def test_a_plan_for_some_minutes_has_the_first_parts_that_fit_and_none_over_100_s(
    minutes: int, parts: set[str]
) -> None:
    lines = listed(f"MINUTES={minutes}").partition("\n\n")[0].splitlines()
    seconds = {line.split()[0]: int(line.split()[1]) for line in lines if "(no time)" not in line}
    assert max(seconds.values()) <= 100
    assert parts <= set(seconds)
    assert sum(seconds.values()) <= 60 * minutes
    assert len(seconds) < len(lines)


def test_a_word_chooses_single_tests_and_minutes_leave_out_what_does_not_fit(
    built: Path, tmp_path: Path
) -> None:
    output = rehearse(tmp_path, "rounding::512-100", "hub", "--minutes", "0.5")
    assert "hub: left out, as it takes" in output
    verdicts = {line["name"].partition("[")[2]: line["verdict"] for line in lines(tmp_path)}
    assert verdicts.pop("512-100000]") == "PROVED"
    assert verdicts.pop("") == "PROVED"
    assert set(verdicts.values()) == {"NOT RUN"}


def test_each_missing_thing_is_a_line_and_only_what_needs_it_is_left_out(root: Path, tmp_path: Path) -> None:
    (root / "fgpuspawner/native/probe").unlink()
    output = rehearse(tmp_path / "out", "facts", root=root, status=1)
    assert "gpu-check: fgpuspawner/native/probe is missing, so not run: facts\n" in output
    assert [(line["verdict"], line["why"]) for line in lines(tmp_path / "out")] == [
        ("NOT RUN", "fgpuspawner/native/probe is missing")
    ]


def test_a_killed_run_leaves_no_hub_and_no_session(built: Path, tmp_path: Path) -> None:
    """They would spoil what is measured next."""
    process = start(tmp_path / "out", "hub", env_more={"TMPDIR": str(tmp_path)}, start_new_session=True)
    deadline = time.monotonic() + 120

    def servers() -> list[psutil.Process]:
        found = []
        for process in of_folder(tmp_path):
            with contextlib.suppress(psutil.NoSuchProcess):
                found += [process] if "jupyterhub.singleuser" in process.cmdline() else []
        return found

    while not servers():
        assert time.monotonic() < deadline
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.05)
    process.kill()
    process.communicate()
    while of_folder(tmp_path):
        assert time.monotonic() < deadline, of_folder(tmp_path)
        time.sleep(0.05)


def of_folder(folder: Path) -> list[psutil.Process]:
    """Return the processes that use a folder for temporary files."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("TMPDIR") == str(folder) or str(folder) in process.cwd():
                found.append(process)
    return found
