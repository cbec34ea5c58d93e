"""Worlds with simulated time (isolation/tests/throttle_world.c) around the shipped throttle."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PARTS = ("batches", "sentinel", "gate", "account", "slots", "lending", "launch")
"""All but clock.c and words.c: the world has a clock and words of its own."""


@dataclass(frozen=True, slots=True)
class Tenant:
    """What came of one: percent of the device, and how far any stretch of some ms was below and above its share.

    ``lent_ms`` is what it was lent. ``back`` is its percent in the first 50, 200, 1000, 5000 and 60,000 ms, counted from
    100 ms after it began. ``stretched`` is how many times as long its cells took as on a whole device, all together.
    """

    share: float
    kernels: int
    paid_ms: float
    busy_ms: float
    off_ms: dict[int, tuple[float, float]]
    lent_ms: float
    cells: int
    stretched: float
    cells_stretched: float
    back: list[float]


@dataclass(frozen=True, slots=True)
class Outcome:
    tenants: list[Tenant]
    disturbed: int


World = Callable[..., Outcome]


def build_world(compile_c: Callable[..., Path]) -> World:
    """Return how to run a world: ``world("slots=0-25,kernel_us=500", ..., seconds=10)``, a text for each tenant."""
    throttle = compile_c(
        "libfgpu/throttle.c", "-shared", "-fPIC", "-Wl,-Bsymbolic", *(f"libfgpu/{part}.c" for part in PARTS)
    )
    program = compile_c("tests/throttle_world.c", "-rdynamic", "-ldl", "-lm", "-pthread")

    def world(*tenants: str, **settings: Any) -> Outcome:
        words = [f"{name}={value}" for name, value in settings.items()]
        words.extend(f"tenant:{tenant}" for tenant in tenants)
        done = subprocess.run(
            [program, throttle, *words], capture_output=True, text=True, check=False, timeout=100
        )
        assert done.returncode == 0, f"{words}: {done.returncode} {done.stderr}"
        found = json.loads(done.stdout)
        for tenant in found["tenants"]:
            tenant["off_ms"] = {int(ms): tuple(off) for ms, off in tenant["off_ms"].items()}
        return Outcome([Tenant(**tenant) for tenant in found["tenants"]], found["disturbed"])

    return world
