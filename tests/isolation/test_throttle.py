"""Shares of a device's time, in simulated time (isolation/tests/throttle_world.c), so each run gives the same result.

The throttle is libfgpu's own; device, driver, clock and host are simulated. `bench/isolation/shares.py` measures real
time. The last tests launch in each way on the simulated driver in real time: they assert only the upper limit, because
on a busy machine everything is less.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
from sessionfolders import MakePath
from throttleworlds import World

PERIOD_MS, IN_FLIGHT_MS = 50, 4
SOLO = ["0-10", "0-25", "0-50", "0-75", "10-20+50-60", "0-5+95-100"]
PAIRS = [("0-25", "25-100"), ("0-50", "50-100"), ("0-10", "25-100"), ("0-10", "10-20"), ("75-100", "0-75")]
SHORT_US = [50, 500, 2000, 3000, 5000]


def percent(slots: str) -> int:
    return sum(int(b) - int(a) for a, b in (slot.split("-") for slot in slots.split("+")))


# --- Shares --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("slots", "kernel_us"), [("0-25", 10), *((slots, us) for slots in SOLO for us in SHORT_US)]
)
def test_a_session_gets_its_share_alone(world: World, slots: str, kernel_us: int) -> None:
    (only,) = world(f"slots={slots},kernel_us={kernel_us}").tenants
    assert only.share == pytest.approx(percent(slots), abs=1)
    assert only.paid_ms == pytest.approx(only.busy_ms, rel=0.03)


@pytest.mark.parametrize("policy", ["fifo", "sliced"])
@pytest.mark.parametrize("kernel_us", SHORT_US)
@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_two_sessions_get_their_shares(
    world: World, pair: tuple[str, str], kernel_us: int, policy: str
) -> None:
    outcome = world(*(f"slots={slots},kernel_us={kernel_us}" for slots in pair), policy=policy)
    for tenant, slots in zip(outcome.tenants, pair, strict=True):
        assert tenant.share == pytest.approx(percent(slots), abs=3)


@pytest.mark.parametrize("policy", ["fifo", "sliced"])
@pytest.mark.parametrize(("first_us", "second_us"), [(50, 5000), (5000, 50), (500, 3000)])
def test_two_sessions_with_kernels_of_different_length(
    world: World, first_us: int, second_us: int, policy: str
) -> None:
    outcome = world(f"slots=0-25,kernel_us={first_us}", f"slots=25-100,kernel_us={second_us}", policy=policy)
    assert [tenant.share for tenant in outcome.tenants] == pytest.approx([25, 75], abs=3)


@pytest.mark.parametrize("kernel_us", [7000, 20_000, 50_000])
@pytest.mark.parametrize("slots", SOLO[:4])
def test_kernels_longer_than_their_slots_get_their_share_in_the_long_run(
    world: World, slots: str, kernel_us: int
) -> None:
    (only,) = world(f"slots={slots},kernel_us={kernel_us}", seconds=30).tenants
    assert only.share == pytest.approx(percent(slots), abs=0.5)


@pytest.mark.parametrize("kernel_us", [7000, 20_000, 50_000])
@pytest.mark.parametrize("pair", PAIRS[:3], ids=str)
def test_two_sessions_with_long_kernels_that_are_served_in_turn(
    world: World, pair: tuple[str, str], kernel_us: int
) -> None:
    outcome = world(*(f"slots={slots},kernel_us={kernel_us}" for slots in pair), seconds=60)
    for tenant, slots in zip(outcome.tenants, pair, strict=True):
        assert tenant.share == pytest.approx(percent(slots), abs=3)


@pytest.mark.parametrize("policy", ["fifo", "sliced"])
@pytest.mark.parametrize("kernel_us", [*SHORT_US, 50_000])
def test_no_neighbour_makes_a_session_exceed_its_share(world: World, kernel_us: int, policy: str) -> None:
    outcome = world(
        *(f"slots={slots},kernel_us={kernel_us}" for slots in ("0-50", "50-100")), policy=policy, seconds=20
    )
    for tenant in outcome.tenants:
        assert tenant.share < 50.5


@pytest.mark.parametrize("kernel_us", [50, 500, 5000, 20_000, 50_000])
@pytest.mark.parametrize("slots", SOLO[:4])
def test_the_published_bound_holds_in_every_stretch_of_time(world: World, slots: str, kernel_us: int) -> None:
    """docs/isolation.md and gate.h: off by at most one kernel, 2.5 periods' slots and what may be in flight."""
    (only,) = world(f"slots={slots},kernel_us={kernel_us}", seconds=30).tenants
    bound = kernel_us / 1000 + 2.5 * percent(slots) / 100 * PERIOD_MS + IN_FLIGHT_MS
    for below, above in only.off_ms.values():
        assert -bound <= below <= above <= bound


# --- Lengths that cannot be foretold -------------------------------------------------------------------


def let_through(kernel_us: int) -> int:
    """How many launches wait in vain and are let through while one kernel runs, each after twice the last patience."""
    return int(math.log2(1 + kernel_us / 1000 / PERIOD_MS))


def unforeseen_bound_ms(kernel_us: int, launches: int) -> float:
    """The bound of docs/isolation.md: launches in flight before the first one has shown its length."""
    return (launches + let_through(kernel_us)) * kernel_us / 1000 + 2.5 * 0.25 * PERIOD_MS + IN_FLIGHT_MS


@pytest.mark.parametrize("program", ["processes=1", "processes=2", "burst=4,idle_ms=4000", "streams=3"])
@pytest.mark.parametrize("kernel_us", [1_000_000, 2_000_000, 3_000_000, 5_000_000])
def test_kernels_of_seconds_get_their_share(world: World, kernel_us: int, program: str) -> None:
    (only,) = world(f"slots=0-25,kernel_us={kernel_us},{program}", seconds=1200).tenants
    processes = 2 if program == "processes=2" else 1
    assert 22 < only.share < 25.5  # less where streams or processes paid for the same seconds: account.h
    assert only.paid_ms > only.busy_ms - processes * kernel_us / 1000
    for _, above in only.off_ms.values():
        assert above <= processes * unforeseen_bound_ms(kernel_us, 1)


CHANGING = [
    (5, 5000),
    (5, 20_000),
    (20, 20_000),
    (20, 100_000),
    (20, 1_000_000),
    (20, 5_000_000),
    (100, 20_000),
]
"""(every, change_us): each ``every``-th launch of a function of 10 us takes ``change_us``."""


@pytest.mark.parametrize(("every", "change_us"), CHANGING)
@pytest.mark.parametrize("program", ["wait_each={0}", "poll_each={0}", "burst={0},idle_ms={1}", "host_us=2"])
def test_a_function_whose_launches_take_now_short_now_long(
    world: World, every: int, change_us: int, program: str
) -> None:
    """In bursts that are waited for, by a hooked function or not; in bursts with pauses; and without an end."""
    program = program.format(every, change_us // 1000)
    text = f"slots=0-25,kernel_us=10,change_us={change_us},every={every},{program}"
    (only,) = world(text, seconds=1200 if change_us >= 1_000_000 else 120).tenants
    assert 20 < only.share < 25.5
    if (
        program != "host_us=2"
    ):  # 4 ms of work, as expected, may be 400 launches before the first has shown its length
        launches = 1 + math.ceil(30 / every)
        assert all(above <= unforeseen_bound_ms(change_us, launches) for _, above in only.off_ms.values())


@pytest.mark.parametrize("policy", ["fifo", "sliced"])
@pytest.mark.parametrize("wait", ["wait_each", "poll_each"])
def test_changing_kernels_press_a_neighbour_no_more_than_constant_ones(
    world: World, wait: str, policy: str
) -> None:
    neighbour = "slots=25-100,kernel_us=500"
    constant = world("slots=0-25,kernel_us=20000", neighbour, seconds=60, policy=policy).tenants
    text = f"slots=0-25,kernel_us=10,change_us=20000,every=20,{wait}=20"
    changing = world(text, neighbour, seconds=60, policy=policy).tenants
    assert changing[0].share < 25.5
    assert changing[1].share > constant[1].share - 1


# --- What programs do ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel_us", [50, 1000])
@pytest.mark.parametrize("processes", [2, 3])
@pytest.mark.parametrize("slots", ["0-10", "0-50"])
def test_processes_of_one_session_share_its_slots(
    world: World, slots: str, processes: int, kernel_us: int
) -> None:
    (only,) = world(f"slots={slots},kernel_us={kernel_us},processes={processes}").tenants
    assert only.share == pytest.approx(percent(slots), abs=1)


@pytest.mark.parametrize("slots", ["0-10", "0-50"])
@pytest.mark.parametrize("mix_us", [500, 5000])
def test_kernels_of_different_length_in_one_program(world: World, slots: str, mix_us: int) -> None:
    (only,) = world(f"slots={slots},kernel_us=50,mix_us={mix_us}").tenants
    assert only.share == pytest.approx(percent(slots), abs=1)


@pytest.mark.parametrize(("kernel_us", "later_us"), [(50, 5000), (5000, 50), (500, 50_000)])
def test_a_kernel_that_becomes_longer_or_shorter(world: World, kernel_us: int, later_us: int) -> None:
    """Work in flight of unknown length is paid for afterwards."""
    (only,) = world(f"slots=0-25,kernel_us={kernel_us},later_us={later_us}", seconds=20).tenants
    assert only.share == pytest.approx(25, abs=1.5)
    assert only.off_ms[1000][1] < 400


@pytest.mark.parametrize("wait", ["wait_each", "poll_each"])
def test_a_program_that_waits_for_each_kernel(world: World, wait: str) -> None:
    (only,) = world(f"slots=0-25,kernel_us=2000,{wait}=1").tenants
    assert only.share == pytest.approx(25, abs=1)


def test_a_program_with_pauses_hoards_nothing(world: World) -> None:
    """50 kernels of 2 ms, a pause of up to 400 ms: after each pause it may have half a period more, not more."""
    (only,) = world("slots=0-25,kernel_us=2000,idle_ms=200").tenants
    assert only.off_ms[200][1] < 2 + 1.5 * 0.25 * PERIOD_MS


@pytest.mark.parametrize("slots", ["0-50", "0-25"])
@pytest.mark.parametrize("mix_us", [500, 900])
def test_work_that_waits_for_later_work_goes_on(world: World, mix_us: int, slots: str) -> None:
    """Slowly, as each has to be waited for in vain; but it does, and does not become slower."""
    (only,) = world(f"slots={slots},kernel_us=500,mix_us={mix_us},collective=1", seconds=60).tenants
    assert only.kernels > 400


@pytest.mark.parametrize("capture", ["capture", "cig"])
def test_capture_is_neither_disturbed_nor_held_back(world: World, capture: str) -> None:
    """The world fails when a captured launch waits, and counts what would break a capture."""
    outcome = world(f"slots=0-25,kernel_us=1000,{capture}=1,streams=2")
    assert outcome.disturbed == 0
    assert outcome.tenants[0].share == pytest.approx(25, abs=1)


def test_events_of_a_context_that_is_gone_are_not_touched(world: World) -> None:
    """The world fails when they are."""
    (only,) = world("slots=0-25,kernel_us=1000,contexts=1,streams=3").tenants
    assert only.share == pytest.approx(25, abs=2)


def test_a_killed_process_leaves_the_share_to_the_others(world: World) -> None:
    (only,) = world("slots=0-25,kernel_us=500,processes=3,kill_ms=1005").tenants
    assert only.share == pytest.approx(25, abs=1)


def test_without_a_limit_launches_go_straight_through(world: World) -> None:
    (only,) = world("slots=0-10,kernel_us=500,free=1").tenants
    assert only.paid_ms == 0
    assert only.share == pytest.approx(100, abs=1)


@pytest.mark.parametrize(("late_us", "stall_permille"), [(200, 0), (60, 5), (60, 20)])
@pytest.mark.parametrize("kernel_us", [50, 500, 5000])
def test_a_host_that_is_late(world: World, kernel_us: int, late_us: int, stall_permille: int) -> None:
    """What it misses of a slot is lost, but never more is taken."""
    outcome = world(
        *(f"slots={slots},kernel_us={kernel_us}" for slots in ("0-25", "25-75")),
        late_us=late_us,
        stall_permille=stall_permille,
    )
    for tenant, share in zip(outcome.tenants, (25, 50), strict=True):
        assert share - 3 < tenant.share < share + 0.5


@pytest.mark.parametrize("seed", range(5))
def test_everything_at_once(world: World, seed: int) -> None:
    outcome = world(
        "slots=0-25,kernel_us=300,mix_us=2000,streams=3,processes=2",
        "slots=25-50,kernel_us=50,capture=1,streams=4",
        "slots=50-100,kernel_us=1000,contexts=1",
        seed=seed,
    )
    assert outcome.disturbed == 0
    assert [tenant.share for tenant in outcome.tenants] == pytest.approx([25, 25, 50], abs=4)


# --- Every way to launch, on the simulated driver, in real time ----------------------------------------

WAYS = [
    "plain",
    "own-stream",
    "null-stream",
    "extended",
    "extended-own-stream",
    "cooperative",
    "cooperative-own-stream",
    "on-several",
    "oldest",
    "old-grid",
    "old-grid-async",
    "graph",
    "graph-own-stream",
]
AFTER = ["capture", "fork", "context", "threads"]
Launches = Callable[[Path, str, int], tuple[int, int]]


@pytest.mark.parametrize("way", [*WAYS, *AFTER])
def test_each_way_to_launch_is_held_to_the_share(
    session_folder: MakePath, launches: Launches, way: str
) -> None:
    folder = session_folder(compute_percent=10, mode="memory+compute", slots="50-60")
    count, took_ms = launches(folder, way, 300)
    assert (folder / "log").read_text() == ""
    assert 0 < count <= 0.1 * took_ms + 1 + 2.5 * 0.1 * PERIOD_MS + IN_FLIGHT_MS


@pytest.mark.parametrize("way", ["plain", "graph", "capture", "context"])
def test_mode_memory_leaves_compute_alone(session_folder: MakePath, launches: Launches, way: str) -> None:
    """The driver takes as many launches as it has room for, at once: far more than would run in that time."""
    count, _ = launches(session_folder(mode="memory"), way, 300)
    assert count > 1000
