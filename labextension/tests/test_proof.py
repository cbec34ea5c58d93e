"""The panel's run of fgpu-verify: what it shows, one at a time, and bounds of time and output."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest
from support import Caller

from jupyterlab_fgpu.app import FGPUStatus
from jupyterlab_fgpu.proof import MOST_BYTES, Proof

CHECKS = [
    {"name": "allocate", "what": "2 MiB past the limit", "verdict": "PROVED", "text": "refused"},
    {"name": "static", "what": "a static program", "verdict": "BYPASSED (expected)", "text": "-"},
    {"name": "raw", "what": "system calls", "verdict": "NOT TRIED", "text": "no GPU"},
]
FAILED = {"name": "x", "what": "x", "verdict": "FAILED", "text": "8192 MiB"}


def program(folder: Path, code: str) -> str:
    """Return a program that stands for fgpu-verify."""
    file = folder / "program.py"
    file.write_text("import os, sys, time, json\n" + code)
    return str(file)


def says(folder: Path, checks: list[dict[str, str]]) -> str:
    return program(folder, f"print(json.dumps({{'checks': {checks!r}}}))")


async def over(proof: Proof) -> dict[str, Any]:
    """Begin a run, and return what is told after it."""
    proof.begin()
    while (told := proof.last_run())["state"] == "running":
        await asyncio.sleep(0.02)
    return told


async def test_before_the_first_run_there_is_nothing(caller: Caller) -> None:
    code, told = await caller.call("proof")
    assert (code, told["state"], told["checks"]) == (200, "none", [])


@pytest.mark.parametrize(("more", "state"), [([], "held"), ([FAILED], "failed")])
async def test_the_checks_are_told_with_whether_each_held(
    caller: Caller, extension: FGPUStatus, tmp_path: Path, more: list[dict[str, str]], state: str
) -> None:
    extension.proof = Proof(program=says(tmp_path, CHECKS + more))
    code, told = await caller.call("proof", method="POST")
    assert (code, told["state"]) == (200, "running")
    while told["state"] == "running":
        _, told = await caller.call("proof")
    assert (told["state"], told["problem"]) == (state, None)
    states = [check["state"] for check in told["checks"]]
    assert states == ["held", "bypassed", "not tried", *["failed"] * len(more)]
    assert told["checks"][0]["text"] == "refused"


async def test_who_asks_while_it_runs_gets_the_same_run(tmp_path: Path) -> None:
    count = tmp_path / "count"
    counts = f"open({str(count)!r}, 'a').write('x')\n"
    code = counts + f"print(json.dumps({{'checks': {CHECKS!r}}}))"
    proof = Proof(program=program(tmp_path, code))
    proof.begin()
    proof.begin()
    assert (await over(proof))["state"] == "held"
    assert count.read_text() == "x"
    await over(proof)
    assert count.read_text() == "xx"


async def test_a_run_without_an_end_is_ended_with_all_that_it_began(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    writes = f"open({str(pid)!r}, 'a').write(f'{{os.getpid()}}\\n')"
    code = f"os.fork()\n{writes}\ntime.sleep(600)"
    told = await over(Proof(program=program(tmp_path, code), within_s=1.5))
    assert (told["state"], told["problem"]) == ("unknown", "fgpu-verify gave no answer in 1.5 s.")
    for number in pid.read_text().split():
        # A zombie without a waiting parent runs no program.
        stat = Path(f"/proc/{number}/stat")
        assert not stat.exists() or stat.read_text().rsplit(")", 1)[1].split()[0] == "Z"


@pytest.mark.parametrize(
    ("code", "problem"),
    [
        ("sys.exit('fgpu-verify: this is no session')", "fgpu-verify: this is no session"),
        ("print('{')", "fgpu-verify said nothing that can be shown."),
        ("print('{}')", "fgpu-verify said nothing that can be shown."),
        (f"print('[' * {4 * MOST_BYTES})", "fgpu-verify said nothing that can be shown."),
    ],
)
async def test_what_cannot_be_shown_is_said(tmp_path: Path, code: str, problem: str) -> None:
    told = await over(Proof(program=program(tmp_path, code)))
    assert (told["state"], told["problem"], told["checks"]) == ("unknown", problem, [])


async def test_the_program_is_not_given_the_servers_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUPYTERHUB_API_TOKEN", "secret")
    seen = tmp_path / "seen"
    code = f"open({str(seen)!r}, 'w').write(json.dumps(dict(os.environ)))"
    await over(Proof(program=program(tmp_path, code)))
    environment = json.loads(seen.read_text())
    assert "JUPYTERHUB_API_TOKEN" not in environment
    assert environment["PATH"] == os.environ["PATH"]
