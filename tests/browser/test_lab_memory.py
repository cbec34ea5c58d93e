"""The explanation under a cell that ran out of GPU memory, of a kernel that the driver really has refused."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator

import pytest
from axe import check_page
from pastruns import Run, write_runs
from playwright.sync_api import expect

from fgpuspawner.isolation import native
from hubprocess import HubProcess
from labsteps import BUILD, TAKE, new_notebook, open_lab, open_panel, run_last_cell, save, spawn, status_item
from steps import START_MS, Person
from watching import Faults

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubProcess]:
    found = HubProcess(tmp_path_factory.mktemp("hub"), before=BUILD)
    try:
        yield found.start()
    finally:
        found.close()


def test_oom_cell_runs_after_resizing_in_place(
    hub: HubProcess, log_in: Callable[..., Person], faults: Faults
) -> None:
    # What is refused below.
    faults.allow(r"(status POST|console) \S+/fgpu/api/sessions/\d+/resize\S* .*\b(400|409)\b")
    if native.find() is None:
        pytest.skip(native.NOT_BUILT)
    eve = log_in(hub.url, "eve", "test-password")
    # To run out of memory is not said to be enough.
    now_s = int(time.time())
    write_runs(hub.data / "fgpu.sqlite", [Run("eve", "python", 500, now_s - n, 300) for n in (900, 800, 700)])
    spawn(hub, "eve")
    hub.reach({"eve/": "RUNNING"}, within_s=START_MS / 1000)
    page = open_lab(hub, eve)
    new_notebook(page)
    run_last_cell(page, TAKE + "held = take(1500)")
    panel = open_panel(page)
    advice = panel.get_by_text("would have been enough")
    expect(advice).to_be_visible()
    failing = run_last_cell(page, "more = take(1000)")
    notice = failing.get_by_role("alert", name="The GPU memory of this session ran out")
    expect(notice).to_be_visible()
    # At once, and not with the next look in ten seconds.
    expect(advice).to_have_count(0, timeout=5000)
    # 2500 MiB of the GPU's 8192, which are 2 fGPU: 0.6 would be 2432 MiB.
    expect(notice).to_contain_text("0.7 fGPU is possible now: 2816 MiB. Your kernel stays.")
    check_page(page, within=".jp-fgpu-OutOfMemory")
    notice.get_by_role("button", name="Grow to 0.7 fGPU now").click()
    expect(notice).to_contain_text("This session has 0.7 fGPU now, 2816 MiB. Run the cell again.")
    expect(status_item(page)).to_contain_text("0.7 fGPU")
    failing.locator(".cm-content").click()
    page.keyboard.press("Shift+Enter")
    expect(failing.locator(".jp-OutputArea-output").first).to_contain_text("took 1000", timeout=START_MS)

    # Less than it holds is refused, in words that name what would do; then it has what it had.
    amount, resize = panel.get_by_label("New amount in fGPU"), panel.get_by_role("button", name="Resize")
    expect(panel).to_contain_text("Possible now: 0.1 to 2. Your kernels run on.")
    for wrong, words in (
        (
            "0.3",
            "Not resized: The session uses 2.4 GiB of GPU memory: choose at least 0.7, or free memory first.",
        ),
        ("0.75", "Not resized: 0.75 isn't possible; choose 0.7 or 0.8 (in steps of 0.1)"),
        ("5", "Not resized: 5 is more than any machine has; choose at most 2"),
    ):
        amount.fill(wrong)
        resize.click()
        expect(panel).to_contain_text(words)
        expect(status_item(page)).to_contain_text("0.7 fGPU")
    check_page(page, within=".jp-fgpu-Panel")
    amount.fill("1")
    resize.click()
    expect(status_item(page)).to_contain_text("1 fGPU · 2500 / 4096 MiB")
    expect(amount).to_have_value("1")
    expect(panel.get_by_text("Not resized")).to_have_count(0)
    hub.stop("eve")
    hub.reach({})


def test_oom_cell_explains_what_would_help(hub: HubProcess, log_in: Callable[..., Person]) -> None:
    # What more it needs is not free on its GPU.
    spawn(hub, "hog", fgpu="1.5")
    hub.reach({"hog/": "RUNNING"}, within_s=START_MS / 1000)
    ann = log_in(hub.url, "ann", "test-password")
    spawn(hub, "ann")
    hub.reach({"hog/": "RUNNING", "ann/": "RUNNING"}, within_s=START_MS / 1000)
    page = open_lab(hub, ann)
    new_notebook(page)
    run_last_cell(page, TAKE + "held = take(1500)")
    failing = run_last_cell(page, "take(1000)")
    notice = failing.get_by_role("alert", name="The GPU memory of this session ran out")
    expect(notice).to_contain_text(
        "Its limit is 2048 MiB. It now holds 1500 MiB. The program asked for 1000 MiB more."
    )
    expect(notice.get_by_role("row", name="this notebook 1500 MiB")).to_be_visible()
    # 2500 MiB of the GPU's 8192, which are 2 fGPU: 0.6 would be 2432 MiB.
    expect(notice).to_contain_text("A session with 0.7 fGPU would have 2816 MiB. Once this one has ended: ")
    check_page(page, within=".jp-fgpu-OutOfMemory")

    # The form opens with that amount, and starts nothing.
    link = notice.get_by_role("link", name="Open the form with 0.7 fGPU")
    with page.context.expect_page() as opened:
        link.click()
    form = opened.value
    expect(form.locator("#fgpu-fgpu")).to_have_value("0.7")
    assert set(hub.sessions()) == {"hog/", "ann/"}
    form.close()

    # No file holds it, and a run that goes well clears it.
    save(page)
    (path,) = (hub.data / "home" / "ann").glob("*.ipynb")
    saved = path.read_text()
    assert "CUDA out of memory" in saved
    assert "this notebook" not in saved
    assert "memory of this session" not in json.dumps(json.loads(saved))
    run_last_cell(page, "give(held)")
    failing.locator(".cm-content").click()
    page.keyboard.press("Shift+Enter")
    expect(failing.locator(".jp-OutputArea-output").first).to_contain_text("took 1000", timeout=START_MS)
    expect(notice).to_have_count(0)
    hub.stop("hog")
    hub.stop("ann")
    hub.reach({})


def test_oom_help_is_dismissed_by_keyboard(hub: HubProcess, log_in: Callable[..., Person]) -> None:
    ben = log_in(hub.url, "ben", "test-password")
    spawn(hub, "ben")
    hub.reach({"ben/": "RUNNING"}, within_s=START_MS / 1000)
    page = open_lab(hub, ben)
    new_notebook(page)
    failing = run_last_cell(page, TAKE + "take(4000)")
    notice = failing.locator(".jp-fgpu-OutOfMemory")
    # The kernel holds no GPU memory yet, so no process is named.
    expect(notice).to_contain_text("The program asked for 4000 MiB more.")
    dismiss = notice.get_by_role("button", name="Dismiss")
    dismiss.focus()
    dismiss.press("Enter")
    expect(notice).to_have_count(0)
    other = run_last_cell(page, "raise RuntimeError('CUDA error: an illegal memory access')")
    expect(other.locator(".jp-OutputArea-output")).to_contain_text(re.compile("illegal memory access"))
    expect(page.locator(".jp-fgpu-OutOfMemory")).to_have_count(0)
