"""`mutants.toml` lists defects. Each is put into a copy of the source, and a test must fail."""

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = "scheduler/fgpu_scheduler"
MUTANTS = tomllib.loads((Path(__file__).parent / "mutants.toml").read_text())["mutant"]
LEAST_NOTICED = 0.9


def noticed(mutant: dict[str, object], folder: Path) -> bool:
    copy = folder / "copy"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(ROOT / PACKAGE, copy / "fgpu_scheduler", ignore=shutil.ignore_patterns("__pycache__"))
    path = copy / "fgpu_scheduler" / str(mutant["file"])
    path.write_text(path.read_text().replace(str(mutant["old"]), str(mutant["new"])))
    env = {**os.environ, "PYTHONPATH": str(copy)}
    options = ["-x", "-q", "-p", "no:cacheprovider", "-k", "not postgresql"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *mutant["tests"]],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=600,
    )
    # 0: all passed; 1: some failed. Any other code is no result for the mutant.
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return done.returncode == 1


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant["name"])
def test_source_line_of_each_mutant_is_there_once(mutant):
    assert (ROOT / PACKAGE / mutant["file"]).read_text().count(mutant["old"]) == 1


@pytest.mark.slow
def test_unchanged_product_passes_every_check(tmp_path):
    tests = sorted({test for mutant in MUTANTS for test in mutant["tests"]})
    assert not noticed({"file": "__init__.py", "old": "", "new": "", "tests": tests}, tmp_path)


@pytest.mark.slow
def test_nine_of_ten_mutants_are_noticed(tmp_path):
    survivors = [mutant["name"] for mutant in MUTANTS if not noticed(mutant, tmp_path)]
    share = 1 - len(survivors) / len(MUTANTS)
    print(f"{share:.0%} of {len(MUTANTS)} mutants are noticed; survivors: {survivors}")
    assert share >= LEAST_NOTICED, survivors
