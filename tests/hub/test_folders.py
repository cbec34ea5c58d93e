"""Shared folders of local sessions: linked in the home, shown in the API, and refused once they are withdrawn."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import requests

from hubprocess import HubProcess, until

SMALL = {"fgpu": "0.5", "cpu": "0.5", "memory_mib": 512}


def test_folder_is_in_the_home_and_the_session_says_so(
    make_hub: Callable[..., HubProcess], tmp_path: Path
) -> None:
    (tmp_path / "sets").mkdir()
    (tmp_path / "sets/big.txt").write_text("data")
    sets = {"path": str(tmp_path / "sets"), "mode": "read-write", "at": "data/sets"}
    hub = make_hub(mini=False, after="c.Spawner.notebook_dir = '.'\n", folders={"sets": sets}).start()
    token = hub.add_user("alice")
    hub.spawn("alice", options={**SMALL, "folders": "sets"}, token=token)
    until(lambda: hub.ready("alice"), within_s=120, what="alice's server is ready")
    headers = {"Authorization": f"token {token}"}
    found = requests.get(f"{hub.url}/user/alice/api/contents/data/sets/big.txt", headers=headers, timeout=60)
    assert found.json()["content"] == "data"
    session = hub.sessions()["alice/"]
    assert session.request.folders == ("sets",)
    url = f"{hub.url}/services/fgpu/"
    shown = requests.get(f"{url}api/v1/sessions/{session.id}", headers=headers, timeout=60).json()
    assert shown["session"]["folders"] == [{"name": "sets", "at": "data/sets", "read_only": False}]
    page = hub.browser("alice", leads_to="/services/fgpu/").get(url, timeout=60).text
    assert "Folders: sets (~/data/sets, read and write)" in page
    # The file browser deletes the link, and nothing of the folder.
    gone = requests.delete(f"{hub.url}/user/alice/api/contents/data/sets", headers=headers, timeout=60)
    assert gone.status_code in (204, 400, 500)
    assert (tmp_path / "sets/big.txt").read_text() == "data"


def test_folder_that_is_withdrawn_while_a_request_waits_fails_its_start_in_one_line(
    make_hub: Callable[..., HubProcess], tmp_path: Path
) -> None:
    (tmp_path / "vision").mkdir()
    vision = {"path": str(tmp_path / "vision"), "mode": "read-write", "hub_groups": ["vision"]}
    may_change_groups = 'c.JupyterHub.load_roles[0]["scopes"].append("admin:groups")\n'
    hub = make_hub(service=False, after=may_change_groups, folders={"vision": vision}).start()
    hub.add_user("ann")
    hub.add_user("bob")
    assert hub.api("POST", "groups/vision").status_code == 201
    assert hub.api("POST", "groups/vision/users", json={"users": ["ann"]}).ok
    hub.spawn("bob", options={**SMALL, "fgpu": "2"})
    hub.reach({"bob/": "RUNNING"})
    hub.spawn("ann", options={**SMALL, "folders": ["vision"]})
    hub.reach({"bob/": "RUNNING", "ann/": "PENDING"})
    assert hub.api("DELETE", "groups/vision/users", json={"users": ["ann"]}).ok
    hub.stop("bob")
    ended = until(lambda: hub.store.ended(user="ann", limit=1), what="ann's session has ended")[0]
    assert ended.message == "folder vision is no longer offered to you; start again without it"
    again = hub.refused("ann")
    assert "folders: there is no 'vision'; leave it out" in again.json()["message"]
