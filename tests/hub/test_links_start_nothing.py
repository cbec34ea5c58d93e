"""What another site can have a browser do: follow links, and send forms without the Hub's token. Nothing starts."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from bs4 import BeautifulSoup

from hubprocess import WITHOUT_SERVICE, HubProcess, running

WORST = """
c.Spawner.options_form = ""
c.JupyterHub.implicit_spawn_seconds = 0.1
"""
"""Settings of JupyterHub's with which a link starts a server at once, or a page goes on by itself."""
FROM_ELSEWHERE = {
    "Sec-Fetch-Site": "cross-site",
    "Sec-Fetch-Mode": "navigate",
    "Origin": "https://evil.example",
    "Referer": "https://evil.example/",
}
OPTIONS = "fgpu=0.5&cpu=0.1&memory_mib=256"
LINKS = (
    "hub/spawn",
    f"hub/spawn?opt-{OPTIONS}",
    f"hub/spawn?{OPTIONS}",
    "hub/spawn?image=python",
    "hub/spawn?opt-image=python&next=/hub/home",
    "hub/spawn?anything=1",
    "hub/spawn?opt-fgpu=0.5&opt-fgpu=0.6",
    "hub/spawn?opt-fgpu=%3Cb%3E",
    "hub/spawn/{user}?opt-fgpu=0.5",
    "hub/spawn/{user}/other?opt-fgpu=0.5",
    "hub/spawn/bob?opt-fgpu=0.5",
    "hub/spawn/bob/other?opt-fgpu=0.5",
    "hub/spawn-pending/{user}?opt-fgpu=0.5",
    "hub/user-redirect/lab?opt-fgpu=0.5",
    "hub/login?next=%2Fhub%2Fspawn%3Fopt-fgpu%3D0.5",
    "user/{user}/lab",
    "user/{user}/other/lab?opt-fgpu=0.5",
    "user/bob/lab",
    "hub/user/{user}/lab",
    "hub/home",
    "",
)


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubProcess]:
    """A Hub with JupyterHub's settings at their worst."""
    with running(tmp_path_factory.mktemp("hub"), before=WORST, after=WITHOUT_SERVICE) as found:
        found.start()
        found.add_user("bob")
        yield found


@pytest.mark.parametrize("user", ["alice", "admin"])
def test_links_start_no_session(hub: HubProcess, user: str) -> None:
    browser = hub.browser(user)
    for link in LINKS:
        url = f"{hub.url}/{link.format(user=user)}"
        found = browser.get(url, headers=FROM_ELSEWHERE, timeout=60)
        assert found.status_code < 500, (link, found.text)
        # What a page would go on to by itself.
        onward = BeautifulSoup(found.text, "html.parser").select_one("a[href*='/hub/spawn']")
        if onward is not None and found.status_code == 424:
            assert browser.get(f"{hub.url}{onward['href']}", headers=FROM_ELSEWHERE, timeout=60).ok
    assert hub.sessions() == {}
    for name in (user, "bob"):
        assert [s for s in hub.servers(name).values() if s["ready"] or s["pending"]] == []
    assert "Traceback" not in hub.log_text()


def test_a_form_from_another_site_starts_nothing_and_the_hubs_own_does(hub: HubProcess) -> None:
    browser, other = hub.browser("alice"), hub.browser("bob")
    theirs = other.cookies.get("_xsrf", path="/hub/")
    fields = {"fgpu": "0.5", "cpu": "0.1", "memory_mib": "256"}
    for path in (
        "hub/spawn",
        "hub/spawn/alice/other",
        "hub/api/users/alice/server",
        "hub/api/users/alice/servers/x",
    ):
        for query in ("", "?_xsrf=", "?_xsrf=guessed", f"?_xsrf={theirs}"):
            url = f"{hub.url}/{path}{query}"
            assert browser.post(url, data=fields, headers=FROM_ELSEWHERE, timeout=60).status_code == 403
    assert hub.sessions() == {}
    form = BeautifulSoup(browser.get(f"{hub.url}/hub/spawn", timeout=60).text, "html.parser")
    sent = form.select_one("#spawn_form")
    assert sent is not None
    for hidden in sent.select("input[name=_xsrf]"):
        fields["_xsrf"] = hidden["value"]
    assert browser.post(f"{hub.url}{sent['action']}", data=fields, timeout=60).ok
    hub.reach({"alice/": "RUNNING"})


def test_the_log_has_no_cookie_and_no_password(hub: HubProcess) -> None:
    browser = hub.browser("carol")
    assert browser.get(f"{hub.url}/hub/spawn", timeout=60).ok
    cookies = [cookie.value for cookie in browser.cookies if cookie.value]
    assert "jupyterhub-session-id" in browser.cookies
    text = hub.log_text()
    assert "Setting new xsrf cookie for '(not shown)'" in text
    assert [secret for secret in ("test-password", *cookies) if secret.strip('"') in text] == []
