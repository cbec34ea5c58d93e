"""The waiting page: position, notification, banner, and the messages of a failed start."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from axe import check_page
from playwright.sync_api import Route, expect

from fgpu_scheduler import Banner, BannerLevel, Notice, Store
from hubprocess import HubProcess, running, until
from steps import START_MS, Person, fact, forecast, more, place, start, start_by
from watching import Faults

pytestmark = pytest.mark.timeout(600)

MINI = Path(__file__).parents[1] / "hub" / "miniserver.py"
LITTLE = {"cpu": "0.1", "memory_mib": 256}
HOSTILE = "<script>document.title = 'planted'</script> <b>\"now\"</b> \N{HEBREW LETTER SHIN}"
CATALOGUE = """
[[image]]
slug = "python"
name = "Python 3.11"
framework = "python"
version = "3.11"
python = "3"
reference = "r"
default = true
[[image]]
slug = "broken"
name = "Broken"
framework = "python"
version = "1"
python = "3"
reference = "r"
environment = "BROKEN"
"""


NOTED = """
window.Notification = class {
  static permission = "granted";
  static async requestPermission() { return "granted"; }
  constructor(title, options) { localStorage.setItem("noted", `${title}: ${options.body}`); }
  close() {}
};
"""
"""Notes in place of showing: what a page was told by the browser itself cannot be read."""


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubProcess]:
    """A Hub with one GPU. Sessions start at once, except those of one image, which never start."""
    folder = tmp_path_factory.mktemp("waiting")
    program = folder / "bin/python"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\nexit 7\n")
    program.chmod(0o755)
    (folder / "catalogue.toml").write_text(CATALOGUE.replace("BROKEN", str(folder)))
    after = f"c.Spawner.cmd = ['python', {str(MINI)!r}]\n"
    with running(folder, after=after, catalogue=str(folder / "catalogue.toml")) as found:
        yield found


@pytest.fixture
def held(hub: HubProcess) -> Iterator[HubProcess]:
    """The same Hub while another user holds the whole GPU for an hour."""
    hub.add_user("holder")
    holds = {"fgpu": "2", "time_limit_s": 3600, **LITTLE}
    assert hub.spawn("holder", options=holds).status_code in (201, 202)
    hub.reach({"holder/": "RUNNING"})
    yield hub
    hub.stop("holder")
    until(lambda: "holder/" not in hub.states(), what="the holder's session has ended")


def test_hidden_page_notifies_of_the_start_and_titles_the_position(
    held: HubProcess, log_in: Callable[..., Person]
) -> None:
    # Without motion colours change at once.
    amy = log_in(held.url, "amy", "test-password", reduced_motion="reduce")
    page = amy.page
    page.context.add_init_script(NOTED)
    start_by(page, amy.link("second", fgpu="1", **LITTLE))
    expect(place(page)).to_have_text("Next in the queue")
    expect(page.locator(".progress")).to_be_hidden()
    expect(page).to_have_title("Next in the queue \N{EN DASH} second")
    expect(fact(page, "Expected start")).to_have_text(
        re.compile(r"^at the latest ([\w ]+,? )?\d\d?:\d\d( \(in .+\))?, from time limits$")
    )
    expect(fact(page, "Starts")).to_have_text("when 1 session ends (2 fGPU)")
    check_page(page)
    page.emulate_media(color_scheme="dark")
    page.set_viewport_size({"width": 390, "height": 844})
    tell = page.get_by_role("button", name="Tell me when it starts")
    tell.click()
    expect(page.get_by_role("button", name="You will be told")).to_have_attribute("aria-pressed", "true")
    check_page(page)
    # It is remembered when the page is loaded again, as it is by a restart.
    page.reload()
    expect(page.get_by_role("button", name="You will be told")).to_be_visible()
    expect(place(page)).to_have_text("Next in the queue")
    front = amy.new_page()
    front.bring_to_front()
    held.stop("holder")
    page.wait_for_url("**/user/amy/second/**", timeout=START_MS)
    assert page.evaluate("localStorage.getItem('noted')") == "Your session is ready: second has started."


def test_smaller_amount_is_offered_and_place_kept(hub: HubProcess, log_in: Callable[..., Person]) -> None:
    for user in ("half", "quick"):
        hub.add_user(user)
    holds = {"fgpu": "1.2", "time_limit_s": 3600, **LITTLE}
    assert hub.spawn("half", options=holds).status_code in (201, 202)
    hub.reach({"half/": "RUNNING"})
    eve = log_in(hub.url, "eve", "test-password", reduced_motion="reduce")
    page = eve.page
    start_by(page, eve.link("big", fgpu="2", **LITTLE))
    take = page.get_by_role("button", name="Start with 0.8 fGPU now")
    expect(take).to_be_visible()
    expect(page.get_by_text("This request then gives up its place.")).to_be_visible()
    check_page(page)
    # Another user takes it first: that session ends before the place that is kept is needed.
    quick = {"fgpu": "0.5", "time_limit_s": 1800, **LITTLE}
    assert hub.spawn("quick", options=quick).status_code in (201, 202)
    hub.reach({"half/": "RUNNING", "quick/": "RUNNING", "eve/big": "PENDING"})
    take.click()
    kept = page.get_by_text("0.8 fGPU can't start now. You keep your place.")
    expect(kept).to_be_visible()
    expect(place(page)).to_have_text("Next in the queue")
    hub.stop("quick")
    until(lambda: "quick/" not in hub.states(), what="the other's session has ended")
    page.reload()
    take.click()
    page.wait_for_url("**/user/eve/big/**", timeout=START_MS)
    assert hub.states()["eve/big"] == "RUNNING"
    assert hub.servers("eve")["big"]["user_options"]["fgpu"] == "0.8"
    for user, name in (("half", ""), ("eve", "big")):
        hub.stop(user, name)
        until(lambda: f"{user}/{name}" not in hub.states(), what="it has ended")  # noqa: B023


def keeping(routes: list[Route]) -> Callable[[Route], None]:
    """Return the open requests, for a test to abort them."""
    return lambda route: routes.append(route)


def test_redirect_after_a_break_notifies_only_of_a_real_start(
    held: HubProcess, log_in: Callable[..., Person], faults: Faults
) -> None:
    faults.allow(r"(failed|console) \S* ?\S+/progress\S* .*ERR_FAILED")
    faults.allow(r"(status|console) \S* ?\S+/progress\S* .*403")
    for name in ("ned", "zoe"):
        person = log_in(held.url, name, "test-password")
        page = person.page
        page.context.add_init_script(NOTED)
        streams: list[Route] = []
        page.route("**/progress**", keeping(streams), times=1)
        start_by(page, person.link(fgpu="1", **LITTLE))
        page.get_by_role("button", name="Tell me when it starts").click()
        expect(page.get_by_role("button", name="You will be told")).to_be_visible()
        held.reach({"holder/": "RUNNING", f"{name}/": "PENDING"})
        if name == "ned":
            # Logged out: the page is sent to where one logs in.
            cookies = page.context.cookies()
            page.context.clear_cookies()
            streams[0].abort()
            page.wait_for_url("**/hub/login**", timeout=START_MS)
            assert page.evaluate("localStorage.getItem('noted')") is None
            page.context.add_cookies(cookies)
            held.stop(name)
        else:
            held.stop("holder")
            until(lambda: held.ready("zoe"), within_s=60, what="the session runs")
            streams[0].abort()
            page.wait_for_url("**/user/zoe/**", timeout=START_MS)
            assert page.evaluate("localStorage.getItem('noted')") == (
                "Your session is ready: Your session has started."
            )


def test_banner_is_text_on_form_and_waiting_page(held: HubProcess, log_in: Callable[..., Person]) -> None:
    cat = log_in(held.url, "cat", "test-password")
    page = cat.page
    expect(page.locator("#fgpu-banner")).to_have_count(0)
    store = Store(f"sqlite:///{held.data / 'fgpu.sqlite'}")
    store.connect()
    banner = Banner(store)
    try:
        banner.put(Notice(HOSTILE, BannerLevel.WARNING), by="admin", now_s=int(time.time()))
        page.reload()
        expect(page.get_by_role("note", name="Announcement")).to_have_text(HOSTILE)
        expect(forecast(page)).to_be_visible()
        check_page(page)
        start_by(page, cat.link(fgpu="1", **LITTLE))
        expect(page.get_by_role("note", name="Announcement")).to_have_text(HOSTILE)
        expect(page).to_have_title("Next in the queue")
    finally:
        banner.take_down(by="admin", now_s=int(time.time()))
        store.close()


def test_failed_start_says_why_and_restores_the_form(
    hub: HubProcess, log_in: Callable[..., Person], faults: Faults
) -> None:
    faults.allow(r"(status|console) .*\b(400|500)\b")
    dan = log_in(hub.url, "dan", "test-password")
    page = dan.page
    page.goto(dan.link("second"))
    page.get_by_role("radio", name="Broken").check()
    page.fill("#fgpu-fgpu", "0.7")
    more(page).fill("#fgpu-cpu", "0.3")
    more(page).fill("#fgpu-memory", "0.625")
    more(page).fill("#fgpu-time", "2:30")
    start(page)
    expect(page.locator(".alert-danger").first).to_contain_text(
        "image Broken: its Python does not run", timeout=START_MS
    )
    page.goto(f"{hub.url}/hub/spawn-pending/dan/second")
    expect(page.get_by_role("heading", name="Your session did not start")).to_be_visible()
    expect(page.locator(".fgpu-happened")).to_contain_text("image Broken: its Python does not run")
    expect(page.locator(".fgpu-next")).to_contain_text(
        "show your administrator this message, or choose another image"
    )
    check_page(page, within="main, .container")
    page.get_by_role("button", name="Back to the form").click()
    expect(page.locator("#fgpu-failed-lately")).to_contain_text("image Broken: its Python does not run")
    expect(page.get_by_role("radio", name="Broken")).to_be_checked()
    for field, value in (("fgpu", "0.7"), ("cpu", "0.3"), ("memory", "0.625"), ("time", "2:30")):
        expect(page.locator(f"#fgpu-{field}")).to_have_value(value)
    # Of another server of the same user it says nothing.
    page.goto(dan.link("third"))
    expect(page.get_by_role("radio", name="Python 3.11")).to_be_checked()
    expect(page.locator("#fgpu-failed-lately")).to_have_count(0)


def test_request_cancelled_elsewhere_can_be_repeated(
    held: HubProcess, log_in: Callable[..., Person], faults: Faults
) -> None:
    faults.allow(r"(status|console) .*\b424\b")
    ida = log_in(held.url, "ida", "test-password")
    page = ida.page
    start_by(page, ida.link(fgpu="1.1", **LITTLE))
    expect(page.locator("#fgpu-place")).to_be_visible()
    assert held.stop("ida").status_code in (202, 204)
    expect(page.locator("#fgpu-last-word")).to_contain_text("Your request was cancelled", timeout=START_MS)
    page.get_by_role("button", name="Start again").click()
    expect(page.locator("#fgpu-fgpu")).to_have_value("1.1")
