"""Requests of an open Lab tab to our service, counted as a browser sends them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest
from playwright.sync_api import Page, expect

from hubprocess import HubProcess, until
from labsteps import BUILD, open_lab, open_panel, spawn
from steps import START_MS, Person

MOST_VISIBLE, MOST_HIDDEN = 12, 1
"""Requests a minute."""


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubProcess]:
    found = HubProcess(tmp_path_factory.mktemp("hub"), before=BUILD)
    try:
        yield found.start()
    finally:
        found.close()


def hide(page: Page, hidden: bool) -> None:
    """Tell the page that it is hidden, or shown again, as a browser does when another tab is chosen."""
    page.evaluate(
        """(hidden) => {
          Object.defineProperty(document, "hidden", {configurable: true, get: () => hidden});
          const state = hidden ? "hidden" : "visible";
          Object.defineProperty(document, "visibilityState", {configurable: true, get: () => state});
          document.dispatchEvent(new Event("visibilitychange"));
        }""",
        hidden,
    )


def count(page: Page, asked: list[str], seconds: float) -> int:
    """Return how many requests for us a tab sends in a time."""
    asked.clear()
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        page.wait_for_timeout(200)
    return len(asked)


NOTIFIES = """
window.notified = [];
window.Notification = class {
  static permission = "PERMISSION";
  constructor(text) { window.notified.push(text); }
  close() {}
};
// A minute passes in two seconds.
const later = window.setTimeout;
window.setTimeout = (run, ms, ...rest) => later(run, ms === 60000 ? 2000 : ms, ...rest);
"""


@pytest.mark.timeout(600)
@pytest.mark.parametrize("permission", ["granted", pytest.param("default", marks=pytest.mark.slow)])
def test_hidden_tab_notifies_if_allowed(
    hub: HubProcess, log_in: Callable[..., Person], permission: str
) -> None:
    name, hog = f"gil-{permission}", f"hog-{permission}"
    spawn(hub, hog, fgpu="1.5")
    gil = log_in(hub.url, name, "test-password")
    gil.page.add_init_script(NOTIFIES.replace("PERMISSION", permission))
    spawn(hub, name, fgpu="0.1")
    hub.reach({f"{hog}/": "RUNNING", f"{name}/": "RUNNING"}, within_s=START_MS / 1000)
    spawn(hub, name, "gpu-2", fgpu="1")
    page = open_lab(hub, gil)
    panel = open_panel(page)
    others = panel.get_by_role("region", name="Your other sessions")
    expect(others.get_by_role("listitem")).to_contain_text("in the queue", timeout=60_000)
    hide(page, True)
    asked: list[str] = []
    page.on("request", lambda r: asked.append(r.url) if "/fgpu/" in r.url else None)
    hub.stop(hog)
    hub.reach({f"{name}/": "RUNNING", f"{name}/gpu-2": "RUNNING"}, within_s=START_MS / 1000)
    if permission == "granted":
        until(
            lambda: page.wait_for_timeout(100) is None and page.evaluate("window.notified.length"),
            within_s=60,
            what="a notification of the browser",
        )
    else:
        # A hidden tab does not ask at all.
        page.wait_for_timeout(5000)
        assert asked == []
    # Who comes back finds it in Lab, too.
    told = page.locator(".Toastify").get_by_text("Your session Python 2 is ready")
    expect(told).to_have_count(0)
    hide(page, False)
    expect(told).to_be_visible(timeout=60_000)
    expected = ["Your session Python 2 is ready"] if permission == "granted" else []
    assert page.evaluate("window.notified") == expected
    for user, server in ((name, "gpu-2"), (name, "")):
        hub.stop(user, server)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "seconds",
    [pytest.param(15, id="short"), pytest.param(60, id="minute", marks=pytest.mark.slow)],
)
def test_hidden_tab_polls_less_often(hub: HubProcess, log_in: Callable[..., Person], seconds: int) -> None:
    name = f"fay{seconds}"
    fay = log_in(hub.url, name, "test-password")
    spawn(hub, name, fgpu="0.1")
    hub.reach({f"{name}/": "RUNNING"}, within_s=START_MS / 1000)
    page = open_lab(hub, fay)
    # The panel is open: nothing of ours asks more than that.
    panel = open_panel(page)
    expect(panel.get_by_role("meter", name="GPU memory in use")).to_be_visible(timeout=60_000)
    # What opening it has asked for is not what an open tab asks.
    page.wait_for_timeout(5000)
    asked: list[str] = []
    page.on("request", lambda r: asked.append(r.url) if "/fgpu/" in r.url else None)
    visible = count(page, asked, seconds)
    assert 1 <= visible <= MOST_VISIBLE * seconds / 60
    hide(page, True)
    page.wait_for_timeout(3000)
    hidden = count(page, asked, seconds)
    assert hidden <= MOST_HIDDEN
    print(f"in {seconds} s: {visible} requests while visible, {hidden} while hidden")
    # What is shown is old by now: it asks at once.
    asked.clear()
    hide(page, False)
    until(lambda: page.wait_for_timeout(100) is None and asked, within_s=8, what="a request when shown again")
