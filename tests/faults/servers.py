"""The programs that stand for a session's server in these tests."""

from __future__ import annotations

from pathlib import Path

import pytest

MINI = Path(__file__).parents[1] / "hub" / "miniserver.py"
ECHO = Path(__file__).parent / "echoserver.py"
QUICK = "c.FGPUSpawner.stop_timeout_s = c.LocalFGPUSpawner.stop_timeout_s = 2\n"

MACHINES = pytest.mark.xdist_group("machines")
ON_ONE_ENGINE = pytest.mark.parametrize(
    "kind",
    [
        "local",
        pytest.param("docker", marks=pytest.mark.slow),
        pytest.param("machines", marks=[pytest.mark.slow, MACHINES]),
    ],
    indirect=True,
)
"""Of what Hub, proxy and database do whatever sessions run in: with processes, and with all kinds in the slow tier."""


def server_lines(kind: str, source: Path) -> str:
    """Return the lines of a configuration that make a program the sessions' server."""
    if kind == "local":
        return f"c.Spawner.cmd = ['python', {str(source)!r}]\n"
    read = f"from pathlib import Path\nsource = Path({str(source)!r}).read_text()\n"
    return read + "c.Spawner.cmd = ['/opt/fgpu/bin/python', '-c', source]\n"
