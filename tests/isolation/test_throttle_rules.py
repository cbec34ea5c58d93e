"""The throttle's pure parts: times in, answers out. Times are in milliseconds here."""

from __future__ import annotations

import itertools
import subprocess
from collections.abc import Callable

import pytest
from sessionfolders import MakePath

MS = 1_000_000
PERIOD = 50.0
GRAIN = 0.1
"""To what the account measures."""

Ask = Callable[..., list[str]]


@pytest.fixture
def ask(compile_c: MakePath) -> Ask:
    """Put questions, one a line, to the pure parts of the throttle; the first says the slots."""
    program = compile_c(
        "tests/throttle_rules.c", *(f"libfgpu/{name}.c" for name in ("slots", "gate", "account"))
    )

    def ask(slots: str, *questions: str) -> list[str]:
        text = "\n".join([f"slots {slots}", *questions, ""])
        done = subprocess.run([program], input=text, capture_output=True, text=True, check=True, timeout=30)
        return done.stdout.splitlines()[1:]

    return ask


def question(name: str, *times: float) -> str:
    return " ".join([name, *(str(round(time * MS)) for time in times)])


def gate(
    now: float,
    expected: float,
    *,
    balance: float,
    in_flight: float = 0,
    sentinels: int = 0,
    longest: float = 0,
) -> str:
    """A launch at `now`; what is in flight began just now."""
    times = question("ask", now, expected, balance, in_flight, now + in_flight)
    return f"{times} {sentinels} {round(longest * MS)}"


def milliseconds(answer: str) -> list[float]:
    return [int(word) / MS for word in answer.split()]


# --- Slots ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("slots", "now", "start", "end"),
    [
        ("0-25", 1000, 1000, 1012.5),
        ("0-25", 1012.4, 1000, 1012.5),
        ("0-25", 1012.5, 1050, 1062.5),
        ("50-75", 1000, 1025, 1037.5),
        ("50-75", 1030, 1025, 1037.5),
        ("10-20,50-60", 1010, 1025, 1030),
        ("10-20,50-60", 1030, 1055, 1060),
        ("10-20,20-30", 1007, 1005, 1015),  # they touch
        ("0-10,90-100", 1049, 1045, 1055),  # across the period's end
        ("0-10,90-100", 1004, 995, 1005),
        ("0-10,90-100", 1006, 1045, 1055),
        ("0-10,40-50,90-100", 1006, 1020, 1025),
        ("0-10,10-20,90-100", 1009, 995, 1010),
    ],
)
def test_a_moment_belongs_to_its_slot_or_to_the_next(
    ask: Ask, slots: str, now: float, start: float, end: float
) -> None:
    assert milliseconds(ask(slots, question("at", now))[0]) == [start, end]


@pytest.mark.parametrize(
    "slots", ["0-1", "0-25", "50-100", "10-20,50-60", "0-10,40-45,90-100", "0-99", "0-100"]
)
def test_entitled_time_is_the_time_inside_slots(ask: Ask, slots: str) -> None:
    """Summed over small steps it is what the slots themselves say of each step's middle."""
    step = 0.25
    moments = [5000 + n * step for n in range(round(3 * PERIOD / step) + 1)]
    entitled = [int(each) / MS for each in ask(slots, *(question("entitled", now) for now in moments))]
    places = ask(slots, *(question("at", now + step / 2) for now in moments[:-1]))
    for now, place, (before, after) in zip(moments, places, itertools.pairwise(entitled), strict=False):
        start, end = milliseconds(place)
        middle = now + step / 2
        assert after - before == pytest.approx(step if start <= middle < end else 0, abs=step / 2)
    hundredths = sum(int(b) - int(a) for a, b in (slot.split("-") for slot in slots.split(",")))
    assert entitled[-1] - entitled[0] == pytest.approx(3 * PERIOD * hundredths / 100)


# --- The gate: slots of 12.5 ms, the first from 1000 on ------------------------------------------------


@pytest.mark.parametrize(
    ("launch", "answer"),
    [
        (gate(1003, 0.05, balance=0), "open"),
        (gate(1003, 0.05, balance=5), "open"),
        # Outside: the next slot.
        (gate(1012.5, 0.05, balance=5), "wait 1050"),
        (gate(1049.9, 0.05, balance=5), "wait 1050"),
        # Something in flight that will last to the slot's end.
        (gate(1010, 0.05, balance=5, in_flight=2), "open"),
        (gate(1010, 0.05, balance=5, in_flight=2.5), "wait 1050"),
        (gate(1010, 0.05, balance=5, in_flight=2.5, sentinels=1), "sentinel"),
        # A kernel of 5 ms with 2 ms left runs over by 3: only if 0.5 ms were left over before.
        (gate(1010.5, 5, balance=0), "wait 1050"),
        (gate(1010.5, 5, balance=0.4), "wait 1050"),
        (gate(1010.5, 5, balance=0.5), "open"),
        # What is owed is waited for: 12.5 ms accrue in each slot, and 2.5 are needed.
        (gate(1000, 5, balance=-10), "open"),
        (gate(1000, 5, balance=-10.1), "wait 1050"),
        (gate(1000, 5, balance=-30), "wait 1100"),
        (gate(1020, 5, balance=-50), "wait 1250"),
        # Longer than the slot: half of the slot is enough, and near its beginning.
        (gate(1000, 50, balance=-6.25), "open"),
        (gate(1000, 50, balance=-6.3), "wait 1050"),
        (gate(1003.1, 50, balance=0), "open"),
        (gate(1003.2, 50, balance=0), "wait 1050"),
        (gate(1003.1, 0.05, balance=0, longest=50), "open"),  # it may take longer than it is expected to
        (gate(1003.2, 0.05, balance=0, longest=50), "wait 1050"),
        (gate(1003.2, 0.05, balance=0, longest=10), "open"),
        (gate(1001, 50, balance=9, in_flight=3, sentinels=1), "sentinel"),  # that may be done sooner
        (gate(1003.2, 50, balance=9, in_flight=3, sentinels=1), "wait 1050"),
        # Work in flight is bounded, but what is alone may be of any length.
        (gate(1001, 1, balance=0, in_flight=3, sentinels=2), "open"),
        (gate(1001, 1, balance=0, in_flight=3.1, sentinels=2), "sentinel"),
        (gate(1001, 1, balance=0, in_flight=3.1, sentinels=1), "open"),
        (gate(1001, 0.01, balance=0, in_flight=0.1, sentinels=29), "open"),
        (gate(1001, 0.01, balance=0, in_flight=0.1, sentinels=30), "sentinel"),
        # Owed because of what is in flight: that may have been expected to take too long.
        (gate(1001, 5, balance=-20, in_flight=6, sentinels=1), "wait 1050"),
        (gate(1001, 5, balance=-20, in_flight=20, sentinels=1), "sentinel"),
        (gate(1001, 5, balance=-20, in_flight=20, sentinels=0), "wait 1050"),
    ],
)
def test_the_gate_decides(ask: Ask, launch: str, answer: str) -> None:
    found = ask("0-25", launch)[0].split()
    assert " ".join([found[0], *(f"{int(word) / MS:g}" for word in found[1:])]) == answer


def test_a_slot_shorter_than_its_first_part_takes_a_long_kernel_at_any_time(ask: Ask) -> None:
    assert ask("0-1", gate(1000.4, 5, balance=0.2)) == ["open"]


# --- The account ---------------------------------------------------------------------------------------


def test_the_balance_begins_with_nothing_and_grows_in_slots_only(ask: Ask) -> None:
    assert ask("0-10", question("balance", 1003), question("balance", 1003)) == ["0", "0"]
    first, then = map(int, ask("0-10", question("entitled", 0), question("entitled", 1000)))
    moments = (1000, 1001, 1002.5, 1006, 1050, 1051)
    begun = (question("balance", 0), f"deposit {then - first}")
    answers = ask("0-10", *begun, *(question("balance", now) for now in moments))
    assert [int(answer) / MS for answer in answers[2:]] == [0, 1, 2.5, 2.5, 2.5, 2.5]


def test_at_most_half_a_period_is_kept_and_a_minute_owed(ask: Ask) -> None:
    begun = question("balance", 0)
    kept = ask("0-50", begun, question("balance", 10_000), question("balance", 100_000))
    assert [float(a) / MS for a in kept[1:]] == [12.5, 12.5]
    owed = ask(
        "0-50", begun, f"deposit {3600 * 1000 * MS}", question("balance", 1000), question("balance", 1050)
    )
    assert [float(a) / MS for a in owed[2:]] == [-60_000, -60_000 + 25]


@pytest.mark.parametrize("start_ms", [70_000, 10**6, 10**10], ids=str)
@pytest.mark.parametrize("sizes", [("0-50", "0-25"), ("0-25", "50-100"), ("0-1", "0-100"), ("0-99", "7-8")])
def test_debt_survives_any_number_of_slot_changes(ask: Ask, sizes: tuple[str, str], start_ms: int) -> None:
    """To a period's slots for each change. Who has not known the old slots carries it over too."""
    owed_ms, changes = 20_000, 100
    questions = [question("balance", start_ms), f"deposit {owed_ms * MS}"]
    for n in range(1, changes + 1):
        # Ten changes a second, each seen a little later in the period.
        questions += [f"change {sizes[n % 2]}", question("balance", start_ms + n * 100 + n * 0.4)]
    found = [int(answer) / MS for answer in ask(sizes[0], *questions)[3::2]]
    percents = [int(end) - int(begin) for begin, end in (size.split("-") for size in sizes)]
    paid_back_ms, slots_ms = changes * 100.4 * sum(percents) / 200, max(percents) / 2
    assert found[0] == pytest.approx(-owed_ms + 100.4 * percents[0] / 100, abs=2 * slots_ms)
    assert found[-1] == pytest.approx(-owed_ms + paid_back_ms, abs=changes * slots_ms)


def test_what_was_kept_is_no_more_than_the_new_slots_allow(ask: Ask) -> None:
    questions = [question("balance", 0), question("balance", 100_000), "change 0-10"]
    answers = ask("0-50", *questions, question("balance", 100_000))
    assert [int(a) / MS for a in (answers[1], answers[3])] == [12.5, 2.5]


def paid(ask: Ask, *spans: tuple[float, float], now: float = 100_000, deposit: float = 0) -> list[float]:
    """What is paid for each span of time, in this order."""
    answers = ask("0-50", *(question("pay", start, end, now, deposit) for start, end in spans))
    return [int(answer) / MS for answer in answers]


def test_time_is_paid_for_once(ask: Ask) -> None:
    spans = [(99_900, 99_910), (99_905, 99_920), (99_900, 99_920), (99_890, 99_930), (99_700, 99_701)]
    assert paid(ask, *spans) == [10, 10, 0, 20, 1]


def test_spans_that_touch_lose_nothing(ask: Ask) -> None:
    """Kernels of 37 us one after another cost as much as one of their whole length, to a grain."""
    spans = [(99_900 + n * 0.037, 99_900 + (n + 1) * 0.037) for n in range(1000)]
    assert sum(paid(ask, *spans)) == pytest.approx(37, abs=GRAIN)


def test_what_is_reported_too_late_is_paid_in_full(ask: Ask) -> None:
    """The time that was paid for already is no longer known."""
    assert paid(ask, (99_800, 100_000), (99_500, 99_510), (99_500, 99_510)) == [200, 10, 10]
    assert paid(ask, (99_880, 100_000), (99_880, 99_890)) == [120, 0]


def test_a_kernel_longer_than_the_memory_of_bits_is_paid_in_full(ask: Ask) -> None:
    assert paid(ask, (90_000, 100_000)) == [10_000]
    assert paid(ask, (99_990, 99_995), (90_000, 100_000)) == [5, 9995]


@pytest.mark.parametrize("hours", [0.5, 1.2, 2.0, 2.4, 30])
def test_bits_of_long_ago_count_as_none(ask: Ask, hours: float) -> None:
    later = 100_000 + hours * 3_600_000
    answers = ask(
        "0-50",
        question("pay", 99_000, 99_100, 99_100, 0),
        question("pay", later, later + 100, later + 100, 0),
        question("pay", later, later + 100, later + 100, 0),
    )
    assert [int(a) / MS for a in answers] == [100, 100, 0]


def test_a_deposit_is_taken_back_when_the_work_is_paid_for(ask: Ask) -> None:
    answers = ask(
        "0-50",
        question("balance", 0),
        question("pay", 999, 999.5, 1000, 0),
        question("balance", 1000),
        question("deposit", 20),
        question("balance", 1000),
        question("pay", 999.5, 1000, 1000, 20),
        question("balance", 1000),
    )
    before, owing, after = (float(answers[n]) / MS for n in (2, 4, 6))
    assert (before, owing, after) == (12.5, -7.5, 12)


# --- The clock -----------------------------------------------------------------------------------------


def test_the_clock_is_the_kernels_and_never_ahead_of_it(compile_c: MakePath) -> None:
    """It lags by as long as a reading of the kernel's clock may take that counts, and 0.1 us."""
    program = compile_c("tests/clock_reads.c", "libfgpu/clock.c")
    done = subprocess.run([program], capture_output=True, text=True, check=True, timeout=60)
    ahead_ns, behind_ns, back_ns = map(int, done.stdout.split())
    assert (ahead_ns, back_ns) == (0, 0)
    assert behind_ns < 5000
