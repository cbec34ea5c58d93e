"""What may queue; and, for what may not, the exact words of the refusal."""

from __future__ import annotations

from typing import Any

import pytest
from simulator import World, world
from simulator.world import request

from fgpu_scheduler.core.admission import Caps, Refusal, admit, amounts_that_fit

LAB = world(devices=3, fgpu_per_gpu=1, cpu=16, node_memory_mib=65536)
"""One node of three GPUs."""

CAPS = Caps(fgpu_step_milli=100, max_fgpu_milli=2000, max_cpu_milli=8000, max_memory_mib=32768)
OPEN = Caps(fgpu_step_milli=100)


def refusals(
    fgpu: str = "0.5",
    *,
    cpu: int | str = 1,
    memory_mib: int = 1024,
    group: str = "default",
    count: int = 1,
    caps: Caps = OPEN,
    lab: World = LAB,
) -> tuple[Refusal, ...]:
    return admit(request("u", fgpu, cpu=cpu, memory_mib=memory_mib, group=group), count, lab.nodes, caps)


@pytest.mark.parametrize("fgpu", ["0.1", "0.5", "1", "2", "3"])
def test_amounts_that_some_node_could_hold_are_admitted(fgpu: str) -> None:
    assert refusals(fgpu) == ()


@pytest.mark.parametrize(
    ("asked", "code", "limit", "nearest", "message"),
    [
        ({"fgpu": "0"}, "too_small", "0.1", "0.1", "fgpu: 0 is too small; choose at least 0.1"),
        ({"fgpu": "0.05"}, "too_small", "0.1", "0.1", "fgpu: 0.05 is too small; choose at least 0.1"),
        (
            {"fgpu": "0.25"},
            "not_a_step",
            "0.1",
            "0.2",
            "fgpu: 0.25 isn't possible; choose 0.2 or 0.3 (in steps of 0.1)",
        ),
        (
            {"fgpu": "1.5"},
            "straddles",
            "1",
            "1",
            "fgpu: 1.5 isn't possible; choose 1 or 2 (above one GPU, 1 fGPU, only whole GPUs)",
        ),
        (
            {"fgpu": "2.1", "caps": CAPS},
            "above_cap",
            "2",
            "2",
            "fgpu: 2.1 is above the limit of 2 per session",
        ),
        ({"fgpu": "3.5"}, "never_fits", "3", "3", "fgpu: 3.5 is more than any machine has; choose at most 3"),
        (
            {"caps": Caps(fgpu_step_milli=100, max_fgpu_milli=50)},
            "no_amount_fits",
            None,
            None,
            "fgpu: no amount is possible here; ask an administrator",
        ),
        ({"cpu": 0}, "too_small", "0.01", "0.01", "cpu: 0 is too small; choose at least 0.01"),
        ({"cpu": "8.5", "caps": CAPS}, "above_cap", "8", "8", "cpu: 8.5 is above the limit of 8 per session"),
        (
            {"cpu": 64, "caps": Caps(fgpu_step_milli=100, max_cpu_milli=32000)},
            "above_cap",
            "32",
            "16",
            "cpu: 64 is above the limit of 32 per session",
        ),
        ({"cpu": 17}, "never_fits", "16", "16", "cpu: 17 is more than any machine has; choose at most 16"),
        ({"memory_mib": 127}, "too_small", "128", "128", "memory_mib: 127 is too small; choose at least 128"),
        (
            {"memory_mib": 32769, "caps": CAPS},
            "above_cap",
            "32768",
            "32768",
            "memory_mib: 32769 is above the limit of 32768 MiB per session",
        ),
        (
            {"memory_mib": 200000, "caps": Caps(fgpu_step_milli=100, max_memory_mib=131072)},
            "above_cap",
            "131072",
            "65536",
            "memory_mib: 200000 is above the limit of 131072 MiB per session",
        ),
        (
            {"memory_mib": 65537},
            "never_fits",
            "65536",
            "65536",
            "memory_mib: 65537 is more than any machine has; choose at most 65536",
        ),
        ({"count": 0}, "out_of_range", "8", "1", "count: 0 isn't possible; choose 1 to 8 sessions"),
        ({"count": 9}, "out_of_range", "8", "8", "count: 9 isn't possible; choose 1 to 8 sessions"),
        (
            {"group": "class"},
            "no_devices",
            None,
            None,
            "group: resource group 'class' has no GPU; choose another",
        ),
        (
            {"lab": world(devices=0).node("n1", devices=0)},
            "no_devices",
            None,
            None,
            "group: resource group 'default' has no GPU; choose another",
        ),
        (
            {
                "fgpu": "2",
                "cpu": 16,
                "lab": world(devices=0).node("n1", devices=2, cpu=4).node("n2", devices=1, cpu=32),
            },
            "never_fits_together",
            None,
            None,
            "fgpu: no machine has 2 fGPU together with 16 CPU and 1024 MiB memory; ask for less of one",
        ),
    ],
)
def test_a_refusal_names_the_field_the_limit_and_what_would_work(
    asked: dict[str, Any], code: str, limit: str | None, nearest: str | None, message: str
) -> None:
    field = message.partition(":")[0]
    assert refusals(**asked) == (Refusal(field, code, message, limit, nearest),)


def test_all_refusals_are_returned_at_once() -> None:
    found = refusals("0.25", cpu=17, memory_mib=1, count=9)
    assert [(r.field, r.code) for r in found] == [
        ("fgpu", "not_a_step"),
        ("cpu", "never_fits"),
        ("memory_mib", "too_small"),
        ("count", "out_of_range"),
    ]


def test_request_may_queue_for_busy_or_cordoned_nodes() -> None:
    assert refusals("3", lab=LAB.running("a", "1").running("b", "1").cordoned("n1")) == ()
    assert refusals("3", lab=LAB.lost("n1")) == ()


def test_the_amounts_are_steps_of_one_device_and_whole_devices() -> None:
    lab = world(devices=3, fgpu_per_gpu="0.5")
    assert amounts_that_fit(lab.nodes, OPEN) == (100, 200, 300, 400, 500, 1000, 1500)


def test_a_whole_device_is_possible_though_it_is_no_multiple_of_the_step() -> None:
    lab = world(devices=2, fgpu_per_gpu=1)
    assert amounts_that_fit(lab.nodes, Caps(fgpu_step_milli=300)) == (300, 600, 900, 1000, 2000)


def test_the_amounts_of_nodes_with_different_units_are_joined() -> None:
    lab = world(devices=0).node("n1", fgpu_per_gpu=1, devices=2).node("n2", fgpu_per_gpu=3)
    caps = Caps(fgpu_step_milli=500, max_fgpu_milli=2500)
    assert amounts_that_fit(lab.nodes, caps) == (500, 1000, 1500, 2000, 2500)


def test_an_amount_whose_memory_rounds_down_to_nothing_is_not_offered() -> None:
    fine = Caps(fgpu_step_milli=10, max_fgpu_milli=40)
    assert amounts_that_fit(world(memory_mib=8192).nodes, fine) == (20, 30, 40)
    (found,) = refusals("0.01", caps=fine, lab=world(memory_mib=8192))
    assert found.message == "fgpu: 0.01 is too small; choose at least 0.02"
