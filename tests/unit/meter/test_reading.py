"""One look at a session's GPUs: what is not told is unknown, with a reason."""

from __future__ import annotations

from dataclasses import replace

import pytest
from sessions import DEVICES, GPU, OTHER, QUARTER, process, session

from fgpu_scheduler import Share
from fgpuspawner.isolation.nvml_reader import DeviceUse, ProcessUse
from fgpuspawner.meter.model import MOST_PROCESSES
from fgpuspawner.meter.reading import DeviceReading, Lent, lent_on, read


def seen(*processes: ProcessUse, energy_mj: int | None = None) -> DeviceReading:
    return DeviceReading(DeviceUse(processes), {p.pid: p.pid // 10 for p in processes}, energy_mj)


def test_a_sessions_processes_are_summed_and_others_left_out() -> None:
    looked = {GPU: seen(process(10, 700, 5.5), process(11, 300, 2.0), process(20, 4000, 60.0))}
    found = read(session(1), looked, DEVICES)
    assert (found.memory_mib, found.sm_percent, found.trouble) == (1000, 7.5, None)
    assert [(p.pid, p.memory_mib) for p in found.processes] == [(10, 700), (11, 300)]


@pytest.mark.parametrize(
    ("charged_mib", "context_mib"), [({GPU: 250}, 500), ({GPU: 400}, 700), ({}, None), ({GPU: 0}, None)]
)
def test_what_is_charged_for_contexts_is_not_the_programs(
    charged_mib: dict[str, int], context_mib: int | None
) -> None:
    looked = {GPU: seen(process(10, 700), process(11, 300), process(20, 4000))}
    assert read(session(1), looked, DEVICES, charged_mib).context_mib == context_mib
    silent = {GPU: seen(process(10, 700), process(11, None))}
    assert read(session(1), silent, DEVICES, charged_mib).context_mib is None


def test_session_use_is_at_most_one_gpu() -> None:
    found = read(session(1), {GPU: seen(process(10, 1, 70.0), process(11, 1, 60.0))}, DEVICES)
    assert found.sm_percent == 100


def test_nothing_held_is_nothing_and_known() -> None:
    found = read(session(1), {GPU: seen()}, DEVICES)
    assert (found.memory_mib, found.sm_percent, found.trouble) == (0, 0, None)


@pytest.mark.parametrize(
    ("looked", "memory", "sm", "words"),
    [
        (
            seen(process(10, None, 3.0), process(11, 5, 1.0)),
            None,
            4.0,
            "does not tell what each process holds",
        ),
        (seen(process(10, 700, None)), 700, None, "does not tell how much each process computes"),
        ("its machine has not answered within 5 s", None, None, "has not answered within 5 s"),
    ],
)
def test_what_is_not_told_is_unknown_with_a_reason(
    looked: DeviceReading | str, memory: int | None, sm: float | None, words: str
) -> None:
    found = read(session(1), {GPU: looked}, DEVICES)
    assert (found.memory_mib, found.sm_percent) == (memory, sm)
    assert words in str(found.trouble)


def test_of_two_gpus_one_that_is_silent_makes_the_sum_unknown() -> None:
    wholes = (Share(GPU, 2000, 8192, 100), Share(OTHER, 2000, 8192, 100))
    looked: dict[str, DeviceReading | str] = {
        GPU: seen(process(10, 700, 80.0), energy_mj=5),
        OTHER: seen(process(10, 200, 70.0), energy_mj=7),
    }
    both = read(session(1, *wholes), looked, DEVICES)
    assert (both.memory_mib, both.sm_percent, both.energy_mj, both.energy_estimated) == (900, 150, 12, False)
    assert [(p.pid, p.memory_mib) for p in both.processes] == [(10, 900)]
    one = read(session(1, *wholes), {**looked, OTHER: "gone"}, DEVICES)
    assert (one.memory_mib, one.sm_percent, one.energy_mj) == (None, None, None)


def test_processes_are_numbered_as_the_session_sees_them_and_bounded() -> None:
    many = [process(10, 1, inner=7)] + [replace(process(11, 5), inner_pid=1000 + i) for i in range(99)]
    found = read(session(1), {GPU: seen(*many)}, DEVICES)
    assert len(found.processes) == MOST_PROCESSES
    assert found.processes[0].pid == 1000
    assert read(session(1), {GPU: seen(many[0])}, DEVICES).processes[0].pid == 7


@pytest.mark.parametrize(
    ("share", "processes", "energy", "estimated"),
    [
        (Share(GPU, 2000, 8192, 100), (process(10, 1, 50.0), process(66, 1, 50.0)), 1000, False),
        (QUARTER, (process(10, 1, 20.0), process(20, 1, 60.0)), 250, True),
        (QUARTER, (process(10, 1, 0.0), process(20, 1, 0.0)), 250, True),
        (QUARTER, (process(10, 1, 10.0), process(20, 1, None)), 250, True),
        (QUARTER, (process(20, 1, 60.0),), 0, True),
    ],
    ids=["whole", "by computing", "idle", "one is not known", "only the other computes"],
)
def test_energy_is_exact_for_a_whole_gpu_and_else_divided(
    share: Share, processes: tuple[ProcessUse, ...], energy: int, estimated: bool
) -> None:
    found = read(session(1, share), {GPU: seen(*processes, energy_mj=1000)}, DEVICES)
    assert (found.energy_mj, found.energy_estimated) == (energy, estimated)


def test_energy_that_is_not_counted_is_unknown() -> None:
    found = read(session(1), {GPU: seen(process(10, 1, 20.0))}, DEVICES)
    assert (found.energy_mj, found.energy_estimated) == (None, False)


def test_only_busy_session_borrows_from_idle_ones_and_free_capacity() -> None:
    found = lent_on({1: 25, 2: 25}, {1: 25, 2: 25}, {1: 100.0})
    assert found[1] == Lent(100.0, 75.0, 0.0)
    # A third of the 75 was the other's share, the rest was free.
    assert found[2] == Lent(0.0, 0.0, 25.0)


def test_nothing_is_lent_when_all_use_their_share() -> None:
    found = lent_on({1: 50, 2: 50}, {1: 50, 2: 50}, {1: 50.0, 2: 50.0})
    assert found == {1: Lent(50.0, 0.0, 0.0), 2: Lent(50.0, 0.0, 0.0)}


def test_strict_session_lends_nothing() -> None:
    found = lent_on({1: 50, 2: 25, 3: 25}, {2: 25, 3: 25}, {2: 45.0, 3: 5.0})
    assert found == {2: Lent(45.0, 20.0, 0.0), 3: Lent(5.0, 0.0, 20.0)}
