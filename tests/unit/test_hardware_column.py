"""The column of docs/isolation.md about real GPUs: filled from results of real GPUs only, and never by hand."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from test_docs import DOCS, ROOT, generator

REAL = {
    "model": "NVIDIA H200",
    "driver": "580.1",
    "simulated": False,
    "run": "2026-12-01T10:00:00Z",
}
WHOLE = "the whole part"


def shown(folder: Path, *lines: dict[str, Any], parts: tuple[str, ...] = ("facts",), more: str = "") -> str:
    text = "".join(
        json.dumps({"part": "facts", "name": WHOLE, "verdict": "PROVED", **REAL, **line}) + "\n"
        for line in lines
    )
    (folder / "gpu-check-2026-12-01-x.jsonl").write_text(text + more)
    found: str = generator.on_hardware(list(parts), folder)
    return found


def test_a_proof_names_model_driver_and_date(tmp_path: Path) -> None:
    found = shown(tmp_path, {"name": "a"}, {})
    assert found == "NVIDIA H200, driver 580.1, 2026-12-01: `facts` PROVED"


def test_rehearsal_fills_no_cell(tmp_path: Path) -> None:
    assert shown(tmp_path, {"name": "a", "simulated": True}, {"simulated": True}) == "not run"
    assert shown(tmp_path, {"name": "a", "simulated": None}, {"simulated": None}) == "not run"


def test_one_refuted_check_refutes_the_part(tmp_path: Path) -> None:
    found = shown(tmp_path, {"name": "a"}, {"name": "b", "verdict": "REFUTED"}, {"verdict": "REFUTED"})
    assert found.endswith(": `facts` REFUTED (1 of 2 checks)")
    more = ({"name": "c", "verdict": "NOT RUN"}, {"name": "b", "verdict": "REFUTED"}, {})
    assert shown(tmp_path, *more).endswith(": `facts` REFUTED (1 of 2 checks, 1 not run)")


def test_what_was_not_run_is_said(tmp_path: Path) -> None:
    found = shown(tmp_path, {"name": "a"}, {"name": "b", "verdict": "NOT RUN"}, {}, parts=("facts", "storm"))
    assert found.endswith(": `facts` PROVED (1 of 2 checks not run); `storm` not run")
    assert shown(tmp_path, {"name": "b", "verdict": "NOT RUN"}, {}).endswith(": `facts` not run")


def test_single_checks_of_a_later_run_are_added_to_the_part(tmp_path: Path) -> None:
    later = {"run": "2026-12-02T10:00:00Z"}
    first = ({"name": "a", "verdict": "REFUTED"}, {"name": "b"}, {"name": "c", "verdict": "NOT RUN"}, {})
    left_out = {"name": "b", "verdict": "NOT RUN", "why": "left out", **later}
    found = shown(tmp_path, *first, {"name": "a", **later}, left_out, {"name": "c", **later}, later)
    assert found == "NVIDIA H200, driver 580.1, 2026-12-02: `facts` PROVED"


def test_interrupted_part_is_not_shown_as_complete(tmp_path: Path) -> None:
    found = shown(tmp_path, {"name": "a"}, more='{"part": "facts", "na')
    assert found.endswith(": `facts` PROVED (0 of 1 checks not run, ended early)")


def test_newer_run_replaces_an_older_one(tmp_path: Path) -> None:
    newer = {"run": "2026-12-02T10:00:00Z"}
    found = shown(tmp_path, {"name": "a", "verdict": "REFUTED"}, {}, {"name": "a", **newer}, newer)
    assert found == "NVIDIA H200, driver 580.1, 2026-12-02: `facts` PROVED"


def test_every_part_has_a_row_and_every_row_a_part_that_there_is() -> None:
    table = (DOCS / "isolation.md").read_text().partition(generator.HARDWARE_BEGIN)[2]
    table = table.partition(generator.HARDWARE_END)[0]
    named = {part for row in table.splitlines() for part in re.findall(r"`(\w+)`", row.rpartition(" | ")[2])}
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests/gpu/check.py"), "--list"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert named == {line.split()[0] for line in done.stdout.partition("\n\n")[0].splitlines()}
