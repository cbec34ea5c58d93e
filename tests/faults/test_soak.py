"""Many sessions, with faults beside them, leave nothing behind. `bench/soak.py` does it for a simulated week."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from soaking import Of, Sample, Soak, soaked, wrong

DAY_S = 24 * 3600


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_thirty_sessions_with_faults_leave_nothing_behind(tmp_path: Path) -> None:
    with Soak(tmp_path, factor=DAY_S / 60) as soak:
        samples = soaked(soak, sessions=30, batch=5)
        assert wrong(samples) == [], samples
    assert samples[-1].sessions >= 30
    assert samples[-1].life == 2


def made(n: int) -> Sample:
    """A sample of a Hub that leaves nothing behind."""
    of = Of(rss_mib=150, uss_mib=120, descriptors=40, threads=20, children=1, cpu_s=n)
    hub_rows = {"servers": 0, "api_tokens": 9, "oauth_clients": 1, "oauth_codes": 0}
    rows = {"old_sessions": 50, "old_events": 0}
    kib = {"scheduler": 400, "hub": 300}
    return Sample(n, n / 3, 1, {"hub": of, "service": of, "proxy": of}, rows, hub_rows, {}, kib, [])


WELL = [made(n) for n in range(0, 500, 25)]


def leaking(name: str, **each: float) -> list[Sample]:
    """The same samples, but each session leaves something in one process."""
    return [
        replace(
            s, of={**s.of, name: replace(of, **{k: getattr(of, k) + v * s.sessions for k, v in each.items()})}
        )
        for s in WELL
        for of in [s.of[name]]
    ]


def test_clean_samples_are_accepted() -> None:
    assert wrong(WELL) == []


@pytest.mark.parametrize(
    ("samples", "said"),
    [
        (leaking("hub", rss_mib=0.05), "the hub's memory has grown by 8.66 %"),
        (leaking("service", descriptors=1), "the service has 325 more descriptors"),
        (
            [*WELL[:-1], replace(WELL[-1], left=["network b3"])],
            "after 475 sessions there is still network b3",
        ),
        (
            [*WELL[:-1], replace(WELL[-1], hub_rows={**WELL[-1].hub_rows, "api_tokens": 99})],
            "the Hub's database has 99 api_tokens, and had 9",
        ),
        (
            [*WELL[:-1], replace(WELL[-1], rows={"old_sessions": 51, "old_events": 1})],
            "51 sessions are there that should be forgotten",
        ),
    ],
    ids=["memory", "descriptors", "left", "tokens", "rows"],
)
def test_growth_and_remains_are_reported(samples: list[Sample], said: str) -> None:
    assert said in wrong(samples)
