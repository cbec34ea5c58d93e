"""What fits where, what it leaves, and which of the fitting places is taken."""

from __future__ import annotations

from dataclasses import replace

import placing
import pytest
from simulator import World, world
from simulator.world import request

from fgpu_scheduler.core.model import MAX_SHARES
from fgpu_scheduler.core.placement import (
    could_ever_fit,
    free,
)
from fgpu_scheduler.core.shares import devices_needed


def goes_to(lab: World, fgpu: str, **asked: int | str) -> list[str] | None:
    """Return the devices that a new request gets now, or None."""
    return placing.goes_to(lab, request("new", fgpu, **asked))  # type: ignore[arg-type]


def test_the_fullest_device_that_still_fits_is_taken() -> None:
    lab = world(devices=3).running("a", "0.3", on="GPU-n1-1").running("b", "0.7", on="GPU-n1-2")
    assert goes_to(lab, "0.3") == ["GPU-n1-2"]
    assert goes_to(lab, "0.4") == ["GPU-n1-1"]
    assert goes_to(lab, "0.8") == ["GPU-n1-0"]


def test_the_score_is_of_the_device_and_not_of_its_size_in_fgpu() -> None:
    """Half of a GPU is half of a GPU, whether the administrator calls that 0.5 or 2.5."""
    lab = world(devices=0).node("n1", fgpu_per_gpu=5).node("n2", fgpu_per_gpu=1)
    assert goes_to(lab, "1") == ["GPU-n2-0"]


def test_whole_devices_come_from_the_node_with_the_fewest_untouched_ones() -> None:
    lab = world(devices=0).node("n1", devices=4).node("n2", devices=2).node("n3", devices=3)
    assert goes_to(lab, "2") == ["GPU-n2-0", "GPU-n2-1"]


def test_no_more_than_twenty_share_one_device() -> None:
    lab = world(devices=1)
    for n in range(MAX_SHARES):
        lab = lab.running(f"u{n}", "0.04")
    assert lab.device("GPU-n1-0").fgpu_milli == 200
    assert goes_to(lab, "0.04") is None
    assert goes_to(lab.ended("u7"), "0.04") == ["GPU-n1-0"]


def test_cpu_and_memory_of_the_node_count_too() -> None:
    lab = world(devices=2, cpu=4, node_memory_mib=8192).running("a", "0.1", cpu=3, memory_mib=2048)
    assert goes_to(lab, "0.1", cpu=1, memory_mib=6144) == ["GPU-n1-0"]
    assert goes_to(lab, "0.1", cpu="1.001") is None
    assert goes_to(lab, "0.1", memory_mib=6145) is None


def test_after_a_change_of_unit_old_shares_keep_their_memory() -> None:
    """Half a GPU under "1 fGPU = 1 GPU" is still half a GPU when 5 fGPU are one."""
    lab = world(fgpu_per_gpu=1, memory_mib=8000).running("a", "0.5").unit(5)
    left = lab.device("GPU-n1-0")
    assert (left.fgpu_milli, left.memory_mib, left.compute_percent) == (4500, 8000 - 3968, 50)
    assert goes_to(lab, "2.5") == ["GPU-n1-0"]
    assert goes_to(lab, "2.6") is None
    assert goes_to(lab.running("b", "2.5"), "0.1") is None


def test_after_a_change_to_a_smaller_unit_nothing_is_promised_twice() -> None:
    lab = world(fgpu_per_gpu=5).running("a", "3").unit(1)
    assert lab.device("GPU-n1-0").fgpu_milli == -2000
    assert goes_to(lab, "0.1") is None


def test_a_session_on_a_node_that_is_no_longer_known_holds_nothing_elsewhere() -> None:
    lab = world(devices=0).node("n1").node("n2").running("a", "1", on="GPU-n2-0")
    gone = replace(lab, nodes=lab.nodes[:1])
    assert [n.node.id for n in free(gone)] == ["n1"]
    assert gone.device("GPU-n1-0").untouched


@pytest.mark.parametrize(
    ("asked", "needed"),
    [(1, 1), (1999, 1), (2000, 1), (2001, None), (3000, None), (4000, 2), (6000, 3)],
)
def test_more_than_one_device_is_whole_devices(asked: int, needed: int | None) -> None:
    assert devices_needed(asked, capacity_milli=2000) == needed


def test_could_ever_fit_ignores_running_sessions_and_cordons() -> None:
    lab = world(devices=2, cpu=8).running("a", "1").running("b", "1").cordoned("n1")
    assert could_ever_fit(request("c", "2", cpu=8), lab.nodes)
    assert not could_ever_fit(request("c", "3"), lab.nodes)
    assert not could_ever_fit(request("c", "1", cpu="8.001"), lab.nodes)
    assert not could_ever_fit(request("c", "1", group="class"), lab.nodes)
