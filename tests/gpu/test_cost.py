"""What libfgpu costs, against the targets of bench/isolation: with it and without it, in turns."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import launch
import overhead
import pytest
from slices import Gpu

ROUNDS = 7
LIMITS = {"alloc-free": 300.0, "start": 1.0, "start of a CUDA program": 1.0}
"""Nanoseconds of a call, milliseconds of a start."""
OF_A_CALL = 0.02
"""The part of the driver's own time that an allocation with its release may cost more: 1,400 ns of 70 us on an H100."""
BUSY = 0.25
"""With a load above this for each CPU, other programs would be measured too."""


@pytest.fixture(scope="module", autouse=True)
def alone(gpu: Gpu) -> None:
    load, cpus = os.getloadavg()[0], os.cpu_count() or 1
    if load > BUSY * cpus and not gpu.simulated:
        pytest.skip(f"the load is {load:.1f} on {cpus} CPUs: run this part alone")


@pytest.fixture(scope="module")
def launches(bench: Any) -> dict[str, Any]:
    found: dict[str, Any] = launch.measure(bench, ROUNDS)["figures"]
    return found


@pytest.fixture(scope="module")
def calls(bench: Any) -> dict[str, Any]:
    found: dict[str, Any] = overhead.measure(bench, rounds=ROUNDS)["figures"]
    return found


@pytest.mark.parametrize("way", sorted(launch.TARGETS))
def test_a_launch_costs_little_more(
    launches: dict[str, Any], record_property: Callable[..., None], way: str
) -> None:
    record_property("ns", launches)
    added = launches[way]["added_ns"]
    assert added <= launch.TARGETS[way], f"{added} ns added, at most {launch.TARGETS[way]}"


@pytest.mark.parametrize("call", sorted(LIMITS))
def test_a_call_and_a_start_cost_little_more(
    calls: dict[str, Any], record_property: Callable[..., None], call: str
) -> None:
    for key in ("direct", "libfgpu", "added", "added_at_best", "unit"):
        record_property(key, calls[call][key])
    # Where others use the CPUs, the fastest turns say more than the median.
    added = min(calls[call]["added"], calls[call]["added_at_best"])
    limit = max(LIMITS[call], OF_A_CALL * calls[call]["direct"] if call == "alloc-free" else 0)
    assert added <= limit, f"{added} {calls[call]['unit']} added, at most {limit}"
