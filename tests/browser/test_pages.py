"""The launch form, the waiting page, JupyterLab and links in a real browser, against one `make run` as it stands."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from playwright.sync_api import Locator, Page, expect

from hubprocess import until
from makerun import MakeRun, running
from steps import (
    START_MS,
    Person,
    Sessions,
    about_image,
    expect_lab,
    fact,
    forecast,
    more,
    place,
    refused,
    run_in_notebook,
    scrolls_sideways,
    start,
    start_by,
)
from watching import Faults

pytestmark = pytest.mark.timeout(600)

LITTLE = {"cpu": "0.2", "memory_mib": 512}
NARROW = {"width": 390, "height": 844}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MakeRun]:
    """One `make run` for this module: one simulated GPU of 2 fGPU. Each test ends what it starts."""
    with running(tmp_path_factory.mktemp("pages")) as found:
        yield found


def environment_of_server(run: MakeRun, user: str, server: str) -> dict[str, str]:
    """Return what this session's server process was given."""
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


def test_a_link_fills_the_form_in_and_its_one_button_starts_the_session(
    run: MakeRun, log_in: Callable[..., Person]
) -> None:
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


def test_a_bad_link_shows_why_at_the_fields(run: MakeRun, log_in: Callable[..., Person]) -> None:
    cleo = log_in(run.url, "cleo", run.password(), java_script_enabled=False)
    cleo.page.goto(cleo.link(fgpu="7", cpu="0.5"))
    expect(refused(cleo.page, "fgpu")).to_contain_text("7")
    # The form is there, as the link filled it in.
    expect(cleo.page.locator("#fgpu-fgpu")).to_have_value("7")
    expect(cleo.page.locator("#fgpu-cpu")).to_have_value("0.5")
    expect(cleo.page.get_by_role("button", name="Start")).to_be_visible()


def test_the_form_works_without_javascript(run: MakeRun, log_in: Callable[..., Person]) -> None:
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
        return Sessions(page).state("default server").all_inner_texts() == ["RUNNING"]

    until(runs, within_s=START_MS / 1000, what="the session runs")
    expect(Sessions(page).row("default server")).to_contain_text("0.3 fGPU")


def test_a_refused_form_comes_back_with_the_words_and_what_was_typed(
    run: MakeRun, log_in: Callable[..., Person], faults: Faults
) -> None:
    faults.allow(r"(status POST|console) \S+/hub/spawn\?_xsrf=\S* .*400")
    eve = log_in(run.url, "eve", run.password(), java_script_enabled=False)
    page = eve.page
    typed = "<b id='planted'>0.5</b>"
    refusal = page.locator(".spawn-error-msg")

    def is_refused() -> bool:
        page.goto(f"{run.url}/hub/spawn")
        if page.locator("#fgpu-waiting").count():
            return False
        # The browser itself would hold back what is no number, or too much: a field of text does not.
        page.locator("#spawn_form").evaluate("form => { form.noValidate = true; }")
        page.locator("#fgpu-fgpu").evaluate("field => { field.type = 'text'; }")
        page.fill("#fgpu-fgpu", typed)
        more(page).fill("#fgpu-memory", "0.625")
        start(page)
        # Where the Hub is slow, a page that waits is shown first.
        expect(refusal.or_(page.locator("#fgpu-waiting"))).to_be_visible()
        return refusal.count() == 1

    until(is_refused, what="the form with the refusal")
    expect(refusal).to_contain_text("GPU (fGPU):")
    expect(page.locator("#planted")).to_have_count(0)
    assert page.locator("#fgpu-fgpu").get_attribute("value") == typed
    expect(page.locator("#fgpu-memory")).to_have_value("0.625")
    # What was refused can be put right, and asked for again.
    expect(page.get_by_role("button", name="Start")).to_be_visible()


def test_the_waiting_page_says_where_one_stands_cancels_that_server_alone_and_ends_in_jupyterlab(
    run: MakeRun, log_in: Callable[..., Person]
) -> None:
    fay = log_in(run.url, "fay", run.password())
    holder = fay.page
    start_by(holder, fay.link(fgpu="2", **LITTLE))
    expect_lab(holder, "fay")

    waiting = fay.new_page()
    start_by(waiting, fay.link("second", fgpu="1", **LITTLE))
    expect(waiting.get_by_role("heading", name="Waiting in the queue")).to_be_visible()
    expect(fact(waiting, "Amount")).to_have_text("1 fGPU")
    expect(place(waiting)).to_have_text("1st in the queue")
    expect(waiting.get_by_role("status").first).to_have_text("All GPUs are busy.")
    expect(fact(waiting, "Expected start")).to_have_text(
        re.compile("^(no estimate|about |at the latest |probably between )")
    )
    expect(waiting.get_by_text("simulated GPU")).to_be_visible()

    # Cancel ends this request, and not the default server; the page goes on to the sessions.
    waiting.get_by_role("button", name="Cancel").click()
    waiting.wait_for_url("**/services/fgpu/")
    sessions = Sessions(waiting)
    expect(sessions.row("second")).to_have_count(0)
    expect(sessions.state("default server")).to_have_text("RUNNING")
    expect(waiting.locator(".past")).to_contain_text("CANCELLED")

    # A waiting page whose turn comes ends in JupyterLab without a click.
    start_by(waiting, fay.link("third", fgpu="1", **LITTLE))
    expect(place(waiting)).to_have_text("1st in the queue")
    holder.goto(f"{run.url}/services/fgpu/")
    Sessions(holder).end("default server")
    expect_lab(waiting, "fay", "third")


def test_jupyterlab_shows_the_slice_and_the_queue_and_keeps_the_token_to_itself(
    run: MakeRun, log_in: Callable[..., Person]
) -> None:
    gus = log_in(run.url, "gus", run.password())
    page, others = gus.page, gus.new_page()
    start_by(page, gus.link(fgpu="1", **LITTLE))
    expect_lab(page, "gus")
    start_by(others, gus.link("second", fgpu="2", **LITTLE))
    expect(place(others)).to_have_text("1st in the queue")
    others.close()

    # The status bar, and from there the panel.
    item = page.locator(".jp-fgpu-StatusItem")
    expect(item).to_have_text("1 fGPU · 0 / 4096 MiB · simulated")
    item.click()
    panel = page.get_by_role("region", name="GPU share")
    this = panel.get_by_role("region", name="This session")
    for words in ("1 fGPU", "simulated", "4096 MiB", "50 %", "GPU-simulated-"):
        expect(this).to_contain_text(words)
    other = panel.get_by_role("region", name="Your other sessions").get_by_role("listitem")
    panel.get_by_role("button", name="Refresh").click()
    expect(other).to_have_count(1, timeout=60_000)
    expect(other).to_contain_text("second")
    expect(other).to_contain_text("Waiting")
    expect(other).to_contain_text("1st in the queue")
    expect(panel).to_contain_text("1 request is waiting.")

    # The notebook sees its slice.
    page.locator(".jp-LauncherCard[data-category=Notebook]").first.click()
    expect(page.locator("#jp-bottom-panel")).to_contain_text("| Idle", timeout=START_MS)
    # Nobody is asked about news.
    expect(page.get_by_role("button", name="No", exact=True)).to_have_count(0)
    page.locator(".jp-Notebook .cm-content").click()
    page.keyboard.insert_text('!env | grep -E "FGPU_(AMOUNT|MEMORY|COMPUTE|SIM)" | sort')
    page.keyboard.press("Shift+Enter")
    output = page.locator(".jp-OutputArea-output")
    for line in ("FGPU_AMOUNT=1", "FGPU_COMPUTE_PERCENT=50", "FGPU_MEMORY_MIB=4096", "FGPU_SIMULATED=1"):
        expect(output).to_contain_text(line, timeout=60_000)
    expect(page.locator("#jp-bottom-panel")).to_contain_text("| Idle")

    # The server's token for the Hub is not in the browser.
    env = environment_of_server(run, "gus", "")
    status = page.request.get(f"{run.url}/user/gus/fgpu/api/status")
    assert status.status == 200
    assert status.json()["session"]["fgpu"] == "1"
    stored = page.evaluate("JSON.stringify([{...localStorage}, {...sessionStorage}, document.cookie])")
    for name in ("JUPYTERHUB_API_TOKEN", "JPY_API_TOKEN"):
        assert name in env
        for where in (page.content(), status.text(), stored, json.dumps(status.headers)):
            assert env[name] not in where

    # The panel's own cancel, with its question.
    other.get_by_role("button", name="Cancel the request second").click()
    page.get_by_role("dialog").get_by_role("button", name="Cancel the Request").click()
    expect(panel.get_by_role("region", name="Your other sessions")).to_contain_text("None.", timeout=60_000)
    expect(panel).to_contain_text("Nobody is waiting.")


def test_no_page_scrolls_sideways_on_a_phone_and_all_follow_the_dark_scheme(
    run: MakeRun, log_in: Callable[..., Person], tmp_path: Path
) -> None:
    hal = log_in(run.url, "hal-of-the-long-name", run.password(), viewport=NARROW)
    page = hal.page
    start_by(page, hal.link(fgpu="2", **LITTLE))
    start_by(page, hal.link("a-server-with-a-long-name", fgpu="2", **LITTLE))
    expect(place(page)).to_have_text("1st in the queue")
    waiting = page.url
    pages = {
        "form": (hal.link("another"), forecast(page)),
        "waiting": (waiting, place(page)),
        "sessions": (f"{run.url}/services/fgpu/", Sessions(page).row("a-server-with-a-long-name")),
    }
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        for name, (url, shown) in pages.items():
            page.goto(url)
            expect(shown).to_be_visible()
            page.screenshot(path=tmp_path / f"{name}-{scheme}.png", full_page=True)
            assert not scrolls_sideways(page), f"{name} scrolls sideways"
            assert is_dark(page) == (scheme == "dark"), f"{name} is not {scheme}"
            if name == "waiting":
                assert contrast(page, page.get_by_role("button", name="Cancel")) >= 4.5


LIGHT_OF = """
(element, key) => getComputedStyle(element)[key].match(/[0-9]+/g).slice(0, 3).map((value) => {
  const part = value / 255;
  return part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
}).reduce((sum, part, n) => sum + part * [0.2126, 0.7152, 0.0722][n], 0)
"""
"""The relative luminance of a colour, as WCAG 2 defines it."""


def light_of(element: Locator, key: str) -> float:
    """Return how light this colour of an element is, from 0 to 1."""
    return float(element.evaluate(f"element => ({LIGHT_OF})(element, '{key}')"))


def is_dark(page: Page) -> bool:
    """Return whether the page's ground is darker than its letters."""
    body = page.locator("body")
    return light_of(body, "backgroundColor") < light_of(body, "color")


def contrast(page: Page, element: Locator) -> float:
    """Return the contrast of an element's letters with the page's ground, from 1 to 21."""
    levels = sorted((light_of(element, "color"), light_of(page.locator("body"), "backgroundColor")))
    return (levels[1] + 0.05) / (levels[0] + 0.05)
