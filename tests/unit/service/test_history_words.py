"""Receipts in words: nothing that is not known is shown as nothing."""

from __future__ import annotations

from fgpu_scheduler import EndCause
from fgpuspawner.service.objects import Receipt
from fgpuspawner.service.pages.history import hours, line, totals

RECEIPT = Receipt(
    session_id=7,
    user="ann",
    server_name="",
    image="python",
    image_name="Python 3.11",
    resource_group="default",
    amount="0.5 fGPU",
    fgpu="0.5",
    submitted_at_s=1000,
    started_at_s=1060,
    ended_at_s=8260,
    end_cause=EndCause.IDLE,
    message=None,
    wait_s=60,
    run_s=7200,
    gpu_hours=0.5,
    gpu_memory_mib=2048,
    memory_peak_mib=512,
    memory_p95_mib=400,
    sm_p95_percent=12,
    energy_wh=31.26,
    energy_estimated=False,
    samples=9,
    compute_entitled_percent=25,
    compute_received_percent=None,
    compute_borrowed_percent=None,
    compute_lent_percent=None,
    mine=True,
    simulated=True,
)


def test_history_line_shows_amount_and_use() -> None:
    found = line(RECEIPT)
    assert (found.name, found.waited, found.ran, found.gpu_hours) == (
        "default session",
        "1 min",
        "2 h",
        "0.50",
    )
    assert found.memory is not None
    assert (found.memory.text, found.memory.percent) == ("0.5 of 2 GiB", "25.0")
    assert (found.usual, found.energy) == ("p95 400 MiB, 12 % of the GPU", "31.3 Wh")
    assert (found.state, found.why) == ("TERMINATED", "ended because it was idle")


def test_unmeasured_use_is_not_shown_as_zero() -> None:
    unknown = dict.fromkeys(("memory_peak_mib", "memory_p95_mib", "sm_p95_percent", "energy_wh"))
    found = line(RECEIPT.model_copy(update=unknown))
    assert (found.memory, found.usual, found.energy) == (None, "", "")
    assert line(RECEIPT.model_copy(update={"memory_p95_mib": None})).usual == "p95 12 % of the GPU"
    assert line(RECEIPT.model_copy(update={"sm_p95_percent": None})).usual == "p95 400 MiB"
    assert line(RECEIPT.model_copy(update={"sm_p95_percent": 0})).usual == "p95 400 MiB, 0 % of the GPU"


def test_lent_compute_is_shown_where_it_was_lent() -> None:
    assert line(RECEIPT).lent == ""
    lent = {"compute_received_percent": 41.2, "compute_borrowed_percent": 18.4, "compute_lent_percent": 0.0}
    assert line(RECEIPT.model_copy(update=lent)).lent == "mean 41 %: 23 of 25 % share + 18 % borrowed"
    only = {"compute_received_percent": 12.0, "compute_borrowed_percent": 0.2, "compute_lent_percent": 3.1}
    assert line(RECEIPT.model_copy(update=only)).lent == "mean 12 of 25 % share; others used 3 % of it"


def test_estimated_energy_says_about() -> None:
    assert (
        line(RECEIPT.model_copy(update={"energy_wh": 1234.0, "energy_estimated": True})).energy
        == "about 1.23 kWh"
    )


def test_ended_sessions_show_cancelled_or_the_error() -> None:
    never = line(
        RECEIPT.model_copy(
            update={"started_at_s": None, "end_cause": "USER", "run_s": 0, "gpu_memory_mib": None}
        )
    )
    assert (never.state, never.ran, never.gpu_memory) == ("CANCELLED", "never ran", "")
    failed = line(RECEIPT.model_copy(update={"end_cause": "OOM", "message": "killed"}))
    assert (failed.state, failed.why) == ("ERROR", "it ran out of memory: killed")


def test_totals_skip_unknown_values() -> None:
    others = [RECEIPT, RECEIPT.model_copy(update={"energy_wh": None, "gpu_hours": 1.25, "wait_s": 180})]
    waits = RECEIPT.model_copy(
        update={"started_at_s": None, "wait_s": 9999, "gpu_hours": 0.0, "energy_wh": None}
    )
    found = totals([*others, waits], more=True)
    assert (found.sessions, found.gpu_hours, found.waited, found.energy, found.more) == (
        3,
        "1.75",
        "2 min",
        "31.3 Wh",
        True,
    )
    assert (totals([waits], more=False).waited, totals([waits], more=False).energy) == ("", "")


def test_small_gpu_hours_are_not_shown_as_zero() -> None:
    assert [hours(amount) for amount in (0, 0.001, 0.005, 12.345)] == ["0.00", "below 0.01", "0.01", "12.35"]
