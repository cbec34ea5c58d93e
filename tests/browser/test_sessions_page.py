"""The sessions page with many sessions, in a real browser: chosen, sorted, kept up to date, and looked over."""

from __future__ import annotations

import csv
import io
import os
import re
import signal
import time
from collections.abc import Callable, Iterator

import pytest
from playwright.sync_api import Locator, Page, expect
from standing import PREFIX, Standing, asked, gpus, standing

from hubprocess import until
from steps import until_asked
from watching import Faults

pytestmark = pytest.mark.timeout(600)


WIDE, NARROW = {"width": 1280, "height": 800}, {"width": 390, "height": 844}
HOSTILE = "<script>alert('x')</script> \"quoted\" \u202etfel ot thgir"
LONG = "A sentence that does not end, " * 140


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standing]:
    folder = tmp_path_factory.mktemp("sessionspage")
    nodes = [{"name": "local"}, {"name": "far", "group": "far"}]
    reclaim = {"far": {"preempt": True, "min_runtime_s": 7200}}
    with standing(folder, nodes=nodes, groups={"default": {}, "far": {}}, reclaim=reclaim) as found:
        found.store.set_nodes([gpus(2), gpus(1, node="far", group="far")], now_s=int(time.time()))
        found.start()
        yield found


@pytest.fixture(autouse=True)
def nothing_left(service: Standing) -> Iterator[None]:
    yield
    service.end_all()


def names(page: Page) -> list[str]:
    return page.locator("#rows th").all_inner_texts()


def line(page: Page, session_id: int) -> Locator:
    return page.locator(f"#session-{session_id}")


def some(service: Standing) -> tuple[int, ...]:
    """Three sessions that run and one that waits; return their ids."""
    found = service.run(
        [
            asked("ann", "gamma", 500),
            asked("ann", "alpha", 1500),
            asked("ben", "beta", 1700),
            asked("ben", "delta", 2000),
        ]
    )
    return tuple(session.id for session in found)


def test_sorting_and_filters_work_in_place(service: Standing, open_as: Callable[..., Page]) -> None:
    some(service)
    page = open_as(service, "root")
    assert names(page) == ["gamma", "alpha", "beta", "delta"]
    page.evaluate("document.body.dataset.same = 'yes'")
    title = page.get_by_role("columnheader", name="Session")
    expect(title).to_have_attribute("aria-sort", "none")
    # By the keyboard: a title is a link.
    page.locator("#sort-name").press("Enter")
    expect(title).to_have_attribute("aria-sort", "ascending")
    expect(page.locator("#rows th")).to_have_text(["alpha", "beta", "delta", "gamma"])
    expect(page.locator("#sort-name")).to_be_focused()
    page.locator("#sort-name").press("Enter")
    expect(title).to_have_attribute("aria-sort", "descending")
    expect(page.locator("#rows th")).to_have_text(["gamma", "delta", "beta", "alpha"])
    page.get_by_role("combobox", name="User").fill("ben")
    expect(page.locator("#rows th")).to_have_text(["delta", "beta"])
    expect(page.locator("#count")).to_contain_text("2 of 4 sessions")
    page.get_by_role("combobox", name="Status").select_option("waiting")
    expect(page.locator("#rows th")).to_have_text(["delta"])
    page.get_by_role("searchbox", name="Search").fill("nobody has this")
    expect(page.get_by_text("No session fits.")).to_be_visible()
    assert page.evaluate("document.body.dataset.same") == "yes"
    # The address holds all choices, so a shared link shows the same.
    assert "user=ben" in page.url
    assert "state=waiting" in page.url
    assert "order=descending" in page.url
    page.reload()
    expect(page.get_by_text("No session fits.")).to_be_visible()
    page.get_by_role("link", name="Show all 4").click()
    expect(page.locator("#rows th")).to_have_count(4)


def test_sorting_filters_and_file_work_without_scripts(
    service: Standing, open_as: Callable[..., Page]
) -> None:
    some(service)
    page = open_as(service, "root", java_script_enabled=False)
    # A click does not wait for the page that it leads to.
    page.locator("#sort-amount").click()
    expect(page.locator("th", has=page.locator("#sort-amount"))).not_to_have_attribute("aria-sort", "none")
    page.locator("#sort-amount").click()
    expect(page.locator("#rows th")).to_have_text(["delta", "beta", "alpha", "gamma"])
    page.locator("[name=state]").select_option("running")
    page.get_by_role("button", name="Show").click()
    expect(page.locator("#rows th")).to_have_text(["beta", "alpha", "gamma"])
    # What a browser downloads has not the headers that say who this is.
    file = page.get_by_role("link", name="CSV").get_attribute("href") or ""
    answer = service.get(file.removeprefix(PREFIX), "root")
    assert re.fullmatch(r'attachment; filename="sessions-[-0-9]+.csv"', answer.headers["Content-Disposition"])
    lines = list(csv.DictReader(io.StringIO(answer.text)))
    assert [(found["user"], found["session"], found["fgpu"]) for found in lines] == [
        ("ben", "beta", "1.7"),
        ("ann", "alpha", "1.5"),
        ("ann", "gamma", "0.5"),
    ]


def test_refused_end_is_not_shown_as_done(
    service: Standing, open_as: Callable[..., Page], faults: Faults
) -> None:
    faults.allow(r"(status DELETE|console) \S+/api/v1/sessions/[0-9]+ .*409")
    some(service)
    page = open_as(service, "root")
    service.ending_answer = 404
    try:
        page.get_by_role("button", name="End beta").click()
        dialog = page.get_by_role("dialog")
        dialog.get_by_role("button", name="End the session").click()
        expect(dialog.locator("#confirm-trouble")).to_contain_text("JupyterHub does not let you end this")
        expect(dialog).to_be_visible()
    finally:
        service.ending_answer = 202
    dialog.get_by_role("button", name="End the session").click()
    expect(dialog).to_be_hidden()


def bars(page: Page) -> list[tuple[str, str, str]]:
    """Return text, own length and own text of the fGPU bars of the group and of all groups."""
    gauge = page.locator(".gauge").filter(has=page.get_by_role("heading", name="GPU", exact=True))
    # In one step: an element found earlier is gone after a page change.
    found: list[tuple[str, str, str]] = gauge.evaluate(
        """(gauge) => Array.from(gauge.querySelectorAll(".bar"), (bar, at) => [
          bar.querySelector(".bar-text").textContent,
          bar.querySelector(".part.mine")?.getAttribute("width") ?? "0",
          gauge.querySelectorAll(".own")[at].textContent.replace("Your use: ", "")])"""
    )
    return [(used, length, own) for used, length, own in found]


def test_only_changed_rows_are_redrawn(service: Standing, open_as: Callable[..., Page]) -> None:
    ids = some(service)
    page = open_as(service, "root")
    page.evaluate("for (const line of document.querySelectorAll('#rows tr')) line.marked = true")
    page.locator(f"#power-{ids[1]}").focus()
    service.store.warn(ids[0], "memory runs out", now_s=int(time.time()))
    expect(line(page, ids[0])).to_contain_text("memory runs out")
    marked = page.evaluate(
        "Array.from(document.querySelectorAll('#rows tr'), (line) => Boolean(line.marked))"
    )
    # What waits is forecast, and that may change with the clock.
    assert marked[:3] == [False, True, True]
    expect(page.locator(f"#power-{ids[1]}")).to_be_focused()
    # The end of one that runs starts the one that waits, and leaves the others alone.
    service.end(ids[2])
    service.place()
    expect(line(page, ids[2])).to_have_count(0)
    expect(line(page, ids[3]).locator(".badge")).to_have_text("RUNNING")
    assert page.evaluate(f"document.getElementById('session-{ids[1]}').marked") is True


def test_row_is_not_redrawn_during_a_click(service: Standing, open_as: Callable[..., Page]) -> None:
    (session,) = service.run([asked("ann", "pressed", 500)])
    page = open_as(service, "ann")
    until_asked(page)
    page.get_by_role("button", name="End pressed").hover()
    page.mouse.down()
    service.store.warn(session.id, "memory runs out", now_s=int(time.time()))
    made_again = "performance.getEntriesByType('resource').some((found) => found.name.includes('part=rows'))"
    until(lambda: page.evaluate(made_again), what="the page has the line that comes in its place")
    page.mouse.up()
    expect(page.get_by_role("dialog", name="End pressed?")).to_be_visible()
    expect(line(page, session.id)).to_contain_text("memory runs out")


def test_events_resume_after_the_service_was_killed(
    service: Standing, open_as: Callable[..., Page], faults: Faults
) -> None:
    faults.allow(
        r"(failed|console) .*(ERR_CONNECTION_REFUSED|ERR_INCOMPLETE_CHUNKED|ERR_CONNECTION_RESET|ERR_EMPTY)"
    )
    # For a moment it listens and has not read its database yet.
    faults.allow(r"(status GET|console) .*\b503\b")
    ids = some(service)
    page = open_as(service, "root")
    page.evaluate(
        "new MutationObserver(() => (window.heard ||= []).push(said.textContent)).observe(said, {childList: true})"
    )
    until_asked(page)
    service.store.warn(ids[0], "before", now_s=int(time.time()))
    expect(line(page, ids[0])).to_contain_text("before")
    asked_for: list[dict[str, str]] = []
    page.on("request", lambda r: asked_for.append(r.all_headers()) if "/events" in r.url else None)
    service.kill()
    # This event happens while no client listens, and no later event repeats it.
    service.store.warn(ids[1], "in between", now_s=int(time.time()))
    expect(page.locator("#offline")).to_be_visible(timeout=60_000)
    service.start()
    expect(line(page, ids[1])).to_contain_text("in between", timeout=60_000)
    expect(page.locator("#offline")).to_be_hidden(timeout=60_000)
    # The page forbids `eval`, which Playwright's own waiting needs where it looks more than once.
    heard = "(window.heard || []).some((text) => text.startsWith('alpha of ann'))"
    until(lambda: page.evaluate(heard), what="the change of alpha is said")
    assert any(int(headers.get("last-event-id", 0)) > 0 for headers in asked_for)


def test_page_reports_a_stopped_service_and_recovers(service: Standing, open_as: Callable[..., Page]) -> None:
    some(service)
    page = open_as(service, "root")
    assert service.process is not None
    os.kill(service.process.pid, signal.SIGSTOP)
    try:
        page.locator("#sort-name").click()
    finally:
        os.kill(service.process.pid, signal.SIGCONT)
    expect(page.locator("#rows th")).to_have_text(["alpha", "beta", "delta", "gamma"])


def test_use_bars_follow_the_meter_while_visible(service: Standing, open_as: Callable[..., Page]) -> None:
    ids = some(service)
    service.measure({ids[0]: 512, ids[1]: 0})
    page = open_as(service, "root")
    cell = line(page, ids[0]).locator(".use")
    expect(cell).to_contain_text("0.5 of 2 GiB")
    # Half a percent, which the page's script rounds too: nothing jumps when it looks again.
    expect(cell).to_contain_text("13 of 25 %")
    expect(cell.locator(".memory .fill")).to_have_attribute("width", "25.0")
    # What is known to be nothing is shown, and what is not known has no bar.
    expect(line(page, ids[1]).locator(".use")).to_contain_text("0 of 6 GiB")
    expect(line(page, ids[2]).locator(".use")).to_have_text("not measured yet")
    until_asked(page)
    page.evaluate("document.querySelector('#rows tr').same = true")
    service.measure({ids[0]: 1536, ids[1]: None}, trouble="the GPU does not answer")
    expect(cell).to_contain_text("1.5 of 2 GiB", timeout=60_000)
    expect(cell).to_contain_text("13 of 25 %")
    expect(cell.locator(".memory .fill")).to_have_attribute("width", "75.0")
    expect(line(page, ids[1]).locator(".use")).to_have_text("the GPU does not answer")
    assert page.evaluate("document.querySelector('#rows tr').same") is True
    expect(cell.locator(".lent")).to_have_text("")
    service.measure({ids[0]: 1536}, lent=(7.5, 2.4), context_mib=400)
    expect(cell.locator(".lent")).to_have_text("others use 2 % of it", timeout=60_000)
    expect(cell).to_contain_text("1.5 of 2 GiB, 0.4 of it contexts and code")
    page.reload()
    expect(cell).to_contain_text("1.5 of 2 GiB, 0.4 of it contexts and code")
    expect(cell.locator(".lent")).to_have_text("others use 2 % of it")
    service.measure({ids[0]: 1536, ids[1]: None}, trouble="the GPU does not answer")
    page.locator("#sort-use").click()
    expect(page.locator("#rows th").first).to_have_text("gamma")


def test_phone_menu_works_with_the_keyboard(service: Standing, open_as: Callable[..., Page]) -> None:
    page = open_as(service, "root", viewport=NARROW)
    menu = page.get_by_role("button", name="Menu")
    site = page.get_by_role("navigation", name="Site")
    expect(site).to_be_hidden()
    menu.press("Enter")
    expect(site.get_by_role("link", name="Sessions")).to_be_visible()
    expect(menu).to_have_attribute("aria-expanded", "true")
    page.keyboard.press("Escape")
    expect(site).to_be_hidden()
    expect(menu).to_be_focused()


def test_chosen_columns_stay_in_this_browser_and_few_sessions_have_no_filters(
    service: Standing, open_as: Callable[..., Page]
) -> None:
    some(service)
    page = open_as(service, "ann")
    expect(page.get_by_role("columnheader", name="Elapsed")).to_be_visible()
    expect(page.get_by_role("columnheader", name="CPU")).to_have_count(0)
    page.locator("#chooser > summary").click()
    page.get_by_role("checkbox", name="CPU").check()
    page.get_by_role("checkbox", name="Image").uncheck()
    page.reload()
    expect(page.get_by_role("columnheader", name="CPU")).to_be_visible()
    expect(page.get_by_role("columnheader", name="Image")).to_have_count(0)
    expect(page.get_by_role("searchbox", name="Search")).to_have_count(0)
