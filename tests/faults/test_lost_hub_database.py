"""A Hub with a new or older database of its own goes on with all running sessions."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable
from contextlib import closing

import pytest
import requests

from hubprocess import HubProcess, until
from launched import launched, processes_of
from notebooks import Kernel

ONE = {"fgpu": "1", "cpu": "0.5", "memory_mib": 512}


def forget(hub: HubProcess) -> None:
    """Remove JupyterHub's database, as if its disk had been lost."""
    for path in hub.data.glob("jupyterhub.sqlite*"):
        path.unlink()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", ["local", "docker"], indirect=True)
def test_owners_log_in_again_and_find_their_notebooks_with_what_they_had_computed(
    make_hub: Callable[..., HubProcess], kind: str
) -> None:
    hub = make_hub(server=None, outer_proxy=True).start()
    token = hub.add_user("alice")
    assert hub.spawn("alice", options=ONE).status_code in (201, 202)
    until(lambda: hub.ready("alice"), within_s=120, what="alice's server is ready")
    kernel = Kernel(hub, "alice", token)
    assert kernel.run("globals().setdefault('x', 23)") == "23"
    session, running = hub.sessions()["alice/"], launched(hub, kind)
    hub.kill()
    forget(hub)
    hub.start()
    # The old token went with the database. What is open stays open.
    assert hub.api("GET", "user", token=token).status_code == 403
    assert kernel.run("x") == "23"
    browser = hub.browser("alice")
    # By way of the Hub, which knows the server as a client of its log-in again.
    until(lambda: browser.get(f"{hub.url}/user/alice/lab", timeout=60).ok, what="she is let in to her server")
    page = browser.get(f"{hub.url}/user/alice/api/kernels", timeout=60)
    (found,) = page.json()
    assert found["id"] == kernel._id
    assert hub.states() == {"alice/": "RUNNING"}
    assert launched(hub, kind) == running
    kernel.close()
    # Everybody else is served, its share counts, and it ends like any other.
    hub.add_user("bob")
    assert hub.spawn("bob", options=ONE).status_code in (201, 202)
    until(lambda: hub.ready("bob"), within_s=120, what="bob's server is ready")
    hub.stop("alice")
    hub.reach({"bob/": "RUNNING"})
    (receipt,) = hub.store.ended(user="alice", limit=5)
    assert receipt.id == session.id


@pytest.mark.parametrize("kind", ["local"], indirect=True)
def test_a_servers_token_is_good_again_and_administrators_are_told(
    make_hub: Callable[..., HubProcess], kind: str
) -> None:
    hub = make_hub().start()
    hub.add_user("alice")
    for server in ("", "night"):
        hub.spawn("alice", server, options=ONE)
    hub.reach({"alice/": "RUNNING", "alice/night": "RUNNING"})
    tokens = {
        key: processes_of(hub, session.id)[0].environ()["JUPYTERHUB_API_TOKEN"]
        for key, session in hub.sessions().items()
    }
    scopes = {key: hub.api("GET", "user", token=token).json()["scopes"] for key, token in tokens.items()}
    hub.kill()
    forget(hub)
    hub.start()
    until(lambda: hub.ready("alice") and hub.ready("alice", "night"), what="both servers are known")
    assert "2 sessions that it did not know are adopted (alice/, alice/night)" in hub.log_text()
    assert {
        key: hub.api("GET", "user", token=token).json()["scopes"] for key, token in tokens.items()
    } == scopes
    with closing(sqlite3.connect(hub.data / "fgpu.sqlite")) as db:
        until(lambda: audited(db) == ["session.adopt"] * 2, what="the audit log has both")
    # Once adopted they are known, and are not adopted again.
    hub.kill()
    hub.start()
    until(lambda: hub.ready("alice") and hub.ready("alice", "night"), what="both servers are known")
    with closing(sqlite3.connect(hub.data / "fgpu.sqlite")) as db:
        assert audited(db) == ["session.adopt"] * 2
    hub.stop("alice", "night")
    hub.reach({"alice/": "RUNNING"})
    assert hub.api("GET", "user", token=tokens["alice/night"]).status_code == 403
    assert hub.api("GET", "user", token=tokens["alice/"]).status_code == 200


def audited(db: sqlite3.Connection) -> list[str]:
    return [action for (action,) in db.execute("SELECT action FROM fgpu_audit")]


@pytest.mark.parametrize("kind", ["local"], indirect=True)
def test_an_older_database_gets_the_newer_session_of_a_server_and_ends_what_is_gone(
    make_hub: Callable[..., HubProcess], kind: str
) -> None:
    hub = make_hub().start()
    for user in ("alice", "bob"):
        hub.add_user(user)
        hub.spawn(user, options=ONE)
    hub.reach({"alice/": "RUNNING", "bob/": "RUNNING"})
    hub.kill()
    kept = {path.name: path.read_bytes() for path in hub.data.glob("jupyterhub.sqlite*")}
    hub.start()
    until(lambda: hub.ready("alice") and hub.ready("bob"))
    for user in ("alice", "bob"):
        hub.stop(user)
    hub.reach({})
    # In the next second: an instant of JupyterHub is compared with one of the scheduler.
    ended = int(time.time())
    until(lambda: time.time() >= ended + 2)
    hub.spawn("alice", options=ONE)
    hub.reach({"alice/": "RUNNING"})
    newer = hub.sessions()["alice/"].id
    token = processes_of(hub, newer)[0].environ()["JUPYTERHUB_API_TOKEN"]
    hub.kill()
    forget(hub)
    for name, content in kept.items():
        (hub.data / name).write_bytes(content)
    hub.start()
    until(lambda: hub.ready("alice"), what="alice's newer server is known")
    until(lambda: not hub.servers("bob"), what="bob's server, which has ended since, is forgotten")
    assert hub.states() == {"alice/": "RUNNING"}
    assert hub.sessions()["alice/"].id == newer
    assert hub.api("GET", "user", token=token).status_code == 200


@pytest.mark.parametrize("kind", ["local"], indirect=True)
def test_a_hub_that_is_told_to_ends_what_it_does_not_know(
    make_hub: Callable[..., HubProcess], kind: str
) -> None:
    hub = make_hub(end_unknown_sessions=True).start()
    hub.add_user("alice")
    hub.spawn("alice", options=ONE)
    hub.reach({"alice/": "RUNNING"})
    hub.kill()
    forget(hub)
    hub.start()
    hub.reach({})
    until(lambda: launched(hub, kind) == {})


@pytest.fixture
def both(make_hub: Callable[..., HubProcess]) -> HubProcess:
    """A Hub that was killed with a session of each of two users; `older.sqlite` is its database of one session."""
    hub = make_hub(simulated_gpus="2").start()
    for user in ("alice", "bob"):
        hub.add_user(user)
        hub.spawn(user, options=ONE)
        until(lambda user=user: hub.ready(user), what="it runs")  # type: ignore[misc]
        if user == "alice":
            with (
                closing(sqlite3.connect(hub.data / "fgpu.sqlite")) as source,
                closing(sqlite3.connect(hub.folder / "older.sqlite")) as copy,
            ):
                source.backup(copy)
    hub.kill()
    return hub


def goes_on_with_its_own(hub: HubProcess, running: dict[int, list[int]]) -> None:
    """Start the Hub on its own database again, and see that nothing has ended."""
    hub.settings.pop("db_url", None)
    hub.start()
    until(lambda: hub.ready("alice") and hub.ready("bob"), what="both servers are known")
    assert hub.states() == {"alice/": "RUNNING", "bob/": "RUNNING"}
    assert launched(hub, "local") == running


@pytest.mark.parametrize("kind", ["local"], indirect=True)
def test_a_start_on_an_empty_database_is_refused_and_ends_nothing(both: HubProcess, kind: str) -> None:
    running = launched(both, kind)
    both.settings["db_url"] = f"sqlite:///{both.folder}/empty.sqlite"
    both.start(wait=False)
    assert both.process is not None
    assert both.process.wait(120) == 1
    # Its last line, but for one of the last Hub's service, which may still be ending.
    said = "\n".join(both.log_text().splitlines()[-2:])
    assert "has files of 2 sessions of installation" in said
    assert "set it back" in said
    goes_on_with_its_own(both, running)


@pytest.mark.parametrize("kind", ["local"], indirect=True)
def test_a_start_on_an_older_database_ends_nothing(both: HubProcess, kind: str) -> None:
    running = launched(both, kind)
    both.settings["db_url"] = f"sqlite:///{both.folder}/older.sqlite"
    both.start()
    until(lambda: "1 sessions run that this database has never had" in both.log_text(), what="it says so")
    health = requests.get(f"{both.url}/hub/health", timeout=60)
    assert (health.status_code, health.json()["status"]) == (503, "unavailable")
    assert "sessions that this Hub does not know" in health.json()["sessions"]
    both.kill()
    goes_on_with_its_own(both, running)
