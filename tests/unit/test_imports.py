"""Imports point down, the core is pure, the scheduler does not know the spawner, and who needs no Docker loads none."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_every_import_contract_is_kept() -> None:
    env = {**os.environ, "PYTHONPATH": f"{ROOT / 'scheduler'}{os.pathsep}{ROOT}"}
    script = Path(sys.executable).with_name("lint-imports")
    found = subprocess.run(
        [sys.executable, str(script), "--no-cache", "--config", str(ROOT / "pyproject.toml")],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert found.returncode == 0, found.stdout + found.stderr
    assert "0 broken" in found.stdout


@pytest.mark.parametrize("module", ["fgpuspawner.engines.local.spawner", "fgpuspawner.engines.local.engine"])
def test_a_hub_of_local_processes_loads_nothing_of_docker(module: str) -> None:
    ask = f"import sys, fgpuspawner.config, {module}; print(*{{name.partition('.')[0] for name in sys.modules}})"
    found = subprocess.run([sys.executable, "-c", ask], cwd=ROOT, capture_output=True, text=True, check=True)
    assert {"docker", "dockerspawner"}.isdisjoint(found.stdout.split())
