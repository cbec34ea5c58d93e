"""A session that becomes an image of its owner's own, in a real browser and on a real engine."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from dockerhub import BASE, DockerHub, Engine, entry
from playwright.sync_api import Page, expect

from fgpuspawner.engines.docker.daemon import connect_here
from hubprocess import PATIENT
from steps import (
    START_MS,
    Person,
    Sessions,
    choose_image,
    expect_lab,
    more,
    run_in_notebook,
    scrolls_sideways,
    start,
    start_by,
)
from watching import Faults

pytestmark = pytest.mark.timeout(600)

LITTLE = {"fgpu": "0.5", "cpu": "0.5", "memory_mib": 1024}
INSTALL = (
    "import pathlib, sysconfig\n"
    "pathlib.Path(sysconfig.get_path('purelib'), 'of_mine.py').write_text('answer = 42')\n"
    "pathlib.Path('at-home.txt').write_text('stays at home')\n"
    "print('installed')"
)
USE = "import of_mine, pathlib; print('it is', of_mine.answer, sorted(p.name for p in pathlib.Path().glob('at-*')))"


@pytest.fixture(scope="module")
def engine(docker_engine: None) -> Iterator[Engine]:
    found = Engine(connect_here({"timeout": 60}))
    yield found
    found.close()


@pytest.fixture
def hub(engine: Engine, tmp_path: Path) -> Iterator[DockerHub]:
    path = tmp_path / "catalogue.toml"
    path.write_text(entry("python", BASE))
    volumes = f"c.FGPUSpawner.volumes = {{'{engine.prefix}-{{username}}': '/home/jovyan'}}\n"
    settings = {"catalogue": str(path), "owners_may_commit": True}
    found = DockerHub(tmp_path / "hub", engine, before=PATIENT, after=volumes, **settings)
    try:
        yield found.start()
    finally:
        installation = found.installation
        found.close()
        for image in engine.client.images():
            for name in image.get("RepoTags") or ():
                if name.startswith(f"fgpu-{installation}/"):
                    engine.client.remove_image(name, force=True)


def test_saved_image_has_the_installed_packages(
    hub: DockerHub, engine: Engine, log_in: Callable[..., Person], faults: Faults
) -> None:
    faults.allow(r"(status POST|console) \S+/hub/spawn .*400")
    amy = log_in(hub.url, f"amy{secrets.token_hex(3)}", "test-password")
    page, full_name = amy.page, f"{amy.name}/torch-more:1"
    start_by(page, amy.link(image="python", **LITTLE))
    expect_lab(page, amy.name)
    run_in_notebook(page, INSTALL, "installed")

    # Saved from the sessions page; what is saved and what is not is said first, and the full name afterwards.
    page.goto(f"{hub.url}/services/fgpu/")
    Sessions(page).row("Python 1").locator("summary").click()
    page.get_by_role("link", name="Save as image Python 1").click()
    expect(page.get_by_role("main")).to_contain_text("The home folder is not saved in it")
    page.get_by_label("Name").fill("torch-more")
    page.get_by_role("button", name="Save").click()
    row = page.get_by_role("table").get_by_role("row").filter(has_text=full_name)
    expect(row).to_contain_text("MiB", timeout=START_MS)
    expect(row.locator(".badge")).to_have_count(0)
    page.set_viewport_size({"width": 390, "height": 844})
    assert not scrolls_sideways(page)
    page.set_viewport_size({"width": 1280, "height": 800})

    # The next session has what was installed, and the home of before.
    page.goto(f"{hub.url}/services/fgpu/")
    Sessions(page).end("Python 1")
    expect(Sessions(page).none).to_be_visible(timeout=START_MS)
    page.goto(amy.link())
    choose_image(page, full_name)
    ask_for_little(page)
    start(page)
    page.wait_for_url(re.compile(f"/user/{amy.name}/lab"), timeout=START_MS, wait_until="commit")
    # JupyterLab would open what was open: that is in the home folder, too.
    page.goto(f"{hub.url}/user/{amy.name}/lab?reset")
    expect_lab(page, amy.name)
    run_in_notebook(page, USE, "it is 42 ['at-home.txt']")

    # Other users do not see it; typing its name gives the same answer as an unknown image.
    bob = log_in(hub.url, f"bob{secrets.token_hex(3)}", "test-password")
    page = bob.page
    page.goto(f"{hub.url}/services/fgpu/private-images")
    expect(page.get_by_role("main")).to_contain_text("No private images")
    refusals = []
    for name in (full_name, full_name.replace("torch-more", "torch-less")):
        page.goto(bob.link())
        assert full_name not in page.content()
        page.get_by_text("Another image, by its name").click()
        page.get_by_label("Name of another image").fill(name)
        ask_for_little(page)
        start(page)
        expect(page.locator("#fgpu-image-refused")).to_be_visible()
        refusals.append(page.locator("#fgpu-image-refused").inner_text().replace(name, "NAME"))
    assert refusals[0] == refusals[1]
    for name in (amy.name, bob.name):
        hub.end_all_but(set())
        engine.remove_volume(f"{engine.prefix}-{name}")


def ask_for_little(page: Page) -> None:
    """Fill in the form's amounts."""
    for field, value in (("fgpu", "0.5"), ("cpu", "0.5"), ("memory", "1")):
        more(page).fill(f"#fgpu-{field}", value)
