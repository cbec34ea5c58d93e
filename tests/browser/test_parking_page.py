"""Parking as its user sees it: a GPU on demand from the form, the sessions page, the way back and forth."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import requests
from axe import check_page
from playwright.sync_api import Page, expect

from fgpuspawner.isolation import native
from hubprocess import PATIENT, ROOT, HubProcess, running
from labsteps import BUILD, TAKE, new_notebook, open_lab, open_panel, run_last_cell, spawn
from steps import START_MS, Person, forecast, scrolls_sideways, start

pytestmark = pytest.mark.timeout(600)

MINI = Path(__file__).parents[1] / "hub" / "miniserver.py"
NARROW = {"width": 390, "height": 844}
PARKS = {"park": "always", "park_after_s": 40, "park_opt_out": True}


def picture(page: Page, name: str) -> None:
    """Take a picture for the documentation when FGPU_DOCS_SHOTS=1 asks for it."""
    if os.environ.get("FGPU_DOCS_SHOTS"):
        page.screenshot(path=ROOT / "docs" / "pictures" / name, animations="disabled")


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubProcess]:
    """A Hub with one GPU of 2 fGPU, which another user holds whole."""
    if native.find() is None:
        pytest.skip(native.NOT_BUILT)
    after = f"c.Spawner.cmd = ['python', {str(MINI)!r}]\n"
    folder = tmp_path_factory.mktemp("parking")
    with running(folder, before=PATIENT, after=after, parked_memory_mib=1024, meter_every_s=1) as found:
        found.add_user("ben")
        found.spawn("ben", options={"fgpu": "2", "cpu": "0.1", "memory_mib": 256})
        found.reach({"ben/": "RUNNING"})
        yield found


def test_a_gpu_on_demand_opens_at_once_and_goes_back_and_forth(
    hub: HubProcess, log_in: Callable[..., Person]
) -> None:
    person = log_in(hub.url, "ada", "test-password")
    page = person.page
    page.get_by_label("GPU on demand").check()
    expect(forecast(page)).to_contain_text("Opens now; a GPU when a cell needs it: none is free now")
    start(page)
    hub.reach({"ada/": "PARKED", "ben/": "RUNNING"})
    page.goto(f"{hub.url}/services/fgpu/")
    row = page.locator("#rows tr")
    expect(row).to_contain_text("A cell that needs the GPU gets it")
    row.get_by_role("button", name=re.compile("Get GPU")).click()
    expect(row).to_contain_text("It waits for its GPU")
    check_page(page)
    picture(page, "parked.png")
    page.set_viewport_size(NARROW)  # type: ignore[arg-type]
    check_page(page)
    assert not scrolls_sideways(page)
    hub.stop("ben")
    expect(row).to_contain_text("RUNNING")
    row.get_by_role("button", name=re.compile("Park")).click()
    expect(row).to_contain_text("PARKED")


@pytest.fixture
def lab_hub(tmp_path: Path) -> Iterator[HubProcess]:
    """A Hub with one GPU of 2 fGPU, which parks a session after 40 idle seconds, also while no other one waits."""
    if native.find() is None:
        pytest.skip(native.NOT_BUILT)
    with running(
        tmp_path, before=f"{BUILD}\n{PATIENT}", parked_memory_mib=1024, reclaim={"*": PARKS}, meter_every_s=1
    ) as found:
        yield found


def test_an_idle_session_is_parked_after_a_warning_and_a_cell_waits_for_its_gpu(
    lab_hub: HubProcess, log_in: Callable[..., Person]
) -> None:
    hub, eve = lab_hub, log_in(lab_hub.url, "eve", "test-password")
    spawn(hub, "eve")
    hub.reach({"eve/": "RUNNING"}, within_s=START_MS / 1000)
    page = open_lab(hub, eve)
    new_notebook(page)
    panel = open_panel(page)
    # The session may have been parked before its first cell.
    run_last_cell(page, TAKE + "held = take(100)")
    warning = panel.get_by_text(re.compile(r"Parked in \d+ s if the GPU stays idle"))
    expect(warning).to_be_visible(timeout=60_000)
    check_page(page, within=".jp-fgpu-Panel")
    sessions = page.context.new_page()
    sessions.goto(f"{hub.url}/services/fgpu/")
    hub.reach({"eve/": "PARKED"})
    expect(panel).to_contain_text("100 MiB of GPU memory kept. Run a cell that uses the GPU to get it.")
    expect(panel.get_by_role("button", name="Prove my slice")).to_have_count(0)

    spawn(hub, "hog", fgpu="2")
    hub.reach({"eve/": "PARKED", "hog/": "RUNNING"}, within_s=START_MS / 1000)
    never = f"{hub.url}/services/fgpu/api/v1/sessions/{hub.sessions()['hog/'].id}/never-park"
    requests.post(
        never, headers={"Authorization": f"token {hub.add_user('hog')}"}, timeout=60
    ).raise_for_status()
    cells = page.locator(".jp-Notebook .jp-CodeCell")
    cell = cells.nth(cells.count() - 1)
    cell.locator(".cm-content").click()
    page.keyboard.insert_text("give(held)")
    page.keyboard.press("Shift+Enter")
    line = cell.locator(".jp-OutputArea-output")
    expect(line).to_contain_text("This session waits for its GPU. Next in the queue", timeout=30_000)
    picture(page, "lab-parked.png")
    hub.stop("hog")
    expect(line).to_have_text(re.compile(r"Waited \d+ s for the GPU\."), timeout=30_000)
    expect(line).to_have_count(1)
    hub.reach({"eve/": "RUNNING"})

    row = sessions.locator("#rows tr")
    expect(row).to_contain_text(re.compile(r"Parked at .* if its GPU stays idle"), timeout=60_000)
    check_page(sessions)
    row.get_by_role("button", name=re.compile("Never park")).click()
    expect(row.get_by_role("button", name=re.compile("Allow parking"))).to_be_visible()
    expect(row).not_to_contain_text("if its GPU stays idle", timeout=60_000)
    sessions.set_viewport_size(NARROW)  # type: ignore[arg-type]
    check_page(sessions)
    assert not scrolls_sideways(sessions)
    # It has been idle for long enough.
    panel.get_by_role("button", name="Allow parking").click()
    hub.reach({"eve/": "PARKED"})
