"""Where and on what a measurement was made: hardware, versions, commit, load."""

from __future__ import annotations

import asyncio
import os
import platform
import subprocess
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import docker
import psutil

ROOT = Path(__file__).parents[1]
PACKAGES = ("jupyterhub", "dockerspawner", "docker", "tornado", "SQLAlchemy", "traitlets", "aiohttp")


def machine() -> dict[str, Any]:
    """Return what the figures depend on."""
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "memory_mib": psutil.virtual_memory().total // 2**20,
        "kernel": platform.release(),
        "python": platform.python_version(),
        "docker": _docker_version(),
        "packages": {name: _version(name) for name in PACKAGES},
    }


def load() -> dict[str, Any]:
    """Return the load averages (1, 5, 15 minutes) and how busy the CPUs are for two seconds from now."""
    return {
        "average": [round(value, 2) for value in os.getloadavg()],
        "busy_percent": psutil.cpu_percent(interval=2),
    }


async def quiet(*, below_percent: float = 20, within_s: float = 15) -> float:
    """Wait, at most this long, until the CPUs have been less busy for half a second; return how busy they are.

    Other programs may use this machine, and the rest of one measurement must not count in the next.
    """
    deadline = time.monotonic() + within_s
    psutil.cpu_percent()
    while True:
        await asyncio.sleep(0.5)
        busy = psutil.cpu_percent()
        if busy < below_percent or time.monotonic() > deadline:
            return busy


def source() -> dict[str, Any]:
    """Return the commit, and which of the product's files differ from it."""
    changed = _git("status", "--porcelain", "--", "fgpuspawner", "scheduler", "images")
    return {"commit": _git("rev-parse", "HEAD"), "changed": changed.splitlines()}


def _git(*words: str) -> str:
    try:
        done = subprocess.run(
            ["git", *words], cwd=ROOT, capture_output=True, text=True, check=True, timeout=20
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip("\n")


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


def _docker_version() -> str:
    try:
        client = docker.from_env(timeout=10)
        try:
            return str(client.version()["Version"])
        finally:
            client.close()
    except docker.errors.DockerException:
        return ""


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""
