"""Imports point down, the core is pure, the scheduler does not know the spawner, and who needs no Docker loads none."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import fgpu_scheduler

ROOT = Path(__file__).parents[2]
HEAVY = {
    "alembic", "cryptography", "docker", "jinja2", "jupyterhub", "numpy", "prometheus_client", "psutil", "pydantic",
    "sqlalchemy", "tornado", "traitlets",
}  # fmt: skip
"""What a Hub needs: each takes from a tenth of a second to half of one to load."""


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


def test_the_hubs_process_loads_no_handlers_of_the_service() -> None:
    # JupyterHub's part of them reads the service's environment when it is imported.
    modules = "fgpuspawner.config, fgpuspawner.engines.docker.spawner, fgpuspawner.engines.local.spawner"
    ask = f"import sys, {modules}; print(*sys.modules)"
    found = subprocess.run([sys.executable, "-c", ask], cwd=ROOT, capture_output=True, text=True, check=True)
    assert {"jupyterhub.services.auth", "fgpuspawner.service.handler"}.isdisjoint(found.stdout.split())


@pytest.mark.parametrize(
    ("words", "status", "without"),
    [
        (["--version"], 0, {*HEAVY, "requests"}),
        (["--help"], 0, {*HEAVY, "requests"}),
        (["nothing"], 2, {*HEAVY, "requests"}),
        (["list"], 2, HEAVY),
        (["run", "--fgpu", "0.5"], 2, HEAVY),
    ],
)
def test_user_commands_import_nothing_of_the_hub(words: list[str], status: int, without: set[str]) -> None:
    lines = f"""
import contextlib, os, sys
from fgpuspawner.cli.main import main
os.environ.pop("JUPYTERHUB_API_TOKEN", None)
with contextlib.redirect_stdout(sys.stderr):
    assert main({words!r}) == {status}
print(*{{name.partition(".")[0] for name in sys.modules}})
"""
    found = subprocess.run(
        [sys.executable, "-c", lines], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert set(found.stdout.split()) & without == set()


def test_every_public_name_of_the_scheduler_can_be_loaded() -> None:
    assert len(fgpu_scheduler.__all__) > 100
    assert [name for name in fgpu_scheduler.__all__ if not hasattr(fgpu_scheduler, name)] == []
    with pytest.raises(ImportError, match="cannot import name 'Nothing'"):
        from fgpu_scheduler import Nothing  # type: ignore[attr-defined]  # noqa: F401
