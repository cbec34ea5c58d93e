"""Tests that are skipped: where something could be installed, continuous integration says that it was not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
ONE = "unit/cli/test_completion_command.py::test_zsh_and_fish_complete_too[fish]"


@pytest.mark.parametrize(("ci", "told"), [("true", "1 failed"), ("", "1 skipped")])
def test_a_test_whose_program_is_not_installed_is_skipped_and_with_ci_true_fails(ci: str, told: str) -> None:
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", TESTS / ONE]
    env = {**os.environ, "CI": ci, "PATH": os.devnull}
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert told in done.stdout.splitlines()[-1], done.stdout + done.stderr
    assert "fish is not installed; apt-get install fish" in done.stdout
