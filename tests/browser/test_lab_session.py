"""A session seen from its JupyterLab: prove its slice, extend it, end it, and read why it ended."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import pytest
import requests
from axe import check_page
from playwright.sync_api import Page, expect

from hubprocess import HubProcess, until
from labsteps import BUILD, new_notebook, open_lab, open_panel
from steps import START_MS, Person
from watching import Faults

pytestmark = pytest.mark.timeout(600)
GONE = r"(status|console|failed) .*/user/(eve|ann)/.*"
"""A page asks on for a while when its server has ended, and the Hub or the proxy refuses in its place."""
ASKS_WITHIN_MS = 12_000
"""Seconds between two requests of an open JupyterLab."""
LITTLE = {"fgpu": "0.5", "cpu": "0.2", "memory_mib": 512}


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubProcess]:
    found = HubProcess(tmp_path_factory.mktemp("hub"), before=BUILD, extend_by_s=3600, extend_times=1)
    try:
        yield found.start()
    finally:
        found.close()


def lab_of(hub: HubProcess, person: Person, **options: str) -> Page:
    hub.add_user(person.name)
    answer = hub.spawn(person.name, options={**LITTLE, **options})
    assert answer.status_code in (201, 202), answer.text
    until(lambda: hub.ready(person.name), within_s=START_MS / 1000, what="the server is ready")
    return open_lab(hub, person)


def test_panel_proves_the_slice(hub: HubProcess, log_in: Callable[..., Person]) -> None:
    page = lab_of(hub, log_in(hub.url, "pia", "test-password"))
    this = open_panel(page).get_by_role("region", name="This session")
    this.get_by_role("button", name="Prove my slice").click()
    expect(this.get_by_role("button", name="Proving…")).to_be_visible()
    # A second press, or another tab's, is the same run.
    this.get_by_role("button", name="Proving…").click()
    table = this.get_by_role("table", name="What was tried")
    expect(table).to_be_visible(timeout=200_000)
    # A local process can leave its limits, which the table says.
    held = re.compile(r"^Your limits hold, with known gaps\. \d+ of \d+ checks held\.$")
    expect(this.get_by_text(held)).to_be_visible()
    expect(table.get_by_role("row", name=re.compile("env -i")).get_by_role("cell").nth(1)).to_have_text(
        "known gap"
    )
    row = table.get_by_role("row", name=re.compile("a smaller allocation works after that"))
    expect(row.get_by_role("cell").nth(1)).to_have_text("held")
    check_page(page, within=".jp-fgpu-Panel")


def test_panel_extends_the_time_limit_within_its_bounds(
    hub: HubProcess, log_in: Callable[..., Person]
) -> None:
    page = lab_of(hub, log_in(hub.url, "tim", "test-password"), time_limit_s="3600")
    this = open_panel(page).get_by_role("region", name="This session")
    expect(this).to_contain_text(re.compile(r"Time left\s*5\d min"))
    this.get_by_role("button", name="Extend by 1 h").click()
    expect(this).to_contain_text(re.compile(r"Time left\s*1 h 5\d min"), timeout=60_000)
    expect(page.locator(".Toastify").get_by_text("The session has more time.")).to_be_visible()
    expect(this.get_by_role("button", name=re.compile("Extend"))).to_have_count(0)
    assert hub.sessions()["tim/"].time_limit_s == 7200


def test_session_is_renamed_in_the_panel_and_a_failed_script_is_told(
    hub: HubProcess, log_in: Callable[..., Person], faults: Faults
) -> None:
    # A refused name.
    faults.allow(r"(status POST|console) \S+/rename\?\d+ .*\b400\b")
    nora = log_in(hub.url, "nora", "test-password")
    token = hub.add_user("nora")
    hub.spawn("nora", options={**LITTLE, "script": "exit 3", "name": "draft"}, token=token)
    until(lambda: hub.ready("nora"), within_s=START_MS / 1000, what="the server is ready")
    page = open_lab(hub, nora)
    notice = page.locator(".Toastify__toast", has_text="Your start script failed with status 3.")
    expect(notice).to_be_visible(timeout=60_000)
    this = open_panel(page).get_by_role("region", name="This session")
    this.get_by_role("button", name="Rename…").click()
    dialog = page.get_by_role("dialog")
    field = dialog.get_by_role("textbox")
    expect(field).to_have_value("draft")
    check_page(page, within=".jp-Dialog")
    field.fill("<b>thesis</b>")
    dialog.get_by_role("button", name="Rename", exact=True).click()
    expect(this.locator("bdi")).to_have_text("<b>thesis</b>", timeout=60_000)
    # The service's words where it does not take a name, and the old one stays.
    this.get_by_role("button", name="Rename…").click()
    field.fill(" ")
    dialog.get_by_role("button", name="Rename", exact=True).click()
    expect(page.locator(".Toastify__toast", has_text="Not done: ")).to_be_visible()
    assert hub.sessions()["nora/"].request.name == "<b>thesis</b>"
    with page.context.expect_page() as opened:
        notice.get_by_role("button", name="Log").click()
    expect(opened.value.get_by_text("your start script failed with status 3")).to_be_visible()
    # Told once.
    page.reload()
    expect(this).to_contain_text("<b>thesis</b>", timeout=60_000)
    expect(notice).to_have_count(0)


def test_ending_in_lab_says_what_is_lost(
    hub: HubProcess, log_in: Callable[..., Person], faults: Faults
) -> None:
    faults.allow(GONE)
    page = lab_of(hub, log_in(hub.url, "eve", "test-password"))
    new_notebook(page)
    page.locator(".jp-Notebook .cm-content").first.click()
    page.keyboard.insert_text("x = 1")
    this = open_panel(page).get_by_role("region", name="This session")
    this.get_by_role("button", name="End this session…").click()
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text("End this session?")
    expect(dialog).to_contain_text("You lose their variables and running programs.")
    expect(dialog).to_contain_text("One open file has unsaved changes. Save it first.")
    dialog.get_by_role("button", name="Keep running").click()
    assert set(hub.sessions()) >= {"eve/"}

    this.get_by_role("button", name="End this session…").click()
    dialog.get_by_role("button", name="End", exact=True).click()
    expect(dialog).to_contain_text("Your session has ended", timeout=60_000)
    expect(dialog).to_contain_text("You ended it.")
    until(lambda: "eve/" not in hub.sessions(), what="the session has ended")
    page.on("dialog", lambda leave: leave.accept())
    dialog.get_by_role("button", name="My Sessions").click()
    page.wait_for_url(re.compile("/services/fgpu/"))


def test_lab_says_why_its_session_ended(
    hub: HubProcess, log_in: Callable[..., Person], faults: Faults
) -> None:
    faults.allow(GONE)
    # This browser has not been on the service's pages.
    page = lab_of(hub, log_in(hub.url, "ann", "test-password"))
    session = hub.sessions()["ann/"]
    answer = requests.delete(
        f"{hub.url}/services/fgpu/api/v1/sessions/{session.id}",
        headers={"Authorization": f"token {hub.add_user('admin')}"},
        json={"message": "repair at 15:00"},
        timeout=60,
    )
    assert answer.status_code == 202, answer.text
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text("Your session has ended", timeout=120_000)
    expect(dialog).to_contain_text("repair at 15:00.")
    expect(page.get_by_text("Server unavailable or unreachable")).to_have_count(0)
    check_page(page, within=".jp-Dialog")
    # It stops polling, and the form has the same request.
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    with page.context.expect_page() as opened:
        dialog.get_by_role("button", name="Start Again").click()
    expect(opened.value.locator("#fgpu-cpu")).to_have_value("0.2")
    expect(dialog).to_have_count(0)
    page.wait_for_timeout(ASKS_WITHIN_MS)
    # The click itself is activity, which is told once.
    assert [url for url in asked if "/api/" in url and "/api/input" not in url] == []


def test_lab_does_not_ask_for_news(hub: HubProcess, log_in: Callable[..., Person]) -> None:
    nia = log_in(hub.url, "nia", "test-password")
    page = lab_of(hub, nia)
    setting = page.evaluate(
        """async () => {
          const token = decodeURIComponent(document.cookie.match(/_xsrf=([^;]*)/)[1]);
          const found = await fetch(
            '/user/nia/lab/api/settings/@jupyterlab/apputils-extension:notification',
            { headers: { 'X-XSRFToken': token } }
          );
          return (await found.json()).schema.properties.fetchNews.default;
        }"""
    )
    assert setting == "false"
    expect(page.get_by_text("Would you like to get notified about official Jupyter news?")).to_have_count(0)
