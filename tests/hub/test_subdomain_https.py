"""Subdomains over HTTPS: a page of one user's domain cannot make its visitor act as another user."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Iterator
from http.cookiejar import DefaultCookiePolicy
from typing import Any

import pytest
import requests
from requests.cookies import RequestsCookieJar

from hubprocess import HubProcess

NAMES = "subjectAltName=IP:127.0.0.1,DNS:hub.localhost,DNS:*.hub.localhost"


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubProcess]:
    """A Hub behind a proxy with a trusted certificate; its names below localhost are this machine."""
    folder = tmp_path_factory.mktemp("hub")
    key, certificate = folder / "key.pem", folder / "certificate.pem"
    words = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    words += ["-subj", "/CN=hub.localhost", "-addext", NAMES, "-days", "2"]
    subprocess.run([*words, "-keyout", key, "-out", certificate], check=True, capture_output=True)
    found = HubProcess(folder)
    found.url = f"https://127.0.0.1:{found.port}"
    found.before = (
        f"c.JupyterHub.ssl_key, c.JupyterHub.ssl_cert = {str(key)!r}, {str(certificate)!r}\n"
        f"c.JupyterHub.subdomain_host = 'https://hub.localhost:{found.port}'\n"
    )
    resolve = socket.getaddrinfo

    def resolved(host: Any, *args: Any, **kwargs: Any) -> Any:
        return resolve("127.0.0.1" if str(host).endswith(".localhost") else host, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("REQUESTS_CA_BUNDLE", str(certificate))
        patch.setattr(socket, "getaddrinfo", resolved)
        # Python's own way, unlike browsers', also sends a host's cookies to the hosts below it.
        strict = DefaultCookiePolicy(strict_ns_domain=DefaultCookiePolicy.DomainStrictNonDomain)
        patch.setattr(requests.sessions, "RequestsCookieJar", lambda: RequestsCookieJar(strict))
        try:
            yield found.start()
        finally:
            found.close()


def log_in(hub: HubProcess, user: str) -> requests.Session:
    """Return a browser in which the user has logged in, at the Hub and at the service."""
    browser, url = requests.Session(), f"https://hub.localhost:{hub.port}/hub"
    page = browser.get(f"{url}/login", timeout=30)
    xsrf = next(c.value for c in browser.cookies if c.name == "_xsrf")
    fields = {"username": user, "password": "test-password", "_xsrf": xsrf}
    assert "Log out" in browser.post(page.url, data=fields, timeout=30).text
    sessions = browser.get(f"https://hub.localhost:{hub.port}/services/fgpu/", timeout=30)
    assert sessions.status_code == 200
    assert sessions.url.startswith(f"https://fgpu--service.hub.localhost:{hub.port}/services/fgpu/")
    return browser


def test_cookie_for_all_domains_changes_no_identity(hub: HubProcess) -> None:
    alice, mallory = log_in(hub, "alice"), log_in(hub, "mallory")
    hub_url = f"https://hub.localhost:{hub.port}/hub/token"
    own_url = f"https://fgpu--service.hub.localhost:{hub.port}/services/fgpu/api/v1/me"

    def name(url: str) -> bool:
        page = alice.get(url, timeout=30)
        assert page.status_code == 200, page.text
        assert ("alice" in page.text) is not ("mallory" in page.text), page.text
        return "alice" in page.text

    assert name(hub_url)
    assert name(own_url)
    # What a page at https://mallory.hub.localhost can have the browser keep: hers, for every domain and every path.
    for cookie in list(mallory.cookies):
        if cookie.name == "jupyterhub-session-id" or cookie.name == "_xsrf":
            continue
        for path in ("/", "/hub/", "/services/fgpu/", str(cookie.path)):
            # No browser takes one that begins so for more than the host that sets it.
            if not cookie.name.startswith("__Host-"):
                alice.cookies.set(cookie.name, cookie.value, domain=".hub.localhost", path=path)
            alice.cookies.set(
                cookie.name.removeprefix("__Host-"), cookie.value, domain=".hub.localhost", path=path
            )
    assert name(hub_url)
    assert name(own_url)
    kept = {c.name for c in alice.cookies if c.secure and c.name.startswith("__Host-")}
    assert {"__Host-jupyterhub-hub-login", "__Host-service-fgpu"} <= kept
