"""A framework that an administrator installs: the form of another user shows how far it is, and then its image."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from playwright.sync_api import expect

from hubprocess import HubProcess
from smallwheels import wheel
from steps import Person, choose_image, images, more

pytestmark = pytest.mark.timeout(600)

ADMIN = "test-admin-password-0123456789-abcdef"
TORCH = "torch-2.13.0-py3-none-any.whl"
HALF = 4 << 20


class Index(ThreadingHTTPServer):
    """An index that does not say sizes, as PyTorch's. While ``open`` is not set, half of a file comes."""

    def __init__(self, folder: Path) -> None:
        class Files(SimpleHTTPRequestHandler):
            def copyfile(self, source, outputfile) -> None:  # type: ignore[no-untyped-def]
                if not self.path.endswith(TORCH):
                    super().copyfile(source, outputfile)
                    return
                outputfile.write(source.read(HALF))
                outputfile.flush()
                index.open.wait(120)
                outputfile.write(source.read())

            def log_message(self, *words: object) -> None:
                pass

        index, self.open = self, threading.Event()
        self.open.set()
        made = [wheel(folder, "torch", "2.13.0", padding=2 * HALF), wheel(folder, "numpy", "2.0.0")]
        for path in made:
            page = folder / "simple" / path.name.partition("-")[0] / "index.html"
            page.parent.mkdir(parents=True)
            link = f"/{path.name}#sha256={hashlib.sha256(path.read_bytes()).hexdigest()}"
            page.write_text(f'<a href="{link}">{path.name}</a>')
        super().__init__(("127.0.0.1", 0), partial(Files, directory=str(folder)))


@pytest.fixture
def index(tmp_path: Path) -> Iterator[Index]:
    found = Index(tmp_path)
    threading.Thread(target=found.serve_forever, daemon=True).start()
    yield found
    found.open.set()
    found.shutdown()
    found.server_close()


@pytest.fixture
def hub(index: Index, tmp_path: Path) -> Iterator[HubProcess]:
    env = {
        "UV_DEFAULT_INDEX": f"http://127.0.0.1:{index.server_port}/simple/",
        "UV_INDEX_URL": "",
        "UV_CACHE_DIR": str(tmp_path / "cache"),
    }
    found = HubProcess(tmp_path / "hub", env=env)
    try:
        yield found.start()
    finally:
        found.close()


def test_form_shows_how_far_a_framework_is_and_then_its_image(
    hub: HubProcess, index: Index, log_in: Callable[..., Person]
) -> None:
    person, admin = log_in(hub.url, "mia", "test-password"), log_in(hub.url, "admin", ADMIN)
    form, page = person.page, admin.page
    before = images(form)
    more(form).fill("#fgpu-memory", "0.625")
    page.goto(f"{hub.url}/services/fgpu/admin/images")
    page.get_by_role("button", name="Show what can be installed").click()
    expect(page.locator("#frameworks")).to_contain_text("fetches 9 MiB")
    index.open.clear()
    page.get_by_role("button", name="Install: PyTorch 2.13").click()
    line = form.locator("#fgpu-installing p")
    # The form asks every 20 s as long as it knows of none.
    expect(line).to_have_text("PyTorch 2.13: installing, 44 %", timeout=60_000)
    expect(line).to_have_attribute("aria-busy", "true")
    index.open.set()
    expect(line).to_have_text("PyTorch 2.13: ready", timeout=60_000)
    expect(form.locator(".version")).to_have_count(len(before) + 1, timeout=60_000)
    # What was filled in stays, and the new image can be chosen.
    expect(form.locator("#fgpu-memory")).to_have_value("0.625")
    assert form.locator("[name=image]:checked").count() == 1
    choose_image(form, "torch-2-13")
    expect(form.locator("#fgpu-chosen")).to_have_text("PyTorch 2.13")
    expect(form.locator(".image-card.is-chosen")).to_have_count(1)
