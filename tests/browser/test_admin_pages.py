"""The administrators' pages in a real browser, with a real Hub and sessions on a simulated GPU: each page's main path."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
from playwright.sync_api import Page, expect

from hubprocess import HubProcess, until
from steps import Person, scrolls_sideways
from watching import Faults

pytestmark = pytest.mark.timeout(600)

NARROW = {"width": 390, "height": 844}
ADMIN = "test-admin-password-0123456789-abcdef"
MINI = Path(__file__).parents[1] / "hub" / "miniserver.py"


HOSTILE = "<script>alert('x')</script> \u202e" + "long" * 100


class World:
    """A Hub with one GPU of 2 fGPU, and its administrator's token."""

    def __init__(self, folder: Path) -> None:
        self.hub = HubProcess(folder, after=f"c.Spawner.cmd = ['python', {str(MINI)!r}]\n").start()
        self.url = self.hub.url
        self.admin = self.hub.add_user("admin")
        until(lambda: self.ask("me").status_code == 200, what="the service answers")

    def ask(self, path: str, method: str = "GET", body: Any = None) -> requests.Response:
        url = f"{self.url}/services/fgpu/api/v1/{path}"
        headers = {"Authorization": f"token {self.admin}"}

        def answers() -> list[requests.Response]:
            answer = requests.request(method, url, headers=headers, json=body, timeout=60)
            # That its database was busy for a moment is no answer yet.
            return [answer] if answer.status_code != 503 else []

        return until(answers, within_s=90, what="the service answers")[0]

    def state(self, user: str) -> str | None:
        """Return the state of the user's live session, None where there is none."""
        found = [s["state"] for s in self.ask("sessions?all=1").json()["sessions"] if s["user"] == user]
        return found[0] if found else None

    def start(self, user: str, state: str, **options: object) -> None:
        """Start a user's server, and wait until its session is in this state."""
        self.hub.add_user(user)
        self.hub.api("POST", f"users/{user}/servers/one", json=options)
        until(lambda: self.state(user) == state, within_s=90, what=f"{user} is {state}")

    def clear(self) -> None:
        """End every session."""
        for session in self.ask("sessions?all=1").json()["sessions"]:
            self.ask(f"sessions/{session['id']}", "DELETE")
        until(
            lambda: not self.ask("sessions?all=1").json()["sessions"], within_s=90, what="all sessions ended"
        )


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    found: World | None = None
    try:
        found = World(tmp_path_factory.mktemp("adminpages") / "hub")
        yield found
    finally:
        if found is not None:
            found.hub.close()


def open_page(page: Page, world: World, path: str) -> None:
    page.goto(f"{world.url}/services/fgpu/admin/{path}")
    expect(page.get_by_role("heading", level=1)).to_be_visible()


def users(page: Page) -> list[str]:
    """Return the users of waiting requests, in the page's order."""
    return page.locator("main tbody th > bdi").all_inner_texts()


def test_administrator_prioritizes_a_request_and_ends_a_session_with_a_message(
    world: World, log_in: Callable[..., Person]
) -> None:
    world.start("alice", "RUNNING", fgpu=2)
    world.start("bob", "PENDING", fgpu=2)
    world.start("carol", "PENDING", fgpu=2)
    page = log_in(world.url, "admin", ADMIN).page
    open_page(page, world, "queue")
    assert [name for name in users(page) if name in ("bob", "carol")] == ["bob", "carol"]
    row = page.get_by_role("row").filter(has_text="carol")
    row.get_by_role("spinbutton").fill("5")
    row.get_by_role("button", name="Set").click()
    expect(page.locator("main tbody th > bdi").first).to_have_text("carol")
    expect(row.get_by_role("spinbutton")).to_have_value("5")
    page.get_by_role("link", name="Machines").click()
    page.locator(".on-device li").filter(has_text="alice").get_by_role("link", name="End").click()
    page.get_by_label("Message to alice").fill("repair <b>at 15:00</b>")
    page.get_by_role("button", name="End the session").click()
    until(lambda: world.state("carol") == "RUNNING", within_s=90, what="carol's starts")
    assert world.state("bob") == "PENDING"
    open_page(page, world, "queue")
    expect(page.locator("main tbody th > bdi")).to_have_text(["bob"])
    other = page.context.new_page()
    other.goto(f"{world.url}/services/fgpu/")
    other.get_by_role("button", name="End one of carol").click()
    other.get_by_label("Message to its owner").fill("enough")
    other.get_by_role("dialog").get_by_role("button", name="End the session").click()
    until(lambda: world.state("bob") == "RUNNING", within_s=90, what="bob's starts")
    other.close()
    # It follows by itself.
    expect(page.get_by_text("No request waits here.")).to_be_visible(timeout=60_000)
    owner = log_in(world.url, "alice", "test-password").page
    owner.goto(f"{world.url}/services/fgpu/")
    said = "ended by the administrator admin: repair <b>at 15:00</b>"
    expect(owner.get_by_text(said, exact=False).first).to_be_visible()
    open_page(page, world, "audit")
    newest, first, second = page.locator("main tbody tr").all()[:3]
    expect(newest).to_contain_text("enough")
    expect(first).to_contain_text("session.end")
    expect(first).to_contain_text("of alice")
    expect(first).to_contain_text("repair <b>at 15:00</b>")
    expect(second).to_contain_text("session.priority")
    page.get_by_label("Text").fill("0 -> 5")
    page.get_by_role("button", name="Find").click()
    expect(page.locator("main tbody tr")).to_have_count(1)
    world.clear()


def test_node_quota_and_banner_forms_work_without_scripts(
    world: World, log_in: Callable[..., Person], faults: Faults
) -> None:
    page = log_in(world.url, "admin", ADMIN, java_script_enabled=False).page
    open_page(page, world, "nodes")
    expect(page.get_by_text("power and errors are not known")).to_have_count(1)
    expect(page.get_by_text("unknown")).to_have_count(0)
    page.get_by_role("button", name="Cordon local", exact=True).click()
    expect(page.locator(".node .badge").first).to_have_text("CORDONED")
    page.get_by_role("button", name="Uncordon local", exact=True).click()
    expect(page.locator(".node .badge").first).to_have_text("READY")
    page.get_by_label("Reason").fill("the fan <b>is</b> broken")
    page.get_by_role("button", name="Cordon GPU 0 of local", exact=True).click()
    expect(page.locator(".devices")).to_contain_text(
        "CORDONED takes no new sessions: the fan <b>is</b> broken"
    )
    open_page(page, world, "overview")
    gone = page.locator(".problems li").filter(has_text="GPU 0 of local takes no new sessions: the fan")
    gone.get_by_role("link", name="Machines").click()
    page.get_by_role("button", name="Uncordon GPU 0 of local", exact=True).click()
    expect(page.locator(".devices")).not_to_contain_text("CORDONED")

    open_page(page, world, "quotas")
    page.get_by_label("Name; * for each").fill("frank")
    faults.allow(r"(status|console) .*/admin/quotas .*400")
    page.get_by_label("sessions at a time").fill("many")
    page.get_by_role("button", name="Set the quota").click()
    expect(page.get_by_role("alert")).to_contain_text("max_sessions must be a whole number")
    expect(page.get_by_label("Name; * for each")).to_have_value("frank")
    page.get_by_label("sessions at a time").fill("0")
    page.get_by_label("Longest run (hours:minutes)").fill("90")
    page.get_by_role("button", name="Set the quota").click()
    expect(page.get_by_role("alert")).to_contain_text(
        "Longest run: '90' is not hours:minutes from 0:01 to 10000:00, such as 24:00"
    )
    page.get_by_label("Longest run (hours:minutes)").fill("1:30")
    page.get_by_role("button", name="Set the quota").click()
    row = page.get_by_role("row").filter(has_text="user 'frank'")
    expect(row).to_contain_text("0 sessions")
    expect(row).to_contain_text("not in the file")
    row.get_by_role("link", name="Change").click()
    expect(page.get_by_label("Longest run (hours:minutes)")).to_have_value("1:30")
    world.hub.add_user("frank")
    assert "quota of user 'frank'" in world.hub.refused("frank", "one", options={"fgpu": 1}).text
    row.get_by_role("button", name="Remove").click()
    expect(row).to_have_count(0)

    open_page(page, world, "banner")
    page.get_by_label("Text (no markup)").fill(HOSTILE)
    page.get_by_label("Level").select_option("warning")
    page.get_by_role("button", name="Publish").click()
    expect(page.locator(".banner.is-warning")).to_contain_text(HOSTILE)
    person = log_in(world.url, "dora", "test-password", viewport=NARROW)
    person.page.goto(f"{world.url}/services/fgpu/")
    expect(person.page.locator(".banner")).to_contain_text(HOSTILE)
    assert not scrolls_sideways(person.page)
    person.page.goto(f"{world.url}/hub/spawn")
    expect(person.page.get_by_text(HOSTILE[:30], exact=False).first).to_be_visible()
    page.get_by_role("button", name="Remove it").click()
    expect(page.locator(".banner")).to_have_count(0)
