"""Product B3 in a real browser, against `make run` as it stands: processes, then containers."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path

import pytest
from playwright.sync_api import expect

from makerun import MakeRun, running
from steps import (
    START_MS,
    Amounts,
    Person,
    Sessions,
    asked_for,
    expect_lab,
    forecast,
    more,
    start,
    whole_group,
)

pytestmark = pytest.mark.timeout(600)


# The unit has little to do with what a session runs in; tests/browser/test_people_pages.py has one of 2 in processes.
KINDS = [
    pytest.param(("local", "2"), id="local 2", marks=pytest.mark.slow),
    pytest.param(("docker", "1"), id="docker 1"),
    pytest.param(("local", "1"), id="local 1", marks=pytest.mark.slow),
    pytest.param(("docker", "2"), id="docker 2", marks=pytest.mark.slow),
]


@pytest.fixture(params=KINDS)
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[MakeRun]:
    """`make run` for processes or containers, with one GPU of the given fGPU."""
    runtime, fgpu_per_gpu = request.param
    if runtime == "docker":
        request.getfixturevalue("docker_engine")
    with running(tmp_path, runtime=runtime, fgpu_per_gpu=fgpu_per_gpu) as found:
        yield found


def test_third_session_starts_when_one_of_two_ends(run: MakeRun, log_in: Callable[..., Person]) -> None:
    amount = {"2": "1", "1": "0.4"}[run.fgpu_per_gpu]
    # Homes in volumes are named by user, and are shared by all installations on this machine.
    name = f"alice{secrets.token_hex(4)}" if run.runtime == "docker" else "alice"
    run.has_home(name)
    alice = log_in(run.url, name, run.password())
    page = alice.page

    # The form: marked as simulated, sliders in step with the fields, and what would become of it.
    expect(page.get_by_role("note")).to_contain_text("Simulated GPUs")
    expect(forecast(page)).to_have_text("Starts now.", timeout=60_000)
    count, fgpu = page.get_by_label("Sessions").first, page.locator("#fgpu-fgpu")
    slider = page.get_by_role("slider", name="GPU (fGPU)")
    slider.focus()
    slider.press("Home")
    expect(fgpu).to_have_value("0.1")
    slider.press("ArrowRight")
    expect(fgpu).to_have_value("0.2")
    more(page)
    sessions_slider = page.get_by_role("slider", name="Sessions")
    sessions_slider.press("ArrowRight")
    sessions_slider.press("ArrowRight")
    expect(count).to_have_value("3")
    expect(sessions_slider).to_have_attribute("aria-valuetext", "3 sessions")
    fgpu.fill(amount)
    expect(slider).to_have_attribute("aria-valuetext", f"{amount} fGPU")
    expect(forecast(page)).to_contain_text("2 start now, 1 waits")
    each = asked_for(page)
    assert each.fgpu == Decimal(amount)

    # All three are asked for together; it ends in JupyterLab without another click.
    start(page)
    expect_lab(page, name)
    page.goto(f"{run.url}/services/fgpu/")
    whole = whole_group(page)
    assert whole.fgpu == Decimal(run.fgpu_per_gpu)
    sessions = Sessions(page)
    for server in ("Python 1", "Python 2"):
        expect(sessions.state(server)).to_have_text("RUNNING", timeout=START_MS)
        expect(sessions.row(server)).to_contain_text(f"{amount} fGPU")
        expect(sessions.row(server)).to_contain_text("simulated")
    waiting = sessions.row("Python 3")
    expect(sessions.state("Python 3")).to_have_text("PENDING")
    expect(waiting).to_contain_text("Next in the queue")
    expect(waiting).to_contain_text("All GPUs are busy" if amount == "1" else f"{amount} fGPU is not free")
    expect(waiting.get_by_role("link", name="Open")).to_have_count(0)
    sessions.expect_bars(each * 2, whole)

    # The power button ends one, and the third runs by itself, on the page as it is.
    with sessions.without_reload():
        sessions.end("Python 2")
        expect(sessions.state("Python 3")).to_have_text("RUNNING", timeout=START_MS)
        expect(sessions.row("Python 2")).to_have_count(0)
        sessions.expect_bars(each * 2, whole)
    waiting.get_by_role("link", name="Open Python 3").click()
    expect_lab(page, name, "gpu-3")

    # The bars fall by exactly what one session had, and to nothing.
    page.goto(f"{run.url}/services/fgpu/")
    with sessions.without_reload():
        sessions.end("Python 1")
        expect(sessions.row("Python 1")).to_have_count(0, timeout=START_MS)
        sessions.expect_bars(each, whole)
        sessions.end("Python 3")
        expect(sessions.none).to_be_visible(timeout=START_MS)
        sessions.expect_bars(Amounts(Decimal(0), Decimal(0), Decimal(0)), whole)
