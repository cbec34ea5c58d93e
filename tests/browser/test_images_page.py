"""Images in a real browser: the administrators' page without scripts, and the launch form's defaults for an image."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Locator, Page, expect

from hubprocess import HubProcess, until
from steps import Person, about_image, choose_image, forecast, images, more, refused, scrolls_sideways
from watching import Faults

pytestmark = pytest.mark.timeout(600)

NARROW = {"width": 390, "height": 844}
ADMIN = "test-admin-password-0123456789-abcdef"
MINI = Path(__file__).parents[1] / "hub" / "miniserver.py"
CATALOGUE = """
[[image]]
slug = "python"
name = "Python 3.11"
framework = "python"
version = "3.11"
python = "3"
reference = "lab/python:1"
description = "Plain Python."
default = true

[[image]]
slug = "torch"
name = "PyTorch 1.9"
framework = "pytorch"
version = "1.9"
python = "3"
environment = "PREFIX"
reference = "registry.example:5000/lab/a-long-name/of-an-image/pytorch:1.9@sha256:DIGEST"
description = "PyTorch with CUDA."
deprecated = "Removed in May."
minimum = { fgpu = "0.4" }
recommended = { fgpu = "0.7", cpu = "0.5", memory_mib = 768 }

[[image]]
slug = "flow"
name = "TensorFlow 1.15"
framework = "tensorflow"
version = "1.15"
python = "3.6"
reference = "lab/tensorflow:1"
""".replace("DIGEST", "0123456789abcdef" * 4).replace("PREFIX", sys.prefix)


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubProcess]:
    folder = tmp_path_factory.mktemp("imagespage")
    path = folder / "catalogue.toml"
    path.write_text(CATALOGUE)
    after = f"c.Spawner.cmd = ['python', {str(MINI)!r}]\n"
    found = HubProcess(folder / "hub", after=after, catalogue=str(path))
    try:
        yield found.start()
    finally:
        found.close()


def row(page: Page, slug: str) -> Locator:
    return page.locator(f"#image-{slug}")


def change(page: Page, slug: str) -> Locator:
    """Open the menu of an image, and return it."""
    menu = row(page, slug).locator("details.row-menu")
    if menu.get_attribute("open") is None:
        menu.locator("> summary").click()
    return menu


def opened(person: Person) -> Page:
    """Go from the sessions to the images, once the service answers."""
    page = person.page

    def there() -> bool:
        page.goto(f"{person.url}/services/fgpu/")
        return page.get_by_role("link", name="Images", exact=True).count() == 1

    until(there, what="the service answers")
    page.get_by_role("link", name="Images", exact=True).click()
    return page


@pytest.mark.parametrize(
    "look", [{}, {"viewport": NARROW, "color_scheme": "dark"}], ids=["wide", "narrow and dark"]
)
def test_image_edit_works_without_scripts(
    hub: HubProcess, log_in: Callable[..., Person], look: dict[str, object]
) -> None:
    page = opened(log_in(hub.url, "admin", ADMIN, java_script_enabled=False, **look))
    torch = row(page, "torch")
    expect(torch).to_contain_text("deprecated")
    expect(torch).to_contain_text("from the file")
    expect(torch.locator(".where .badge")).to_have_text("here")
    # Its sessions would be plain Python: no user is offered it.
    flow = row(page, "flow").locator(".where")
    expect(flow).to_contain_text("can't start")
    expect(flow).to_contain_text("which has Python 3.")
    expect(flow).to_contain_text("not 3.6, and no tensorflow.")
    expect(flow).to_contain_text("Users can't choose it.")
    expect(flow.get_by_role("link", name="Set its environment: TensorFlow 1.15")).to_be_visible()
    assert not scrolls_sideways(page)
    # One menu a row.
    assert page.locator("table.images td.do").get_by_role("button").count() == 0
    change(page, "torch").get_by_role("button", name="Hide").click()
    expect(torch.locator(".badge").first).to_have_text("hidden")
    expect(torch).to_contain_text("hidden: yes (in the file: no)")
    change(page, "torch").get_by_role("button", name="Move up").click()
    expect(page.locator("table.images tbody tr").first).to_have_id("image-torch")
    change(page, "torch").get_by_role("link", name="Edit").click()
    # A click does not wait for the page that it leads to, nor for its style sheet.
    expect(page.get_by_role("button", name="Save")).to_be_visible()
    page.wait_for_load_state()
    assert not scrolls_sideways(page)
    page.get_by_label("Name", exact=True).fill("Torch")
    page.get_by_label("Hidden").uncheck()
    page.get_by_role("button", name="Save").click()
    expect(torch.locator(".badge").first).to_have_text("enabled")
    expect(torch).to_contain_text("name: Torch (in the file: PyTorch 1.9)")
    change(page, "torch").get_by_role("button", name="Back to the file").click()
    expect(torch).to_contain_text("PyTorch 1.9")
    expect(page.locator("table.images tbody tr").first).to_have_id("image-python")


def test_image_is_copied_checked_written_to_the_file_and_removed(
    hub: HubProcess, log_in: Callable[..., Person], faults: Faults
) -> None:
    page = opened(log_in(hub.url, "admin", ADMIN))
    file = Path(hub.settings["catalogue"])
    change(page, "python").get_by_role("link", name="Copy").click()
    page.get_by_role("textbox", name="Slug").fill("statistics")
    page.get_by_label("Name", exact=True).fill("Statistics")
    # Checked while it is typed, by the same rules as the file.
    page.get_by_label("Image reference").fill("lab/a b; rm -rf /")
    expect(page.locator("#refused")).to_contain_text("write a Docker image reference")
    expect(page.get_by_label("Image reference")).to_have_attribute("aria-invalid", "true")
    page.get_by_label("Image reference").fill("lab/statistics:1")
    expect(page.locator("#refused")).to_be_hidden()
    page.get_by_role("button", name="Add").click()
    expect(row(page, "statistics")).to_contain_text("not in the file")
    before = file.read_text()
    faults.allow(r".*admin/images.*400")
    # What cannot be written is said, and the change stays.
    blocked = file.with_name(f".{file.name}.new")
    blocked.mkdir()
    page.get_by_role("button", name="Write to the file").click()
    expect(page.get_by_role("alert")).to_contain_text(
        "catalogue.toml cannot be written (Is a directory); it is as it was"
    )
    blocked.rmdir()
    assert file.read_text() == before
    page.get_by_role("button", name="Write to the file").click()
    expect(row(page, "statistics")).to_contain_text("from the file")
    assert file.read_text().startswith(before.rstrip())
    assert 'slug = "statistics"' in file.read_text()
    menu = change(page, "statistics")
    menu.get_by_label("Remove: Statistics").click()
    menu.get_by_role("button", name="Remove now: Statistics").click()
    expect(row(page, "statistics")).to_have_count(0)
    assert file.read_text().strip() == before.strip()


def test_form_preselects_recommended_amounts_and_keeps_input(
    hub: HubProcess, log_in: Callable[..., Person]
) -> None:
    page = log_in(hub.url, "ina", "test-password").page

    def offered() -> bool:
        # The Hub follows within seconds to what another test did.
        page.goto(f"{hub.url}/hub/spawn")
        return images(page) == ["Python 3.11", "PyTorch 1.9"]

    until(offered, what="the form has both images")
    more(page).fill("#fgpu-memory", "0.625")
    choose_image(page, "torch")
    expect(page.locator("#fgpu-fgpu")).to_have_value("0.7")
    expect(page.locator("#fgpu-cpu")).to_have_value("0.5")
    expect(page.locator("#fgpu-memory")).to_have_value("0.625")
    hint = about_image(page, "torch")
    expect(hint).to_contain_text("At least 0.4 fGPU.")
    expect(hint).to_contain_text("Deprecated: Removed in May.")
    expect(page.locator(".image-card.is-chosen svg")).to_be_visible()
    expect(page.locator(".image-card.is-chosen")).to_have_accessible_name("PyTorch")
    # What the image needs is marked beside the slider, and taken with a click.
    page.get_by_role("button", name="least 0.4 fGPU").click()
    expect(page.locator("#fgpu-fgpu")).to_have_value("0.4")
    page.fill("#fgpu-fgpu", "0.3")
    expect(refused(page, "fgpu")).to_have_text("0.3 is below the least of 0.4 that PyTorch 1.9 needs")
    expect(forecast(page)).to_have_text("To start, change: GPU (fGPU).")
    page.fill("#fgpu-fgpu", "0.4")
    expect(forecast(page)).to_contain_text("Starts now.")
    # An image by its name counts in place of the list's.
    page.get_by_text("Another image, by its name").click()
    page.fill("#fgpu-image-name", "eve/secret:1")
    expect(refused(page, "image")).to_have_text("there is no 'eve/secret:1'; choose one of python, torch")
