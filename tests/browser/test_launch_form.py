"""The launch form in a browser: cards, search, sliders, the forecast, presets, last launches, refusals."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from decimal import ROUND_DOWN, Decimal
from pathlib import Path
from zoneinfo import ZoneInfo

import pytest
from axe import check_page
from playwright.sync_api import Page, Route, expect

from hubprocess import PATIENT, HubProcess, running, until
from steps import (
    EXPECT_MS,
    START_MS,
    Person,
    about_image,
    choose_image,
    forecast,
    images,
    more,
    place,
    refused,
    scrolls_sideways,
    start,
)
from watching import Faults

pytestmark = pytest.mark.timeout(600)

MINI = Path(__file__).parents[1] / "hub" / "miniserver.py"
HOSTILE = "<script>document.title = 'planted'</script> \"quoted\" '\N{HEBREW LETTER SHIN}' " + "wide" * 180
PRESETS = [
    {"name": "Exercise <b>1</b>", "image": "torch-3", "fgpu": "0.2", "cpu": "0.4", "memory_mib": 384},
    {"name": "Exact", "gpu_memory_mib": 1024, "compute_percent": 10},
    {"name": "Never shown", "image": "nobodys"},
    {"name": "Exam", "image": "exam", "fgpu": "0.3"},
    {"name": "Course", "image": "torch-3"},
]
LITTLE = {"cpu": "0.1", "memory_mib": 256}
NARROW = {"width": 390, "height": 844}


def catalogue() -> str:
    """Return a catalogue of eight images, one of them described with hostile words."""
    entries = [("python", "Python 3.11", "python", "Plain.")]
    entries += [(f"torch-{n}", f"PyTorch 2.{n}", "pytorch", f"For course {n}.") for n in range(1, 5)]
    entries += [(f"flow-{n}", f"TensorFlow 2.{n}", "tensorflow", HOSTILE) for n in range(1, 4)]
    entries.append(("exam", "Exam 2026", "exam", ""))
    more = {
        "exam": "hidden = true\n",
        "torch-3": "minimum = { fgpu = '0.2', cpu = '0.2' }\nrecommended = { fgpu = '0.4' }\n",
    }
    return "\n".join(
        f"[[image]]\nslug = {json.dumps(slug)}\nname = {json.dumps(name)}\nframework = {json.dumps(framework)}\n"
        f"version = {json.dumps(name.split()[1])}\npython = '3'\ndescription = {json.dumps(text)}\n"
        f"reference = 'r'\nenvironment = {json.dumps(sys.prefix)}\n"
        f"{'default = true' if slug == 'python' else ''}\n{more.get(slug, '')}"
        for slug, name, framework, text in entries
    )


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubProcess]:
    """A Hub with one GPU of 2 fGPU; another user holds 1.5 for about an hour."""
    folder = tmp_path_factory.mktemp("form")
    (folder / "catalogue.toml").write_text(catalogue())
    after = f"c.Spawner.cmd = ['python', {str(MINI)!r}]\n"
    given = {"catalogue": str(folder / "catalogue.toml"), "presets": PRESETS}
    quotas = [{"user": "ida", "max_fgpu": "0.4", "max_sessions": 3}, {"user": "lea", "max_pending": 1}]
    with running(folder, before=PATIENT, after=after, quotas=quotas, **given) as found:
        found.add_user("holder")
        found.spawn("holder", options={"fgpu": "1.5", "time_limit_s": 3600, **LITTLE})
        found.reach({"holder/": "RUNNING"})
        yield found


@pytest.fixture(autouse=True)
def before_it_asks_again() -> Iterator[None]:
    """The form refreshes every 20 s. A shorter wait shows that a change came from the user's action."""
    expect.set_options(timeout=15_000)
    yield
    expect.set_options(timeout=EXPECT_MS)


def test_image_is_found_with_the_keyboard(hub: HubProcess, log_in: Callable[..., Person]) -> None:
    page = log_in(hub.url, "ann", "test-password").page
    assert images(page)[:3] == ["Python 3.11", "PyTorch 2.1", "PyTorch 2.2"]
    assert len(images(page)) == 8
    search = page.get_by_role("searchbox", name="Search images")
    search.focus()
    page.keyboard.type("torch 2.3 course")
    expect(page.locator("#fgpu-search-found")).to_have_text("1 of 8 images. Enter takes the first.")
    page.keyboard.press("Enter")
    torch = page.get_by_role("radio", name="PyTorch 2.3")
    expect(torch).to_be_checked()
    expect(torch).to_be_focused()
    expect(torch).to_have_accessible_description("For course 3. At least 0.2 fGPU, 0.2 CPU.")
    # What is recommended goes with it, and is marked.
    expect(page.locator("#fgpu-fgpu")).to_have_value("0.4")
    expect(page.get_by_role("button", name="recommended 0.4 fGPU")).to_be_visible()
    expect(page.locator("[data-track=fgpu] .tick")).to_have_count(2)

    # All of them are one group, whatever cards they are on.
    search.focus()
    page.keyboard.press("Escape")
    expect(search).to_have_value("")
    torch.focus()
    page.keyboard.press("ArrowDown")
    expect(page.get_by_role("radio", name="PyTorch 2.4")).to_be_checked()
    page.keyboard.press("ArrowDown")
    expect(page.get_by_role("radio", name="TensorFlow 2.1")).to_be_checked()
    expect(about_image(page, "flow-1")).to_contain_text(HOSTILE)
    expect(page).not_to_have_title("planted")
    page.get_by_role("searchbox").fill("no such image")
    expect(page.locator("#fgpu-search-found")).to_contain_text("0 of 8 images.")
    expect(page.locator("#fgpu-chosen")).to_have_text("TensorFlow 2.1")


def test_forecast_follows_the_slider(hub: HubProcess, log_in: Callable[..., Person]) -> None:
    page = log_in(hub.url, "ben", "test-password").page
    slider, field = page.get_by_role("slider", name="GPU (fGPU)"), page.locator("#fgpu-fgpu")
    expect(forecast(page)).to_contain_text("next in the queue, at the latest ")
    expect(forecast(page)).to_contain_text("A place is kept for it.")
    expect(forecast(page)).to_contain_text("Starts when 1 session ends (1.5 fGPU).")
    # When it starts is said in the browser's own time, not in the machine's.
    ends_at_s = hub.sessions()["holder/"].started_at_s
    assert ends_at_s is not None
    zone = ZoneInfo("Europe/Berlin")
    around = [
        datetime.fromtimestamp(ends_at_s + 3600 + more, zone).strftime("%H:%M").lstrip("0")
        for more in (0, 60)
    ]
    assert any(clock in forecast(page).inner_text() for clock in around)
    take = page.get_by_role("button", name="Take 0.5 fGPU: starts now")
    take.focus()
    # The same answer again leaves all as it is, what has the focus and what is read out.
    page.evaluate("window.offered = document.activeElement")
    with page.expect_response("**/api/v1/forecast**"):
        page.locator("#fgpu-fgpu").dispatch_event("input")
    expect(forecast(page)).not_to_have_attribute("aria-busy", "true")
    assert page.evaluate("document.activeElement === window.offered && window.offered.isConnected")
    # Another leaves the focus on what is offered then.
    with page.expect_response("**/forecast?**time_limit=0%3A30**"):
        more(page).locator("#fgpu-time").evaluate(
            "e => { e.value = '0:30'; e.dispatchEvent(new Event('input', { bubbles: true })); }"
        )
    expect(forecast(page)).not_to_have_attribute("aria-busy", "true")
    for typed, told in (
        ("abc", "time limit not readable"),
        ("1:30", "ends after 1:30"),
        ("", "no time limit"),
    ):
        more(page).fill("#fgpu-time", typed)
        expect(page.locator("#fgpu-more-now")).to_contain_text(f"GiB memory, {told}")
    expect(forecast(page)).not_to_have_attribute("aria-busy", "true")
    take.click()
    expect(field).to_have_value("0.5")
    expect(field).to_be_focused()
    expect(forecast(page)).to_have_text("Starts now.")
    slider.press("ArrowRight")
    expect(field).to_have_value("0.6")
    expect(forecast(page)).to_contain_text("next in the queue")
    slider.press("ArrowLeft")
    expect(forecast(page)).to_have_text("Starts now.")

    for name, number in (("CPU (cores)", "#fgpu-cpu"), ("Memory (GiB)", "#fgpu-memory")):
        page.get_by_role("slider", name=name).press("End")
        expect(page.locator(number)).to_have_value(page.locator(number).get_attribute("max") or "none")
    page.get_by_role("slider", name="Sessions").press("End")
    expect(page.locator("#fgpu-count")).to_have_value("8")


def test_cpu_and_memory_follow_the_amount_until_edited(
    hub: HubProcess, log_in: Callable[..., Person]
) -> None:
    page = log_in(hub.url, "amy", "test-password").page
    field, means, cpu = page.locator("#fgpu-fgpu"), page.locator("#fgpu-means"), page.locator("#fgpu-cpu")
    expect(means).to_have_text("1 fGPU = 1/2 GPU: 4 GiB GPU memory, at least 50 % compute")
    field.press("ArrowDown")
    expect(field).to_have_value("0.9")
    field.press("ArrowUp")
    field.press("ArrowUp")
    expect(means).to_have_text("1.1 fGPU = 11/20 GPU: 4.375 GiB GPU memory, at least 55 % compute")
    cores = Decimal(cpu.get_attribute("max") or "0")
    for fgpu in ("0.5", "2"):
        field.fill(fgpu)
        expect(cpu).to_have_value(
            f"{(cores * Decimal(fgpu) / 2).quantize(Decimal('0.1'), ROUND_DOWN).normalize():f}"
        )
    field.fill("0.5")
    expect(page.locator("#fgpu-more-now")).to_contain_text(f"{cpu.input_value()} core")
    expect(forecast(page)).to_have_text("Starts now.")
    # What was edited stays as it is.
    more(page).fill("#fgpu-cpu", "0.3")
    field.fill("0.2")
    expect(cpu).to_have_value("0.3")
    memory = Decimal(page.locator("#fgpu-memory").input_value())
    page.locator("#fgpu-memory").press("ArrowUp")
    assert Decimal(page.locator("#fgpu-memory").input_value()) - memory <= 1
    # The other way to ask is told in the same place.
    page.get_by_label("Exact GPU memory and compute").check()
    page.fill("#fgpu-gpu-memory", "2048")
    page.fill("#fgpu-compute", "10")
    expect(means).to_have_text("2 GiB of GPU memory, at least 10 % compute")


def test_first_screen_has_the_main_choices(hub: HubProcess, log_in: Callable[..., Person]) -> None:
    page = log_in(hub.url, "uma", "test-password", viewport={"width": 1366, "height": 768}).page
    expect(forecast(page)).to_contain_text("in the queue")
    expect(page.get_by_role("group", name="Presets")).to_be_visible()
    for part in (
        page.get_by_role("radio", name="Python 3.11"),
        page.locator("#fgpu-fgpu"),
        page.locator("#fgpu-means"),
        page.locator("#fgpu-forecast"),
        page.get_by_role("button", name="Start", exact=True),
    ):
        expect(part).to_be_in_viewport(ratio=1)
    # Nothing of the amount is behind the bar, which stays where it is.
    means, foot = page.locator("#fgpu-means").bounding_box(), page.locator(".fgpu-form .foot").bounding_box()
    assert means is not None
    assert foot is not None
    assert means["y"] + means["height"] <= foot["y"]


def test_link_fragment_fills_in_the_form(hub: HubProcess, log_in: Callable[..., Person]) -> None:
    page = log_in(hub.url, "oda", "test-password").page
    page.goto(f"{hub.url}/hub/spawn/oda/other#fgpu=0.3&count=2&time_limit_s=5400")
    for field, value in (("fgpu", "0.3"), ("count", "2"), ("time", "1:30")):
        expect(page.locator(f"#fgpu-{field}")).to_have_value(value)
    expect(forecast(page)).to_be_visible()


def test_late_answers_are_dropped_and_failures_shown(
    hub: HubProcess, log_in: Callable[..., Person], faults: Faults
) -> None:
    page = log_in(hub.url, "cid", "test-password").page
    expect(forecast(page)).to_contain_text("in the queue")
    kept: list[Route] = []

    def late(route: Route) -> None:
        if "fgpu=0.5" in route.request.url:
            kept.append(route)
        else:
            route.continue_()

    page.route("**/api/v1/forecast**", late)
    with page.expect_request("**/forecast?**fgpu=0.5**"):
        page.fill("#fgpu-fgpu", "0.5")
    # The one before is not shown as if it were the answer.
    expect(forecast(page)).to_have_attribute("aria-busy", "true")
    page.fill("#fgpu-fgpu", "0.9")
    expect(forecast(page)).to_contain_text("A place is kept for it.")
    for route in kept:
        route.fulfill(json={"starts_now": True, "count": 1, "refusals": [], "quota": None})
    page.get_by_role("slider", name="GPU (fGPU)").focus()
    expect(forecast(page)).to_contain_text("A place is kept for it.")
    page.unroute("**/api/v1/forecast**")

    faults.allow(r"(failed|console) .*forecast")
    page.route("**/api/v1/forecast**", lambda route: route.abort())
    page.fill("#fgpu-fgpu", "0.5")
    expect(forecast(page)).to_have_text(
        "No forecast: the queue's service does not answer. You can start all the same."
    )
    expect(page.get_by_role("button", name="Start")).to_be_enabled()


def test_answer_during_a_click_does_not_lose_the_start(
    hub: HubProcess, log_in: Callable[..., Person]
) -> None:
    page = log_in(hub.url, "cora", "test-password").page
    kept: list[Route] = []
    page.route("**/api/v1/forecast**", lambda route: kept.append(route))
    with page.expect_request("**/api/v1/forecast**"):
        page.goto(f"{hub.url}/hub/spawn?fgpu=2&cpu=0.1")
    page.get_by_role("button", name="Start", exact=True).hover()
    page.mouse.down()
    with page.expect_response("**/api/v1/forecast**"):
        kept[-1].continue_()
    page.wait_for_timeout(500)
    page.mouse.up()
    expect(place(page)).to_be_visible()


def test_presets_and_launches_only_fill_in_the_form(hub: HubProcess, log_in: Callable[..., Person]) -> None:
    dee = log_in(hub.url, "dee", "test-password")
    page = dee.page
    presets = page.get_by_role("group", name="Presets").get_by_role("button")
    expect(presets).to_have_count(4)
    expect(page.get_by_role("group", name="Your last launches")).to_have_count(0)
    presets.nth(1).click()
    expect(page.get_by_label("GPU memory (MiB)")).to_have_value("1024")
    presets.first.click()
    expect(presets.first).to_contain_text("Exercise <b>1</b>")
    expect(page.get_by_role("radio", name="PyTorch 2.3")).to_be_checked()
    for field, value in (("fgpu", "0.2"), ("cpu", "0.4"), ("memory", "0.375")):
        expect(page.locator(f"#fgpu-{field}")).to_have_value(value)
    expect(forecast(page)).to_have_text("Starts now.")
    assert "dee/" not in hub.states()
    # An image alone is taken with what is recommended for it, whatever was there before.
    expect(presets.nth(3)).to_contain_text("PyTorch 2.3")
    presets.nth(3).click()
    expect(page.locator("#fgpu-fgpu")).to_have_value("0.4")
    presets.first.click()
    more(page).fill("#fgpu-time", "1:30")
    start(page)
    page.wait_for_url("**/user/dee/**", timeout=START_MS)
    asked = hub.sessions()["dee/"].request
    assert (asked.image, asked.fgpu_milli, asked.cpu_milli, asked.time_limit_s) == ("torch-3", 200, 400, 5400)

    page.goto(dee.link("another"))
    launches = page.get_by_role("group", name="Your last launches").get_by_role("button")
    expect(launches).to_have_count(1)
    expect(launches).to_contain_text("0.2 fGPU, 0.4 CPU, 384 MiB, 1:30")
    more(page).get_by_label("Exact GPU memory and compute").check()
    launches.click()
    expect(page.locator("#fgpu-fgpu")).to_have_value("0.2")
    expect(page.locator("#fgpu-time")).to_have_value("1:30")
    expect(page.get_by_role("radio", name="PyTorch 2.3")).to_be_checked()


def test_named_image_and_chosen_image_exclude_each_other(
    hub: HubProcess, log_in: Callable[..., Person]
) -> None:
    page = log_in(hub.url, "jon", "test-password").page
    name, heading = page.get_by_label("Name of another image"), page.locator("#fgpu-chosen")
    page.get_by_role("button", name="Exam").click()
    expect(name).to_be_visible()
    expect(name).to_have_value("exam")
    expect(heading).to_have_text("exam")
    expect(page.locator(".fgpu-form [name=image]:checked")).to_have_count(0)
    choose_image(page, "torch-1")
    expect(name).to_have_value("")
    expect(heading).to_have_text("PyTorch 2.1")
    # Typed, and taken back.
    name.fill("ann/more")
    expect(heading).to_have_text("ann/more")
    name.fill("")
    expect(heading).to_have_text("PyTorch 2.1")
    expect(page.locator('[name=image][value="torch-1"]')).to_be_checked()
    page.get_by_role("button", name="Exam").click()
    choose_image(page, "torch-2")
    expect(forecast(page)).to_have_text("Starts now.")
    start(page)
    page.wait_for_url("**/user/jon/**", timeout=START_MS)
    assert hub.sessions()["jon/"].request.image == "torch-2"


def test_expired_ticket_is_renewed_and_input_kept(
    hub: HubProcess, log_in: Callable[..., Person], faults: Faults
) -> None:
    faults.allow(r"(status|console) .*forecast\S* .*401")
    page = log_in(hub.url, "kim", "test-password").page
    expect(forecast(page)).to_contain_text("in the queue")
    # As after a restart of the Hub, which makes earlier tickets invalid.
    page.evaluate("document.querySelector('.fgpu-form').dataset.ticket = 'W10=.' + '0'.repeat(64)")
    page.fill("#fgpu-fgpu", "0.3")
    expect(forecast(page)).to_have_text("Starts now.")
    assert any(re.search("forecast.* 401", fault) for fault in faults.found)
    expect(page.locator("#fgpu-fgpu")).to_have_value("0.3")
    # Where the Hub gives none, it is said in words.
    page.route("**/hub/spawn", lambda route: route.abort())
    faults.allow(r"(failed|console) \S* ?\S+/hub/spawn .*ERR_FAILED")
    page.evaluate("document.querySelector('.fgpu-form').dataset.ticket = 'old'")
    page.fill("#fgpu-fgpu", "0.2")
    expect(forecast(page)).to_have_text(
        "This page is too old for a forecast. Open the form again. You can start all the same."
    )


def test_refusals_are_shown_at_their_fields(
    hub: HubProcess, log_in: Callable[..., Person], faults: Faults
) -> None:
    faults.allow(r"(status POST|console) \S+/hub/spawn .*400")
    page = log_in(hub.url, "eli", "test-password").page
    choose_image(page, "torch-3")
    # The browser itself would hold back too much.
    page.locator("#spawn_form").evaluate("form => { form.noValidate = true; }")
    more(page).fill("#fgpu-time", "soon")
    expect(refused(page, "time_limit")).to_have_text("'soon' is not hours:minutes such as 2:30")
    expect(page.locator("#fgpu-time")).to_have_attribute("aria-invalid", "true")
    expect(page.locator("#fgpu-time")).to_have_accessible_description(re.compile("^'soon' is not"))
    expect(forecast(page)).to_have_text("To start, change: Time limit.")
    more(page).fill("#fgpu-time", "")
    page.fill("#fgpu-fgpu", "0.1")
    expect(refused(page, "fgpu")).to_contain_text("below the least of 0.2 that PyTorch 2.3 needs")
    expect(refused(page, "time_limit")).to_be_hidden()
    expect(page.locator("#fgpu-time")).not_to_have_attribute("aria-invalid", "true")
    start(page)
    # The Hub says the same, in the form that comes back.
    expect(page.locator(".spawn-error-msg")).to_contain_text("GPU (fGPU): 0.1 is below the least of 0.2")
    expect(refused(page, "fgpu")).to_contain_text("below the least of 0.2 that PyTorch 2.3 needs")
    expect(page.locator("#fgpu-fgpu")).to_have_attribute("aria-invalid", "true")
    expect(page.get_by_role("radio", name="PyTorch 2.3")).to_be_checked()
    expect(page.get_by_role("button", name="Start")).to_be_enabled()


def test_hidden_gpu_fields_do_not_block_the_start(hub: HubProcess, log_in: Callable[..., Person]) -> None:
    page = log_in(hub.url, "kim", "test-password").page
    sendable = "document.getElementById('spawn_form').checkValidity()"
    by_fgpu, by_memory = (page.locator(f"[name=gpu_by][value={way}]") for way in ("fgpu", "memory"))
    page.fill("#fgpu-fgpu", "9")
    more(page)
    by_memory.check()
    more(page).fill("#fgpu-gpu-memory", "256")
    assert page.evaluate(sendable)
    more(page).fill("#fgpu-gpu-memory", "999999")
    assert not page.evaluate(sendable)
    by_fgpu.check()
    page.fill("#fgpu-fgpu", "0.1")
    expect(page.locator("#fgpu-gpu-memory")).to_have_value("999999")
    expect(forecast(page)).to_have_text("Starts now.")
    start(page)
    page.wait_for_url("**/user/kim/**", timeout=START_MS)
    assert hub.sessions()["kim/"].request.gpu_memory_mib is None


def test_pending_limit_is_shown_before_and_after_sending(
    hub: HubProcess, log_in: Callable[..., Person], faults: Faults
) -> None:
    faults.allow(r"(status POST|console) \S+/hub/spawn .*409")
    lea = log_in(hub.url, "lea", "test-password")
    hub.spawn("lea", "first", options={"fgpu": "2", **LITTLE})
    until(lambda: hub.states().get("lea/first") == "PENDING", what="the first waits")
    page = lea.page
    page.goto(lea.link())
    words = "the quota of user 'lea' is 1 requests waiting: 1 wait already, and this would add 1"
    expect(forecast(page)).to_have_text(f"Sessions: {words}.")
    expect(refused(page, "count")).to_have_text(words)
    page.fill("#fgpu-fgpu", "0.1")
    more(page).fill("#fgpu-memory", "0.625")
    start(page)
    expect(page.locator(".spawn-error-msg")).to_contain_text(words)
    expect(refused(page, "count")).to_have_text(words)
    expect(page.locator("#fgpu-fgpu")).to_have_value("0.1")
    expect(page.locator("#fgpu-memory")).to_have_value("0.625")


def test_refused_link_is_shown_in_its_own_form(hub: HubProcess, log_in: Callable[..., Person]) -> None:
    # With scripts the forecast would say it, too.
    mia = log_in(hub.url, "mia", "test-password", java_script_enabled=False)
    page = mia.page
    page.goto(mia.link("other", image="exam", fgpu="77"))
    expect(refused(page, "fgpu")).to_contain_text("77 is more than any machine has")
    expect(page.locator("#fgpu-fgpu")).to_have_value("77")
    # Nothing lists this image.
    expect(page.locator("#fgpu-image-name")).to_have_value("exam")
    page.goto(mia.link())
    expect(refused(page, "fgpu")).to_be_hidden()
    expect(page.locator("#fgpu-fgpu")).not_to_have_value("77")
    expect(page.get_by_role("radio", name="Python 3.11")).to_be_checked()


@pytest.mark.parametrize(
    ("scheme", "screen"), [("light", None), ("dark", NARROW)], ids=["light", "dark narrow"]
)
def test_form_is_accessible(
    hub: HubProcess, log_in: Callable[..., Person], scheme: str, screen: dict[str, int] | None
) -> None:
    # Without motion the page is scrolled at once.
    options = {"color_scheme": scheme, "reduced_motion": "reduce"} | ({"viewport": screen} if screen else {})
    page = log_in(hub.url, "gil", "test-password", **options).page
    expect(forecast(page)).to_contain_text("in the queue")
    check_page(page)
    # With marks, a refusal, the other way to ask for a GPU, and an offer.
    choose_image(page, "torch-3")
    more(page).fill("#fgpu-time", "soon")
    expect(refused(page, "time_limit")).to_be_visible()
    check_page(page)
    more(page).fill("#fgpu-time", "")
    more(page).get_by_label("Exact GPU memory and compute").check()
    page.fill("#fgpu-gpu-memory", "4096")
    expect(page.get_by_role("button", name="Take 0.5 fGPU: starts now")).to_be_visible()
    check_page(page)
    assert not scrolls_sideways(page)
    _focus_is_never_covered(page)


def _focus_is_never_covered(page: Page) -> None:
    """Step through the form with Tab: what has the focus is where it can be seen."""
    page.locator("#fgpu-search").focus()
    deadline = time.monotonic() + 30
    while not page.evaluate("document.activeElement.matches('#spawn_form [type=submit]')"):
        assert time.monotonic() < deadline, "Tab does not reach the button"
        assert page.evaluate(
            """() => {
              const at = document.activeElement.getBoundingClientRect();
              const there = document.elementFromPoint(at.left + at.width / 2, at.top + at.height / 2);
              const foot = document.querySelector(".fgpu-form .foot");
              return foot.contains(document.activeElement) || !foot.contains(there);
            }"""
        ), page.evaluate("document.activeElement.outerHTML")
        page.keyboard.press("Tab")
