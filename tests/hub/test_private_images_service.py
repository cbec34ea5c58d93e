"""Private images in the service's API and on its pages: who may save, see, name, share and delete them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from bs4 import BeautifulSoup
from test_service import ServiceHub, now_s, run

from fgpu_scheduler import Device, ImageQuota, ImageState, Node, PrivateImages
from hubprocess import module_world, until

JSON = dict[str, Any]


class World:
    """A Hub where users may save sessions: alice runs two, bob one."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        given = {"owners_may_commit": True, "max_private_images": 3, **settings}
        self.hub = ServiceHub(folder, **given)
        store = self.store = self.hub.writable
        self.images = PrivateImages(store)
        gpu = Device("GPU-simulated-local-0", "local", 0, "Simulated GPU", 8192, 2000, simulated=True)
        store.set_nodes([Node("local", "default", 8000, 16384, (gpu,))], now_s=now_s())
        self.alice_runs = run(store, "alice", "", 500)
        self.alice_second = run(store, "alice", "two", 500)
        self.bob_runs = run(store, "bob", "", 500)
        self.hub.start()
        self.alice, self.bob = (self.hub.add_user(name) for name in ("alice", "bob"))
        self.admin = self.hub.add_user("admin")
        until(
            lambda: self.hub.ask("GET", "health", None).status_code == 200, what="the service reads the store"
        )

    def ask(self, method: str, path: str, token: str, status: int, body: Any = None) -> JSON:
        answer = self.hub.ask(method, f"api/v1/{path}", token, json=body)
        assert answer.status_code == status, answer.text
        return dict(answer.json())

    def save(self, session: Any, token: str, name: str, **more: Any) -> JSON:
        return dict(
            self.ask("POST", f"sessions/{session.id}/image", token, 202, {"name": name, **more})["image"]
        )

    def ready(self, image_id: int) -> None:
        """Make it, as the worker does."""
        self.images.begin(image_id, facts="", now_s=now_s())
        self.images.made(
            image_id,
            engines_id="sha256:0",
            size_bytes=3 * 2**20,
            recipe="FROM x\n# <b>recipe</b>\n",
            server_kept=True,
            quota=ImageQuota(),
            now_s=now_s(),
        )

    def offers(self, name: str, token: str) -> None:
        """Wait until the service offers an image: it looks every other second."""

        def offered() -> bool:
            return name in [image["slug"] for image in self.hub.get("images", token)["images"]]

        until(offered, what=f"{name} is offered")

    def forget_all(self) -> None:
        for image in self.images.all():
            if image.state is ImageState.COMMITTING:
                self.images.fail(image.id, "not now", now_s=1)
            self.images.delete(image.id, now_s=1)
            self.images.removed(image.id, now_s=1)


shared = module_world(World, "images")


@pytest.fixture
def world(shared: World) -> Iterator[World]:
    yield shared
    shared.forget_all()


def test_an_owner_saves_their_session_and_is_told_the_full_name(world: World) -> None:
    image = world.save(world.alice_runs, world.alice, "torch-more")
    assert image["name"] == "alice/torch-more:1"
    assert (image["state"], image["mine"], image["asked_by"]) == ("WISHED", True, "alice")
    session = world.hub.get(f"sessions/{world.alice_runs.id}", world.alice)["session"]
    assert session["saving"] == {
        "id": image["id"],
        "name": "alice/torch-more:1",
        "state": "WISHED",
        "message": None,
    }
    found = world.hub.get("private-images", world.alice)
    assert [i["name"] for i in found["images"]] == ["alice/torch-more:1"]
    assert found["quota"] == {"images": 3, "mib": 20480, "images_used": 1, "mib_used": 0}
    world.ready(image["id"])
    world.offers("alice/torch-more:1", world.alice)
    assert world.save(world.alice_runs, world.alice, "torch-more:v2")["name"] == "alice/torch-more:v2"


def test_administrators_are_told_in_red_that_sharing_needs_a_domain_for_each_user(world: World) -> None:
    danger = "their sessions are on the Hub's own domain"
    admin = world.hub.browser("admin")
    for path in ("admin/images", "admin/queue", "admin/audit"):
        assert danger in world.hub.page(admin, path).select(".notice.bad[role=alert]")[0].text
    for page in (world.hub.page(admin, "private-images"), world.hub.page(world.hub.browser("bob"))):
        assert danger not in page.text


def test_only_the_owner_or_an_administrator_saves_a_session(world: World) -> None:
    told = world.ask("POST", f"sessions/{world.alice_runs.id}/image", world.bob, 404, {"name": "torch"})
    assert told["error"]["code"] == "no_such_session"
    image = world.save(world.alice_runs, world.admin, "by-admin")
    assert (image["owner"], image["asked_by"], image["mine"]) == ("alice", "admin", False)
    assert world.hub.get("private-images", world.admin)["images"] == []
    assert len(world.hub.get("private-images?all=1", world.admin)["images"]) == 1
    lines = world.hub.get("admin/audit?action=private-image", world.admin)["lines"]
    said = [(line["actor"], line["action"], line["target"]) for line in lines]
    assert said == [("admin", "private-image.save", f"session {world.alice_runs.id} of alice as by-admin")], (
        "and nothing of what owners do with their own"
    )
    assert world.ask("GET", "private-images?all=1", world.alice, 403)["error"]["field"] == "all"


def test_shared_image_is_visible_to_its_recipients_only(world: World) -> None:
    image = world.save(world.alice_runs, world.alice, "torch")
    world.ready(image["id"])
    path = f"private-images/{image['id']}"
    shared = world.ask("PUT", f"{path}/shares", world.alice, 200, {"users": ["bob"], "groups": ["class"]})
    assert (shared["image"]["shared_users"], shared["image"]["shared_groups"]) == (["bob"], ["class"])
    seen = world.ask("GET", path, world.bob, 200)["image"]
    assert (seen["mine"], seen["can_manage"], seen["shared_users"]) == (False, False, None)
    assert (seen["answer"], seen["accepted_by"], seen["digest"]) == ("offered", None, "sha256:0")
    slugs = {i["slug"] for i in world.hub.get("images", world.bob)["images"]}
    assert image["name"] not in slugs, "nothing is listed to start that was not accepted"
    # A user cannot accept for another user, nor a session for its owner.
    for token in (world.alice, world.admin):
        world.ask("PUT", f"{path}/answer", token, 403, {"accepted": True})
    told = world.ask("PUT", f"{path}/answer", world.bob, 400, {"accepted": "yes"})["error"]
    assert told["message"] == "accepted: must be true or false"
    for accepted, answer in ((True, "accepted"), (False, "declined"), (True, "accepted")):
        said = world.ask("PUT", f"{path}/answer", world.bob, 200, {"accepted": accepted})["image"]
        assert said["answer"] == answer
    assert world.ask("GET", path, world.alice, 200)["image"]["accepted_by"] == ["bob"]
    world.offers(image["name"], world.bob)
    assert world.hub.ask("GET", f"api/v1/{path}/recipe", world.bob).text == "FROM x\n# <b>recipe</b>\n"
    assert world.ask("DELETE", path, world.bob, 403)["error"]["code"] == "forbidden"
    world.ask("PUT", f"{path}/shares", world.alice, 200, {"users": [], "groups": []})
    world.ask("GET", path, world.bob, 404)


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        ({"name": "Torch"}, 400, "such as torch-more"),
        ({"name": "$(id)"}, 400, "cannot be an image's name"),
        ({"name": "n" * 300}, 400, "300 characters; at most"),
        ({"name": "torch", "tag": "t" * 129}, 400, "129 characters; at most 128"),
        ({}, 400, "name: must be a text"),
        ({"name": 5}, 400, "name: must be a text"),
        ({"name": "torch", "owner": "bob"}, 400, "'owner' is unknown"),
        ([], 400, "JSON object"),
    ],
)
def test_invalid_image_name_is_refused_with_a_valid_one(
    world: World, body: Any, status: int, said: str
) -> None:
    told = world.ask("POST", f"sessions/{world.alice_runs.id}/image", world.alice, status, body)["error"]
    assert said in told["message"]


@pytest.mark.parametrize(
    "raw",
    ["[" * 60_000, '{"name": ' + "9" * 5000 + "}", '{"name": ', '"' + "x" * 65536 + '"'],
    ids=["nested", "digits", "broken", "long"],
)
def test_unreadable_body_is_a_bad_request(world: World, raw: str) -> None:
    answer = world.hub.ask("POST", f"api/v1/sessions/{world.alice_runs.id}/image", world.alice, data=raw)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["message"] == "the body must be a JSON object"


def test_pages_save_share_rename_and_delete_without_scripts(world: World) -> None:
    browser = world.hub.browser("alice")
    front = world.hub.page(browser)
    link = front.select_one(f"#save-{world.alice_runs.id}")
    assert link is not None
    form = world.hub.page(browser, f"save/{world.alice_runs.id}")
    assert "The home folder is not saved in it" in form.text
    assert form.select_one("[name=name]")["value"] == "python-saved"  # type: ignore[index]
    assert form.select_one("[name=end][checked]") is None
    then = world.hub.page(browser, f"save/{world.alice_runs.id}?end=1")
    assert then.select_one("[name=end][checked]") is not None
    after = submit_form(world, browser, form, f"save/{world.alice_runs.id}", name="<i>", tag="7", status=400)
    # What was typed stays, and what is wrong with it is said beside it.
    typed = {one["name"]: one.get("value") for one in after.select(".fields input")}
    assert typed == {"name": "<i>", "tag": "7"}
    assert "such as torch-more" in after.select_one(".fields div:has([name=name]) .refused").text
    after = submit_form(world, browser, form, f"save/{world.alice_runs.id}", name="torch")
    assert "alice/torch:1" in after.text
    assert "waits to be made" in after.text
    assert after.select_one("meta[http-equiv=refresh]") is not None
    assert "being saved as alice/torch:1" in world.hub.page(browser).text
    assert world.hub.page(browser).select_one(f"#save-{world.alice_runs.id}") is None
    image = world.images.by_name("alice/torch:1")
    world.ready(image.id)
    listed = world.hub.page(browser, "private-images")
    assert listed.select_one("meta[http-equiv=refresh]") is None
    assert "3 MiB" in listed.text
    assert "Images don't contain your home folder" in listed.text
    recipe = listed.select_one("a[download]")
    assert recipe is not None
    assert "# <b>recipe</b>" in browser.get(f"{world.hub.url}{recipe['href']}", timeout=30).text
    path = f"private-images/{image.id}"
    submit_form(world, browser, listed, f"{path}/share", users="bob, <script>", groups="")
    assert world.images.get(image.id).shared_users == ("bob", "<script>")
    assert "<script>" not in str(world.hub.page(browser, "private-images").select_one("table"))
    submit_form(world, browser, listed, f"{path}/rename", name="vision:v1")
    assert world.images.get(image.id).name == "alice/vision:v1"
    submit_form(world, browser, world.hub.page(browser, f"{path}/delete"), f"{path}/delete")
    assert world.images.get(image.id).state is ImageState.DELETING
    answer = browser.post(f"{world.hub.url}/services/fgpu/{path}/rename", data={"name": "x"}, timeout=30)
    assert answer.status_code == 403, "a form of another site has no XSRF field"


def test_recipient_accepts_or_declines_an_image(world: World) -> None:
    saved = world.save(world.alice_runs, world.alice, "torch")
    world.ready(saved["id"])
    world.ask(
        "PUT", f"private-images/{saved['id']}/shares", world.alice, 200, {"users": ["bob"], "groups": []}
    )
    browser, row, path = (
        world.hub.browser("bob"),
        f"#image-{saved['id']}",
        f"private-images/{saved['id']}/answer",
    )
    page = world.hub.page(browser, "private-images")
    assert "Their programs would run as you" in page.select(".notice")[0].text
    assert "with you, by alice" in " ".join(page.select(row)[0].text.split())
    for answer, word, buttons in (("no", "declined", ["Accept"]), ("yes", "accepted", ["Decline"])):
        page = submit_form(world, browser, page, path, accepted=answer)
        shown = page.select(row)[0]
        assert shown.select(".badge")[0].text == word
        assert [b.contents[0] for b in shown.select("form[action$=answer] button")] == buttons
    assert page.select(".notice") == []
    cross_site = browser.post(f"{world.hub.url}/services/fgpu/{path}", data={"accepted": "yes"}, timeout=30)
    assert cross_site.status_code == 403


def submit_form(
    world: World, browser: Any, page: BeautifulSoup, path: str, *, status: int = 200, **fields: str
) -> BeautifulSoup:
    xsrf = page.select_one("input[name=_xsrf]")
    assert xsrf is not None
    data = {"_xsrf": xsrf["value"], **fields}
    answer = browser.post(f"{world.hub.url}/services/fgpu/{path}", data=data, timeout=30)
    assert answer.status_code == status, answer.text
    return BeautifulSoup(answer.text, "html.parser")


def test_only_administrators_save_if_owners_may_not(tmp_path: Path) -> None:
    world = World(tmp_path, owners_may_commit=False)
    try:
        told = world.ask("POST", f"sessions/{world.alice_runs.id}/image", world.alice, 403, {"name": "torch"})
        assert told["error"]["message"] == "only administrators save sessions as images here"
        assert world.hub.page(world.hub.browser("alice")).select_one(f"#save-{world.alice_runs.id}") is None
        assert world.save(world.alice_runs, world.admin, "torch")["owner"] == "alice"
    finally:
        world.hub.close()
