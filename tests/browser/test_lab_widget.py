"""`GPUWidget` and `%fgpu` in notebooks: live, while the kernel counts as idle, and a table in the file."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from datetime import datetime

import pytest
from axe import check_page
from playwright.sync_api import Page, expect

from hubprocess import HubProcess, until
from labsteps import BUILD, TAKE, new_notebook, open_lab, run_last_cell, save, spawn
from steps import START_MS, Person

pytestmark = pytest.mark.timeout(600)

LIVE_MS = 40_000


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubProcess]:
    found = HubProcess(tmp_path_factory.mktemp("hub"), before=BUILD)
    try:
        yield found.start()
    finally:
        found.close()


def last_activity(hub: HubProcess, page: Page, user: str) -> datetime:
    """Return when a kernel of the user's only server last did something."""
    kernels = page.evaluate(
        """async (url) => {
          const xsrf = /(?:^|; )_xsrf=([^;]*)/.exec(document.cookie)[1];
          const headers = {"X-XSRFToken": decodeURIComponent(xsrf)};
          return (await fetch(url, {headers})).json();
        }""",
        f"{hub.url}/user/{user}/api/kernels?no_track_activity=1",
    )
    return max(datetime.fromisoformat(kernel["last_activity"]) for kernel in kernels)


def test_widget_updates_without_the_kernel(hub: HubProcess, log_in: Callable[..., Person]) -> None:
    eve = log_in(hub.url, "eve", "test-password")
    spawn(hub, "eve")
    hub.reach({"eve/": "RUNNING"}, within_s=START_MS / 1000)
    page = open_lab(hub, eve)
    new_notebook(page)
    run_last_cell(page, TAKE + "held = take(600)")
    by_lab = run_last_cell(page, "from jupyterlab_fgpu import GPUWidget\nGPUWidget()")
    share = by_lab.get_by_role("region", name="GPU share")
    expect(share).to_contain_text("600 / 2048 MiB", timeout=LIVE_MS)
    expect(share.get_by_role("row", name="Untitled.ipynb 600 MiB")).to_be_visible(timeout=LIVE_MS)
    expect(share).to_contain_text("No request is waiting.")
    check_page(page, within=".jp-fgpu-Share")

    by_any = run_last_cell(page, "GPUWidget(backend='anywidget')")
    widget = by_any.get_by_role("region", name="GPU share")
    expect(widget.get_by_role("row", name="GPU memory 600 / 2048 MiB")).to_be_visible(timeout=LIVE_MS)
    expect(widget.get_by_role("row", name="Untitled.ipynb 600 MiB")).to_be_visible()
    check_page(page, within=".jp-fgpu-Widget")

    by_ipywidgets = run_last_cell(page, "GPUWidget(backend='ipywidgets')")
    expect(by_ipywidgets.get_by_role("row", name="GPU memory 600 / 2048 MiB")).to_be_visible(timeout=LIVE_MS)

    told = run_last_cell(page, "%load_ext jupyterlab_fgpu\n%fgpu")
    expect(told.locator(".jp-OutputArea-output")).to_contain_text("600 / 2048 MiB", timeout=LIVE_MS)
    expect(told.locator(".jp-OutputArea-output")).to_contain_text("(this kernel)")

    # They go on asking, and the kernel does nothing.
    expect(page.locator("#jp-bottom-panel")).to_contain_text("| Idle", timeout=START_MS)
    seen = [last_activity(hub, page, "eve")]

    def stands_still() -> bool:
        page.wait_for_timeout(2000)
        seen.append(last_activity(hub, page, "eve"))
        return seen[-1] == seen[-2]

    until(stands_still, what="the kernel has said all that it has to say")
    before = seen[-1]
    asked: list[str] = []
    page.on("request", lambda r: asked.append(r.url) if "fgpu/api/status" in r.url else None)
    until(
        lambda: (
            page.wait_for_timeout(200) is None
            and any("no_track_activity=1" in url for url in asked)
            and any("no_track_activity=1" not in url for url in asked)
        ),
        within_s=60,
        what="the widget and the panel's model have each asked again",
    )
    assert last_activity(hub, page, "eve") == before

    # The file shows a table where nothing is live.
    save(page)
    (path,) = (hub.data / "home" / "eve").glob("*.ipynb")
    cells = json.loads(path.read_text())["cells"]
    for number in (1, 2, 3):
        (output,) = cells[number]["outputs"]
        table = "".join(output["data"]["text/html"])
        assert "600 / 2048 MiB" in table
        assert "<script" not in table
        assert "600 / 2048 MiB" in "".join(output["data"]["text/plain"])
