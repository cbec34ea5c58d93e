"""Each user's server, and the service, on a domain of its own: ``c.JupyterHub.subdomain_host``."""

from __future__ import annotations

import html
import re
import socket
from collections.abc import Iterator
from http.cookiejar import DefaultCookiePolicy
from typing import Any
from urllib.parse import urljoin, urlparse

import pytest
import requests
from requests.cookies import RequestsCookieJar

from hubprocess import HubProcess, until

LOGIN_COOKIE = "jupyterhub-hub-login"


@pytest.fixture(scope="module", autouse=True)
def as_browsers_do() -> Iterator[None]:
    """Names below localhost are this machine, and cookies go to their hosts only."""
    resolve = socket.getaddrinfo

    def resolved(host: Any, *args: Any, **kwargs: Any) -> Any:
        return resolve("127.0.0.1" if str(host).endswith(".localhost") else host, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, "getaddrinfo", resolved)
        # Python's own way, unlike browsers', also sends a host's cookies to the hosts below it.
        strict = DefaultCookiePolicy(strict_ns_domain=DefaultCookiePolicy.DomainStrictNonDomain)
        patch.setattr(requests.sessions, "RequestsCookieJar", lambda: RequestsCookieJar(strict))
        yield


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubProcess]:
    """A Hub with the service and real servers, in local processes."""
    found = HubProcess(tmp_path_factory.mktemp("hub"))
    found.after = f"c.JupyterHub.subdomain_host = 'http://hub.localhost:{found.port}'\n"
    try:
        yield found.start()
    finally:
        found.close()


class Browser(requests.Session):
    """Keeps cookies as a browser does: each for the hosts and paths that it was set for."""

    def __init__(self, hub: HubProcess) -> None:
        super().__init__()
        self.hub = f"http://hub.localhost:{hub.port}"
        self.port = hub.port

    def log_in(self, user: str) -> None:
        page = self.get(f"{self.hub}/hub/login", timeout=30)
        answer = self.post(
            page.url,
            data={"username": user, "password": "test-password", "_xsrf": self.xsrf("/hub/")},
            timeout=30,
        )
        assert "Log out" in answer.text, answer.text

    def xsrf(self, path: str) -> str:
        return next(c.value or "" for c in self.cookies if c.name == "_xsrf" and c.path == path)

    def sent_to(self, url: str) -> set[str]:
        """Return the names of the cookies that go with a request."""
        prepared = self.prepare_request(requests.Request("GET", url))
        return {part.split("=")[0].strip() for part in prepared.headers.get("Cookie", "").split(";")} - {""}


@pytest.fixture(scope="module")
def alice(hub: HubProcess) -> Iterator[Browser]:
    """A browser in which alice is logged in; her server is asked for in the form, and runs."""
    browser = Browser(hub)
    browser.log_in("alice")
    page = browser.get(f"{browser.hub}/hub/spawn", timeout=30)
    assert 'class="fgpu-form"' in page.text
    form = {"image": "python", "fgpu": "0.5", "cpu": "0.5", "memory_mib": "512", "count": "1"}
    answer = browser.post(f"{page.url}?_xsrf={browser.xsrf('/hub/')}", data=form, timeout=30)
    assert answer.status_code == 200, answer.text
    assert 'id="fgpu-waiting"' in answer.text or "/user/alice/" in answer.url
    until(lambda: hub.ready("alice"), within_s=60)
    yield browser
    hub.stop("alice")


def test_the_forms_forecast_is_answered_where_the_form_asks_for_it(hub: HubProcess) -> None:
    browser = Browser(hub)
    browser.log_in("bob")
    page = browser.get(f"{browser.hub}/hub/spawn", timeout=30)
    found = re.search(r'data-service="([^"]+)" data-ticket="([^"]+)"', page.text)
    assert found is not None
    url = urljoin(page.url, html.unescape(found[1])) + "api/v1/forecast"
    assert urlparse(url).netloc == urlparse(browser.hub).netloc, "a page may not read other origins"
    query = {"image": "python", "fgpu": "0.5", "cpu": "0.5", "memory_mib": "512", "count": "1"}
    answer = browser.get(url, params=query, headers={"X-FGPU-Ticket": html.unescape(found[2])}, timeout=30)
    assert answer.status_code == 200, answer.text
    assert "text" in answer.json()


def test_the_waiting_page_works_on_the_hubs_host(hub: HubProcess) -> None:
    browser = Browser(hub)
    browser.log_in("carol")
    hub.add_user("carol")
    large = {"fgpu": "2", "cpu": "0.5", "memory_mib": 512}
    hub.add_user("dave")
    hub.spawn("dave", options=large)
    assert hub.spawn("carol", options=large).status_code == 202
    try:
        page = browser.get(f"{browser.hub}/hub/spawn-pending/carol", timeout=30)
        found = re.search(r'data-progress="([^"]+)".*?data-sessions="([^"]+)"', page.text, re.DOTALL)
        assert found is not None, page.text
        with browser.get(urljoin(page.url, html.unescape(found[1])), stream=True, timeout=30) as stream:
            line = next(line for line in stream.iter_lines() if line.startswith(b"data:"))
        assert b'"progress"' in line
        sessions = browser.get(urljoin(page.url, found[2]), timeout=30)
        assert sessions.status_code == 200
        assert "carol" in sessions.text
    finally:
        hub.stop("carol")
        hub.stop("dave")
        until(lambda: not {"carol/", "dave/"} & set(hub.states()), what="their sessions have ended")


def test_jupyterlab_and_its_panel_answer_on_the_users_own_domain(hub: HubProcess, alice: Browser) -> None:
    lab = alice.get(f"{alice.hub}/user/alice/lab", timeout=60)
    assert lab.status_code == 200
    assert lab.url.startswith(f"http://alice.hub.localhost:{hub.port}/user/alice/lab")
    assert "jupyter-config-data" in lab.text
    own = f"http://alice.hub.localhost:{hub.port}/user/alice"
    status = alice.get(f"{own}/fgpu/api/status", timeout=30)
    assert status.status_code == 200
    assert status.json()["session"]["state"] == "RUNNING"


def test_the_service_is_a_page_of_its_own_domain_whose_links_lead_back(
    hub: HubProcess, alice: Browser
) -> None:
    page = alice.get(f"{alice.hub}/services/fgpu/?show=mine", timeout=30)
    assert page.status_code == 200
    assert page.url.startswith(f"http://fgpu--service.hub.localhost:{hub.port}/services/fgpu/?show=mine")
    links = dict(re.findall(r'<a class="button[^"]*" id="(\w+)[^"]*" href="([^"]+)"', page.text))
    opened = alice.get(html.unescape(links["open"]), timeout=60)
    assert opened.status_code == 200
    assert opened.url.startswith(f"http://alice.hub.localhost:{hub.port}/user/alice/")
    new = alice.get(html.unescape(links["new"]), timeout=30)
    assert new.url.startswith(f"{alice.hub}/hub/spawn/alice/")
    assert 'class="fgpu-form"' in new.text, "she is still logged in there"
    icon = re.search(r'rel="icon" href="([^"]+)"', page.text)
    assert icon is not None
    assert alice.get(urljoin(page.url, icon[1]), timeout=30).status_code == 200
    script = re.search(r'<script src="([^"]+)"', page.text)
    assert script is not None
    assert alice.get(urljoin(page.url, script[1]), timeout=30).status_code == 200


def test_the_services_events_stream_on_its_own_domain(hub: HubProcess, alice: Browser) -> None:
    alice.get(f"{alice.hub}/services/fgpu/", timeout=30)
    url = f"http://fgpu--service.hub.localhost:{hub.port}/services/fgpu/api/v1/events"
    xsrf = {"X-XSRFToken": alice.xsrf("/services/fgpu/")}
    with alice.get(url, headers=xsrf, stream=True, timeout=30) as stream:
        assert stream.status_code == 200, stream.text
        assert next(line for line in stream.iter_lines() if line)


def test_the_hubs_cookies_do_not_reach_a_users_domain_nor_the_other_way(
    hub: HubProcess, alice: Browser
) -> None:
    own = f"http://alice.hub.localhost:{hub.port}/user/alice/"
    alice.get(own + "lab", timeout=60)
    at_hub, at_server = alice.sent_to(f"{alice.hub}/hub/home"), alice.sent_to(own)
    assert LOGIN_COOKIE in at_hub
    # The one that both get says who logged in when, so that a logout is noticed; it opens nothing.
    assert at_hub & at_server <= {"jupyterhub-session-id", "_xsrf"}
    assert alice.sent_to(f"http://alice.hub.localhost:{hub.port}/hub/home") <= {"jupyterhub-session-id"}
    only = Browser(hub)
    only.cookies.set(
        "jupyterhub-session-id",
        next(str(c.value) for c in alice.cookies if c.name == "jupyterhub-session-id"),
        domain=".hub.localhost",
    )
    refused = only.get(f"{alice.hub}/hub/api/user", timeout=30)
    assert refused.status_code == 403


def test_a_page_of_a_users_domain_cannot_use_the_hub(hub: HubProcess, alice: Browser) -> None:
    """As a browser would ask, with all of the visitor's cookies, for a script of somebody else's server."""
    origin = f"http://mallory.hub.localhost:{hub.port}"
    headers = {"Origin": origin, "Referer": f"{origin}/user/mallory/", "Sec-Fetch-Site": "same-site"}
    answer = alice.get(f"{alice.hub}/hub/api/user", headers=headers, timeout=30)
    assert "Access-Control-Allow-Origin" not in answer.headers, "the script may not read it"
    for more in ({"Sec-Fetch-Mode": "cors"}, {}):
        url = f"{alice.hub}/hub/api/users/alice/server"
        answer = alice.delete(url, headers=headers | more, timeout=30)
        assert answer.status_code == 403, answer.text
    assert hub.ready("alice")
