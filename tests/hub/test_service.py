"""The service process against a real Hub and its proxy; the scheduler's database is filled by the test itself."""

from __future__ import annotations

import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import requests
from bs4 import BeautifulSoup

from fgpu_scheduler import Device, EndCause, Node, Policy, Request, Session, SessionState, Store, plan
from fgpuspawner.engines.base import Capabilities
from fgpuspawner.settings import FGPU
from hubprocess import ROOT, HubProcess, free_ports, module_world, until

S = SessionState
MARKUP = "<img src=x onerror=alert(1)>"

CONFIG = """
import os
from jupyterhub.spawner import SimpleLocalProcessSpawner
from fgpuspawner import config
from fgpuspawner.engines.base import Capabilities
from fgpuspawner.settings import FGPU

c = get_config()  # noqa: F821
c.JupyterHub.bind_url = "http://127.0.0.1:{port}"
c.JupyterHub.hub_port = {port} + 1
c.JupyterHub.db_url = "sqlite:///{folder}/jupyterhub.sqlite"
c.JupyterHub.cookie_secret_file = "{folder}/cookie_secret"
c.ConfigurableHTTPProxy.pid_file = "{folder}/proxy.pid"
c.ConfigurableHTTPProxy.api_url = "http://127.0.0.1:{port_of_proxy}"
c.ConfigurableHTTPProxy.command = [{proxy!r}]
c.ConfigurableHTTPProxy.auth_token = "{token}"
c.JupyterHub.authenticator_class = "shared-password"
c.SharedPasswordAuthenticator.user_password = "test-password"
c.SharedPasswordAuthenticator.admin_password = "test-admin-password-0123456789-abcdef"
c.Authenticator.admin_users = {{"admin"}}
c.Authenticator.allow_all = True
c.JupyterHub.allow_named_servers = True
c.JupyterHub.services = [{{"name": "test", "api_token": "{token}"}}, {{"name": "bare", "api_token": "{token}-bare"}}]
c.JupyterHub.load_roles = [
    {{"name": "test", "services": ["test"], "scopes": ["admin:users", "admin:servers", "tokens", "access:services"]}},
]
c.JupyterHub.tornado_settings = {{"slow_spawn_timeout": 2}}
c.Spawner.server_token_scopes = [
    "users:activity!user", "access:servers!server", "read:servers!server", config.ACCESS, config.QUEUE_READ,
    "delete:servers!user",
]

class Noted(SimpleLocalProcessSpawner):
    '''Notes every start; no scheduler is behind it, so that the test alone decides what the store says.'''

    async def start(self):
        with open("{folder}/starts", "a") as notes:
            notes.write(f"{{self.user.name}}/{{self.name}}\\n")
        return await super().start()

    def get_env(self):
        env = super().get_env()
        with open(f"{folder}/token-{{self.user.name}}-{{self.name}}", "w") as note:
            note.write(env["JUPYTERHUB_API_TOKEN"])
        return env

c.JupyterHub.spawner_class = Noted
c.Spawner.cmd = ["python", {mini!r}]
c.SimpleLocalProcessSpawner.home_dir_template = "{folder}/home-{{username}}"
# The service as it really is wired, without the scheduler that would act on what the test writes.
able = Capabilities("containers", own_root=True, saves_images=True)
config._use_service(c, FGPU.from_json({settings!r}).checked(), able)
"""


class ServiceHub(HubProcess):
    """A Hub with the service, but with no scheduler."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        super().__init__(folder)
        self.fgpu = FGPU(data_dir=str(folder), service_port=self.port + 3, **settings)
        self.writable = Store(self.fgpu.database_url())
        self.writable.open()

    def write_config(self) -> Path:
        path = self.folder / "jupyterhub_config.py"
        path.write_text(
            CONFIG.format(
                port=self.port,
                port_of_proxy=self.port + 2,
                proxy=str(ROOT / ".node/node_modules/.bin/configurable-http-proxy"),
                token=self.token,
                folder=self.folder,
                mini=str(Path(__file__).parent / "miniserver.py"),
                settings=self.fgpu.to_json(),
            )
        )
        return path

    def close(self) -> None:
        super().close()
        self.writable.close()

    def ask(self, method: str, path: str, token: str | None, **kwargs: Any) -> requests.Response:
        """Ask the service through the proxy."""
        headers = {"Authorization": f"token {token}"} if token else {}
        headers |= kwargs.pop("headers", {})
        url = f"{self.url}/services/fgpu/{path}"
        return requests.request(method, url, headers=headers, timeout=30, allow_redirects=False, **kwargs)

    def get(self, path: str, token: str | None, *, status: int = 200) -> Any:
        """Return the JSON of an answer that has this status."""
        answer = self.ask("GET", f"api/v1/{path}", token)
        assert answer.status_code == status, answer.text
        return answer.json()

    def page(self, browser: requests.Session, path: str = "", *, status: int = 200) -> BeautifulSoup:
        """Return a page of the service, after the log-in that the browser is sent through."""
        answer = browser.get(f"{self.url}/services/fgpu/{path}", timeout=30)
        assert answer.status_code == status, answer.text
        return BeautifulSoup(answer.text, "html.parser")


def now_s() -> int:
    return int(time.time())


def submit(store: Store, user: str, server: str, fgpu_milli: int, **kwargs: Any) -> Session:
    """Queue one request."""
    asked = Request(
        user,
        server,
        kwargs.pop("image", "python"),
        kwargs.pop("group", "default"),
        fgpu_milli,
        cpu_milli=1000,
        memory_mib=1024,
    )
    return store.submit([asked], now_s=kwargs.pop("now_s", now_s()), **kwargs)[0]


def place(store: Store) -> None:
    """Give shares to all who fit, as the scheduler would."""
    store.commit(plan(store.snapshot(now_s()), Policy()), now_s=now_s())


def run(store: Store, user: str, server: str, fgpu_milli: int, **kwargs: Any) -> Session:
    """Queue one request that fits, and take it to RUNNING."""
    session = submit(store, user, server, fgpu_milli, **kwargs)
    place(store)
    store.move(session.id, S.PREPARING, now_s=now_s())
    return store.move(session.id, S.RUNNING, now_s=now_s())


def end(store: Store, session: Session) -> None:
    """End a session, wherever it is."""
    current = store.session(session.id)
    assert current is not None
    if current.state in (S.PENDING, S.SCHEDULED):
        store.move(session.id, S.CANCELLED, now_s=now_s(), cause=EndCause.USER)
    elif current.ended_at_s is None:
        store.move(session.id, S.TERMINATING, now_s=now_s(), cause=EndCause.USER)
        store.move(session.id, S.TERMINATED, now_s=now_s())


class World:
    """A Hub, its users' tokens, and the sessions that every test finds.

    One GPU of 2 fGPU in group "default": alice runs 0.5, bob 1; alice waits for 1, bob for 1.
    """

    def __init__(self, folder: Path) -> None:
        self.hub = ServiceHub(folder)
        self.store = self.hub.writable
        gpu = Device("GPU-simulated-local-0", "local", 0, "Simulated GPU", 8192, 2000, simulated=True)
        self.store.set_nodes([Node("local", "default", 8000, 16384, (gpu,))], now_s=now_s())
        self.alice_runs = run(self.store, "alice", "", 500)
        self.bob_runs = run(self.store, "bob", "", 1000)
        self.alice_waits = submit(self.store, "alice", "gpu-2", 1000)
        self.bob_waits = submit(self.store, "bob", "b2", 1000)
        place(self.store)
        self.hub.start()
        self.alice = self.hub.add_user("alice")
        self.bob = self.hub.add_user("bob")
        self.carol = self.hub.add_user("carol")
        self.admin = self.hub.add_user("admin")
        until(
            lambda: self.hub.ask("GET", "health", None).status_code == 200, what="the service reads the store"
        )

    @contextmanager
    def another(self, session: Session) -> Iterator[Session]:
        """A session for the time of one test."""
        try:
            yield session
        finally:
            end(self.store, session)


world = module_world(World, "service")


class Stream:
    """An open event stream."""

    def __init__(self, hub: ServiceHub, token: str, *, last: int | None = None) -> None:
        headers = {"Authorization": f"token {token}"}
        if last is not None:
            headers["Last-Event-ID"] = str(last)
        url = f"{hub.url}/services/fgpu/api/v1/events"
        self.answer = requests.get(url, headers=headers, stream=True, timeout=(30, 60))
        self._lines = self.answer.iter_lines(chunk_size=1, decode_unicode=True)

    def next(self) -> tuple[str, int, Any]:
        """Return the next event's name, number and data."""
        found: dict[str, str] = {}
        for line in self._lines:
            name, _, value = line.partition(": ")
            if line == "" and "event" in found:
                return found["event"], int(found["id"]), json.loads(found["data"])
            if name and value:
                found[name] = value
        raise AssertionError("the stream has ended")

    def until(self, state: str) -> list[tuple[str, int, Any]]:
        """Return the events up to the one in which a session has this state."""
        found = []
        while True:
            found.append(self.next())
            if found[-1][0] == "change" and found[-1][2]["session"]["state"] == state:
                return found

    def close(self) -> None:
        self.answer.close()

    def __enter__(self) -> Stream:
        assert self.answer.status_code == 200, self.answer.text
        return self

    def __exit__(self, *args: object) -> None:
        self.close()


# --- Who may call ---


def test_an_administrators_scope_asked_for_by_a_user_is_not_given(world: World) -> None:
    body = {"scopes": ["access:services!service=fgpu", "custom:fgpu:queue:read", "custom:fgpu:admin"]}
    made = world.hub.api("POST", "users/alice/tokens", json=body, token=world.alice)
    token = made.json().get("token", world.alice)
    assert world.hub.get("me", token)["admin"] is False
    assert world.hub.get("sessions?all=1", token, status=403)["error"]["field"] == "all"


def test_errors_of_addresses_and_arguments_are_json_too(world: World) -> None:
    assert world.hub.get("nothing", world.alice, status=404)["error"]["code"] == "not_found"
    assert world.hub.get("sessions?ended=maybe", world.alice, status=400)["error"]["field"] == "ended"
    assert world.hub.get("queue?group=secret", world.alice, status=404)["error"]["code"] == "no_such_group"
    assert world.hub.ask("POST", "api/v1/me", world.alice).json()["error"]["code"] == "method_not_allowed"
    assert world.hub.get("sessions/999999", world.alice, status=404)["error"]["code"] == "no_such_session"
    answer = world.hub.ask("GET", "api/v1/events", world.alice, headers={"Last-Event-ID": "x"})
    assert (answer.status_code, answer.json()["error"]["field"]) == (400, "Last-Event-ID")


def test_me_tells_a_person_from_a_server(world: World) -> None:
    person = world.hub.get("me", world.alice)
    assert person == {
        "user": "alice",
        "admin": False,
        "administers": [],
        "server_name": None,
        "groups": ["default"],
        "banner": None,
        "simulated": True,
    }
    assert world.hub.get("me", world.admin)["admin"] is True
    for server in ("", "n1"):
        assert world.hub.spawn("carol", server).status_code in (201, 202)
        until(lambda server=server: world.hub.ready("carol", server), what="carol's server")
        token = (world.hub.folder / f"token-carol-{server}").read_text()
        found = world.hub.get("me", token)
        assert (found["user"], found["server_name"]) == ("carol", server)
        world.hub.stop("carol", server)


# --- Sessions, queue, capacity ---


def test_images_are_those_that_the_caller_may_start(world: World) -> None:
    found = world.hub.get("images", world.alice)
    (default,) = [i for i in found["images"] if i["default"]]
    assert default["slug"] == "python"
    assert (default["python"], default["icon"], default["private"]) == ("3", "snake", False)
    nothing = {"fgpu": None, "gpu_memory_mib": None, "cpu": None, "memory_mib": None}
    assert (default["minimum"], default["recommended"]) == (nothing, nothing)
    assert "reference" not in default


# --- The event stream ---


def test_a_change_arrives_and_a_broken_stream_resumes_after_the_last_event(world: World) -> None:
    with Stream(world.hub, world.alice) as stream:
        name, first, about = stream.next()
        assert (name, about["simulated"]) == ("queue", True)
        ran = run(world.store, "alice", "streamed", 100)
        seen = stream.until("RUNNING")
        assert seen[-1][2]["session"]["id"] == ran.id
    ids = [number for _, number, _ in seen]
    assert ids == sorted(ids)
    assert ids[0] > first
    with world.another(ran):
        pass
    with Stream(world.hub, world.alice, last=ids[-1]) as resumed:
        name, number, data = resumed.next()
    assert (name, data["session"]["id"], data["session"]["state"]) == ("change", ran.id, "TERMINATED")
    assert number > ids[-1]


def test_too_many_streams_of_one_user_are_refused_and_a_closed_one_makes_room(world: World) -> None:
    streams = [Stream(world.hub, world.carol) for _ in range(10)]
    try:
        assert [s.answer.status_code for s in streams] == [200] * 10
        refused = world.hub.get("events", world.carol, status=429)
        assert refused["error"]["code"] == "too_many_streams"
        with Stream(world.hub, world.bob):
            pass  # Others are not affected.
        streams.pop().close()

        def again() -> bool:
            stream = Stream(world.hub, world.carol)
            streams.append(stream)
            return stream.answer.status_code == 200

        until(again, what="there is room again")
    finally:
        for stream in streams:
            stream.close()


# --- Ending ---


def test_ending_goes_through_the_hub_with_the_callers_own_rights(world: World) -> None:
    hub = world.hub
    assert hub.spawn("alice", "mine").status_code in (201, 202)
    until(lambda: hub.ready("alice", "mine"), what="alice's server")
    with world.another(run(world.store, "alice", "mine", 100)) as ran:
        refused = hub.ask("DELETE", f"api/v1/sessions/{ran.id}", world.bob)
        # The Hub does not let on that bob may not: to him there is no such server.
        assert (refused.status_code, refused.json()["error"]["code"]) == (404, "no_such_session")
        assert hub.ready("alice", "mine")
        ended = hub.ask("DELETE", f"api/v1/sessions/{ran.id}", world.alice)
        assert (ended.status_code, ended.json()["session"]["id"]) == (202, ran.id)
        until(lambda: not hub.ready("alice", "mine"), what="the Hub has stopped it")
    again = hub.ask("DELETE", f"api/v1/sessions/{ran.id}", world.alice)
    assert (again.status_code, again.json()["error"]["code"]) == (409, "already_ended")
    assert hub.ask("DELETE", "api/v1/sessions/999999", world.alice).status_code == 404


def test_a_write_with_a_cookie_needs_the_token_against_forgery(world: World) -> None:
    hub = world.hub
    assert hub.spawn("alice", "cookie").status_code in (201, 202)
    until(lambda: hub.ready("alice", "cookie"), what="alice's server")
    browser = hub.browser("alice")
    with world.another(run(world.store, "alice", "cookie", 100)) as ran:
        live = hub.page(browser).find(id="live")
        assert live is not None
        url = f"{hub.url}/services/fgpu/api/v1/sessions/{ran.id}"
        forged = browser.delete(url, timeout=30)
        assert (forged.status_code, forged.json()["error"]["code"]) == (403, "xsrf")
        posted = browser.post(f"{hub.url}/services/fgpu/end/{ran.id}", timeout=30)
        assert posted.status_code == 403
        assert hub.ready("alice", "cookie")
        # Without scripts: the question first, then its form.
        form = hub.page(browser, f"end/{ran.id}").find("input", {"name": "_xsrf"})
        assert form is not None
        sent = browser.post(
            f"{hub.url}/services/fgpu/end/{ran.id}",
            data={"_xsrf": form["value"]},
            allow_redirects=False,
            timeout=30,
        )
        assert (sent.status_code, sent.headers["Location"]) == (303, "/services/fgpu/")
        until(lambda: not hub.ready("alice", "cookie"), what="the Hub has stopped it")
        # And with them: the header.
        accepted = browser.delete(url, headers={"X-XSRFToken": live["data-xsrf"]}, timeout=30)
        assert accepted.status_code == 202, accepted.text


# --- The page ---


def test_the_page_shows_sessions_bars_and_queue(world: World) -> None:
    page = world.hub.page(world.hub.browser("alice"))
    rows = page.select("table.sessions tbody tr")
    assert [row.select_one(".badge").text for row in rows] == ["RUNNING", "PENDING"]
    runs, waits = rows
    assert "0.5 fGPU" in runs.text
    assert "2 GiB" in runs.text
    assert runs.select_one(f"#open-{world.alice_runs.id}")["href"] == "/user/alice/"
    assert "Next in the queue" in waits.text
    assert "No request is ahead" in waits.select_one("details").text
    assert "1 fGPU is not free, only 0.5 is" in waits.text
    assert waits.select_one("form.power button").text.startswith("Cancel")
    assert waits.select_one(f"#wait-{world.alice_waits.id}")["href"] == "/hub/spawn-pending/alice/gpu-2"
    gauges = [[bar.text for bar in gauge.select(".bar-text")] for gauge in page.select(".gauge")]
    assert gauges == [["1.5 of 2 fGPU"], ["2 of 8 cores"], ["2 of 16 GiB"]]
    assert [own.text for own in page.select(".own-text")] == ["0.5 of 1 fGPU", "1 of 7 cores", "1 of 15 GiB"]
    assert page.select_one(".gauge .part.mine")["width"] == "25.0"
    assert page.select_one("#new")["href"] == "/hub/spawn/alice/gpu-1"
    assert "Simulated GPUs" in page.text
    assert page.select_one("p.facts strong").text == "2"
    assert "bob" not in page.text


def test_only_the_owner_renames_a_session_and_its_address_stays(world: World) -> None:
    with world.another(run(world.store, "alice", "calc", 100)) as session:
        where = f"api/v1/sessions/{session.id}"

        def renamed(name: object, token: str) -> Any:
            return world.hub.ask("PATCH", where, token, json={"name": name})

        assert (
            renamed("<i>night</i> run", world.alice).json()["session"]["display_name"] == "<i>night</i> run"
        )
        assert world.hub.get(f"sessions/{session.id}", world.alice)["session"]["url"] == "/user/alice/calc/"
        for name in ("", "x" * 61, "a\u202eb", None):
            assert renamed(name, world.alice).json()["error"]["field"] == "name"
        assert renamed("mine", world.bob).status_code == 404
        assert renamed("mine", world.admin).status_code == 403
        assert "night" not in world.hub.page(world.hub.browser("bob")).text
        row = world.hub.page(world.hub.browser("admin")).select_one(f"#session-{session.id} th")
        assert row.text == "<i>night</i> run"
    assert renamed("late", world.alice).json()["error"]["code"] == "already_ended"


def test_names_with_markup_stay_text(world: World) -> None:
    browser = world.hub.browser("alice")
    with world.another(submit(world.store, "alice", MARKUP, 1000, image=MARKUP)) as waits:
        answer = browser.get(f"{world.hub.url}/services/fgpu/", timeout=30)
        page = BeautifulSoup(answer.text, "html.parser")
        assert page.select_one("img:not(.logo)") is None
        assert page.select_one(f"#session-{waits.id} th").text.strip() == MARKUP
        shown = world.hub.get(f"sessions/{waits.id}", world.alice)["session"]
        assert "<" not in shown["url"]
        question = world.hub.page(browser, f"end/{waits.id}")
        assert question.select_one("img:not(.logo)") is None
    policy = answer.headers["Content-Security-Policy"]
    assert "script-src 'self'" in policy
    assert "unsafe" not in policy
    assert all(script.get("src") for script in page.find_all("script"))
    assert not page.find_all(style=True)


def test_browser_without_log_in_is_redirected_to_the_hub(world: World) -> None:
    answer = world.hub.ask("GET", "", None)
    assert answer.status_code == 302
    assert answer.headers["Location"].startswith("/hub/api/oauth2/authorize?")


# --- When parts fail ---


def test_a_lost_store_is_an_error_and_never_an_empty_list(world: World) -> None:
    hub = world.hub
    browser = hub.browser("alice")
    assert len(hub.page(browser).select("table.sessions tbody tr")) == 2
    database = hub.folder / "fgpu.sqlite"

    def rename(old: str, new: str) -> None:
        with sqlite3.connect(database) as connection:
            connection.execute(f"ALTER TABLE {old} RENAME TO {new}")
        connection.close()

    rename("fgpu_meta", "lost")
    try:
        for path in ("me", "sessions", "queue", "capacity", "forecast?fgpu=0.5", "images", "events"):
            assert hub.get(path, world.alice, status=503)["error"]["code"] == "store_unavailable"
        page = hub.page(browser, status=503)
        assert "not up to date" in page.text
        assert re.search(r"read \d+ seconds ago", page.text)
        assert len(page.select("table.sessions tbody tr")) == 2
        rename("fgpu_events", "lost_events")
        assert hub.ask("GET", "health", None).status_code == 503
        rename("lost_events", "fgpu_events")
    finally:
        rename("lost", "fgpu_meta")
    # For half a second it keeps what it knows.
    until(lambda: hub.ask("GET", "health", None).json() == {"status": "ok"}, what="its health is good again")
    until(lambda: hub.ask("GET", "api/v1/me", world.alice).status_code == 200, what="alice is answered")
    assert len(hub.get("sessions", world.alice)["sessions"]) == 2


def test_held_requests_are_resumed_in_queue_order(world: World) -> None:
    hub, store = world.hub, world.store
    for user in ("r1", "r2", "r3"):
        hub.add_user(user)
    began = now_s()
    # Later ids have waited longer; the Hub has no user "stranger".
    held = [
        submit(store, user, server, 2000, held=True, now_s=began - waited)
        for user, server, waited in (
            ("r3", "n", 100),
            ("r2", "", 200),
            ("stranger", "", 400),
            ("r1", "", 300),
        )
    ]
    try:

        def asked() -> list[str]:
            notes = hub.folder / "starts"
            lines = notes.read_text().split() if notes.exists() else []
            return [line for line in lines if line[0] == "r"]

        until(lambda: len(asked()) == 3, what="the Hub was asked for all three")
        assert asked() == ["r1/", "r2/", "r3/n"]
        until(
            lambda: "(stranger/): the Hub does not spawn it again: 404" in hub.log_text(), what="it is logged"
        )
        shown = hub.get("sessions?all=1", world.admin)["sessions"]
        assert {s["wait_reason"] for s in shown if s["user"][0] == "r"} == {"HELD"}
        refused = hub.ask("DELETE", f"api/v1/sessions/{held[0].id}", world.admin)
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "held")
    finally:
        for session in held:
            end(store, session)
        for user, server in (("r1", ""), ("r2", ""), ("r3", "n")):
            hub.stop(user, server)
    assert hub.log_text().count("(stranger/)") == 1


def test_the_log_holds_no_tokens(world: World) -> None:
    text = world.hub.log_text()
    assert "Connected to the scheduler's database" in text
    for token in (world.alice, world.bob, world.carol, world.admin):
        assert token not in text
    # The servers of the test's users write to the same log.
    assert f'File "{ROOT}/fgpuspawner' not in text


# --- The process itself ---


def service_process(folder: Path, **changes: str) -> subprocess.Popen[str]:
    """Start the service by itself, as a Hub would that is not there."""
    port = free_ports(1)
    env = {k: v for k, v in os.environ.items() if not k.startswith("JUPYTERHUB")}
    env |= {
        "FGPU_SETTINGS": FGPU(data_dir=str(folder), service_port=1).to_json(),
        "FGPU_ENGINE": Capabilities("local processes").to_json(),
        "JUPYTERHUB_API_TOKEN": "a-token",
        "FGPU_FORECAST_KEY": "00" * 32,
        "JUPYTERHUB_API_URL": f"http://127.0.0.1:{free_ports(1)}/hub/api",
        "JUPYTERHUB_CLIENT_ID": "service-fgpu",
        "JUPYTERHUB_SERVICE_NAME": "fgpu",
        "JUPYTERHUB_SERVICE_PREFIX": "/services/fgpu/",
        "JUPYTERHUB_SERVICE_URL": f"http://127.0.0.1:{port}",
    }
    env |= changes
    process = subprocess.Popen(
        [sys.executable, "-m", "fgpuspawner.service"], env=env, stderr=subprocess.PIPE, text=True, cwd=ROOT
    )
    process.url = env["JUPYTERHUB_SERVICE_URL"] + "/services/fgpu/"  # type: ignore[attr-defined]
    return process


def health(process: subprocess.Popen[str]) -> int | None:
    try:
        return requests.get(process.url + "health", timeout=10).status_code  # type: ignore[attr-defined]
    except (requests.ConnectionError, requests.Timeout):
        return None


def test_the_service_waits_for_the_database_and_ends_when_told_to(tmp_path: Path) -> None:
    process = service_process(tmp_path)
    try:
        until(lambda: health(process) == 503, what="it listens where the Hub says, without a database")
        store = Store(f"sqlite:///{tmp_path}/fgpu.sqlite")
        store.open()
        store.close()
        until(lambda: health(process) == 200, what="it has found the database")
        answer = requests.get(
            process.url + "api/v1/me",  # type: ignore[attr-defined]
            headers={"Authorization": "token abc"},
            timeout=60,
        )
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "hub_unavailable")
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0, said
    assert "does not exist yet" in said
    assert "Ended" in said
    assert "a-token" not in said
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"FGPU_SETTINGS": "{"}, "FGPU_SETTINGS is not JSON"),
        ({"FGPU_SETTINGS": '{"max_sessions": "many"}'}, "FGPU_SETTINGS does not fit"),
        ({"FGPU_SETTINGS": '{"fgpu_step": "0"}'}, "c.FGPU.fgpu_step is 0"),
        ({"FGPU_SETTINGS": '{"db_url": "mysql://u:hush@h/d"}'}, "the database may be SQLite or PostgreSQL"),
        ({"FGPU_ENGINE": "{}"}, "FGPU_ENGINE does not fit"),
        ({"JUPYTERHUB_API_TOKEN": ""}, "JUPYTERHUB_API_TOKEN is not set"),
        # With an empty key every client could sign tickets.
        ({"FGPU_FORECAST_KEY": ""}, "FGPU_FORECAST_KEY is not set"),
    ],
)
def test_a_wrong_setting_ends_the_service_with_one_line(
    tmp_path: Path, changes: dict[str, str], line: str
) -> None:
    process = service_process(tmp_path, **changes)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 1
    assert said.startswith("fgpuspawner.service: ")
    assert line in said
    assert said.count("\n") == 1
    assert "hush" not in said
