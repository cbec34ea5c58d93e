"""Advised amounts would have been enough, are whole steps, and are below the requested amount."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fgpuspawner.form.advice import HEADROOM_PERCENT, LEAST_RUNS, NEWEST_RUNS, SHARE_MIB, MeasuredRun, advise

STEPS = st.sampled_from([50, 100, 200, 250, 500])


@st.composite
def runs(draw: st.DrawFn) -> tuple[int, int, int, list[MeasuredRun]]:
    """Return a step, a device's MiB and capacity, and runs on it, each with its share."""
    step = draw(STEPS)
    device_mib = draw(st.sampled_from([8192, 16160, 40960, 81920]))
    capacity = draw(st.sampled_from([1000, 2000, 5000]))
    found = []
    for _ in range(draw(st.integers(0, 8))):
        milli = draw(st.integers(1, capacity // step)) * step
        limit = device_mib * milli // capacity // SHARE_MIB * SHARE_MIB if milli < capacity else device_mib
        compute = draw(st.sampled_from([0, max(1, 100 * milli // capacity)]))
        peak = draw(st.integers(0, max(SHARE_MIB, limit) + 300))
        sm = draw(st.none() | st.integers(0, 100))
        found.append(MeasuredRun("image", milli, max(SHARE_MIB, limit), peak, compute, sm))
    return step, device_mib, capacity, found


@given(runs(), st.sampled_from([0, 100, 300]))
def test_advised_amount_covers_every_run_plus_a_fifth(
    world: tuple[int, int, int, list[MeasuredRun]], least: int
) -> None:
    step, device_mib, capacity, found = world
    advice = advise(found, step_milli=step, least_milli=least)
    if advice is None:
        return
    newest = found[:NEWEST_RUNS]
    assert len(newest) == advice.runs >= LEAST_RUNS
    assert advice.enough_milli % step == 0
    assert max(step, least) <= advice.enough_milli < newest[0].fgpu_milli == advice.asked_milli
    share_mib = device_mib * advice.enough_milli // capacity // SHARE_MIB * SHARE_MIB
    for run in newest:
        assert share_mib * 100 >= run.peak_mib * (100 + HEADROOM_PERCENT)
        if run.compute_percent and run.sm_p95_percent is not None:
            # The advised compute is enough for the measured use, so the run would not have been slower.
            assert advice.enough_milli * run.compute_percent >= run.sm_p95_percent * run.fgpu_milli


@given(runs())
def test_next_smaller_amount_is_not_enough(world: tuple[int, int, int, list[MeasuredRun]]) -> None:
    step, _, _, found = world
    advice = advise(found, step_milli=step)
    if advice is None or advice.enough_milli == step:
        return
    smaller = advice.enough_milli - step

    def is_enough(run: MeasuredRun) -> bool:
        share_mib = run.limit_mib * smaller // run.fgpu_milli // SHARE_MIB * SHARE_MIB
        computes = run.compute_percent and run.sm_p95_percent is not None
        slower = computes and smaller * run.compute_percent < (run.sm_p95_percent or 0) * run.fgpu_milli
        return share_mib * 100 >= run.peak_mib * (100 + HEADROOM_PERCENT) and not slower

    assert not all(is_enough(run) for run in found[:NEWEST_RUNS])
