"""The image catalogue of a running Hub and its service: changed in the file, and on the administrators' page."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
from bs4 import BeautifulSoup

from hubprocess import MINI, HubProcess, module_world, until

QUICK = "c.JupyterHub.tornado_settings = {'slow_spawn_timeout': 1}\n"
"""A request that has to wait is answered after a second."""
ENTRY = """[[image]]
slug = "{slug}"
name = "{name}"
framework = "python"
version = "3.11"
python = "3"
reference = "lab/{slug}:1"
"""
PYTHON = ENTRY.format(slug="python", name="Python") + "default = true\n"
TORCH = ENTRY.format(slug="torch", name="PyTorch")
MARKUP = "<img src=x onerror=alert(1)>"
PAGE = "admin/images"


class Site:
    """A Hub with a catalogue of its own, in which alice and an administrator have tokens."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "catalogue.toml"
        self.path.write_text(PYTHON + TORCH)
        self.hub = HubProcess(folder / "hub", after=MINI + QUICK, catalogue=str(self.path))
        self.hub.start()
        self.alice, self.admin = self.hub.add_user("alice"), self.hub.add_user("admin")
        until(lambda: self.ask("GET", "health").status_code == 200, what="the service reads the store")

    def ask(self, method: str, path: str, token: str | None = None, **kwargs: Any) -> requests.Response:
        headers = {"Authorization": f"token {token}"} if token else {}
        url = f"{self.hub.url}/services/fgpu/{path}"
        return requests.request(method, url, headers=headers, timeout=30, allow_redirects=False, **kwargs)

    def slugs(self) -> list[str]:
        """Return what the service shows to alice."""
        return [image["slug"] for image in self.ask("GET", "api/v1/images", self.alice).json()["images"]]

    def hub_offers(self, slug: str) -> bool:
        """Return whether the Hub knows the image. Nothing starts: no GPU is so large."""
        answer = self.hub.refused("alice", "never", options={"image": slug, "fgpu": "99"})
        assert answer.status_code >= 400
        return f"there is no '{slug}'" not in answer.text

    def page(self, path: str = PAGE, *, status: int = 200) -> BeautifulSoup:
        answer = self.ask("GET", path, self.admin)
        assert answer.status_code == status, answer.text
        return BeautifulSoup(answer.text, "html.parser")

    def act(self, slug: str, action: str) -> None:
        answer = self.ask("POST", PAGE, self.admin, data={"slug": slug, "action": action})
        assert answer.status_code == 303, answer.text
        assert answer.headers["Location"] == f"/services/fgpu/{PAGE}#image-{slug}"


site = module_world(Site, "images")


@pytest.fixture(autouse=True)
def as_it_was(site: Site) -> Iterator[None]:
    yield
    site.path.write_text(PYTHON + TORCH)
    for slug in ("python", "torch"):
        site.act(slug, "back")
    until(lambda: site.slugs() == ["python", "torch"], what="the service has the file of before")
    until(lambda: site.hub_offers("torch"), what="the Hub has the file of before")


def test_an_image_comes_and_goes_with_the_file_while_hub_and_service_run(site: Site) -> None:
    site.path.write_text(PYTHON + TORCH + ENTRY.format(slug="flow", name="TensorFlow"))
    until(lambda: site.slugs() == ["python", "torch", "flow"], what="the service has the new image")
    until(lambda: site.hub_offers("flow"), what="the Hub has it")
    site.path.write_text(PYTHON)
    until(lambda: site.slugs() == ["python"], what="the service has only one left")
    until(lambda: not site.hub_offers("torch"), what="the Hub does not offer it")


def test_invalid_catalogue_keeps_the_last_good_one(site: Site) -> None:
    site.path.write_text(PYTHON + TORCH.replace('"3.11"', "3.11", 1))
    until(
        lambda: site.ask("GET", "health").json() == {"status": "ok", "catalogue": "last good"},
        what="it is told",
    )
    line = 'image "torch": version: 3.11 cannot be used; write a text of one line'
    assert line in site.page().select_one(".notice.bad").text
    assert site.slugs() == ["python", "torch"]
    until(lambda: line in site.hub.log_text(), what="the Hub logs it")
    assert site.hub_offers("torch")
    # What is done on the page counts all the same.
    site.act("torch", "disable")
    assert site.slugs() == ["python"]
    until(lambda: not site.hub_offers("torch"), what="the Hub does not offer it")


@pytest.mark.parametrize("how", ["disabled", "for others only"])
def test_removed_image_keeps_running_sessions_and_is_shown_to_waiting_owners(site: Site, how: str) -> None:
    hub = site.hub
    whole = {"image": "torch", "fgpu": "2", "cpu": "0.1", "memory_mib": 128}
    assert hub.spawn("alice", "runs", options=whole).status_code in (201, 202)
    until(lambda: hub.ready("alice", "runs"), what="the session runs")
    assert hub.spawn("alice", "waits", options=whole).status_code in (201, 202)
    hub.reach({"alice/runs": "RUNNING", "alice/waits": "PENDING"})
    if how == "disabled":
        site.act("torch", "disable")
    else:
        site.path.write_text(PYTHON + TORCH + 'users = ["zoe"]\n')
    until(lambda: site.slugs() == ["python"], what="the service does not offer it")
    until(lambda: not site.hub_offers("torch"), what="the Hub does not offer it")
    sessions = {
        s["server_name"]: s for s in site.ask("GET", "api/v1/sessions", site.alice).json()["sessions"]
    }
    assert sessions["runs"]["state"] == "RUNNING"
    assert sessions["runs"]["message"] is None
    assert sessions["waits"]["message"].startswith("its image is not in the catalogue any more")
    stream = requests.get(
        f"{hub.url}/hub/api/users/alice/servers/waits/progress",
        headers={"Authorization": f"token {hub.token}"},
        stream=True,
        timeout=60,
    )
    with stream:
        events = (json.loads(line[5:]) for line in stream.iter_lines() if line.startswith(b"data:"))
        told = next(event for event in events if "fgpu" in event)
    assert told["message"].startswith("Its image is not in the catalogue any more")
    assert hub.states() == {"alice/runs": "RUNNING", "alice/waits": "PENDING"}
    # Its turn comes: it is refused, and gives its share back.
    assert hub.stop("alice", "runs").status_code in (202, 204)
    hub.reach({})
    ended = next(s for s in hub.store.ended(user="alice", limit=9) if s.request.server_name == "waits")
    assert (ended.end_cause, ended.message) == ("PULL_FAILED", "there is no image 'torch' any more")


def test_an_entry_is_edited_whole_and_checked_like_the_file(site: Site) -> None:
    form = site.page(f"{PAGE}/torch").select_one("form.entry")
    assert form is not None
    values = {field["name"]: field.get("value", "") for field in form.select("input[type=text]")}
    assert (values["name"], values["reference"], values["minimum.fgpu"]) == ("PyTorch", "lab/torch:1", "")
    values |= {"name": MARKUP, "minimum.fgpu": "0.5", "groups": "lab\nnlp, too", "enabled": "1"}
    bad = site.ask("POST", f"{PAGE}/torch", site.admin, data={**values, "reference": "a; reboot"})
    assert bad.status_code == 400
    page = BeautifulSoup(bad.text, "html.parser")
    assert 'image "torch": reference: "a; reboot" cannot be used' in page.select_one(".notice.bad").text
    assert page.select_one("input[name=name]")["value"] == MARKUP
    assert page.main.find("img") is None
    assert site.ask("POST", f"{PAGE}/torch", site.admin, data=values).status_code == 303
    assert site.slugs() == ["python"], "alice is in neither group"
    page = site.page()
    assert page.main.find("img") is None
    row = page.select_one("#image-torch")
    assert "minimum: fgpu 0.5 (in the file: none)" in row.text
    assert MARKUP in row.select_one("th").text
    assert "for group lab, group nlp, too" in row.text
    # The same form again changes nothing.
    again = site.page(f"{PAGE}/torch").select_one("textarea[name=groups]")
    assert again.text.strip() == "lab\nnlp, too"


def test_image_with_an_impossible_minimum_is_reported_and_not_offered(site: Site) -> None:
    site.path.write_text(PYTHON + TORCH + 'minimum = { fgpu = "40" }\n')
    until(lambda: site.slugs() == ["python"], what="the service does not show it")
    until(lambda: not site.hub_offers("torch"), what="the Hub does not offer it")
    said = site.page().select_one("#image-torch .warning")
    assert said is not None
    assert "minimum.fgpu: 40 is more than the largest GPU has" in said.text


def test_an_action_or_an_image_that_there_is_not_is_an_error(site: Site) -> None:
    assert site.ask("POST", PAGE, site.admin, data={"slug": "torch", "action": "explode"}).status_code == 400
    unknown = site.ask("POST", PAGE, site.admin, data={"slug": MARKUP, "action": "hide"})
    assert unknown.status_code == 400
    assert "there is no image" in unknown.text
    assert MARKUP not in unknown.text
    site.page(f"{PAGE}/none", status=404)
