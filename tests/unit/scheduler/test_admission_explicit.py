"""What may queue of explicit GPU memory, models, time limits, priorities and quotas; the exact words of refusals."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulator import world
from simulator.world import request

from fgpu_scheduler.core.admission import Caps, Refusal, admit
from fgpu_scheduler.core.model import Quota, QuotaScope

OPEN = Caps(fgpu_step_milli=100)
LAB = (
    world(devices=0)
    .node("n1", devices=2, memory_mib=16160, model="Small")
    .node("n2", memory_mib=24576, fgpu_per_gpu=2, model="Large")
)
"""Two GPUs with a memory that is no multiple of 128 MiB, and a larger one."""


def refusals(
    *, count: int = 1, caps: Caps = OPEN, quotas: tuple[Quota, ...] = (), **asked: Any
) -> tuple[Refusal, ...]:
    plain = request("alice", asked.pop("fgpu", "0"))
    return admit(replace(plain, groups=("class",), **asked), count, LAB.nodes, caps, quotas)


@pytest.mark.parametrize(
    "asked",
    [
        {"gpu_memory_mib": 128},
        {"gpu_memory_mib": 5120, "compute_percent": 35},
        {"gpu_memory_mib": 16160},
        {"gpu_memory_mib": 16128, "gpu_models": ("Small",), "compute_percent": 100},
        {"gpu_memory_mib": 24576, "compute_percent": 5},
        {"fgpu": "2", "gpu_models": ("Large",)},
        {"fgpu": "2", "gpu_models": ("Small",)},
        {"fgpu": "0.5", "time_limit_s": 60, "priority": 10**6},
    ],
)
def test_explicit_amounts_that_some_device_could_hold_are_admitted(asked: dict[str, Any]) -> None:
    assert refusals(**asked) == ()


@pytest.mark.parametrize(
    ("asked", "code", "limit", "nearest", "message"),
    [
        ({"compute_percent": 50}, "compute_alone", None, None, "compute_percent: give gpu_memory_mib, too"),
        (
            {"fgpu": "0.5", "gpu_memory_mib": 1024},
            "two_ways",
            None,
            None,
            "gpu_memory_mib: give this or fgpu, not both",
        ),
        (
            {"gpu_memory_mib": 24704},
            "never_fits",
            "24576",
            "24576",
            "gpu_memory_mib: 24704 is more than one GPU has; choose at most 24576",
        ),
        (
            {"gpu_memory_mib": 16384, "gpu_models": ("Small",)},
            "never_fits",
            "16160",
            "16160",
            "gpu_memory_mib: 16384 is more than one GPU has; choose at most 16160",
        ),
        (
            {"gpu_memory_mib": 0},
            "too_small",
            "128",
            "128",
            "gpu_memory_mib: 0 is too small; choose at least 128",
        ),
        (
            {"gpu_memory_mib": 1000},
            "not_a_step",
            "128",
            "1024",
            "gpu_memory_mib: 1000 isn't possible; choose 1024 (a multiple of 128, or all of a GPU)",
        ),
        (
            {"gpu_memory_mib": 16159},
            "not_a_step",
            "128",
            "16160",
            "gpu_memory_mib: 16159 isn't possible; choose 16160 (a multiple of 128, or all of a GPU)",
        ),
        (
            {"gpu_memory_mib": 1024, "compute_percent": 0},
            "out_of_range",
            "5",
            "5",
            "compute_percent: 0 isn't possible; choose 5 to 100",
        ),
        (
            {"gpu_memory_mib": 1024, "compute_percent": 105},
            "out_of_range",
            "100",
            "100",
            "compute_percent: 105 isn't possible; choose 5 to 100",
        ),
        (
            {"gpu_memory_mib": 1024, "compute_percent": 33},
            "not_a_step",
            "5",
            "35",
            "compute_percent: 33 isn't possible; choose 35 (a multiple of 5)",
        ),
        (
            {"gpu_memory_mib": 16128, "caps": replace(OPEN, max_fgpu_milli=500)},
            "above_cap",
            "0.5",
            "8064",
            "gpu_memory_mib: this is worth 0.998 fGPU, above the limit of 0.5 per session",
        ),
        (
            {"gpu_memory_mib": 128, "compute_percent": 80, "caps": replace(OPEN, max_fgpu_milli=500)},
            "above_cap",
            "0.5",
            None,
            "gpu_memory_mib: this is worth 0.8 fGPU, above the limit of 0.5 per session",
        ),
        (
            {"fgpu": "0.5", "gpu_models": ("Large", "Huge")},
            "unknown_model",
            None,
            "Large",
            "gpu_models: there is no 'Huge' here; the models are Large, Small",
        ),
        (
            {"fgpu": "0.5", "gpu_models": ("Large", "Small", "Large")},
            "named_twice",
            None,
            "Large,Small",
            "gpu_models: 'Large' is named twice; name each model once",
        ),
        (
            {"fgpu": "1.5", "gpu_models": ("Small",)},
            "straddles",
            "1",
            "1",
            "fgpu: 1.5 isn't possible; choose 1 or 2 (above one GPU, 1 fGPU, only whole GPUs)",
        ),
        (
            {"gpu_memory_mib": 20480, "memory_mib": 262144, "cpu_milli": 32000, "time_limit_s": 59},
            "too_small",
            "60",
            "60",
            "time_limit_s: 59 is too short; choose at least 60",
        ),
        (
            {"fgpu": "1", "time_limit_s": 3601, "caps": replace(OPEN, max_time_limit_s=3600)},
            "above_cap",
            "3600",
            "3600",
            "time_limit_s: 3601 is too long; choose at most 3600",
        ),
        (
            {"fgpu": "1", "priority": 3, "caps": replace(OPEN, max_priority=2)},
            "above_cap",
            "2",
            "2",
            "priority: 3 is too high; choose at most 2",
        ),
        (
            {"fgpu": "1", "priority": -1, "caps": replace(OPEN, min_priority=0)},
            "too_small",
            "0",
            "0",
            "priority: -1 is too low; choose at least 0",
        ),
        (
            {"fgpu": "1", "quotas": (Quota(QuotaScope.USER, "*", max_fgpu_milli=750),)},
            "above_quota",
            "0.75",
            "0.7",
            "fgpu: 1 fGPU is above 0.75, the quota of each user",
        ),
        (
            {
                "gpu_memory_mib": 16128,
                "quotas": (
                    Quota(QuotaScope.GROUP, "class", max_fgpu_milli=250),
                    Quota(QuotaScope.USER, "*", max_fgpu_milli=750),
                    Quota(QuotaScope.USER, "bob", max_fgpu_milli=1),
                ),
            },
            "above_quota",
            "0.25",
            "3968",
            "gpu_memory_mib: 0.998 fGPU is above 0.25, the quota of group 'class'",
        ),
        (
            {"fgpu": "1", "quotas": (Quota(QuotaScope.USER, "alice", max_sessions=0),)},
            "above_quota",
            "0",
            None,
            "count: 1 is above 0 sessions, the quota of user 'alice'",
        ),
        (
            {"fgpu": "1", "count": 4, "quotas": (Quota(QuotaScope.ALL, "*", "default", max_pending=3),)},
            "above_quota",
            "3",
            "3",
            "count: 4 is above 3 requests waiting at once, the quota of everybody together in resource group 'default'",
        ),
    ],
)
def test_a_refusal_names_the_field_the_limit_and_what_would_work(
    asked: dict[str, Any], code: str, limit: str | None, nearest: str | None, message: str
) -> None:
    field = message.partition(":")[0]
    assert refusals(**asked) == (Refusal(field, code, message, limit, nearest),)


def test_request_within_its_quotas_may_queue() -> None:
    quotas = (Quota(QuotaScope.USER, "*", max_fgpu_milli=1000, max_sessions=1, max_pending=8),)
    assert refusals(fgpu="1", count=8, quotas=quotas) == ()
    elsewhere = replace(quotas[0], resource_group="other", max_fgpu_milli=1)
    assert refusals(fgpu="1", quotas=(elsewhere,)) == ()


def test_explicit_memory_that_no_node_has_beside_that_much_cpu_is_refused() -> None:
    asked = replace(request("a", "0", cpu=16), gpu_memory_mib=20480)
    small = LAB.node("n2", memory_mib=24576, model="Large", cpu=4)
    nodes = [node for node in small.nodes if node.cpu_milli == 4000 or node.id == "n1"]
    (found,) = admit(asked, 1, nodes, OPEN)
    assert (found.field, found.code) == ("gpu_memory_mib", "never_fits_together")
    assert "20480 MiB GPU memory together with 16 CPU" in found.message


@settings(derandomize=True, database=None, deadline=None, max_examples=300)
@given(
    st.integers(0, 30000),
    st.one_of(st.none(), st.integers(-5, 130)),
    st.sampled_from(((), ("Small",), ("Large",), ("Large", "Small"))),
    st.one_of(st.none(), st.integers(1, 2000)),
)
def test_the_nearest_amount_would_be_accepted(
    memory_mib: int, compute: int | None, models: tuple[str, ...], cap: int | None
) -> None:
    asked: dict[str, Any] = {"gpu_memory_mib": memory_mib, "compute_percent": compute, "gpu_models": models}
    caps = replace(OPEN, max_fgpu_milli=cap)
    # Memory, compute and what both are worth are told one after the other.
    for _ in range(4):
        found = [refusal for refusal in refusals(caps=caps, **asked) if refusal.nearest is not None]
        if not found:
            break
        asked |= {refusal.field: int(refusal.nearest or "") for refusal in found}
    assert all(refusal.nearest is None for refusal in refusals(caps=caps, **asked))
