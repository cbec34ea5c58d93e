"""Explicit GPU memory and compute (product H1 to H5 and H10), and the choice of a GPU model."""

from __future__ import annotations

from dataclasses import replace

import pytest
from placing import goes_to
from simulator import world
from simulator.world import request

from fgpu_scheduler.core.model import Device, Placement, Request, Share, ShareMode
from fgpu_scheduler.core.placement import claimed_if_fits, could_ever_fit, free
from fgpu_scheduler.core.shares import shape, shares_of

T4 = Device("GPU-0", "n1", 0, "T4", 16160, 2000)
MEMORY, BOTH = ShareMode.MEMORY, ShareMode.MEMORY_COMPUTE


def asks(gpu_memory_mib: int | None, compute_percent: int | None = None, **other: str) -> Request:
    asked = request("new", other.pop("fgpu", "0"), **other)  # type: ignore[arg-type]
    return replace(asked, gpu_memory_mib=gpu_memory_mib, compute_percent=compute_percent)


def on_one(asked: Request, device: Device = T4) -> Share | None:
    shares = shares_of(asked, (device,))
    return shares[0] if shares else None


@pytest.mark.parametrize(
    ("memory_mib", "percent", "share"),
    [
        (5120, 30, Share("GPU-0", 633, 5120, 30, BOTH)),  # 5120 of 16160 MiB are more than 30 %
        (1024, 30, Share("GPU-0", 600, 1024, 30, BOTH)),
        (5120, None, Share("GPU-0", 633, 5120, 0, MEMORY)),
        (128, 5, Share("GPU-0", 100, 128, 5, BOTH)),
        (128, None, Share("GPU-0", 15, 128, 0, MEMORY)),
        (16128, None, Share("GPU-0", 1996, 16128, 0, MEMORY)),
        (16128, 95, Share("GPU-0", 1996, 16128, 95, BOTH)),
    ],
)
def test_a_share_is_worth_the_larger_of_its_two_parts(memory_mib: int, percent: int, share: Share) -> None:
    assert on_one(asks(memory_mib, percent)) == share


@pytest.mark.parametrize(("memory_mib", "percent"), [(16160, 5), (16160, None), (16160, 100), (128, 100)])
def test_full_memory_or_full_compute_takes_the_whole_device(memory_mib: int, percent: int | None) -> None:
    assert on_one(asks(memory_mib, percent)) == Share("GPU-0", 2000, 16160, 100, BOTH)


@pytest.mark.parametrize(
    "asked",
    [
        # GPU memory is a multiple of 128 or all that a device has.
        *(
            asks(mib, part)
            for mib in (0, -128, 100, 5121, 16159, 16161, 16256, 32768)
            for part in (None, 100)
        ),
        # Compute is a multiple of 5 up to 100, and comes with GPU memory.
        *(asks(5120, percent) for percent in (0, -5, 1, 33, 101, 105)),
        asks(None, 50),
        asks(5120, 50, fgpu="1"),
    ],
)
def test_impossible_amounts_have_no_share(asked: Request) -> None:
    assert on_one(asked) is None


def test_the_shares_of_one_device_are_of_one_mode() -> None:
    lab = world(devices=1, memory_mib=8192).holding(asks(1024))
    assert lab.device("GPU-n1-0").mode is MEMORY
    assert goes_to(lab, asks(1024, 10)) is None
    assert goes_to(lab, request("b", "0.1")) is None
    assert goes_to(lab, asks(1024)) == ["GPU-n1-0"]
    other = world(devices=1, memory_mib=8192).running("a", "0.1")
    assert other.device("GPU-n1-0").mode is BOTH
    assert goes_to(other, asks(1024)) is None
    assert goes_to(other, asks(1024, 10)) == goes_to(other, request("b", "0.1")) == ["GPU-n1-0"]


SHARED = world(devices=2, memory_mib=8192).node("n2").running("a", "0.1", on="GPU-n1-1")
"""Of the first node one GPU is empty, and the other has a share of memory and compute."""
EMPTY, TAKEN = SHARED.nodes[0].devices
ELSEWHERE = SHARED.nodes[1].devices[0]
EXPLICIT = Share(EMPTY.uuid, 250, 2048, 20, BOTH)


@pytest.mark.parametrize(
    ("asked", "shares", "fits"),
    [
        (request("b", "0.5"), [Share.of(EMPTY, 500)], True),
        (request("b", "0.5"), [Share.of(EMPTY, 400)], False),
        (request("b", "0.5"), [Share.of(EMPTY, 600)], False),
        (request("b", "0.5"), [], False),
        (request("b", "1"), [Share.of(EMPTY, 500), Share.of(EMPTY, 500)], False),
        (request("b", "2"), [Share.of(EMPTY, 1000), Share.of(TAKEN, 1000)], False),
        (request("b", "0.5"), [Share.of(ELSEWHERE, 500)], False),
        # A hundredth of 8 GiB rounds down to no memory: there would be no limit to set.
        (request("b", "0.01"), [Share.of(EMPTY, 10)], False),
        (request("b", "0.016"), [Share.of(EMPTY, 16)], True),
        (request("b", "0.5", gpu_models=("Test GPU",)), [Share.of(EMPTY, 500)], True),
        (request("b", "0.5", gpu_models=("A100",)), [Share.of(EMPTY, 500)], False),
        (asks(2048, 20), [EXPLICIT], True),
        (asks(2048, 20), [replace(EXPLICIT, memory_mib=1024)], False),
        (asks(2048, 20), [replace(EXPLICIT, memory_mib=4096)], False),
        (asks(2048, 20), [replace(EXPLICIT, compute_percent=10)], False),
        (asks(2048, 20), [replace(EXPLICIT, fgpu_milli=1)], False),
        (asks(2048, 20), [replace(EXPLICIT, mode=MEMORY)], False),
        (asks(2048, 20), [replace(EXPLICIT, device_uuid=TAKEN.uuid)], True),
        # All shares of one device have one mode.
        (asks(2048), [Share(EMPTY.uuid, 250, 2048, 0, MEMORY)], True),
        (asks(2048), [Share(TAKEN.uuid, 250, 2048, 0, MEMORY)], False),
    ],
)
def test_the_fit_check_accepts_exactly_what_was_asked(
    asked: Request, shares: list[Share], fits: bool
) -> None:
    """Whatever a planner proposes: the store asks only this."""
    where = Placement("n1", tuple(shares))
    assert (claimed_if_fits(free(SHARED)[0], asked, where) is not None) is fits


def test_a_thin_slice_goes_to_the_larger_gpu() -> None:
    lab = world(devices=0).node("n1", memory_mib=8192).node("n2", memory_mib=81559)
    assert goes_to(lab, request("b", "0.01")) == ["GPU-n2-0"]
    assert goes_to(lab.lost("n2"), request("b", "0.01")) is None


def test_request_needs_every_part_of_its_share() -> None:
    lab = world(devices=1, memory_mib=10240).holding(asks(1024, 60))
    assert lab.device("GPU-n1-0").memory_mib == 9216
    assert goes_to(lab, asks(1024, 45)) is None, "60 + 45 % of compute"
    assert goes_to(lab, asks(1024, 40)) == ["GPU-n1-0"]
    assert goes_to(lab, asks(4224, 5)) is None, "0.6 and 0.4125 of the device"
    assert goes_to(lab, request("b", "0.4")) == ["GPU-n1-0"]


def test_a_whole_device_by_memory_needs_an_untouched_one() -> None:
    lab = world(devices=1, memory_mib=16160)
    assert goes_to(lab, asks(16160)) == ["GPU-n1-0"]
    assert goes_to(lab.holding(asks(128)), asks(16160)) is None


def test_full_memory_of_one_model_is_a_part_of_another_only_where_it_is_a_multiple() -> None:
    lab = world(devices=0).node("n1", memory_mib=24564).node("n2", memory_mib=16160)
    assert goes_to(lab, asks(16160)) == ["GPU-n2-0"]
    assert goes_to(lab, asks(16128)) == ["GPU-n2-0"], "the fuller fit"
    assert goes_to(lab.lost("n2"), asks(16160)) is None


def test_lowered_number_of_shares_keeps_sessions_and_admits_none() -> None:
    lab = world().running("a", "0.1").running("b", "0.1")
    fewer = replace(lab.nodes[0], devices=(replace(lab.nodes[0].devices[0], max_shares=1),))
    lab = replace(lab, nodes=(fewer,))
    assert lab.device("GPU-n1-0").shares == -1
    assert goes_to(lab, request("c", "0.1")) is None


@pytest.mark.parametrize("asked", [asks(1024), asks(1024, 10), request("r", "0.5"), request("r", "2")])
def test_only_the_model_that_was_asked_for(asked: Request) -> None:
    lab = world(devices=0).node("n1", devices=2, model="T4").node("n2", devices=2, model="T4 16G")
    found = goes_to(lab, replace(asked, gpu_models=("T4 16G",)))
    assert found is not None
    assert found[0] == "GPU-n2-0"
    assert goes_to(lab, replace(asked, gpu_models=("t4",))) is None
    assert not could_ever_fit(replace(asked, gpu_models=("t4",)), lab.nodes)


def test_a_session_without_gpu_takes_only_cpu_and_memory() -> None:
    lab = world(devices=1, cpu=2).running("a", "1")
    assert goes_to(lab, request("b", "0", cpu=1)) == []
    assert goes_to(lab, request("b", "0", cpu=2)) is None


def test_shape_has_exactly_the_fields_that_decide_the_fit() -> None:
    asked = asks(1024, 10)
    assert shape(asked) == shape(replace(asked, user="b", server_name="s", priority=3, time_limit_s=60))
    for other in (
        replace(asked, gpu_memory_mib=2048),
        replace(asked, compute_percent=None),
        replace(asked, gpu_models=("A100",)),
        replace(asked, cpu_milli=1),
        replace(asked, memory_mib=1),
        replace(asked, resource_group="class"),
        replace(asked, fgpu_milli=1),
    ):
        assert shape(asked) != shape(other)
