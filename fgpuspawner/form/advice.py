"""Advice: the smallest amount that a user's last runs of an image needed. Pure; shown by service and launch form."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from fgpu_scheduler import Device, EndCause, PastSession, format_milli
from fgpuspawner.images.model import Image
from fgpuspawner.images.needs import least_fgpu_milli

NEWEST_RUNS = 5
LEAST_RUNS = 3
"""Fewer runs do not show what is usual."""
LOOKED_THROUGH = 200
"""How many of a user's newest runs are read to find the newest of each image."""
HEADROOM_PERCENT = 20
"""Above the highest peak: the next run may need a little more."""
SHARE_MIB = 128
"""Shares of memory are rounded down to multiples of this."""


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    """One run on one GPU: its amount, its memory limit and peak, and its compute."""

    image: str
    fgpu_milli: int
    limit_mib: int
    peak_mib: int
    #: Its share of compute; 0 without one.
    compute_percent: int = 0
    sm_p95_percent: int | None = None
    #: Whether it ended because it ran out of memory.
    ran_out: bool = False


@dataclass(frozen=True, slots=True)
class Advice:
    """The smallest amount that would have been enough for the last runs of an image, below what was asked for."""

    image: str
    runs: int
    asked_milli: int
    enough_milli: int
    peak_mib: int

    @property
    def text(self) -> str:
        """It in words, for the user."""
        runs, enough = {3: "three", 4: "four", 5: "five"}[self.runs], format_milli(self.enough_milli)
        peak = f"{self.peak_mib} MiB" if self.peak_mib < 1000 else f"{self.peak_mib / 1024:.1f} GiB"
        return f"your last {runs} runs peaked at {peak}: {enough} fGPU would have been enough"


def advise(
    runs: Sequence[MeasuredRun], *, step_milli: int, least_milli: int = 0, devices: Sequence[Device] = ()
) -> Advice | None:
    """Return the smallest sufficient amount for runs of one image, newest first; None without one below the newest.

    It is a multiple of the step and at least ``least_milli``, the image's minimum. Its memory covers the highest peak
    and a fifth more. Its compute covers the p95 use of each run. A run that ran out of memory needs at least its own
    amount. With ``devices``, the amount is enough on each of them, as its memory depends on the GPU.
    """
    kinds = {(d.capacity_milli, d.memory_mib) for d in devices}
    newest = runs[:NEWEST_RUNS]
    if len(newest) < LEAST_RUNS:
        return None
    asked_milli = newest[0].fgpu_milli
    needed = max(least_milli, *(_enough(run, kinds) for run in newest))
    enough_milli = max(step_milli, -(-needed // step_milli) * step_milli)
    if enough_milli >= asked_milli:
        return None
    return Advice(newest[0].image, len(newest), asked_milli, enough_milli, max(r.peak_mib for r in newest))


def _enough(run: MeasuredRun, kinds: Collection[tuple[int, int]]) -> int:
    """Return the fGPU x 1000 that this run needed, on its own GPU or on each of these kinds."""
    needed_mib = -(-run.peak_mib * (100 + HEADROOM_PERCENT) // 100)
    needed_mib = max(1, -(-needed_mib // SHARE_MIB)) * SHARE_MIB
    on = kinds or {(run.fgpu_milli, run.limit_mib)}
    milli = max(-(-needed_mib * worth_milli // of_mib) for worth_milli, of_mib in on)
    if run.compute_percent and run.sm_p95_percent is not None:
        milli = max(milli, -(-run.sm_p95_percent * run.fgpu_milli // run.compute_percent))
    # Its peak is unknown, as it was cut off.
    return max(milli, run.fgpu_milli) if run.ran_out else milli


def runs_of(past: Iterable[PastSession]) -> dict[str, list[MeasuredRun]]:
    """Return the measured runs on one GPU, by image, in the given order. Several whole GPUs cannot become smaller."""
    found: dict[str, list[MeasuredRun]] = {}
    for one in past:
        shares = one.session.placement.shares if one.session.placement else ()
        told = one.measured
        if len(shares) == 1 and told is not None and told.samples and told.peak_mib is not None:
            share, image = shares[0], one.session.request.image
            held = share.fgpu_milli, share.memory_mib, told.peak_mib
            computed = share.compute_percent, told.sm_p95_percent
            ran_out = one.session.end_cause is EndCause.OOM
            found.setdefault(image, []).append(MeasuredRun(image, *held, *computed, ran_out))
    return found


def advice_by_image(
    past: Iterable[PastSession], *, step_milli: int, images: Iterable[Image], devices: Sequence[Device]
) -> dict[str, Advice]:
    """Return the advice on a user's runs, by image.

    ``past`` is newest first, ``devices`` are those that the user may get, and ``images`` give the least amounts.
    """
    runs, found = runs_of(past), {}
    for image in sorted((image for image in images if image.slug in runs), key=lambda image: image.slug):
        least = least_fgpu_milli(image, devices, step_milli=step_milli)
        told = advise(runs[image.slug], step_milli=step_milli, least_milli=least, devices=devices)
        if told is not None:
            found[image.slug] = told
    return found
