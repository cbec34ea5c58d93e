"""Images on a real engine, as their user meets them: one after the other, and two at once."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterator

import pytest
from dockerhub import BASE, DockerHub, Engine, entry
from localimages import SLUGS, TwoImages, missing_pythons, two_images
from playwright.sync_api import Page, expect

from fgpuspawner.engines.docker.daemon import connect_here
from hubprocess import until
from steps import START_MS, Person, Sessions, choose_image, expect_lab, more, run_in_notebook, start, start_by

pytestmark = [pytest.mark.timeout(600), pytest.mark.xdist_group("images")]

LITTLE = {"fgpu": "0.5", "cpu": "0.5", "memory_mib": 1024}
SAY = "import sys, tabulate; print('it is', tabulate.__version__, 'on', '%d.%d' % sys.version_info[:2])"


@pytest.fixture(scope="module")
def engine(docker_engine: None) -> Iterator[Engine]:
    found = Engine(connect_here({"timeout": 60}))
    yield found
    found.close()


@pytest.fixture(scope="module")
def two(docker_engine: None) -> TwoImages:
    """Two versions of one library on two Pythons."""
    if reason := missing_pythons():
        pytest.skip(reason)
    return two_images(BASE)


@pytest.fixture(scope="module")
def hub(engine: Engine, two: TwoImages, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DockerHub]:
    path = tmp_path_factory.mktemp("catalogue") / "catalogue.toml"
    entries = [entry(slug, reference) for slug, reference in two.references.items()]
    path.write_text("\n".join(entries).replace("default = false", "default = true", 1))
    found = DockerHub(
        tmp_path_factory.mktemp("hub"),
        engine,
        catalogue=str(path),
        after="c.JupyterHub.allow_named_servers = True\n",
    )
    try:
        yield found.start()
    finally:
        found.close()


@pytest.mark.slow
def test_image_after_image_each_with_its_own_python_and_version(
    hub: DockerHub, two: TwoImages, log_in: Callable[..., Person]
) -> None:
    ann = log_in(hub.url, f"ann{secrets.token_hex(3)}", "test-password")
    page = ann.page
    for slug in ("old", "new"):
        page.goto(ann.link())
        choose_image(page, slug)
        for field, value in (("fgpu", "0.5"), ("cpu", "0.5"), ("memory", "1")):
            more(page).fill(f"#fgpu-{field}", value)
        start(page)
        expect_lab(page, ann.name)
        expect_versions(page, hub, two, slug)
        page.goto(f"{hub.url}/services/fgpu/")
        expect(Sessions(page).row("default server")).to_contain_text(slug)
        Sessions(page).end("default server")
        expect(Sessions(page).none).to_be_visible(timeout=START_MS)


@pytest.mark.slow
def test_two_images_at_once_in_tabs_of_their_own_each_with_its_own_python_and_version(
    hub: DockerHub, two: TwoImages, log_in: Callable[..., Person]
) -> None:
    ann = log_in(hub.url, f"ann{secrets.token_hex(3)}", "test-password")
    page = ann.page
    tabs = {slug: ann.new_page() for slug in SLUGS}
    for slug, tab in tabs.items():
        start_by(tab, ann.link(slug, image=slug, **LITTLE))
        expect_lab(tab, ann.name, slug)
    page.goto(f"{hub.url}/services/fgpu/")
    for slug in SLUGS:
        expect(Sessions(page).state(slug)).to_have_text("RUNNING", timeout=START_MS)
    for slug, tab in tabs.items():
        expect_versions(tab, hub, two, slug, server=slug)


def expect_versions(page: Page, hub: DockerHub, two: TwoImages, slug: str, *, server: str = "") -> None:
    """See which version a new notebook prints, and a new terminal."""
    version = two.versions[slug]
    wanted = f"it is {version} on {two.pythons[slug]}"
    # The kernel has no token, and tells the queue all the same.
    told = run_in_notebook(page, f"{SAY}\n%fgpu", wanted, kernel=f"Tabulate {version}")
    expect(told).to_contain_text("no request is waiting", timeout=START_MS)

    # What a terminal shows is drawn, so it writes it down.
    name = f"said-{secrets.token_hex(3)}.txt"
    page.get_by_role("button", name="New Launcher (").click()
    page.locator(".jp-LauncherCard[title='Start a new terminal session']").click()
    screen = page.locator(".jp-Terminal .xterm-screen")
    expect(screen).to_be_visible(timeout=START_MS)
    screen.click()
    page.keyboard.type(f'python -c "{SAY}" > {name}\n')
    base = re.sub(r"/lab.*", "", page.url)

    def said() -> str:
        answer = page.request.get(f"{base}/files/{name}")
        return answer.text().strip() if answer.ok else ""

    assert until(said, within_s=START_MS / 1000, what="the terminal has written it") == wanted
