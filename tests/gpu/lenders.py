"""Programs in sessions that lend each other compute."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

WARM_UP_S = 3.0
Start = Callable[[str, bool | None, list[str]], "subprocess.Popen[str]"]
"""Starts a program in a session with these slots: that lends, that does not, or (None) without libfgpu."""


def milliseconds(process: subprocess.Popen[str]) -> list[float]:
    output = process.communicate()[0]
    if process.returncode:
        raise RuntimeError(f"a program ended with {process.returncode}")
    return [float(line) for line in output.split()]
