"""Each server on its own domain, in a real browser: links work, and a server's page cannot act for its visitor."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import pytest
from playwright.sync_api import expect

from hubprocess import HubProcess
from steps import START_MS, Person, Sessions, forecast, more, place, start, start_by
from watching import Faults

pytestmark = pytest.mark.timeout(600)

READ = """
async (url) => {
  try {
    const answer = await fetch(url, {credentials: "include"});
    return "read " + (await answer.text());
  } catch (error) {
    return "refused";
  }
}
"""
SEND = """
async (url) => {
  try {
    const answer = await fetch(url, {method: "POST", credentials: "include", mode: "no-cors", body: "{}"});
    return answer.type;
  } catch (error) {
    return "refused";
  }
}
"""


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubProcess]:
    found = HubProcess(tmp_path_factory.mktemp("hub"))
    found.after = f"c.JupyterHub.subdomain_host = 'http://hub.localhost:{found.port}'\n"
    try:
        yield found.start()
    finally:
        found.close()


def test_everything_works_across_domains(hub: HubProcess, log_in: Callable[..., Person]) -> None:
    url = f"http://hub.localhost:{hub.port}"
    fay = log_in(url, "fay", "test-password")
    page = fay.page
    expect(forecast(page)).to_contain_text("now")
    page.fill("#fgpu-fgpu", "2")
    more(page).fill("#fgpu-cpu", "0.2")
    more(page).fill("#fgpu-memory", "0.5")
    start(page)
    page.wait_for_url(re.compile(rf"^http://fay\.hub\.localhost:{hub.port}/user/fay/"), timeout=START_MS)
    item = page.locator(".jp-fgpu-StatusItem")
    expect(item).to_contain_text("2 fGPU", timeout=START_MS)

    waiting = fay.new_page()
    start_by(waiting, fay.link("second", fgpu="1", cpu="0.2", memory_mib=512))
    expect(place(waiting)).to_have_text("Next in the queue")

    # The panel hears of it, and its link leads to the service.
    item.click()
    panel = page.get_by_role("region", name="GPU share")
    expect(panel).to_contain_text("1 request is waiting.", timeout=60_000)
    sessions_page = fay.new_page()
    sessions_page.goto(f"{url}/services/fgpu/")
    assert sessions_page.url.startswith(f"http://fgpu--service.hub.localhost:{hub.port}/services/fgpu/")
    sessions = Sessions(sessions_page)
    expect(sessions.state("second")).to_have_text("PENDING")

    # Its events change the page by themselves, and cancelling leads from the Hub's host to it.
    with sessions.without_reload():
        waiting.get_by_role("button", name="Cancel").click()
        expect(sessions.row("second")).to_have_count(0, timeout=60_000)
    waiting.wait_for_url(f"http://fgpu--service.hub.localhost:{hub.port}/services/fgpu/")
    sessions_page.get_by_role("link", name="Open Python 1").click()
    sessions_page.wait_for_url(re.compile(rf"^http://fay\.hub\.localhost:{hub.port}/user/fay/"))


def test_server_page_cannot_act_as_its_visitor(
    hub: HubProcess, log_in: Callable[..., Person], faults: Faults
) -> None:
    # Refusals are what this is about.
    faults.allow("")
    url = f"http://hub.localhost:{hub.port}"
    ike = log_in(url, "ike", "test-password")
    page = ike.new_page()
    page.goto(f"{url}/hub/token")
    assert "ike" in page.evaluate(READ, f"{url}/hub/token"), "the Hub's own page may, with his cookie"
    evil = ike.new_page()
    # Whatever is on eve's domain runs with its origin: a picture that the Hub gives anybody will do.
    evil.goto(f"http://eve.hub.localhost:{hub.port}/hub/logo")
    assert evil.evaluate("location.hostname") == "eve.hub.localhost"
    assert evil.evaluate(READ, f"{url}/hub/api/user") == "refused"
    assert evil.evaluate(READ, f"{url}/hub/token") == "refused"
    evil.evaluate(SEND, f"{url}/hub/api/users/ike/server")
    evil.evaluate(SEND, f"{url}/hub/api/users/ike/tokens")
    assert hub.servers("ike") == {}
    assert "jupyterhub-hub-login" not in evil.evaluate("document.cookie")
