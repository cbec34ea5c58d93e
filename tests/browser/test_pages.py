"""The launch form, the waiting page, JupyterLab and links in a real browser, against one `make run` as it stands."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from playwright.sync_api import expect

from hubprocess import until
from makerun import MakeRun, running
from steps import START_MS, Person, Sessions, about_image, expect_lab, forecast, more, run_in_notebook, start

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MakeRun]:
    """One `make run` for this module: one simulated GPU of 2 fGPU. Each test ends what it starts."""
    with running(tmp_path_factory.mktemp("pages")) as found:
        yield found


def environment_of_server(run: MakeRun, user: str, server: str) -> dict[str, str]:
    """Return the environment of this session's server process."""
    for process in psutil.process_iter():
        try:
            env = process.environ()
        except (psutil.Error, OSError):
            continue
        if (
            env.get("FGPU_INSTALLATION") == run.installation
            and env.get("JUPYTERHUB_USER") == user
            and env.get("JUPYTERHUB_SERVER_NAME") == server
        ):
            return env
    raise AssertionError(f"no process of {user}/{server}")


def test_link_fills_in_the_form_and_the_button_starts(run: MakeRun, log_in: Callable[..., Person]) -> None:
    ben = log_in(run.url, "ben", run.password())
    ben.page.goto(ben.link(fgpu="0.5", cpu="0.5", memory_mib="512"))
    expect(ben.page.locator("#fgpu-by-link")).to_contain_text("Nothing has started yet")
    expect(ben.page.locator(".spawn-error-msg")).to_have_count(0)
    start(ben.page)
    expect_lab(ben.page, "ben")
    env = environment_of_server(run, "ben", "")
    assert (env["FGPU_AMOUNT"], env["FGPU_MEMORY_MIB"], env["FGPU_COMPUTE_PERCENT"]) == ("0.5", "2048", "25")
    # Its kernels have the magic, and its terminals the session's own commands, without another step.
    run_in_notebook(ben.page, "%fgpu", "no request is waiting")
    found = Path(env["HOME"]) / "found"
    ben.page.get_by_role("button", name="New Launcher (").click()
    ben.page.locator(".jp-LauncherCard[title='Start a new terminal session']").click()
    screen = ben.page.locator(".jp-Terminal .xterm-screen")
    expect(screen).to_be_visible(timeout=START_MS)
    screen.click()
    ben.page.keyboard.type(f"command -v nvidia-smi fgpu-smi fgpu-verify > {found}\n")
    until(
        lambda: found.is_file() and len(found.read_text().split()) == 3,
        within_s=START_MS / 1000,
        what="it finds all three",
    )


def test_form_works_without_scripts(run: MakeRun, log_in: Callable[..., Person]) -> None:
    dan = log_in(run.url, "dan", run.password(), java_script_enabled=False)
    page = dan.page
    expect(page.get_by_role("note")).to_contain_text("Simulated GPUs")
    expect(forecast(page)).to_be_hidden()
    expect(page.get_by_role("radio", name="Python", exact=True)).to_be_checked()
    expect(about_image(page, "python")).to_contain_text("Plain Python with JupyterLab")
    page.fill("#fgpu-fgpu", "0.3")
    more(page).fill("#fgpu-cpu", "0.2")
    more(page).fill("#fgpu-memory", "0.5")
    start(page)
    page.wait_for_url(re.compile("/hub/spawn-pending/dan|/user/dan/"))
    # Nothing is shown that would do nothing, or say nothing.
    expect(page.locator("#stop-server-btn")).to_be_hidden()
    expect(page.locator("#progress-message")).to_be_hidden()

    def runs() -> bool:
        page.goto(f"{run.url}/services/fgpu/")
        # Nothing comes by itself on a page without scripts.
        return Sessions(page).state("Python 1").all_inner_texts() == ["RUNNING"]

    until(runs, within_s=START_MS / 1000, what="the session runs")
    expect(Sessions(page).row("Python 1")).to_contain_text("0.3 fGPU")
