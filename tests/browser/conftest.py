from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import requests
from playwright.sync_api import Browser, Page, expect, sync_playwright
from playwright.sync_api import Error as BrowserError
from standing import Standing

from hubprocess import until
from steps import EXPECT_MS, Person
from watching import Faults

ARGS = [
    "--no-sandbox",
    "--disable-dev-shm-usage",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
SCREEN = {"width": 1280, "height": 800}
PATIENCE_MS = 60_000
"""What is waited for comes within a second; on a machine that does much else, within this."""

expect.set_options(timeout=EXPECT_MS)


@pytest.fixture(scope="session")
def quiet_network(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library that Chromium preloads while containers change the network."""
    library = tmp_path_factory.mktemp("chromium") / "quiet_network.so"
    source = Path(__file__).with_name("quiet_network.c")
    subprocess.run(["cc", "-shared", "-fPIC", "-O2", "-o", library, source], check=True)
    return library


@pytest.fixture(scope="module")
def chromium(quiet_network: Path) -> Iterator[Browser]:
    """The browser. Of a module, because Playwright's event loop would be in the way of asynchronous tests."""
    path = os.environ.get("FGPU_TEST_CHROMIUM") or shutil.which("chromium")
    if not path or not Path(path).exists():
        pytest.skip("no Chromium (FGPU_TEST_CHROMIUM, tests/services.sh)")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=path,
            args=ARGS,
            env={**os.environ, "LD_PRELOAD": str(quiet_network)},
            timeout=2 * PATIENCE_MS,
        )
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def docker_engine() -> None:
    """A Docker engine with the default image."""
    image = ["docker", "image", "inspect", "fgpuspawner/base:0.1"]
    if not shutil.which("docker") or subprocess.run(image, capture_output=True, check=False).returncode:
        pytest.skip("no Docker engine with the image fgpuspawner/base:0.1 (tests/services.sh, make image)")


@pytest.fixture
def faults() -> Faults:
    """Collects errors of this test's pages; the test fails on any that it did not allow."""
    return Faults()


def service_answers(url: str) -> bool:
    """Return whether the service of the Hub at this address answers, also where it has a domain of its own."""
    hub = urlsplit(url)
    host = hub.netloc if hub.hostname == "127.0.0.1" else f"fgpu--service.{hub.netloc}"
    health = f"http://127.0.0.1:{hub.port}/services/fgpu/health"
    try:
        return requests.get(health, headers={"Host": host}, timeout=30).status_code == 200
    except (requests.ConnectionError, requests.Timeout):
        return False


@pytest.fixture
def log_in(chromium: Browser, faults: Faults) -> Iterator[Callable[..., Person]]:
    """Logs people in, each in a browser profile of their own; their sessions are ended after the test."""
    people: list[Person] = []

    def log_in(url: str, name: str, password: str, **options: Any) -> Person:
        # It comes after the Hub, and the first page that one sees asks it.
        until(lambda: service_answers(url), within_s=120, what="the service answers")
        options = {"viewport": SCREEN, "locale": "en-GB", "timezone_id": "Europe/Berlin"} | options
        context = chromium.new_context(**options)
        context.set_default_timeout(PATIENCE_MS)
        faults.watch(context)
        page: Page = context.new_page()
        people.append(Person(name=name, url=url, page=page))
        page.goto(url)
        page.fill("#username_input", name)
        page.fill("#password_input", password)
        page.click("#login_submit")
        page.wait_for_url("**/hub/spawn")
        return people[-1]

    yield log_in
    unexpected = faults.unexpected()
    for person in people:
        try:
            person.end_all()
        finally:
            with suppress(BrowserError):
                person.page.context.close()
    assert not unexpected, "\n".join(unexpected)


@pytest.fixture
def open_as(chromium: Browser, faults: Faults) -> Iterator[Callable[..., Page]]:
    """Opens a page of a service that stands alone, as a user, in a browser profile of their own."""
    contexts = []
    # The icon and the logo are the Hub's, and there is none.
    faults.allow(r"(status GET|console) \S+/(favicon.ico|hub/logo)")

    def open_as(service: Standing, user: str, path: str = "", **options: Any) -> Page:
        headers = {"Authorization": f"token token-{user}"}
        context = chromium.new_context(**({"viewport": SCREEN, "extra_http_headers": headers} | options))
        context.set_default_timeout(PATIENCE_MS)
        contexts.append(context)
        faults.watch(context)
        page = context.new_page()
        page.goto(service.url + path)
        return page

    yield open_as
    for context in contexts:
        context.close()
    assert not faults.unexpected(), "\n".join(faults.unexpected())
