"""Shared folders in the form: ticked, filled in by a preset, and shown with the session."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from axe import check_page
from playwright.sync_api import expect

from hubprocess import PATIENT, HubProcess, running
from steps import START_MS, Person, forecast, scrolls_sideways, start

pytestmark = pytest.mark.timeout(600)

MINI = Path(__file__).parents[1] / "hub" / "miniserver.py"
LONG = "ImageNet, COCO and everything else that the group has collected in years: ask Ida for more"
PRESETS = [{"name": "Vision course", "folders": ["vision"]}]


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubProcess]:
    places = tmp_path_factory.mktemp("places")
    folders = {
        name: {"path": str(places / name), "mode": "read-write", **more}
        for name, more in (
            ("datasets", {"at": "data/datasets", "text": LONG, "always": True}),
            ("vision", {"at": "projects/vision", "text": "Our project"}),
            ("scratch", {}),
        )
    }
    for name in folders:
        (places / name).mkdir()
    after = f"c.Spawner.cmd = ['python', {str(MINI)!r}]\n"
    with running(
        tmp_path_factory.mktemp("folders"), before=PATIENT, after=after, folders=folders, presets=PRESETS
    ) as found:
        yield found


def test_folders_are_ticked_filled_in_by_a_preset_and_shown_with_the_session(
    hub: HubProcess, log_in: Callable[..., Person]
) -> None:
    person = log_in(hub.url, "ann", "test-password")
    page = person.page
    boxes = {name: page.get_by_role("checkbox", name=name) for name in ("datasets", "vision", "scratch")}
    expect(boxes["datasets"]).to_be_checked()
    expect(boxes["datasets"]).to_be_disabled()
    expect(boxes["vision"]).to_have_accessible_description(
        "read and write, at ~/projects/vision: Our project"
    )
    boxes["scratch"].check()
    page.locator(".choice", has_text="Vision course").click()
    expect(boxes["vision"]).to_be_checked()
    expect(boxes["scratch"]).not_to_be_checked()
    expect(forecast(page)).to_have_text("Starts now.")
    check_page(page, within="#fgpu-folders")
    pictures = os.environ.get("FGPU_FOLDER_PICTURES")
    for name, width, dark in (("wide", 1280, False), ("phone", 390, False), ("dark", 1280, True)):
        page.set_viewport_size({"width": width, "height": 844})
        page.evaluate(f"document.documentElement.dataset.bsTheme = '{'dark' if dark else 'light'}'")
        assert not scrolls_sideways(page)
        check_page(page, within="#fgpu-folders")
        if pictures:
            page.screenshot(path=f"{pictures}/{name}.png", full_page=True)
    page.set_viewport_size({"width": 1280, "height": 844})
    start(page)
    page.wait_for_url("**/user/ann/**", timeout=START_MS)
    assert hub.sessions()["ann/"].request.folders == ("vision",)
    page.goto(f"{hub.url}/services/fgpu/")
    page.locator(".status summary").first.click()
    shown = page.get_by_text("Folders: datasets (~/data/datasets, read and write), vision")
    expect(shown).to_be_visible()
    if pictures:
        page.screenshot(path=f"{pictures}/session.png")
    # A link ticks them.
    page.goto(f"{hub.url}/hub/spawn/ann/other?opt-folders=scratch")
    expect(page.get_by_role("checkbox", name="scratch")).to_be_checked()
