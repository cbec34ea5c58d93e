"""One product: the Hub's pages and the service's have the same header, theme and name, and Home is the sessions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from hubprocess import HubProcess
from steps import Person
from watching import Faults

pytestmark = pytest.mark.timeout(600)

ADMIN = "test-admin-password-0123456789-abcdef"
MINI = Path(__file__).parents[1] / "hub" / "miniserver.py"
LOGO = '<svg xmlns="http://www.w3.org/2000/svg" width="30" height="10"><rect width="30" height="10"/></svg>'
SERVICE = "services/fgpu/"


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubProcess]:
    folder = tmp_path_factory.mktemp("oneheader")
    (folder / "own.svg").write_text(LOGO)
    before = f"c.JupyterHub.logo_file = {str(folder / 'own.svg')!r}\n"
    # An administrator's own variables of templates, set late, do not take ours away.
    after = f"c.Spawner.cmd = ['python', {str(MINI)!r}]\nc.JupyterHub.template_vars = {{'announcement': 'Hello'}}\n"
    found = HubProcess(folder / "hub", before=before, after=after, site_name="Lab <GPUs>")
    try:
        yield found.start()
    finally:
        found.close()


def header(page: Page) -> list[str]:
    """Return the header's entries in order, with their addresses."""
    found: list[str] = page.locator("header.top").evaluate(
        """(top) => Array.from(top.querySelectorAll("a, nav button, .who"), (one) =>
          [one.textContent.trim() || one.ariaLabel, one.getAttribute("href") || ""].join(" "))"""
    )
    return found


@pytest.mark.parametrize("who", ["ann", "admin"])
def test_hub_and_service_share_one_header(hub: HubProcess, log_in: Callable[..., Person], who: str) -> None:
    page = log_in(hub.url, who, ADMIN if who == "admin" else "test-password").page
    seen, titles = {}, set()
    for path in (SERVICE, f"{SERVICE}map", "hub/spawn", "hub/token"):
        page.goto(f"{hub.url}/{path}")
        seen[path] = header(page)
        titles.add(page.title())
        assert page.locator(".top .logo").evaluate("(logo) => logo.naturalWidth") == 30
        assert "Lab <GPUs>" in page.title()
    assert seen[SERVICE] == seen["hub/spawn"] == seen["hub/token"] == seen[f"{SERVICE}map"]
    assert {title.partition(" ")[0] for title in titles} >= {"Start", "Tokens", "Cluster"}
    assert len(titles) == 4
    words = [one.rpartition(" ")[0] for one in seen[SERVICE]]
    assert words[:4] == ["Lab <GPUs>", "Sessions", "Cluster map", "History"]
    assert ("Hub admin" in words) is ("Queue" in words) is (who == "admin")


def test_forbidden_page_has_the_header_and_one_sentence(
    hub: HubProcess, log_in: Callable[..., Person], faults: Faults
) -> None:
    faults.allow(r"(status GET|console) \S+/admin/queue .*403")
    faults.allow(r"(status GET|console) \S+/(hub|fgpu)/nothing .*404")
    page = log_in(hub.url, "dan", "test-password").page
    page.goto(f"{hub.url}/{SERVICE}")
    usual = header(page)
    page.goto(f"{hub.url}/{SERVICE}admin/queue")
    expect(page.get_by_role("alert")).to_contain_text("Only administrators may do this")
    assert header(page) == usual
    page.goto(f"{hub.url}/{SERVICE}nothing")
    expect(page.get_by_role("alert")).to_have_text("There is no such page.")
    assert header(page) == usual
    page.goto(f"{hub.url}/hub/nothing")
    expect(page.get_by_role("heading", name="There is no such page")).to_be_visible()
    assert header(page) == usual
    page.get_by_role("link", name="All sessions").click()
    expect(page.get_by_role("heading", name="Your sessions")).to_be_visible()


def test_home_theme_and_log_out_work_on_every_page(hub: HubProcess, log_in: Callable[..., Person]) -> None:
    bea = log_in(hub.url, "bea", "test-password")
    page = bea.new_page()
    page.goto(f"{hub.url}/hub/home")
    expect(page.get_by_role("heading", name="Your sessions")).to_be_visible()
    assert page.url == f"{hub.url}/{SERVICE}"
    root = page.locator(":root")
    page.get_by_role("button", name="Light or dark").click()
    expect(root).to_have_attribute("data-bs-theme", "dark")
    page.goto(f"{hub.url}/hub/spawn")
    expect(root).to_have_attribute("data-bs-theme", "dark")
    page.get_by_role("button", name="Light or dark").click()
    page.goto(f"{hub.url}/{SERVICE}")
    expect(root).to_have_attribute("data-bs-theme", "light")
    page.get_by_role("link", name="Log out").click()
    expect(page.locator("#username_input")).to_be_visible()
    page.goto(f"{hub.url}/{SERVICE}")
    expect(page.locator("#username_input")).to_be_visible()
    # What follows the test ends her sessions as her.
    page.fill("#username_input", "bea")
    page.fill("#password_input", "test-password")
    page.click("#login_submit")
    expect(page.get_by_role("heading", name="Your sessions")).to_be_visible()
