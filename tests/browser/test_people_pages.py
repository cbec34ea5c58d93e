"""The service's pages with a real Hub, its logins and real sessions: started, looked at, ended, looked up."""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path

import pytest
from axe import check_page
from playwright.sync_api import expect

from hubprocess import HubProcess
from steps import START_MS, Amounts, Person, Sessions

pytestmark = pytest.mark.timeout(600)


MINI = Path(__file__).parents[1] / "hub" / "miniserver.py"
OPTIONS = {"fgpu": "0.7", "cpu": "0.2", "memory_mib": "512"}
EACH = Amounts(Decimal("0.7"), Decimal("0.2"), Decimal(512))

NOTHING = Amounts(Decimal(0), Decimal(0), Decimal(0))


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubProcess]:
    after = f"c.Spawner.cmd = ['python', {str(MINI)!r}]\n"
    found = HubProcess(tmp_path_factory.mktemp("people") / "hub", after=after, meter_every_s=1)
    try:
        yield found.start()
    finally:
        found.close()


def whole(hub: HubProcess) -> Amounts:
    """Return all that the one machine has."""
    (node,) = hub.store.snapshot(0).nodes
    fgpu = sum(device.capacity_milli for device in node.devices)
    return Amounts(Decimal(fgpu) / 1000, Decimal(node.cpu_milli) / 1000, Decimal(node.memory_mib))


def test_session_from_start_to_receipt(hub: HubProcess, log_in: Callable[..., Person]) -> None:
    ivy = log_in(hub.url, "ivy", "test-password")
    page, all_of_it = ivy.page, whole(hub)
    page.goto(f"{hub.url}/services/fgpu/")
    sessions = Sessions(page)
    expect(sessions.none).to_be_visible()
    check_page(page)
    with sessions.without_reload():
        # Both bars rise by exactly what starts, and the meter tells what it holds of the GPU.
        hub.spawn("ivy", "", options=OPTIONS)
        expect(sessions.state("Python 1")).to_have_text("RUNNING", timeout=START_MS)
        sessions.expect_bars(EACH, all_of_it)
        hub.spawn("ivy", "second", options=OPTIONS)
        expect(sessions.state("second")).to_have_text("RUNNING", timeout=START_MS)
        sessions.expect_bars(EACH * 2, all_of_it)
        hub.spawn("ivy", "third", options=OPTIONS)
        expect(sessions.state("third")).to_have_text("PENDING", timeout=START_MS)
        expect(sessions.row("Python 1").locator(".use")).to_contain_text("of 2.75 GiB", timeout=60_000)
        # The file comes with the cookie that the browser has.
        with page.expect_download() as download:
            page.get_by_role("link", name="CSV").click()
        found = list(csv.DictReader(download.value.path().read_text().splitlines()))
        assert [(one["session"], one["state"], one["fgpu"]) for one in found] == [
            ("Python 1", "RUNNING", "0.7"),
            ("second", "RUNNING", "0.7"),
            ("third", "PENDING", "0.7"),
        ]
    page.get_by_role("link", name="Cluster map").click()
    expect(page.locator(".gpu rect.mine")).to_have_count(2)
    expect(page.locator(".gpu .of-free")).to_have_text("free")
    expect(page.locator(".map-queue")).to_contain_text(
        "Your request, 0.7 fGPU, starts at once if one of these ends: your Python 1"
    )
    # One ends while the map is open: the one that waits takes its place.
    hub.stop("ivy", "second")
    expect(page.locator(".block")).to_have_count(0, timeout=START_MS)
    expect(page.get_by_role("img", name=re.compile("0.7 fGPU your third"))).to_be_visible(timeout=START_MS)
    page.get_by_role("link", name="Sessions", exact=True).click()
    expect(sessions.state("third")).to_have_text("RUNNING", timeout=START_MS)
    with sessions.without_reload():
        sessions.end("Python 1")
        expect(sessions.row("Python 1")).to_have_count(0, timeout=START_MS)
        sessions.expect_bars(EACH, all_of_it)
        sessions.end("third")
        expect(sessions.none).to_be_visible(timeout=START_MS)
        sessions.expect_bars(NOTHING, all_of_it)
    page.get_by_role("link", name="History").click()
    receipts = page.locator(".history tbody tr")
    expect(receipts).to_have_count(3)
    expect(receipts.first).to_contain_text("third")
    expect(receipts.first).to_contain_text("ended on request")
    with page.expect_download() as download:
        page.get_by_role("link", name="CSV").click()
    found = list(csv.DictReader(download.value.path().read_text().splitlines()))
    assert [one["server_name"] for one in found] == ["third", "second", ""]
