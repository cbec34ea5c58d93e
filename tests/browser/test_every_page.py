"""Every page of the service and of the Hub that is ours, for a user and for an administrator, full of hostile texts:
nothing of them becomes a part of a page, axe-core and the console find nothing, and a phone need not scroll sideways."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import quote

import pytest
from axe import check_page
from hostile import CATALOGUE, IN_A_FILE, MARK, NAME, ONE, TEXT, Planted, plant, turned
from playwright.sync_api import Page, expect
from tornado.routing import PathMatches, Rule
from tornado.web import RequestHandler

from fgpuspawner.service import app, navigation
from fgpuspawner.service.pages.base import NoPage, PageHandler
from hubprocess import HubProcess, until
from steps import Person, scrolls_sideways
from watching import Faults

pytestmark = pytest.mark.timeout(600)

PREFIX = "/services/fgpu/"
ADMIN = "test-admin-password-0123456789-abcdef"
MINI = Path(__file__).parents[1] / "hub" / "miniserver.py"
WIDE, NARROW = {"width": 1280, "height": 800}, {"width": 390, "height": 844}


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubProcess]:
    folder = tmp_path_factory.mktemp("everypage")
    (folder / "catalogue.toml").write_text(CATALOGUE)
    after = f"c.Spawner.cmd = ['python', {str(MINI)!r}]\n"
    found = HubProcess(folder / "hub", after=after, catalogue=str(folder / "catalogue.toml"))
    try:
        yield found.start()
    finally:
        found.close()


def routes() -> Iterator[tuple[str, type[PageHandler]]]:
    """Yield each address pattern that answers GET with a page, and its handler."""
    service = SimpleNamespace(prefix=PREFIX)
    for rule in app.make_app(service).wildcard_router.rules:  # type: ignore[arg-type]
        assert isinstance(rule, Rule)
        assert isinstance(rule.matcher, PathMatches)
        handler = rule.target
        if not isinstance(handler, type) or not issubclass(handler, PageHandler) or handler is NoPage:
            continue
        pattern = rule.matcher.regex.pattern.removeprefix(PREFIX).removesuffix("$")
        # Files to download are no pages.
        if handler.get is not RequestHandler.get and not pattern.endswith(".csv"):
            yield pattern, handler


def address(pattern: str, planted: Planted) -> str:
    """Return an address that this pattern leads to a page of."""
    where = {
        "end": planted.running,
        "keep": planted.running,
        "log": planted.running,
        "rename": planted.running,
        "resize": planted.running,
        "save": planted.running,
        "history": planted.ended,
        "private-images": planted.private_image,
        "admin/images": "python",
        "admin/nodes": "drain?node=local",
        "admin/sessions": planted.running,
    }
    group = re.search(r"\(.*?\)", pattern)
    if group is None:
        return pattern
    assert pattern.count("(") == 1, f"{pattern}: say here what stands for each part"
    for start, value in where.items():
        if pattern.startswith(f"{start}/"):
            return pattern.replace(group[0], str(value))
    raise AssertionError(f"{pattern}: say here what stands for {group[0]}")


def test_navigation_entries_are_pages() -> None:
    assert {entry.address for entry in navigation.PAGES} <= {pattern for pattern, _ in routes()}


def look_at(page: Page, where: str, shown: Iterable[str]) -> list[str]:
    """Return the problems of the page at an address, wide and narrow, light and dark."""
    wrong: list[str] = []
    page.goto(where)
    if not re.fullmatch(r".+ \N{EN DASH} .+", page.title()) or "_xsrf" in page.url:
        wrong.append(f"{where} has the title {page.title()!r} and the address {page.url}")
    for size, scheme in product((WIDE, NARROW), ("light", "dark")):
        page.set_viewport_size(size)  # type: ignore[arg-type]
        # Without motion: a fading colour has the contrast of neither end.
        page.emulate_media(color_scheme=scheme, reduced_motion="reduce")  # type: ignore[arg-type]
        try:
            check_page(page)
        except AssertionError as e:
            wrong.append(f"{size['width']} px, {scheme}: {e}")
        if page.get_by_role("main").count() != 1:
            wrong.append(f"{where} has not one main landmark")
        if scrolls_sideways(page):
            wrong.append(f"{where} scrolls sideways at {size['width']} px")
    if page.locator(f"[{MARK}]").count():
        wrong.append(f"{where} has a part that was planted")
    wrong += [f"{where} lets a text turn what follows it: {each}" for each in turned(page)]
    text = page.locator("body").inner_text()
    return wrong + [f"{where} does not show {each}" for each in shown if each not in text]


SHOWN = {
    "": {"admin": [NAME, TEXT], NAME: [IN_A_FILE]},
    "private-images": {NAME: [TEXT]},
    "admin/images": {"admin": [IN_A_FILE]},
    "admin/queue": {"admin": [NAME]},
    "admin/quotas": {"admin": [NAME, TEXT]},
    "admin/usage?by=user": {"admin": [NAME]},
    "admin/usage?by=image": {"admin": [TEXT]},
    "map": {"admin": [NAME]},
    "admin/banner": {"admin": [TEXT, NAME]},
    "admin/audit": {"admin": [NAME, TEXT]},
    "history": {"admin": [NAME, TEXT], NAME: [TEXT]},
}
"""What has to be there to be read, of what was planted."""


OF_THE_HUB = {"spawn": "Start a session", "spawn-pending": "in the queue", "user": "not running"}


def addresses(who: str, planted: Planted) -> Iterator[str]:
    """Yield the addresses of the service's pages and of the Hub's that are ours."""
    for pattern, _ in routes():
        if who == "admin" or not pattern.startswith("admin/"):
            yield PREFIX + address(pattern, planted)
    if who == "admin":
        yield from (PREFIX + other for other in SHOWN if "?" in other)
    user = quote(NAME, safe="")
    yield f"/hub/spawn/{user}/third"
    yield f"/hub/spawn-pending/{user}/second"
    yield f"/hub/user/{user}/third/"
    yield from ("/hub/home", "/hub/token", "/hub/nothing-here")
    if who == "admin":
        yield "/hub/admin"


@pytest.mark.parametrize("who", [NAME, "admin"], ids=["user", "administrator"])
def test_pages_escape_user_text_and_are_accessible(
    hub: HubProcess, log_in: Callable[..., Person], faults: Faults, who: str
) -> None:
    # A local session cannot be saved, and a server that is not running is told with a status.
    faults.allow(r"(status GET|console) \S+/save/\d+ .*409")
    faults.allow(r"(status GET|console) \S+/hub/user/\S+ .*424")
    faults.allow(r"(status GET|console) \S+/hub/nothing-here .*404")
    person = log_in(hub.url, who, ADMIN if who == "admin" else "test-password")
    page, dialogs = person.page, list[str]()
    page.on("dialog", lambda dialog: (dialogs.append(f"{page.url} {dialog.message}"), dialog.dismiss()))
    planted = plant(hub)
    until(lambda: page.goto(f"{hub.url}{PREFIX}").ok, what="the service answers")  # type: ignore[union-attr]
    wrong: list[str] = []
    for path in addresses(who, planted):
        shown = SHOWN.get(path.removeprefix(PREFIX), {}).get(who, [])
        if path.startswith("/hub/"):
            shown = [words for part, words in OF_THE_HUB.items() if path.startswith(f"/hub/{part}/")]
        # The banner is on each page of the service.
        wrong += look_at(page, f"{hub.url}{path}", shown + [TEXT] * path.startswith(PREFIX))
    assert dialogs == []
    assert not wrong, "\n\n".join(wrong)


@pytest.mark.parametrize("server", ["", "later"], ids=["unnamed server", "named server"])
def test_cancelled_owner_reads_the_message_as_text(
    hub: HubProcess, log_in: Callable[..., Person], faults: Faults, server: str
) -> None:
    # The Hub answers with an error status for servers that do not run or no longer exist.
    faults.allow(r"(status GET|console) \S+/hub/spawn-pending/\S+ .*(404|424|500)")
    plant(hub)
    page, dialogs = log_in(hub.url, "ida", "test-password").page, list[str]()
    hub.spawn("ida", server, options={**ONE, "fgpu": "2"})
    until(lambda: hub.states().get(f"ida/{server}") == "PENDING", what="it waits")
    page.on("dialog", lambda dialog: (dialogs.append(dialog.message), dialog.dismiss()))
    page.goto(f"{hub.url}/hub/spawn-pending/ida/{server}".rstrip("/"))
    expect(page.get_by_role("heading", name="Waiting in the queue")).to_be_visible()
    admin = log_in(hub.url, "admin", ADMIN).page
    admin.goto(f"{hub.url}{PREFIX}end/{hub.sessions()[f'ida/{server}'].id}")
    said = "x" * 100 + TEXT + "w" * 100
    admin.get_by_label("Message to ida").fill(said)
    admin.get_by_role("button", name="Cancel the request").click()
    expect(page.locator("body")).to_contain_text(said, timeout=60_000)
    assert page.locator(f"[{MARK}]").count() == 0
    assert turned(page) == []
    page.set_viewport_size(NARROW)  # type: ignore[arg-type]
    assert not scrolls_sideways(page)
    check_page(page)
    assert dialogs == []
