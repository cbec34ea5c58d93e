"""What may queue; and, for what may not, the exact words of the refusal."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulator import World, world
from simulator.world import request

from fgpu_scheduler.core.admission import Caps, Refusal, admit, amounts_that_fit
from fgpu_scheduler.core.model import Quota, QuotaScope

LAB = world(devices=3, cpu=16, node_memory_mib=65536)
"""One node of three GPUs."""
MIXED = (
    world(devices=0)
    .node("n1", devices=2, memory_mib=16160, model="Small")
    .node("n2", memory_mib=24576, fgpu_per_gpu=2, model="Large")
)
"""Two GPUs with a memory that is no multiple of 128 MiB, and a larger one."""
OPEN = Caps(fgpu_step_milli=100)


def refusals(
    lab: World = LAB, *, count: int = 1, caps: Caps = OPEN, quotas: tuple[Quota, ...] = (), **asked: Any
) -> tuple[Refusal, ...]:
    plain = request(
        "alice", asked.pop("fgpu", "0"), cpu=asked.pop("cpu", 1), group=asked.pop("group", "default")
    )
    return admit(replace(plain, groups=("class",), **asked), count, lab.nodes, caps, quotas)


# A request and the caps that are set; the code, the limit and the nearest amount. Then the message.
REFUSED = """
fgpu=0 -> too_small 0.1 0.1
    fgpu: 0 is too small; choose at least 0.1
fgpu=0.05 -> too_small 0.1 0.1
    fgpu: 0.05 is too small; choose at least 0.1
fgpu=0.01 fgpu_step_milli=10 max_fgpu_milli=40 -> too_small 0.02 0.02
    fgpu: 0.01 is too small; choose at least 0.02
fgpu=0.25 -> not_a_step 0.1 0.2
    fgpu: 0.25 isn't possible; choose 0.2 or 0.3 (in steps of 0.1)
fgpu=1.5 -> straddles 1 1
    fgpu: 1.5 isn't possible; choose 1 or 2 (above one GPU, 1 fGPU, only whole GPUs)
fgpu=2.1 max_fgpu_milli=2000 -> above_cap 2 2
    fgpu: 2.1 is above the limit of 2 per session
fgpu=3.5 -> never_fits 3 3
    fgpu: 3.5 is more than any machine has; choose at most 3
fgpu=0.5 max_fgpu_milli=50 -> no_amount_fits None None
    fgpu: no amount is possible here; ask an administrator
fgpu=0.5 cpu=0 -> too_small 0.01 0.01
    cpu: 0 is too small; choose at least 0.01
fgpu=0.5 cpu=8.5 max_cpu_milli=8000 -> above_cap 8 8
    cpu: 8.5 is above the limit of 8 per session
fgpu=0.5 cpu=64 max_cpu_milli=32000 -> above_cap 32 16
    cpu: 64 is above the limit of 32 per session
fgpu=0.5 cpu=17 -> never_fits 16 16
    cpu: 17 is more than any machine has; choose at most 16
fgpu=0.5 memory_mib=127 -> too_small 128 128
    memory_mib: 127 is too small; choose at least 128
fgpu=0.5 memory_mib=32769 max_memory_mib=32768 -> above_cap 32768 32768
    memory_mib: 32769 is above the limit of 32768 MiB per session
fgpu=0.5 memory_mib=200000 max_memory_mib=131072 -> above_cap 131072 65536
    memory_mib: 200000 is above the limit of 131072 MiB per session
fgpu=0.5 memory_mib=65537 -> never_fits 65536 65536
    memory_mib: 65537 is more than any machine has; choose at most 65536
fgpu=0.5 count=0 -> out_of_range 8 1
    count: 0 isn't possible; choose 1 to 8 sessions
fgpu=0.5 count=9 -> out_of_range 8 8
    count: 9 isn't possible; choose 1 to 8 sessions
fgpu=0.5 group=class -> no_devices None None
    group: resource group 'class' has no GPU; choose another
"""
REFUSED_OF_MIXED = """
compute_percent=50 -> compute_alone None None
    compute_percent: give gpu_memory_mib, too
fgpu=0.5 gpu_memory_mib=1024 -> two_ways None None
    gpu_memory_mib: give this or fgpu, not both
gpu_memory_mib=24704 -> never_fits 24576 24576
    gpu_memory_mib: 24704 is more than one GPU has; choose at most 24576
gpu_memory_mib=16384 gpu_models=Small -> never_fits 16160 16160
    gpu_memory_mib: 16384 is more than one GPU has; choose at most 16160
gpu_memory_mib=0 -> too_small 128 128
    gpu_memory_mib: 0 is too small; choose at least 128
gpu_memory_mib=1000 -> not_a_step 128 1024
    gpu_memory_mib: 1000 isn't possible; choose 1024 (a multiple of 128, or all of a GPU)
gpu_memory_mib=16159 -> not_a_step 128 16160
    gpu_memory_mib: 16159 isn't possible; choose 16160 (a multiple of 128, or all of a GPU)
gpu_memory_mib=1024 compute_percent=0 -> out_of_range 5 5
    compute_percent: 0 isn't possible; choose 5 to 100
gpu_memory_mib=1024 compute_percent=105 -> out_of_range 100 100
    compute_percent: 105 isn't possible; choose 5 to 100
gpu_memory_mib=1024 compute_percent=33 -> not_a_step 5 35
    compute_percent: 33 isn't possible; choose 35 (a multiple of 5)
gpu_memory_mib=16128 max_fgpu_milli=500 -> above_cap 0.5 8064
    gpu_memory_mib: this is worth 0.998 fGPU, above the limit of 0.5 per session
gpu_memory_mib=128 compute_percent=80 max_fgpu_milli=500 -> above_cap 0.5 None
    gpu_memory_mib: this is worth 0.8 fGPU, above the limit of 0.5 per session
fgpu=0.5 gpu_models=Large,Huge -> unknown_model None Large
    gpu_models: there is no 'Huge' here; the models are Large, Small
fgpu=0.5 gpu_models=Large,Small,Large -> named_twice None Large,Small
    gpu_models: 'Large' is named twice; name each model once
fgpu=1.5 gpu_models=Small -> straddles 1 1
    fgpu: 1.5 isn't possible; choose 1 or 2 (above one GPU, 1 fGPU, only whole GPUs)
gpu_memory_mib=20480 memory_mib=262144 cpu_milli=32000 time_limit_s=59 -> too_small 60 60
    time_limit_s: 59 is too short; choose at least 60
fgpu=1 time_limit_s=3601 max_time_limit_s=3600 -> above_cap 3600 3600
    time_limit_s: 3601 is too long; choose at most 3600
fgpu=1 priority=3 max_priority=2 -> above_cap 2 2
    priority: 3 is too high; choose at most 2
fgpu=1 priority=-1 min_priority=0 -> too_small 0 0
    priority: -1 is too low; choose at least 0
"""


def rows(lab: World, table: str) -> Iterator[tuple[World, dict[str, Any], str, str]]:
    """Yield the lab, the arguments of `refusals`, "code limit nearest" and the message of each row."""
    lines = table.strip().splitlines()
    for row, message in zip(lines[::2], lines[1::2], strict=True):
        words, found = row.split(" -> ")
        asked: dict[str, Any] = dict(word.split("=") for word in words.split())
        asked |= {
            name: int(asked[name]) for name in asked if name not in ("fgpu", "cpu", "group", "gpu_models")
        }
        if "gpu_models" in asked:
            asked["gpu_models"] = tuple(asked["gpu_models"].split(","))
        caps = {field.name: asked.pop(field.name) for field in fields(Caps) if field.name in asked}
        yield lab, {**asked, "caps": replace(OPEN, **caps)}, found, message.strip()


EACH, CLASS = (
    Quota(QuotaScope.USER, "*", max_fgpu_milli=750),
    Quota(QuotaScope.GROUP, "class", max_fgpu_milli=250),
)
NO_DEVICES = world(devices=0).node("n1", devices=0)
LITTLE_CPU = world(devices=0).node("n1", devices=2, cpu=4).node("n2", devices=1, cpu=32)
OVER_QUOTA: list[tuple[World, dict[str, Any], str, str]] = [
    (
        MIXED,
        {"fgpu": "1", "quotas": (EACH,)},
        "above_quota 0.75 0.7",
        "fgpu: 1 fGPU is above 0.75, the quota of each user",
    ),
    (
        MIXED,
        {"gpu_memory_mib": 16128, "quotas": (CLASS, EACH, replace(EACH, name="bob", max_fgpu_milli=1))},
        "above_quota 0.25 3968",
        "gpu_memory_mib: 0.998 fGPU is above 0.25, the quota of group 'class'",
    ),
    (
        MIXED,
        {"fgpu": "1", "quotas": (Quota(QuotaScope.USER, "alice", max_sessions=0),)},
        "above_quota 0 None",
        "count: 1 is above 0 sessions, the quota of user 'alice'",
    ),
    (
        MIXED,
        {"fgpu": "1", "count": 4, "quotas": (Quota(QuotaScope.ALL, "*", "default", max_pending=3),)},
        "above_quota 3 3",
        "count: 4 is above 3 requests waiting at once, the quota of everybody together in resource group 'default'",
    ),
    (NO_DEVICES, {}, "no_devices None None", "group: resource group 'default' has no GPU; choose another"),
    (
        LITTLE_CPU,
        {"fgpu": "2", "cpu": 16},
        "never_fits_together None None",
        "fgpu: no machine has 2 fGPU together with 16 CPU and 1024 MiB memory; ask for less of one",
    ),
]


@pytest.mark.parametrize(
    ("lab", "asked", "found", "message"),
    [*rows(LAB, REFUSED), *rows(MIXED, REFUSED_OF_MIXED), *OVER_QUOTA],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_refusal_names_the_field_the_limit_and_what_would_work(
    lab: World, asked: dict[str, Any], found: str, message: str
) -> None:
    code, *amounts = found.split(" ", 2)
    limit, nearest = (None if amount == "None" else amount for amount in amounts)
    assert refusals(lab, **asked) == (Refusal(message.partition(":")[0], code, message, limit, nearest),)


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
        {
            "fgpu": "1",
            "count": 8,
            "quotas": (replace(EACH, max_fgpu_milli=1000, max_sessions=1, max_pending=8),),
        },
        {"fgpu": "1", "quotas": (replace(EACH, resource_group="other"),)},
    ],
)
def test_amounts_that_some_device_could_hold_are_admitted(asked: dict[str, Any]) -> None:
    assert refusals(MIXED, **asked) == ()


def test_all_refusals_are_returned_at_once() -> None:
    found = refusals(fgpu="0.25", cpu=17, memory_mib=1, count=9)
    assert [f"{r.field} {r.code}" for r in found] == [
        "fgpu not_a_step",
        "cpu never_fits",
        "memory_mib too_small",
        "count out_of_range",
    ]


def test_request_may_queue_for_busy_or_cordoned_nodes() -> None:
    assert refusals(LAB.running("a", "1").running("b", "1").cordoned("n1"), fgpu="3") == ()
    assert refusals(LAB.lost("n1"), fgpu="3") == ()


@pytest.mark.parametrize(
    ("lab", "caps", "amounts"),
    [
        (world(devices=3, fgpu_per_gpu="0.5"), OPEN, (100, 200, 300, 400, 500, 1000, 1500)),
        # A whole device is possible though it is no multiple of the step.
        (world(devices=2), Caps(fgpu_step_milli=300), (300, 600, 900, 1000, 2000)),
        # The amounts of nodes with different units are joined.
        (
            world(devices=0).node("n1", fgpu_per_gpu=1, devices=2).node("n2", fgpu_per_gpu=3),
            Caps(fgpu_step_milli=500, max_fgpu_milli=2500),
            (500, 1000, 1500, 2000, 2500),
        ),
        # The memory of 0.01 fGPU rounds down to nothing.
        (world(memory_mib=8192), Caps(fgpu_step_milli=10, max_fgpu_milli=40), (20, 30, 40)),
    ],
)
def test_the_amounts_are_steps_of_one_device_and_whole_devices(
    lab: World, caps: Caps, amounts: tuple[int, ...]
) -> None:
    assert amounts_that_fit(lab.nodes, caps) == amounts


def test_explicit_memory_that_no_node_has_beside_that_much_cpu_is_refused() -> None:
    small = world(devices=0).node("n1", cpu=32).node("n2", memory_mib=24576, cpu=4)
    (found,) = refusals(small, gpu_memory_mib=20480, cpu=16)
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
        found = [refusal for refusal in refusals(MIXED, caps=caps, **asked) if refusal.nearest is not None]
        if not found:
            break
        asked |= {refusal.field: int(refusal.nearest or "") for refusal in found}
    assert all(refusal.nearest is None for refusal in refusals(MIXED, caps=caps, **asked))
