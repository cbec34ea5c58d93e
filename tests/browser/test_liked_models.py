"""GPU models in order of preference: in the form and by link."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from hubprocess import PATIENT, HubProcess, running
from steps import START_MS, Person, forecast, more, start

pytestmark = pytest.mark.timeout(600)

MINI = Path(__file__).parents[1] / "hub" / "miniserver.py"
SMALL, MIDDLE, LARGE = (f"Simulated GPU {mib} MiB" for mib in (4096, 8192, 16384))
PRESETS = [{"name": "Large first", "fgpu": "1", "gpu_models": [LARGE, SMALL]}]


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubProcess]:
    """A Hub with one GPU of each of three models; another user holds the middle one."""
    nodes = [
        {"name": name, "cpu": 8, "memory_mib": 16384, "gpus": {"simulated": 1, "memory_mib": mib}}
        for name, mib in (("a", 4096), ("b", 8192), ("c", 16384))
    ]
    after = f"c.Spawner.cmd = ['python', {str(MINI)!r}]\n"
    with running(
        tmp_path_factory.mktemp("models"), before=PATIENT, after=after, nodes=nodes, presets=PRESETS
    ) as found:
        found.add_user("holder")
        # By the name of before.
        options = {"fgpu": "2", "cpu": "0.1", "memory_mib": 256, "gpu_model": MIDDLE}
        found.spawn("holder", options=options)
        found.reach({"holder/": "RUNNING"})
        assert found.sessions()["holder/"].request.gpu_models == (MIDDLE,)
        yield found


def chosen(page: Page) -> list[str]:
    """Return the values of the visible fields for models."""
    return [one.input_value() for one in page.locator("[name=gpu_models]:visible").all()]


def offered(page: Page, at: int) -> list[str]:
    """Return the models that a field lets one choose."""
    options = page.locator("[name=gpu_models]").nth(at).locator("option:not([disabled])")
    return [one.get_attribute("value") or "" for one in options.all()]


def test_models_are_chosen_with_the_keyboard(hub: HubProcess, log_in: Callable[..., Person]) -> None:
    page = more(log_in(hub.url, "ann", "test-password").page)
    first = page.get_by_role("combobox", name="GPU model")
    others = page.get_by_role("combobox", name="Or, if that is not free")
    expect(first).to_have_accessible_description(re.compile("first of these that is free.*do not wait"))
    assert (chosen(page), offered(page, 0)) == ([""], ["", SMALL, MIDDLE, LARGE])
    first.focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowDown")
    expect(first).to_have_value(MIDDLE)
    # Only what is held is asked for: it waits, and says so.
    expect(forecast(page)).to_contain_text("in the queue")
    expect(others).to_have_count(1)
    page.keyboard.press("Tab")
    expect(others.first).to_be_focused()
    page.keyboard.press("ArrowDown")
    expect(others.first).to_have_value(SMALL)
    assert offered(page, 1) == ["", SMALL, LARGE]
    expect(forecast(page)).to_have_text("Starts now.")
    expect(page.locator("#fgpu-more-now")).to_contain_text(f"{MIDDLE} or {SMALL}")
    expect(others).to_have_count(2)
    assert offered(page, 2) == ["", LARGE]
    # A request for any model has no second choice.
    first.select_option("")
    assert chosen(page) == [""]
    first.select_option(MIDDLE)
    assert chosen(page) == [MIDDLE, ""]
    others.first.select_option(SMALL)
    start(page)
    page.wait_for_url("**/user/ann/**", timeout=START_MS)
    session = hub.sessions()["ann/"]
    assert session.request.gpu_models == (MIDDLE, SMALL)
    assert session.placement is not None
    assert session.placement.node_id == "a"
