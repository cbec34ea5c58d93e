"""Steps of a user in the browser, and what they see."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from decimal import Decimal

from playwright.sync_api import Locator, Page, expect

from fgpuspawner.service.pages.sessions_view import part_of
from hubprocess import until

START_MS = 90_000
"""How long a session may take to start on a busy machine."""

EXPECT_MS = 30_000
"""What is shown comes within a second. Playwright's own five are too few beside tests that start Hubs and containers."""

END_SESSIONS = """
async () => {
  const live = document.getElementById("live");
  const headers = {"X-XSRFToken": live.dataset.xsrf};
  const api = live.dataset.prefix + "api/v1/sessions";
  const mine = (await (await fetch(api, {headers})).json()).sessions;
  await Promise.all(mine.map((s) => fetch(api + "/" + s.id, {method: "DELETE", headers})));
  return mine.length;
}
"""
WHOLE_GROUP = """
async () => {
  const live = document.getElementById("live");
  const headers = {"X-XSRFToken": live.dataset.xsrf};
  const answer = await fetch(live.dataset.prefix + "api/v1/capacity", {headers});
  if (!answer.ok) { throw new Error(await answer.text()); }
  return (await answer.json()).groups[0].total;
}
"""


@dataclass(frozen=True)
class Person:
    """A logged-in user and their page."""

    name: str
    url: str
    page: Page

    def link(self, server: str = "", **options: object) -> str:
        """Return a link to a server's form, filled in with these options."""
        where = f"/{self.name}/{server}" if server else ""
        query = "&".join(f"opt-{name}={value}" for name, value in options.items())
        return f"{self.url}/hub/spawn{where}" + (f"?{query}" if query else "")

    def new_page(self) -> Page:
        """Open another tab."""
        return self.page.context.new_page()

    def end_all(self) -> None:
        """End every session that is left."""
        page = self.new_page()
        page.goto(f"{self.url}/services/fgpu/")
        until(
            lambda: page.evaluate(END_SESSIONS) == 0, within_s=START_MS / 1000, what="all sessions have ended"
        )
        page.close()


# -- the launch form ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Amounts:
    """Exact amounts of a session or a bar; memory in MiB."""

    fgpu: Decimal
    cpu: Decimal
    memory_mib: Decimal

    def __mul__(self, times: int) -> Amounts:
        return Amounts(self.fgpu * times, self.cpu * times, self.memory_mib * times)


def forecast(page: Page) -> Locator:
    """Return the form's forecast."""
    return page.locator("#fgpu-forecast")


def images(page: Page) -> list[str]:
    """Return the names of the images that the form offers, as they are announced, card by card."""
    found = page.locator(".fgpu-form .version").all_text_contents()
    return [" ".join(name.split()) for name in found]


def choose_image(page: Page, slug: str) -> None:
    """Choose an image by its card."""
    page.locator(f'.fgpu-form [name=image][value="{slug}"]').check()


def about_image(page: Page, slug: str) -> Locator:
    """Return the text on an image's card."""
    return page.locator(f'.fgpu-form .about[data-image="{slug}"]')


def refused(page: Page, name: str) -> Locator:
    """Return the refusal at a field."""
    return page.locator(f"#fgpu-{name}-refused")


def more(page: Page) -> Page:
    """Unfold the fields that the form shows on demand."""
    folded = page.locator("#fgpu-more:not([open]) > summary")
    if folded.count():
        folded.click()
    return page


def start(page: Page) -> None:
    """Press the form's button."""
    page.get_by_role("button", name="Start", exact=True).click()


def start_by(page: Page, link: str) -> None:
    """Follow a link, and press the button of the form that it has filled in."""
    page.goto(link)
    start(page)


def asked_for(page: Page) -> Amounts:
    """Return the values of the form's fields."""
    fgpu, cpu, memory_gib = (
        Decimal(page.locator(f"#fgpu-{name}").input_value()) for name in ("fgpu", "cpu", "memory")
    )
    return Amounts(fgpu, cpu, Decimal(round(memory_gib * 1024)))


def whole_group(page: Page) -> Amounts:
    """Return the first resource group's capacity, as the service shows it to the page's user."""
    total = page.evaluate(WHOLE_GROUP)
    return Amounts(*(Decimal(total[name]) for name in ("fgpu", "cpu", "memory_mib")))


# -- the sessions page --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sessions:
    """The service's page of sessions and resources."""

    page: Page

    @property
    def none(self) -> Locator:
        """The text for a user without sessions."""
        return self.page.get_by_text("You have no session.")

    def row(self, name: str) -> Locator:
        """Return a session's line."""
        head = self.page.locator("th[scope=row]", has_text=re.compile(f"^{re.escape(name)}$"))
        return self.page.locator("table.sessions tbody tr").filter(has=head)

    def state(self, name: str) -> Locator:
        """Return the state in a session's line."""
        return self.row(name).locator(".badge")

    def end(self, name: str) -> None:
        """Press the power button and say yes."""
        self.row(name).get_by_role("button", name=f"End {name}").click()
        dialog = self.page.get_by_role("dialog", name=f"End {name}?")
        expect(dialog).to_contain_text("Its programs stop")
        # Only the owner of another's session is told something.
        expect(dialog.locator("#confirm-told")).to_be_hidden()
        dialog.get_by_role("button", name="End the session").click()
        expect(dialog).to_be_hidden(timeout=60_000)

    def expect_bars(self, own: Amounts, whole: Amounts) -> None:
        """Wait until the bar of each resource shows exactly ``own`` of ``whole``, in words and in length."""
        for name, part, total in (
            ("GPU", own.fgpu, whole.fgpu),
            ("CPU", own.cpu, whole.cpu),
            ("Memory", own.memory_mib, whole.memory_mib),
        ):
            heading = self.page.locator("h3", has_text=re.compile(f"^{name}$"))
            gauge = self.page.locator(".gauge").filter(has=heading)
            words = _words(name, part, total)
            expect(gauge.locator(".bar")).to_have_count(1)
            expect(gauge.locator(".bar-text")).to_have_text(words)
            expect(gauge.locator(".own-text")).to_have_text(words)
            tenths = int(part * 1000 // total)
            length = f"{tenths // 10}.{tenths % 10}"
            if part:
                expect(gauge.locator(".part.mine")).to_have_attribute("width", length)
            else:
                expect(gauge.locator(".part.mine")).to_have_count(0)

    @contextmanager
    def without_reload(self) -> Iterator[None]:
        """Check that the page is not reloaded inside of this block."""
        self.page.evaluate("window.sameDocument = true")
        yield
        assert self.page.evaluate("window.sameDocument") is True, "the page was loaded again"


def _words(name: str, part: Decimal, whole: Decimal) -> str:
    if name == "Memory":
        return part_of(int(part), int(whole), "memory_mib", "GiB")
    return f"{part:f} of {whole:f} {'fGPU' if name == 'GPU' else 'cores'}"


# -- the waiting page, JupyterLab ---------------------------------------------------------------------


def fact(page: Page, name: str) -> Locator:
    """Return the waiting page's value beside this word."""
    return page.locator(f"dt:text-is('{name}') + dd")


def place(page: Page) -> Locator:
    """Return where the waiting page says one's place."""
    return page.locator("#fgpu-place")


def expect_lab(page: Page, user: str, server: str = "") -> None:
    """Wait until the page has become this server's JupyterLab by itself."""
    where = f"/user/{user}/{server}/lab" if server else f"/user/{user}/lab"
    page.wait_for_url(re.compile(re.escape(where)), timeout=START_MS, wait_until="commit")
    try:
        expect(page.locator(".jp-Launcher")).to_be_visible(timeout=START_MS / 3)
    except AssertionError:
        # Containers that come and go change the machine's network, and Chromium then drops what it loads.
        page.reload()
        expect(page.locator(".jp-Launcher")).to_be_visible(timeout=START_MS)


def run_in_notebook(page: Page, code: str, prints: str, *, kernel: str = "") -> Locator:
    """Open a notebook from JupyterLab's launcher, run a cell of code, and return its expected output's element."""
    card = page.locator(".jp-LauncherCard[data-category=Notebook]").first
    expect(card).to_contain_text(kernel)
    card.click()
    expect(page.locator("#jp-bottom-panel")).to_contain_text("| Idle", timeout=START_MS)
    page.locator(".jp-Notebook .cm-content").click()
    page.keyboard.insert_text(code)
    page.keyboard.press("Shift+Enter")
    output = page.locator(".jp-OutputArea-output")
    expect(output).to_contain_text(prints, timeout=START_MS)
    return output


def scrolls_sideways(page: Page) -> bool:
    """Return whether the page is wider than its window."""
    return bool(page.evaluate("document.documentElement.scrollWidth > document.documentElement.clientWidth"))


ASKED = "performance.getEntriesByType('resource').filter((r) => r.name.includes('part=1')).length"


def until_asked(page: Page, times: int = 1) -> None:
    """Wait until a page has asked for its parts this many times; the first time is when its events begin."""
    until(lambda: page.evaluate(ASKED) >= times, what="the page asks what has changed")
