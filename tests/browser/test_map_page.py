"""The cluster map in a real browser: to scale, anonymous for users, named for administrators, updated."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest
from playwright.sync_api import Locator, Page, expect
from standing import Standing, asked, gpus, standing

from fgpu_scheduler import NodeState
from hubprocess import until
from steps import until_asked

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standing]:
    with standing(tmp_path_factory.mktemp("mappage")) as found:
        found.store.set_nodes([gpus(2), gpus(1, node="spare")], now_s=int(time.time()))
        found.store.set_node_state("spare", NodeState.CORDONED, now_s=int(time.time()))
        yield found.start()


@pytest.fixture(autouse=True)
def nothing_left(service: Standing) -> Iterator[None]:
    yield
    service.end_all()


WIDTHS = """
(card, kind) => {
  const whole = card.querySelector(".slices").getBoundingClientRect().width;
  // Of the shapes, without the lines around them.
  return Array.from(card.querySelectorAll(`rect.${kind}`), (r) => Math.round(100 * r.getBBox().width / whole));
}
"""


def card(page: Page, gpu: str, machine: str = "local") -> Locator:
    own = page.locator(".map-machine").filter(has=page.get_by_role("heading", name=machine))
    return own.locator(".gpu").filter(has_text=gpu)


def drawn(page: Page, gpu: str, kind: str) -> list[int]:
    """Return the widths of a GPU's slices of one kind, in percent of the drawing as it stands on the screen."""
    found: list[int] = card(page, gpu).evaluate(WIDTHS, kind)
    return found


def busy(service: Standing) -> tuple[int, ...]:
    """Fill two GPUs of 2 fGPU and queue two requests; return the ids."""
    found = service.run(
        [
            asked("ann", "mine", 500),
            asked("ben", "secret-name", 1500),
            asked("ben", "other", 1700),
            asked("cy", "first", 1000),
            asked("ann", "second", 2000),
        ]
    )
    return tuple(session.id for session in found)


def test_map_shows_own_slices_and_only_sizes_of_others(
    service: Standing, open_as: Callable[..., Page]
) -> None:
    busy(service)
    page = open_as(service, "ann", "map")
    expect(page.get_by_role("link", name="Cluster map")).to_have_attribute("aria-current", "page")
    # The planner chooses each session's GPU.
    full, other = (
        ("GPU 0", "GPU 1") if card(page, "GPU 0").locator("rect.mine").count() else ("GPU 1", "GPU 0")
    )
    assert (drawn(page, full, "mine"), drawn(page, full, "other")) == ([25], [75])
    assert (drawn(page, other, "other"), drawn(page, other, "free")) == ([85], [15])
    image = card(page, full).get_by_role("img")
    expect(image).to_have_attribute(
        "aria-label", f"{full} of local: 0.5 fGPU your mine, 1.5 fGPU another user's"
    )
    expect(page.locator(".facts")).to_contain_text("0.3 fGPU is free, in one piece. 2 fGPU is unavailable.")
    assert "secret-name" not in page.content()
    assert "ben" not in page.locator("main").inner_text()
    blocks = page.locator(".block")
    expect(blocks).to_have_count(2)
    expect(blocks.first).to_contain_text("1st 1 fGPU")
    expect(blocks.last).to_contain_text("your second")
    expect(page.locator(".map-queue")).to_contain_text(
        "starts at once if one of these ends: a session with 1.5 fGPU on"
    )


def test_map_updates_and_keeps_the_table_open(service: Standing, open_as: Callable[..., Page]) -> None:
    ids = busy(service)
    page = open_as(service, "cy", "map")
    page.get_by_text("The same as a table").click()
    expect(page.locator("rect.mine")).to_have_count(1 + 1)  # The key's, and the block of the one that waits.
    service.end(ids[1])
    service.place()
    expect(page.locator(".gpu rect.mine")).to_have_count(1)
    expect(page.locator(".block")).to_have_count(1)
    expect(page.get_by_role("table", name="GPUs of default")).to_contain_text("1 fGPU your first")
    service.store.set_node_state("spare", NodeState.READY, now_s=int(time.time()))
    expect(page.locator(".map-machine.cordoned")).to_have_count(0)
    service.store.set_node_state("spare", NodeState.CORDONED, now_s=int(time.time()))
    expect(page.locator(".map-machine.cordoned")).to_have_count(1)


def test_unchanged_map_is_not_redrawn(service: Standing, open_as: Callable[..., Page]) -> None:
    # Without waiting requests: a shown start time could change with the minute.
    found = service.run([asked("ann", "mine", 500), asked("ben", "secret-name", 1500)])
    ids = [session.id for session in found]
    page = open_as(service, "ben", "map")
    page.evaluate("document.querySelector('.slices').drawnBefore = true")
    until_asked(page)
    service.store.warn(ids[1], "nothing that the map shows", now_s=int(time.time()))
    expect(page.locator("#said")).to_have_text("secret-name: RUNNING")
    until_asked(page, 2)
    assert page.evaluate("document.querySelector('.slices').drawnBefore") is True
    service.end(ids[1])
    until(
        lambda: not page.evaluate("document.querySelector('.slices').drawnBefore"), what="it is drawn again"
    )
