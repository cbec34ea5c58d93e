"""Several processes of one session share its slice; what is charged is what the driver says is used."""

from __future__ import annotations

import signal
from collections.abc import Callable

from slices import Gpu, Nvml, Slice, held, status_of


def test_the_limit_is_of_all_processes_together_and_survives_kills(slice_of: Callable[..., Slice]) -> None:
    session = slice_of(4096)
    first, status = held(session, 3072)
    assert status == 0
    assert status_of(session, 2048) == 2
    first.send_signal(signal.SIGKILL)
    first.communicate()
    assert status_of(session, 4096) == 0, "what a killed process held was not given back"


def test_what_is_charged_is_what_the_driver_says_is_used(
    slice_of: Callable[..., Slice],
    nvml: Nvml,
    gpu: Gpu,
    a_context_mib: int,
    record_property: Callable[..., None],
) -> None:
    """The difference between NVML's figure and ours, beyond one context."""
    sizes = [1, 3, 17, 100, 1000, 4096, *[2] * 200]
    before = nvml.settled_mib(gpu.uuid)
    full, status = held(slice_of(16384), *sizes)
    assert status == 0
    beyond = nvml.settled_mib(gpu.uuid) - before - a_context_mib - sum(sizes)
    full.kill()
    full.communicate()
    record_property("context_mib", a_context_mib)
    record_property("used_beyond_charged_mib", beyond)
    assert abs(beyond) <= max(64, sum(sizes) / 50)


def test_a_context_is_charged_what_the_limits_say(slice_of: Callable[..., Slice]) -> None:
    session = slice_of(2048, context_mib=512)
    assert status_of(session, 1536) == 0
    assert status_of(session, 1537) == 2
