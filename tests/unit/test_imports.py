"""What a process does not need it does not load. `lint-imports` holds which module imports which."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import fgpu_scheduler

ROOT = Path(__file__).parents[2]
HEAVY = {
    "alembic", "cryptography", "docker", "jinja2", "jupyterhub", "prometheus_client", "psutil", "pydantic",
    "sqlalchemy", "tornado", "traitlets",
}  # fmt: skip
"""What a Hub needs: each takes from a tenth of a second to half of one to load."""


@pytest.mark.parametrize(
    ("modules", "without"),
    [
        ("fgpuspawner.engines.local.spawner", {"docker", "dockerspawner"}),
        ("fgpuspawner.engines.local.engine", {"docker", "dockerspawner"}),
        # JupyterHub's part of them reads the service's environment when it is imported.
        (
            "fgpuspawner.engines.docker.spawner, fgpuspawner.engines.local.spawner",
            {"jupyterhub.services.auth", "fgpuspawner.service.handler"},
        ),
    ],
)
def test_hub_loads_no_docker_for_local_sessions_and_nothing_of_the_service(
    modules: str, without: set[str]
) -> None:
    ask = f"import sys, fgpuspawner.config, {modules}; print(*sys.modules)"
    found = subprocess.run([sys.executable, "-c", ask], cwd=ROOT, capture_output=True, text=True, check=True)
    assert without.isdisjoint(found.stdout.split())


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
