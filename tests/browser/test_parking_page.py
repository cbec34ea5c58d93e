"""Parking as its user sees it: a GPU on demand from the form, the sessions page, the way back and forth."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from axe import check_page
from playwright.sync_api import expect

from fgpuspawner.isolation import native
from hubprocess import PATIENT, HubProcess, running
from steps import Person, forecast, scrolls_sideways, start

pytestmark = pytest.mark.timeout(600)

MINI = Path(__file__).parents[1] / "hub" / "miniserver.py"
NARROW = {"width": 390, "height": 844}


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
    page.set_viewport_size(NARROW)  # type: ignore[arg-type]
    check_page(page)
    assert not scrolls_sideways(page)
    hub.stop("ben")
    expect(row).to_contain_text("RUNNING")
    row.get_by_role("button", name=re.compile("Park")).click()
    expect(row).to_contain_text("PARKED")
