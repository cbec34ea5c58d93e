"""How each GPU is: what is told of it, what stays known, and what an administrator has to see to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fgpu_scheduler import SystemClock
from fgpuspawner.hub.gpu_observers import GpuHealthWatch
from fgpuspawner.isolation.gpu_poller import NvmlSource
from fgpuspawner.isolation.nvml_reader import NvmlUnknown
from fgpuspawner.meter.gpu_health import HEALTH, OLD_S, GpuHealth, GpuHealthState, health_of

ANSWER = {
    "use_percent": 50,
    "memory_used_bytes": 3 * 2**30,
    "temperature_c": 61,
    "power_mw": 120_500,
    "power_limit_mw": 700_000,
    "ecc_errors": 0,
    "xid": 0,
}


class Driver:
    """A driver of one GPU at each of some places, which answers so."""

    def __init__(self, *answers: object) -> None:
        self.answers = answers

    def sources(self) -> dict[NvmlSource, list[str]]:
        return {NvmlSource(f"lib{n}"): [f"GPU-{n}"] for n in range(len(self.answers))}

    def reader(self, place: NvmlSource) -> Driver:
        return Driver(self.answers[int(place.library.removeprefix("lib"))])

    async def ask(self, question: dict[str, Any]) -> dict[str, Any]:
        (answer,) = self.answers
        if isinstance(answer, Exception):
            raise answer
        return {"devices": dict.fromkeys(question["uuids"], answer)}


async def looked(data: Path, *answers: object) -> dict[str, GpuHealth]:
    await GpuHealthWatch(Driver(*answers), SystemClock(), data=data).look()  # type: ignore[arg-type]
    return dict(HEALTH.read(data).devices)


async def test_a_gpu_that_cannot_be_asked_is_unknown_with_the_reason_and_hides_no_other(
    tmp_path: Path,
) -> None:
    found = await looked(
        tmp_path, ANSWER, NvmlUnknown("no answer"), {"use_percent": 1}, {"error": "GPU is lost"}
    )
    first = found["GPU-0"]
    assert (first.use_percent, first.memory_used_mib, first.temperature_c) == (50, 3072, 61)
    assert (first.power_w, first.power_limit_w, first.ecc_errors, first.xid) == (120.5, 700.0, 0, 0)
    assert first.problem == ""
    assert found["GPU-1"].trouble == "no answer"
    assert "makes no sense" in str(found["GPU-2"].trouble)
    assert found["GPU-3"].problem == "its driver does not tell how it is: GPU is lost"
    assert found["GPU-3"].ecc_errors is None


async def test_an_error_that_was_seen_stays_known_over_a_restart_of_the_hub(tmp_path: Path) -> None:
    seen = (await looked(tmp_path, ANSWER | {"xid": 79}))["GPU-0"]
    assert (seen.xid, seen.xid_at_s) == (79, seen.at_s)
    later = (await looked(tmp_path, ANSWER | {"xid": None}))["GPU-0"]
    assert (later.xid, later.xid_at_s) == (79, seen.at_s)


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        ({"xid": 31}, ""),
        ({"xid": 79}, "error 79 of the driver (Xid)"),
        ({"ecc_errors": 2}, "2 uncorrected memory errors (ECC)"),
        ({"temperature_c": 95}, "95 °C"),
        (dict.fromkeys(ANSWER), ""),
    ],
)
def test_what_an_administrator_has_to_see_to(more: dict[str, Any], problem: str) -> None:
    assert health_of(ANSWER | more, 100).problem == problem


def test_what_was_read_long_ago_is_not_told_as_what_is() -> None:
    told = GpuHealthState({"GPU-0": GpuHealth(1000, use_percent=5)})
    assert told.of("GPU-0", 1000 + OLD_S) == GpuHealth(1000, use_percent=5)
    assert told.of("GPU-0", 1001 + OLD_S) is None


def test_a_file_that_makes_no_sense_tells_nothing(tmp_path: Path) -> None:
    assert HEALTH.read(tmp_path) == GpuHealthState()
    (tmp_path / "gpu_health.json").write_text("[")
    assert HEALTH.read(tmp_path) == GpuHealthState()


def test_an_error_of_the_gpu_stands_over_those_of_programs_for_a_week() -> None:
    lost = GpuHealth(100, xid=79).after(None)
    later = GpuHealth(200, xid=45).after(lost)
    assert (later.xid, later.xid_at_s) == (79, 100)
    assert GpuHealth(300, xid=48).after(later).xid == 48
    assert GpuHealth(100 + 8 * 24 * 3600, xid=0).after(later).xid == 0
