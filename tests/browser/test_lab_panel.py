"""Our panel, status item, notifications and running sessions, in JupyterLab on a real Hub."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import pytest
from axe import check_page
from playwright.sync_api import expect

from hubprocess import HubProcess
from labsteps import BUILD, TAKE, new_notebook, open_lab, open_panel, run_last_cell, spawn, status_item
from steps import START_MS, Person

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubProcess]:
    found = HubProcess(tmp_path_factory.mktemp("hub"), before=BUILD)
    try:
        yield found.start()
    finally:
        found.close()


def test_panel_shows_slice_queue_and_changes(hub: HubProcess, log_in: Callable[..., Person]) -> None:
    cat = log_in(hub.url, "cat", "test-password")
    spawn(hub, "hog", fgpu="1.5")
    spawn(hub, "cat")
    hub.reach({"hog/": "RUNNING", "cat/": "RUNNING"}, within_s=START_MS / 1000)
    spawn(hub, "cat", "gpu-2", fgpu="1")
    hub.reach({"hog/": "RUNNING", "cat/": "RUNNING", "cat/gpu-2": "PENDING"})
    page = open_lab(hub, cat)
    expect(status_item(page)).to_contain_text("0.5 fGPU · 0 / 2048 MiB · simulated")
    new_notebook(page)
    run_last_cell(page, TAKE + "held = take(700)")

    panel = open_panel(page)
    this = panel.get_by_role("region", name="This session")
    expect(this.get_by_role("meter", name="GPU memory in use")).to_have_attribute(
        "aria-valuetext", "700 / 2048 MiB", timeout=60_000
    )
    expect(status_item(page)).to_contain_text("700 / 2048 MiB")
    expect(this.get_by_role("row", name="Untitled.ipynb 700 MiB")).to_be_visible(timeout=60_000)
    # Measured on the machine, and drawn.
    expect(this.get_by_role("meter", name="Compute in use")).to_be_visible(timeout=60_000)
    memory = this.get_by_role("img", name=re.compile(r"GPU memory, last .*minute.*: at most 700 of 2048 MiB"))
    expect(memory).to_be_visible(timeout=60_000)

    others = panel.get_by_role("region", name="Your other sessions")
    expect(others.get_by_role("listitem")).to_contain_text("Next in the queue")
    expect(others.get_by_role("link", name="Launch another…")).to_have_attribute(
        "href", "/hub/spawn/cat/gpu-3"
    )
    bars = panel.get_by_role("region", name="Your use")
    expect(bars.get_by_role("meter", name="GPU")).to_have_attribute("aria-valuetext", "0.5 of 0.5 fGPU")
    # One resource group: what is overall is the same, and not said twice.
    expect(bars.get_by_role("meter")).to_have_count(3)
    check_page(page, within=".jp-fgpu-Panel")
    check_page(page, within=".jp-fgpu-StatusItem")

    # It starts, which is told once: not again in a tab that is opened, or loaded again.
    hub.stop("hog")
    told = page.locator(".Toastify").get_by_text("Your session Python 2 is ready")
    expect(told).to_be_visible(timeout=START_MS)
    expect(bars.get_by_role("meter", name="GPU")).to_have_attribute("aria-valuetext", "1.5 of 2 fGPU")
    page.reload()
    expect(status_item(page)).to_contain_text("fGPU", timeout=START_MS)
    panel = open_panel(page)
    others = panel.get_by_role("region", name="Your other sessions")
    expect(others.get_by_role("listitem")).to_contain_text("Running")
    expect(told).to_have_count(0)

    # It is in the panel of what runs too, and is ended there, after a question.
    page.get_by_role("tab", name=re.compile("Running Terminals and Kernels")).click()
    expect(page.get_by_role("heading", name="GPU Sessions")).to_be_visible()
    item = page.locator(".jp-RunningSessions-item").filter(has_text="Python 2")
    item.hover()
    item.locator("[title='End the Session']").click()
    page.get_by_role("dialog").get_by_role("button", name="End", exact=True).click()
    hub.reach({"cat/": "RUNNING"})
    expect(item).to_have_count(0, timeout=60_000)


def test_palette_commands_describe_their_arguments(hub: HubProcess, log_in: Callable[..., Person]) -> None:
    dan = log_in(hub.url, "dan", "test-password")
    spawn(hub, "dan", fgpu="0.1")
    hub.reach({"dan/": "RUNNING"}, within_s=START_MS / 1000)
    page = open_lab(hub, dan)
    page.keyboard.press("Control+Shift+c")
    palette = page.locator(".lm-CommandPalette")
    palette.locator("input").fill("GPU")
    for name in (
        "Show GPU Share",
        "Launch Another GPU Session",
        "Open the GPU Sessions Page",
        "Refresh GPU Share",
    ):
        expect(palette.get_by_text(name, exact=True)).to_be_visible()
    palette.locator("input").press("Escape")
