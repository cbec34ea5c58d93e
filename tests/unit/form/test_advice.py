"""The fit advisor: its advice, and when there is none."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fgpu_scheduler import (
    Device,
    EndCause,
    PastSession,
    Placement,
    Request,
    Session,
    SessionMeasurements,
    SessionState,
    Share,
)
from fgpuspawner.form.advice import MeasuredRun, advice_by_image, advise, runs_of
from fgpuspawner.images.model import Image

RUN = MeasuredRun("torch", 1000, 4096, 1331, 50, 20)


def test_small_peaks_give_advice() -> None:
    runs = [RUN, replace(RUN, peak_mib=600), *[replace(RUN, peak_mib=900)] * 5]
    advice = advise(runs, step_milli=100)
    assert advice is not None
    assert advice.text == "your last five runs peaked at 1.3 GiB: 0.5 fGPU would have been enough"
    assert (advice.runs, advice.asked_milli, advice.enough_milli) == (5, 1000, 500)


def test_oom_run_gives_no_advice() -> None:
    assert advise([RUN, RUN, replace(RUN, ran_out=True)], step_milli=100) is None
    smaller = replace(RUN, fgpu_milli=700, peak_mib=300, ran_out=True)
    advice = advise([RUN, RUN, smaller], step_milli=100)
    assert advice is not None
    assert advice.enough_milli == 700


def test_advice_needs_three_runs() -> None:
    advice = advise([replace(RUN, peak_mib=300, sm_p95_percent=1)] * 3, step_milli=100)
    assert advice is not None
    assert advice.text == "your last three runs peaked at 300 MiB: 0.1 fGPU would have been enough"
    assert advise([replace(RUN, peak_mib=300)] * 2, step_milli=100) is None


@pytest.mark.parametrize(
    ("run", "why"),
    [
        (replace(RUN, peak_mib=3500), "memory"),
        (replace(RUN, peak_mib=100, sm_p95_percent=48), "compute"),
        (
            replace(RUN, fgpu_milli=100, limit_mib=409, peak_mib=10, compute_percent=5, sm_p95_percent=0),
            "step",
        ),
    ],
)
def test_no_advice_without_a_smaller_sufficient_amount(run: MeasuredRun, why: str) -> None:
    assert advise([run] * 5, step_milli=100) is None, why


def test_advice_covers_the_largest_run() -> None:
    small = replace(RUN, peak_mib=100, sm_p95_percent=0)
    advice = advise([small, small, replace(small, peak_mib=2000), small, small], step_milli=100)
    assert advice is not None
    assert (advice.enough_milli, advice.peak_mib) == (600, 2000)
    # Of the newest five only.
    advice = advise([small] * 5 + [replace(small, peak_mib=2000)], step_milli=100)
    assert advice is not None
    assert advice.enough_milli == 100


def test_unknown_or_unshared_compute_is_ignored() -> None:
    for run in (replace(RUN, sm_p95_percent=None), replace(RUN, compute_percent=0, sm_p95_percent=100)):
        advice = advise([run] * 3, step_milli=100)
        assert advice is not None
        assert advice.enough_milli == 500


def test_advice_respects_the_image_minimum() -> None:
    run = replace(RUN, peak_mib=100, sm_p95_percent=0)
    advice = advise([run] * 3, step_milli=100, least_milli=350)
    assert advice is not None
    assert advice.enough_milli == 400


def past(session_id: int, *shares: Share, samples: int = 5, peak_mib: int | None = 700) -> PastSession:
    asked = Request("alice", "", "torch", "default", 500, 1000, 1024)
    ended = Session(session_id, asked, SessionState.TERMINATED, 1, placement=Placement("n1", shares))
    return PastSession(
        ended,
        SessionMeasurements(session_id, 1, 250, 2048, samples=samples, peak_mib=peak_mib, sm_p95_percent=9),
    )


def test_unmeasured_and_multi_gpu_runs_do_not_count() -> None:
    one = Share("GPU-1", 500, 2048, 25)
    wholes = (Share("GPU-1", 1000, 8192, 100), Share("GPU-2", 1000, 8192, 100))
    found = runs_of(
        [
            past(5, one),
            past(4, one, samples=0, peak_mib=None),
            past(3, *wholes),
            replace(past(2, one), measured=None),
            past(1),
        ]
    )
    assert found == {"torch": [MeasuredRun("torch", 500, 2048, 700, 25, 9)]}
    full = replace(past(6, one), session=replace(past(6, one).session, end_cause=EndCause.OOM))
    assert [run.ran_out for run in runs_of([full, past(5, one)])["torch"]] == [True, False]


def test_advice_is_enough_on_every_possible_gpu() -> None:
    runs = [replace(RUN, peak_mib=900)] * 3
    here = Device("GPU-a", "n", 0, "Big", 8192, 2000)
    small = Device("GPU-b", "n", 1, "Small", 4096, 2000)
    alone, both = (advise(runs, step_milli=100, devices=d) for d in ([here], [here, small]))
    assert alone is not None
    assert both is not None
    assert (alone.enough_milli, both.enough_milli) == (400, 600)
    tiny = Device("GPU-c", "n", 2, "Tiny", 1024, 2000)
    assert advise(runs, step_milli=100, devices=[here, tiny]) is None


def test_image_minimum_counts_as_at_launch() -> None:
    ran = [past(n, Share("GPU-1", 1000, 4096, 50), peak_mib=100) for n in (3, 2, 1)]
    image = Image("torch", "torch", "any", "any", "any", "any", min_gpu_memory_mib=1024)
    devices = [Device("GPU-a", "n", 0, "Big", 8192, 2000)]
    found = advice_by_image(ran, step_milli=100, images=[image], devices=devices)
    # 0.2 would be 768 MiB.
    assert found["torch"].enough_milli == 300
    assert advice_by_image(ran, step_milli=100, images=[], devices=devices) == {}
