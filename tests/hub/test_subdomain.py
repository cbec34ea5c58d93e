"""Each user's server, and the service, on a domain of its own: ``c.JupyterHub.subdomain_host``."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from http.cookiejar import DefaultCookiePolicy
from typing import Any

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
    """Request a script of another user's server as a browser would, with all cookies of the visitor."""
    origin = f"http://mallory.hub.localhost:{hub.port}"
    headers = {"Origin": origin, "Referer": f"{origin}/user/mallory/", "Sec-Fetch-Site": "same-site"}
    answer = alice.get(f"{alice.hub}/hub/api/user", headers=headers, timeout=30)
    assert "Access-Control-Allow-Origin" not in answer.headers, "the script may not read it"
    for more in ({"Sec-Fetch-Mode": "cors"}, {}):
        url = f"{alice.hub}/hub/api/users/alice/server"
        answer = alice.delete(url, headers=headers | more, timeout=30)
        assert answer.status_code == 403, answer.text
    assert hub.ready("alice")
