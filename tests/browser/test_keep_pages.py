"""The warning before an idle session is ended, and Keep, on the sessions page and in JupyterLab's panel."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import pytest
from playwright.sync_api import expect

from fgpu_scheduler import EndCause
from hubprocess import HubProcess, until
from labsteps import BUILD, status_item
from steps import START_MS, Person, Sessions, expect_lab, start_by

pytestmark = pytest.mark.timeout(600)

LITTLE = {"fgpu": "0.5", "cpu": "0.2", "memory_mib": 512}
WARNED_MS = 60_000


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubProcess]:
    reclaim = {"*": {"idle_after_s": 15, "grace_s": 3600}}
    found = HubProcess(tmp_path_factory.mktemp("hub"), before=BUILD, reclaim=reclaim)
    try:
        yield found.start()
    finally:
        found.close()


def test_idle_session_is_warned_and_kept(hub: HubProcess, log_in: Callable[..., Person]) -> None:
    gil = log_in(hub.url, "gil", "test-password")
    page = gil.page
    for server in ("", "gpu-2"):
        start_by(page, gil.link(server, **LITTLE))
        page.wait_for_url(re.compile(f"/user/gil/{server}"), timeout=START_MS, wait_until="commit")
    # Both sessions are idle from here on.
    page.goto(f"{hub.url}/services/fgpu/")
    sessions = Sessions(page)
    first, second = sessions.row("Python 1"), sessions.row("Python 2")
    expect(first).to_contain_text("It is idle: use it or keep it running; it ends at", timeout=WARNED_MS)
    expect(second).to_contain_text("idle", timeout=WARNED_MS)

    with sessions.without_reload():
        first.get_by_role("button", name="Keep running Python 1").click()
        expect(first.get_by_role("button", name="Keep")).to_have_count(0)
        expect(first).not_to_contain_text("idle")
    expect(second).to_contain_text("idle")

    # The other one is kept from the first one's JupyterLab.
    page.goto(f"{hub.url}/user/gil/lab")
    # The button, which is there an instant after the place for it.
    status_item(page).click(timeout=START_MS)
    other = page.get_by_role("region", name="Your other sessions").get_by_role("listitem")
    expect(other.get_by_role("alert")).to_contain_text("It is idle", timeout=60_000)
    notice = page.locator(".Toastify").get_by_text("Python 2 ends soon unless you use it. It is idle")
    expect(notice).to_be_visible(timeout=60_000)
    other.get_by_role("button", name="Keep running Python 2").click()
    expect(other.get_by_role("alert")).to_have_count(0, timeout=60_000)
    # What the notification says is no longer so.
    expect(notice).to_have_count(0, timeout=60_000)
    assert all(session.kept_until_s for session in hub.sessions().values())


def test_only_activity_keeps_a_session(hub: HubProcess, log_in: Callable[..., Person]) -> None:
    hal = log_in(hub.url, "hal", "test-password")
    start_by(hal.page, hal.link(**LITTLE))
    expect_lab(hal.page, "hal")

    def cause() -> EndCause | None:
        return hub.sessions()["hal/"].ends_cause

    # The page asks its server for much, and the Hub hears of that.
    until(lambda: cause() is EndCause.IDLE, within_s=90, what="the session is warned, with its tab open")
    hal.page.keyboard.press("Shift")
    until(lambda: cause() is None, within_s=60, what="the warning is taken back")
