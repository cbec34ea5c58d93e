"""Compute that sessions lend each other, in simulated time: idle compute is used, and owners lose none of theirs."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
from sessionfolders import MakePath
from throttleworlds import Tenant, World

QUARTERS = ("0-25", "25-50", "50-75", "75-100")
LENDS = "lending=1"


def quarters(*programs: str) -> list[str]:
    """Return tenants of a quarter each that lend, one for each program; the rest of the device is free."""
    return [f"slots={slots},{LENDS},{program}" for slots, program in zip(QUARTERS, programs, strict=False)]


# --- What is idle is used ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("slots", "kernel_us"),
    [
        ("0-25", 10),
        *itertools.product(("0-10", "0-25", "10-20+50-60"), (500, 5000, 100_000, 1_000_000)),
    ],
)
def test_a_session_alone_gets_the_whole_device(world: World, slots: str, kernel_us: int) -> None:
    (only,) = world(f"slots={slots},{LENDS},kernel_us={kernel_us}", seconds=20).tenants
    assert only.share > 98.5
    assert only.paid_ms + only.lent_ms > only.busy_ms - 2 * kernel_us / 1000 - 50


def test_what_was_lent_is_not_held_against_the_borrower(world: World) -> None:
    """It is charged for its own slots only, so it owes nothing when the owners come back."""
    borrower, *owners = world(
        *quarters("kernel_us=500", *["kernel_us=500,start_ms=10000"] * 3), seconds=11
    ).tenants
    assert borrower.paid_ms == pytest.approx(0.25 * 11_000, rel=0.02)
    assert borrower.lent_ms == pytest.approx(0.75 * 10_000, rel=0.02)
    assert all(owner.back[1] > 24 for owner in owners)


@pytest.mark.parametrize("most", [25, 30, 50, 90])
def test_no_more_is_lent_than_the_administrator_allows(world: World, most: int) -> None:
    (only,) = world(f"slots=0-25,{LENDS},most={most},kernel_us=500").tenants
    assert only.share == pytest.approx(most, abs=0.5)


@pytest.mark.parametrize("count", range(2, 10))
def test_busy_sessions_borrow_equally(world: World, count: int) -> None:
    tenants = world(*(f"slots={i * 10}-{i * 10 + 10},{LENDS},kernel_us=500" for i in range(count))).tenants
    assert [t.share for t in tenants] == pytest.approx([100 / count] * count, abs=1.5)


@pytest.mark.parametrize("kernel_us", [200, 1000])
def test_two_borrowers_on_a_gpu_that_slices_time_use_nearly_all_of_it(world: World, kernel_us: int) -> None:
    """The rest of a kernel at a grant's end waits for a whole slice of the neighbour, and is not charged for that."""
    idle = f"kernel_us={kernel_us},task_ms=10,gap_ms=1000000000"
    busy = f"kernel_us={kernel_us}"
    tenants = world(*quarters(busy, busy, idle, idle), policy="sliced", seconds=20).tenants
    assert sum(tenant.share for tenant in tenants) > 90
    assert tenants[0].share == pytest.approx(tenants[1].share, abs=2)


NOTEBOOKS = [
    # sessions, percent each, percent of the time in which each would have work on a whole device, at most so slow
    (2, 50, 5, 1.15),
    (2, 50, 10, 1.25),
    (2, 50, 19, 1.35),
    (4, 25, 5, 1.3),
    (4, 25, 10, 1.5),
    (4, 25, 19, 2.1),
    (10, 10, 5, 2.2),
    (10, 10, 10, 4.5),
    (10, 10, 19, 7.0),
]


def notebooks(count: int, percent: int, duty: int, more: str) -> list[str]:
    """Return notebooks with cells of 2 s on the mean on a whole device, drawn from the clock's seed."""
    program = f"kernel_us=2000,task_ms=2000,gap_ms={2000 * (100 - duty) // duty}{more}"
    return [f"slots={n * percent}-{(n + 1) * percent},{program}" for n in range(count)]


def slow_down(tenants: list[Tenant]) -> float:
    cells = sum(t.cells for t in tenants)
    assert cells > 30
    return sum(t.cells * t.cells_stretched for t in tenants) / cells


@pytest.mark.parametrize(("count", "percent", "duty", "most"), NOTEBOOKS)
def test_cells_of_notebooks_take_little_longer_than_on_a_whole_device(
    world: World, count: int, percent: int, duty: int, most: float
) -> None:
    # Ten sessions' cells are many: half the time has enough of them.
    seconds = 2000 if count < 10 else 1000
    assert slow_down(world(*notebooks(count, percent, duty, f",{LENDS}"), seconds=seconds).tenants) < most


def test_without_lending_they_take_as_long_as_their_share_says(world: World) -> None:
    assert slow_down(world(*notebooks(4, 25, 10, ""), seconds=1000).tenants) == pytest.approx(4, rel=0.05)


# --- A share is a floor --------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["fifo", "sliced"])
@pytest.mark.parametrize("kernel_us", [50, 500, 2000, 5000])
def test_where_all_have_work_it_is_as_without_lending(world: World, kernel_us: int, policy: str) -> None:
    program = f"kernel_us={kernel_us}"
    elastic = world(*quarters(*[program] * 4), policy=policy).tenants
    strict = world(*(f"slots={slots},{program}" for slots in QUARTERS), policy=policy).tenants
    assert [t.share for t in elastic] == pytest.approx([t.share for t in strict], abs=0.4)
    assert sum(t.lent_ms for t in elastic) < 50  # while the last of them begins


@pytest.mark.parametrize("policy", ["fifo", "sliced"])
@pytest.mark.parametrize("borrowers", [1, 2, 3])
@pytest.mark.parametrize("start_ms", [3000, 3010, 3033, 3047])
@pytest.mark.parametrize("kernel_us", [50, 500])
def test_an_owner_who_comes_back_has_its_floor_from_100_ms_on(
    world: World, kernel_us: int, start_ms: int, borrowers: int, policy: str
) -> None:
    programs = [f"kernel_us={kernel_us},start_ms={start_ms}", *[f"kernel_us={kernel_us}"] * borrowers]
    owner = world(*quarters(*programs), policy=policy).tenants[0]
    assert all(percent > 24 for percent in owner.back[:4])


@pytest.mark.parametrize("policy", ["fifo", "sliced"])
@pytest.mark.parametrize("borrower_us", [1000, 2000, 3000, 4000])
@pytest.mark.parametrize("borrowers", [1, 2, 3])
def test_longer_kernels_of_borrowers_press_an_owner_no_more_than_without_lending(
    world: World, borrowers: int, borrower_us: int, policy: str
) -> None:
    owner = "kernel_us=500,start_ms=3010"
    programs = [owner, *[f"kernel_us={borrower_us}"] * borrowers]
    elastic = world(*quarters(*programs), policy=policy, seconds=20).tenants[0]
    strict = world(
        *(f"slots={slots},{program}" for slots, program in zip(QUARTERS, programs, strict=False)),
        policy=policy,
        seconds=20,
    ).tenants[0]
    assert elastic.back[3] > min(24, strict.back[3] - 0.5)


@pytest.mark.parametrize("policy", ["fifo", "sliced"])
@pytest.mark.parametrize(
    "program", ["kernel_us=20000", "kernel_us=10,change_us=20000,every=20,wait_each=20"], ids=str
)
def test_what_is_known_to_be_longer_than_a_grant_gets_none_while_another_has_work(
    world: World, program: str, policy: str
) -> None:
    elastic = world(*quarters(program, "kernel_us=500"), seconds=60, policy=policy).tenants
    strict = world(f"slots=0-25,{program}", "slots=25-50,kernel_us=500", seconds=60, policy=policy).tenants
    assert strict[0].share - 0.7 < elastic[0].share < 25.7
    assert elastic[1].share > strict[1].share + 5


def test_a_session_that_does_not_lend_keeps_its_slots(world: World) -> None:
    borrower, other = world(f"slots=0-25,{LENDS},kernel_us=500", "slots=25-50,kernel_us=500").tenants
    assert borrower.share == pytest.approx(75, abs=1)
    assert other.share == pytest.approx(25, abs=0.5)


# --- Who lies ------------------------------------------------------------------------------------------

HONEST = "kernel_us=500"
LIES = ["liar=1", "future=1", "unread=1", "flicker=1", "silent=1"]


@pytest.mark.parametrize("lie", LIES)
def test_a_liar_gains_nothing(world: World, lie: str) -> None:
    """With three busy neighbours it gets its share; with one it gets at most what an honest session gets."""
    for others in (1, 3):
        programs = [HONEST] * others
        honest = world(*quarters(HONEST, *programs)).tenants[0].share
        assert world(*quarters(f"{HONEST},{lie}", *programs)).tenants[0].share < honest + 0.5


@pytest.mark.parametrize("lie", ["liar=1", "unread=1", "flicker=1,liar=1"])
def test_session_that_claims_work_only_stops_lending(world: World, lie: str) -> None:
    one, liar = world(*quarters(HONEST, lie if "liar" in lie else f"{HONEST},start_ms=60000,{lie}")).tenants
    assert liar.share == 0
    assert one.share > 49


@pytest.mark.parametrize("lie", ["future=1", "unread=1", "flicker=1"])
def test_no_liar_takes_from_a_floor(world: World, lie: str) -> None:
    tenants = world(*quarters(f"{HONEST},{lie}", *[HONEST] * 3)).tenants
    assert all(t.share > 24 for t in tenants[1:]) or lie == "future=1"


@pytest.mark.parametrize("policy", ["fifo", "sliced"])
@pytest.mark.parametrize("kernel_us", [500, 2000])
def test_session_that_hides_its_work_loses_most(world: World, kernel_us: int, policy: str) -> None:
    programs = [f"{HONEST},silent=1", *[f"kernel_us={kernel_us}"] * 3]
    liar, *others = world(*quarters(*programs), policy=policy).tenants
    assert liar.share < min(t.share for t in others)
    assert all(t.share > 19 for t in others)


@pytest.mark.parametrize("word", ["", "future=1"])
def test_a_killed_owners_word_says_nothing_after_three_periods(world: World, word: str) -> None:
    program = f"{HONEST},kill_ms=2500" + (f",{word}" if word else "")
    left, _killed = world(*quarters(HONEST, program), seconds=3).tenants
    assert left.busy_ms > 0.49 * 2500 + 0.97 * (500 - 150)


# --- In real time, on the simulated driver -------------------------------------------------------------


@pytest.fixture
def percent_of(session_folder: MakePath, launches: Callable[..., tuple[int, int]]) -> Callable[..., float]:
    """Launch kernels for half a second in slots 0-25 beside these words; return the percent of time that they took."""

    def percent_of(neighbour: bytes | None, *, own: bool = True) -> float:
        slots = "0-25 lending=1 most_percent=100"
        folder = session_folder(compute_percent=25, mode="memory+compute", slots=slots)
        shared = folder / "lending" / "0"
        shared.mkdir(parents=True)
        word = folder / "lending" / "own-0"
        (shared / "owners").write_bytes(bytes([1] * 25 + [2] * 75))
        if own:
            word.write_bytes(bytes(8))
            (shared / "1").hardlink_to(word)
        if neighbour is not None:
            (shared / "2").write_bytes(neighbour)
        count, took_ms = launches(folder, "plain", 500)
        assert ("cannot be said" in (folder / "log").read_text()) == (not own)
        return 100 * count / took_ms

    return percent_of


MOST_OF_A_QUARTER = 25 + 100 * (1 + 2.5 * 0.25 * 50 + 4) / 500
"""What the bound of a share of 25 % allows in half a second."""


def test_a_word_that_is_not_there_keeps_its_slots(percent_of: Callable[..., float]) -> None:
    assert percent_of(None) < MOST_OF_A_QUARTER


def test_session_without_a_word_gets_only_its_slots(percent_of: Callable[..., float]) -> None:
    assert 0 < percent_of(bytes(8), own=False) < MOST_OF_A_QUARTER
