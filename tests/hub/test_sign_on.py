"""People log in with accounts of elsewhere, by the lines of docs/log-in.md; their groups decide what they may start."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import requests

from hubprocess import MINI, HubProcess, until
from signon import NOBODY, PASSWORD, Directory, Machine, OpenID, SignOn, make_certificate

SETTINGS = {
    "groups": {"default": {}, "class": {"hub_groups": ["ml101"]}},
    "nodes": [
        {"name": "n1", "cpu": 8, "memory_mib": 16384, "gpus": {"simulated": 1, "memory_mib": 8192}},
        {
            "name": "n2",
            "group": "class",
            "cpu": 8,
            "memory_mib": 16384,
            "gpus": {"simulated": 2, "memory_mib": 8192},
        },
    ],
    "quotas": [{"hub_group": "ml101", "max_sessions": 1}],
}
IN_CLASS = {"group": "class", "fgpu": "0.5"}
KINDS: dict[str, Callable[[Path], SignOn]] = {"openid": OpenID, "ldap": Directory, "pam": Machine}


class Lab:
    """A Hub with accounts in an external directory."""

    def __init__(self, hub: HubProcess, sign_on: SignOn) -> None:
        self.hub = hub
        self.sign_on = sign_on

    def log_in(self, user: str) -> requests.Session:
        browser = self.sign_on.log_in(self.hub, user)
        assert browser is not None, f"{user} may not log in"
        return browser

    def known(self, user: str) -> tuple[set[str], bool]:
        """Return the user's groups in the Hub, and whether the user administers it."""
        model = self.hub.api("GET", f"users/{user}").json()
        return set(model["groups"]), bool(model["admin"])

    def administers(self, token: str) -> bool:
        """Return whether the service takes who has this token for an administrator."""
        url = f"{self.hub.url}/services/fgpu/api/v1/me"
        answer = requests.get(url, headers={"Authorization": f"token {token}"}, timeout=60)
        return answer.status_code == 200 and bool(answer.json()["admin"])

    def refused_in_class(self, user: str, server: str = "") -> bool:
        """Return whether a request for the course's resource group is refused as unknown."""
        message = self.hub.refused(user, server, options=IN_CLASS).json()["message"]
        return message == "group: there is no 'class'; choose one of default"

    def start_in_class(self, user: str, server: str) -> None:
        """Request a session in the course's resource group as a permitted user."""
        assert self.hub.spawn(user, server, options=IN_CLASS).status_code in (201, 202)


def lab_with(kind: str, tmp_path: Path) -> Iterator[Lab]:
    if kind == "ldap" and not Directory.program():
        pytest.skip("slapd is not installed (Debian's packages slapd and ldap-utils)")
    if kind == "pam" and os.geteuid() != 0:
        pytest.skip("only root can give a process accounts of its own")
    (tmp_path / "accounts").mkdir()
    sign_on = KINDS[kind](tmp_path / "accounts")
    settings: dict[str, Any] = SETTINGS
    hub = HubProcess(
        tmp_path / "hub", before=NOBODY + sign_on.before, after=MINI, env=sign_on.env, **settings
    )
    try:
        yield Lab(hub.start(), sign_on)
    finally:
        hub.close()
        sign_on.close()


@pytest.fixture(params=list(KINDS))
def lab(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Lab]:
    yield from lab_with(request.param, tmp_path)


@pytest.fixture
def openid_lab(tmp_path: Path) -> Iterator[Lab]:
    yield from lab_with("openid", tmp_path)


@pytest.fixture
def ldap_lab(tmp_path: Path) -> Iterator[Lab]:
    yield from lab_with("ldap", tmp_path)


def test_groups_and_administrators_are_those_of_the_sign_on(lab: Lab) -> None:
    lab.sign_on.put("alice", "ml101", "members")
    lab.sign_on.put("zoe", "gpu-admins")
    lab.sign_on.put("mallory")
    for user in ("alice", "zoe"):
        lab.log_in(user)
    assert lab.known("alice") == ({"ml101", "members"}, False)
    assert lab.known("zoe") == ({"gpu-admins"}, True)
    assert lab.sign_on.log_in(lab.hub, "mallory") is None
    if not isinstance(lab.sign_on, OpenID):
        assert lab.sign_on.log_in(lab.hub, "alice", "a wrong one") is None
    token = lab.hub.add_user("zoe")
    until(lambda: lab.administers(token), what="the service knows that zoe administers")
    assert lab.refused_in_class("zoe")

    # Both leave.
    lab.sign_on.put("alice", "members")
    lab.sign_on.put("zoe", "members")
    for user in ("alice", "zoe"):
        lab.log_in(user)
    assert lab.known("alice") == ({"members"}, False)
    assert lab.known("zoe") == ({"members"}, False)
    assert lab.refused_in_class("alice")
    until(lambda: not lab.administers(token), what="the token that zoe has administers nothing")


@pytest.mark.slow
def test_quota_counts_group_members_at_submission(lab: Lab) -> None:
    for user in ("alice", "carol"):
        lab.sign_on.put(user, "ml101", "members")
        lab.log_in(user)
    lab.start_in_class("alice", "one")
    lab.hub.reach({"alice/one": "RUNNING"})
    # The group may hold one session, and it stays its session whatever becomes of its owner.
    lab.start_in_class("carol", "two")
    lab.hub.reach({"alice/one": "RUNNING", "carol/two": "PENDING"})
    lab.sign_on.put("alice", "members")
    lab.log_in("alice")
    assert lab.refused_in_class("alice", "three")
    assert lab.hub.sessions()["carol/two"].wait_reason == "QUOTA"
    assert lab.hub.states() == {"alice/one": "RUNNING", "carol/two": "PENDING"}
    assert lab.hub.stop("alice", "one").status_code in (202, 204)
    lab.hub.reach({"carol/two": "RUNNING"})


@pytest.mark.slow
def test_with_openid_connect_a_lost_group_counts_at_the_next_start_without_a_new_log_in(
    openid_lab: Lab,
) -> None:
    lab = openid_lab
    lab.sign_on.put("alice", "ml101", "members")
    browser = lab.log_in("alice")
    lab.sign_on.put("alice", "members")
    assert lab.known("alice")[0] == {"ml101", "members"}
    assert lab.refused_in_class("alice")
    assert lab.known("alice")[0] == {"members"}
    shown = browser.get(f"{lab.hub.url}/hub/home", allow_redirects=False, timeout=60)
    assert shown.headers["Location"] == "/services/fgpu/"


@pytest.mark.slow
def test_pending_request_of_a_forgotten_user_is_resumed_after_a_restart(
    openid_lab: Lab,
) -> None:
    lab, sign_on = openid_lab, openid_lab.sign_on
    assert isinstance(sign_on, OpenID)
    sign_on.put("alice", "ml101", "members")
    lab.log_in("alice")
    lab.start_in_class("alice", "one")
    lab.hub.reach({"alice/one": "RUNNING"})
    lab.start_in_class("alice", "two")
    lab.hub.reach({"alice/one": "RUNNING", "alice/two": "PENDING"})
    sign_on.forget_log_ins("alice")
    lab.hub.terminate()
    lab.hub.start()
    until(lambda: lab.hub.sessions()["alice/two"].wait_reason == "QUOTA", what="the request is held no more")
    lab.hub.stop("alice", "one")
    lab.hub.reach({"alice/two": "RUNNING"})


@pytest.mark.slow
def test_directory_with_another_certificate_refuses_log_ins(ldap_lab: Lab, tmp_path: Path) -> None:
    lab = ldap_lab
    lab.sign_on.put("alice", "members")
    lab.log_in("alice")
    # What the Hub trusts from now on is another one than slapd has.
    make_certificate(tmp_path / "accounts")
    shown = requests.Session()
    shown.get(f"{lab.hub.url}/hub/login", timeout=60)
    sent = {"username": "alice", "password": PASSWORD, "_xsrf": shown.cookies["_xsrf"]}
    answer = shown.post(f"{lab.hub.url}/hub/login", data=sent, allow_redirects=False, timeout=60)
    assert answer.status_code == 500
    assert "CERTIFICATE_VERIFY_FAILED" in lab.hub.log_text()
