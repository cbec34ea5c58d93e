"""What `make test` ends with is what its tests end with."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PYTHON = """#!/bin/sh
case "$*" in *--durations*) exit "$STATUS_OF_TESTS" ;; esac
"""
PARTS = """#!/bin/sh
case "$1" in passed) echo "$@" >>passed ;; names | changed) echo docker ;; esac
"""


@pytest.mark.parametrize(
    ("of_tests", "arguments", "ended", "recorded"),
    [
        (0, [], 0, True),
        (1, [], 1, False),
        (5, [], 5, False),
        (5, ["-k", "one"], 0, False),
        (2, ["-x"], 2, False),
    ],
)
def test_failed_tests_fail_the_command_and_record_no_part(
    tmp_path: Path, of_tests: int, arguments: list[str], ended: int, recorded: bool
) -> None:
    programs = {f".venv/bin/{name}": "#!/bin/sh\n" for name in ("ruff", "mypy", "lint-imports", "proselint")}
    programs |= {".venv/bin/jlpm": "#!/bin/sh\n", ".venv/bin/python": PYTHON, "tests/parts.py": PARTS}
    programs["tests/services.sh"] = '#!/bin/sh\n[ "$1" = stop ] || : >"$5"\n'
    for name, text in programs.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    for folder in ("scripts", "labextension", "docs"):
        (tmp_path / folder).mkdir()
    shutil.copy(ROOT / "scripts/test.sh", tmp_path / "scripts")
    env = {"PATH": os.environ["PATH"], "CI": "true", "STATUS_OF_TESTS": str(of_tests)}
    command = ["scripts/test.sh", *(["", *arguments] if arguments else [])]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == ended, done.stdout + done.stderr
    assert (tmp_path / "passed").exists() is recorded
