"""With ``log_format="json"``: one id leads through form, service, scheduler, spawner and engine, also after a restart."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests

from hubprocess import HubProcess, running, until

pytestmark = pytest.mark.timeout(600)

FORGED = 'x\n{"process": "hub", "level": "INFO", "message": "forged"}\r\n[I 2026 forged]'
OF_THE_PROXY = re.compile(r"\d\d:\d\d:\d\d\.\d+ \[ConfigProxy\] ")


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[HubProcess]:
    with running(tmp_path / "hub", runtime="local", log_format="json") as found:
        yield found


def lines(hub: HubProcess) -> list[dict[str, Any]]:
    """Return all lines of Hub and service once the configuration is read; each is an object."""
    said = [line for line in hub.log_text().splitlines() if not OF_THE_PROXY.search(line)]
    first = next(i for i, line in enumerate(said) if line.startswith("{"))
    assert all("app:" in line or "application" in line for line in said[:first]), said[:first]
    return [json.loads(line) for line in said[first:] if line.startswith("{") or "forged" in line]


def of_request(hub: HubProcess, request_id: str) -> list[dict[str, Any]]:
    """Return the lines of one id."""
    return [line for line in lines(hub) if line.get("request_id") == request_id]


def said(found: list[dict[str, Any]], logger: str, words: str, process: str = "hub") -> bool:
    return any(
        line["process"] == process and line["logger"] == logger and re.search(words, line["message"])
        for line in found
    )


def test_no_line_has_the_cookie_that_a_browser_is_known_by(hub: HubProcess) -> None:
    browser = requests.Session()
    browser.get(f"{hub.url}/hub/login", timeout=60)
    fields = {
        "username": "ann",
        "password": "test-password",
        "_xsrf": browser.cookies.get("_xsrf", path="/hub/"),
    }
    browser.post(f"{hub.url}/hub/login?next=/hub/token", data=fields, timeout=60)
    known_by = browser.cookies.get("jupyterhub-session-id")
    assert known_by
    assert "Setting new xsrf cookie for '(not shown)'" in hub.log_text()
    assert known_by not in hub.log_text()


def test_one_id_leads_through_all_of_a_launch(hub: HubProcess) -> None:
    browser = requests.Session()
    assert browser.get(f"{hub.url}/hub/login", timeout=60).ok
    fields = {
        "username": "ann",
        "password": "test-password",
        "_xsrf": browser.cookies.get("_xsrf", path="/hub/"),
    }
    form = browser.post(f"{hub.url}/hub/login?next=/hub/spawn", data=fields, timeout=60).text
    request_id = re.search(r'name="request_id" value="([0-9a-f]{16})"', form)
    ticket = re.search(r'data-ticket="([^"]+)"', form)
    assert request_id
    assert ticket
    asks = {"X-FGPU-Ticket": ticket[1], "X-Request-ID": request_id[1]}
    for _ in range(3):
        answer = browser.get(f"{hub.url}/services/fgpu/api/v1/forecast?fgpu=1", headers=asks, timeout=60)
        assert answer.ok
    sent = {"request_id": request_id[1], "image": "python", "fgpu": "1"}
    xsrf = {"_xsrf": browser.cookies.get("_xsrf", path="/hub/")}
    # What is refused is of the same id, and in one line.
    browser.post(f"{hub.url}/hub/spawn", data=sent | {"image": FORGED}, params=xsrf, timeout=60)
    assert browser.post(f"{hub.url}/hub/spawn", data=sent, params=xsrf, timeout=60).ok
    until(lambda: hub.ready("ann"), within_s=120, what="ann's server")
    found = of_request(hub, request_id[1])
    assert said(found, "JupyterHub", r"200 GET /hub/spawn")
    assert said(found, "JupyterHub", r"POST /hub/spawn")
    asked = [line["message"] for line in found if line["process"] == "service"]
    assert len(asked) == 1, asked
    assert said(found, "fgpuspawner.service.app", r"200 GET \S+forecast", process="service")
    assert said(found, "fgpu.scheduler", r"new -> PENDING")
    assert said(found, "fgpu.scheduler", r"PENDING -> SCHEDULED")
    assert said(found, "fgpu", r"is (not )?verified")
    assert said(found, "fgpu.local", r"is started")
    assert said(found, "fgpu.scheduler", r"-> RUNNING")
    (session_id,) = {line["session_id"] for line in found if "session_id" in line}

    # The session keeps it: over a restart of the Hub, and for whoever ends it.
    hub.kill()
    hub.start()
    token = hub.add_user("ann")
    before = len(found)
    headers = {"Authorization": f"token {token}", "X-Request-ID": "who-ends-it"}
    url = f"{hub.url}/services/fgpu/api/v1/sessions/{session_id}"
    until(lambda: requests.delete(url, headers=headers, timeout=60).status_code == 202, what="the end")
    until(lambda: not hub.sessions(), what="ann's session has ended")
    found = of_request(hub, request_id[1])[before:]
    assert said(found, "fgpu.scheduler", r"RUNNING -> TERMINATING")
    assert {line["session_id"] for line in found} == {session_id}
    asked_for = of_request(hub, "who-ends-it")
    assert said(asked_for, "fgpuspawner.service.app", r"202 DELETE", process="service")
    assert said(asked_for, "JupyterHub", r"DELETE /hub/api/users/ann/server")

    # Nothing in it opens anything, and nobody writes lines of their own.
    text = hub.log_text()
    # JupyterHub names this cookie's value, which logs nobody in.
    cookies = [c.value for c in browser.cookies if c.value and c.name != "jupyterhub-session-id"]
    secrets = [hub.token, token, ticket[1], "test-password", *cookies]
    assert [secret for secret in secrets if secret.strip('"') in text] == []
    assert not any(line["message"] == "forged" for line in lines(hub))


def test_a_users_name_and_options_stay_in_their_lines(hub: HubProcess) -> None:
    name = requests.utils.quote(FORGED.replace("/", ""), safe="")
    hub.api("POST", f"users/{name}")
    hub.add_user("ann")
    hub.api("POST", "users/ann/servers/" + name, json={"user_options": {"image": FORGED, FORGED: 1}})
    hub.spawn("ann", options={"image": FORGED, "fgpu": "1"})
    requests.get(f"{hub.url}/services/fgpu/{name}", headers={"X-Request-ID": FORGED[:1]}, timeout=60)
    until(lambda: any("forged" in line["message"] for line in lines(hub)), what="it is in the log")
    assert not any(line["message"] == "forged" for line in lines(hub))
