"""Receipts, and the lines of the history page."""

from __future__ import annotations

import csv
import io
from dataclasses import replace

import pytest

from fgpu_scheduler import (
    Device,
    EndCause,
    Node,
    PastSession,
    Placement,
    Request,
    Session,
    SessionMeasurements,
    SessionState,
    Share,
    ShareMode,
    Size,
    Snapshot,
)
from fgpuspawner.meter.model import Live, Meter, MeterState
from fgpuspawner.service.api.history import COLUMNS, cells, receipt
from fgpuspawner.service.api.session_objects import session_object
from fgpuspawner.service.csv_file import csv_text
from fgpuspawner.service.model import Site, Viewer, World
from fgpuspawner.service.objects import Receipt
from fgpuspawner.service.pages.history import HistoryLine, HistoryTotals, history_line, hours, totals
from fgpuspawner.service.pages.session_rows import Bar, use
from fgpuspawner.text.times import cell

ALICE = Viewer("alice", groups=("default",))
SITE = Site("/", {"python": "Python 3.11"})
GPU = Device("GPU-1", "n1", 0, "Model", 8192, 2000, False)
QUARTER = Share("GPU-1", 500, 2048, 25)


def world(*devices: Device, now_s: int = 100_000, **more: object) -> World:
    nodes = (Node("n1", "default", 8000, 16384, devices),)
    return World(Snapshot(now_s, 1, nodes, ()), **more)  # type: ignore[arg-type]


ENDED = Session(
    7,
    Request("alice", "work", "python", "default", 500, 1000, 1024),
    SessionState.TERMINATED,
    1000,
    placement=Placement("n1", (QUARTER,)),
    scheduled_at_s=1060,
    started_at_s=1100,
    ended_at_s=1060 + 7200,
    end_cause=EndCause.USER,
    message="said",
)
MEASURED = SessionMeasurements(7, 8000, 250_000, 2048, 360, 3600, 1331, 1290, 21, 65_520_000, True)


def test_a_receipt_has_exactly_the_documented_fields() -> None:
    assert receipt(PastSession(ENDED, MEASURED), world(GPU), ALICE, SITE).model_dump(mode="json") == {
        "session_id": 7,
        "user": "alice",
        "server_name": "work",
        "display_name": "work",
        "image": "python",
        "image_name": "Python 3.11",
        "resource_group": "default",
        "amount": "0.5 fGPU",
        "fgpu": "0.5",
        "submitted_at_s": 1000,
        "started_at_s": 1100,
        "ended_at_s": 8260,
        "end_cause": "USER",
        "message": "said",
        "wait_s": 60,
        "run_s": 7160,
        # A quarter of a GPU, for the two hours that it was held.
        "gpu_hours": 0.5,
        "gpu_memory_mib": 2048,
        "memory_peak_mib": 1331,
        "memory_p95_mib": 1290,
        "sm_p95_percent": 21,
        "energy_wh": 18.2,
        "energy_estimated": True,
        "samples": 360,
        "compute_entitled_percent": 25,
        "compute_received_percent": None,
        "compute_borrowed_percent": None,
        "compute_lent_percent": None,
        "mine": True,
        "simulated": False,
    }


@pytest.mark.parametrize(
    ("measured", "devices", "hours"),
    [
        # What its GPUs were worth while it ran, whatever they are worth now.
        (MEASURED, (replace(GPU, capacity_milli=5000),), 0.5),
        # Not measured: what they are worth now, or else by its compute.
        (None, (replace(GPU, capacity_milli=5000),), 0.2),
        (None, (), 0.5),
    ],
)
def test_gpu_hours_follow_the_shares(
    measured: SessionMeasurements | None, devices: tuple[Device, ...], hours: float
) -> None:
    assert receipt(PastSession(ENDED, measured), world(*devices), ALICE, SITE)["gpu_hours"] == hours


def test_unmeasured_values_are_null() -> None:
    for measured in (None, SessionMeasurements(7, 8000, 250_000, 2048)):
        found = receipt(PastSession(ENDED, measured), world(GPU), ALICE, SITE)
        for name in ("memory_peak_mib", "memory_p95_mib", "sm_p95_percent", "energy_wh"):
            assert found[name] is None
        assert (found["samples"], found["energy_estimated"]) == (0, False)


def test_receipt_has_mean_lent_compute() -> None:
    counts = '{"memory": {}, "sm": {}, "received": {"20": 1, "60": 3}, "borrowed": {"0": 1, "35": 3}, "lent": {"5": 4}}'
    found = receipt(PastSession(ENDED, replace(MEASURED, counts=counts)), world(GPU), ALICE, SITE)
    names = ("entitled", "received", "borrowed", "lent")
    assert [found[f"compute_{name}_percent"] for name in names] == [25, 50.0, 26.2, 5.0]


def test_request_that_never_started_cost_nothing() -> None:
    cancelled = replace(
        ENDED, state=SessionState.CANCELLED, placement=None, scheduled_at_s=None, started_at_s=None
    )
    found = receipt(PastSession(cancelled, None), world(GPU), ALICE, SITE)
    assert (found["wait_s"], found["run_s"], found["gpu_hours"]) == (7260, 0, 0)
    assert found["gpu_memory_mib"] is None


def test_receipt_of_a_running_session_is_up_to_now() -> None:
    runs = replace(ENDED, state=SessionState.RUNNING, ended_at_s=None, end_cause=None)
    found = receipt(PastSession(runs, MEASURED), world(GPU, now_s=1060 + 3600), ALICE, SITE)
    assert (found["ended_at_s"], found["run_s"], found["gpu_hours"]) == (None, 3560, 0.25)


@pytest.mark.parametrize(
    ("exact", "amount"),
    [
        (None, "1 fGPU for 30 min, then 0.5 fGPU for 1 h 30 min"),
        (2048, "4 GiB + 50 % for 30 min, then 2 GiB + 25 % for 1 h 30 min"),
    ],
)
def test_resized_session_lists_each_amount_with_its_time(exact: int | None, amount: str) -> None:
    asked = replace(ENDED.request, gpu_memory_mib=exact, compute_percent=None if exact is None else 25)
    resized = replace(ENDED, request=asked, sizes=(Size(1060 + 1800, 1000, 500_000, 4096, 50),))
    found = receipt(PastSession(resized, MEASURED), world(GPU), ALICE, SITE)
    assert (found["amount"], found["fgpu"], found["gpu_memory_mib"]) == (amount, "0.625", 4096)
    assert (found["gpu_hours"], found["compute_entitled_percent"]) == (0.5 * 0.5 + 1.5 * 0.25, 31)


def test_many_amounts_are_shortened() -> None:
    sizes = tuple(Size(1060 + 60 * n, 1000, 500_000, 4096, 50) for n in range(1, 7))
    found = receipt(PastSession(replace(ENDED, sizes=sizes), None), world(GPU), ALICE, SITE)
    assert found["amount"] == ", then ".join(["1 fGPU for 1 min"] * 4 + ["3 more for 1 h 56 min"])


def test_start_time_is_not_queue_wait() -> None:
    at_once = replace(ENDED, scheduled_at_s=1000, started_at_s=1012)
    assert receipt(PastSession(at_once, None), world(GPU), ALICE, SITE)["wait_s"] == 0


def test_clock_set_back_gives_no_negative_amounts() -> None:
    back = replace(ENDED, scheduled_at_s=900, started_at_s=900, ended_at_s=500)
    found = receipt(PastSession(back, None), world(GPU), ALICE, SITE)
    assert (found["wait_s"], found["run_s"], found["gpu_hours"]) == (0, 0, 0)


def test_csv_file_has_every_receipt_field() -> None:
    found = receipt(PastSession(ENDED, None), world(GPU), ALICE, SITE)
    assert set(COLUMNS) == {name.removesuffix("_at_s") for name in Receipt.model_fields} - {"mine"}
    (line,) = list(csv.reader(io.StringIO(csv_text(COLUMNS, [cells(found)]))))[1:]
    told = dict(zip(COLUMNS, line, strict=True))
    assert told["memory_peak_mib"] == ""
    # One format of time in all files.
    assert told["ended"] == cell(found["ended_at_s"])


# --- The meter in the session object ---


def test_only_running_sessions_have_a_meter() -> None:
    meter = Meter(99_990, 1331, 2048, 12.5, 25, 14.1, None)
    found = world(GPU, meters=MeterState(10, {7: Live(meter)}))
    runs = replace(ENDED, state=SessionState.RUNNING, ended_at_s=None)
    shown = session_object(runs, found, ALICE, SITE)
    assert shown.meter == meter
    for state in (SessionState.TERMINATING, SessionState.TERMINATED, SessionState.PREPARING):
        assert session_object(replace(runs, state=state), found, ALICE, SITE)["meter"] is None
    assert session_object(replace(runs, id=8), found, ALICE, SITE)["meter"] is None


def test_meter_uses_the_new_slice_after_a_resize() -> None:
    looked = Live(Meter(99_990, 1331, 2048, 12.5, 25, 14.1, None))
    half = Placement("n1", (Share("GPU-1", 1000, 4096, 50),))
    runs = replace(ENDED, state=SessionState.RUNNING, ended_at_s=None, placement=half)
    shown = session_object(runs, world(GPU, meters=MeterState(10, {7: looked})), ALICE, SITE).meter
    assert shown is not None
    assert (shown.memory_limit_mib, shown.compute_entitled_percent) == (4096, 50)
    assert shown.memory_used_mib == 1331


def test_memory_only_session_has_no_compute_share() -> None:
    looked = Live(Meter(99_990, 1331, 2048, 37.5, None, 37.5, None))
    memory_only = Placement("n1", (Share("GPU-1", 500, 2048, 0, ShareMode.MEMORY),))
    runs = replace(ENDED, state=SessionState.RUNNING, ended_at_s=None, placement=memory_only)
    found = world(GPU, meters=MeterState(10, {7: looked}))
    shown = session_object(runs, found, ALICE, SITE)
    assert (shown["compute_percent"], shown["gpus"][0]["compute_percent"]) == (None, None)
    assert receipt(PastSession(runs, None), found, ALICE, SITE)["compute_entitled_percent"] is None
    bars = use(shown["meter"])
    assert bars is not None
    assert bars.compute == Bar("Compute", "38 % of GPU", "37.5")


RECEIPT = receipt(
    PastSession(replace(ENDED, end_cause=EndCause.IDLE, message=None), MEASURED), world(GPU), ALICE, SITE
)


def line(**changes: object) -> HistoryLine:
    return history_line(RECEIPT.model_copy(update=changes))


def test_history_line_shows_amount_and_use() -> None:
    found = line()
    assert (found.name, found.waited, found.ran, found.gpu_hours) == ("work", "1 min", "1 h 59 min", "0.50")
    assert found.memory == Bar("Peak", "1.3 of 2 GiB", "64.9")
    assert (found.usual, found.energy) == ("p95 1.3 GiB, 21 % of the GPU", "about 18.2 Wh")
    assert (found.state, found.why) == ("TERMINATED", "ended because it was idle")


def test_unmeasured_use_is_not_shown_as_zero() -> None:
    found = line(memory_peak_mib=None, memory_p95_mib=None, sm_p95_percent=None, energy_wh=None)
    assert (found.memory, found.usual, found.energy) == (None, "", "")
    assert line(memory_p95_mib=None).usual == "p95 21 % of the GPU"
    assert line(sm_p95_percent=None).usual == "p95 1.3 GiB"
    assert line(sm_p95_percent=0).usual == "p95 1.3 GiB, 0 % of the GPU"


@pytest.mark.parametrize(
    ("received", "borrowed", "lent", "said"),
    [
        (None, None, None, ""),
        (41.2, 18.4, 0.0, "mean 41 %: 23 of 25 % share + 18 % borrowed"),
        (12.0, 0.2, 3.1, "mean 12 of 25 % share; others used 3 % of it"),
    ],
)
def test_lent_compute_is_shown_where_it_was_lent(
    received: float | None, borrowed: float | None, lent: float | None, said: str
) -> None:
    names = ("compute_received_percent", "compute_borrowed_percent", "compute_lent_percent")
    assert line(**dict(zip(names, (received, borrowed, lent), strict=True))).lent == said


def test_only_estimated_energy_says_about() -> None:
    assert line(energy_wh=1234.0).energy == "about 1.23 kWh"
    assert line(energy_wh=31.26, energy_estimated=False).energy == "31.3 Wh"


def test_ended_sessions_show_cancelled_or_the_error() -> None:
    never = line(started_at_s=None, end_cause="USER", run_s=0, gpu_memory_mib=None)
    assert (never.state, never.ran, never.gpu_memory) == ("CANCELLED", "never ran", "")
    failed = line(end_cause="OOM", message="killed")
    assert (failed.state, failed.why) == ("ERROR", "it ran out of memory: killed")


def test_totals_skip_unknown_values() -> None:
    others = [RECEIPT, RECEIPT.model_copy(update={"energy_wh": None, "gpu_hours": 1.25, "wait_s": 180})]
    never = {"started_at_s": None, "wait_s": 9999, "gpu_hours": 0.0, "energy_wh": None}
    waits = RECEIPT.model_copy(update=never)
    assert totals([*others, waits], more=True) == HistoryTotals(3, "1.75", "2 min", "about 18.2 Wh", True)
    assert (totals([waits], more=False).waited, totals([waits], more=False).energy) == ("", "")


def test_small_gpu_hours_are_not_shown_as_zero() -> None:
    assert [hours(amount) for amount in (0, 0.001, 0.005, 12.345)] == ["0.00", "below 0.01", "0.01", "12.35"]
