from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import (
    Browser,
    Page,
    sync_playwright,
)
from playwright.sync_api import Error as BrowserError

from steps import Person
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


def _skip(reason: str) -> None:
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    """The browser. Of a module, because Playwright's event loop would be in the way of asynchronous tests."""
    path = os.environ.get("FGPU_TEST_CHROMIUM") or shutil.which("chromium")
    if not path or not Path(path).exists():
        _skip("no Chromium (FGPU_TEST_CHROMIUM, tests/services.sh)")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=ARGS)
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def docker_engine() -> None:
    """A Docker engine with the default image."""
    image = ["docker", "image", "inspect", "fgpuspawner/base:0.1"]
    if not shutil.which("docker") or subprocess.run(image, capture_output=True, check=False).returncode:
        _skip("no Docker engine with the image fgpuspawner/base:0.1 (tests/services.sh, make image)")


@pytest.fixture
def faults() -> Faults:
    """What goes wrong in this test's pages; it fails if there is anything that nobody allowed."""
    return Faults()


@pytest.fixture
def log_in(chromium: Browser, faults: Faults) -> Iterator[Callable[..., Person]]:
    """Logs people in, each in a browser profile of their own; their sessions are ended after the test."""
    people: list[Person] = []

    def log_in(url: str, name: str, password: str, **options: Any) -> Person:
        options = {"viewport": SCREEN, "locale": "en-GB", "timezone_id": "Europe/Berlin"} | options
        context = chromium.new_context(**options)
        context.set_default_timeout(15_000)
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
def shot() -> Callable[[Page, str], None]:
    """Takes a picture for the documentation, when FGPU_DOCS_SHOTS=1 asks for them."""

    def take(page: Page, name: str) -> None:
        if os.environ.get("FGPU_DOCS_SHOTS"):
            folder = Path(__file__).parents[2] / "docs" / "images"
            page.screenshot(path=folder / name, animations="disabled")

    return take
