"""What happens when things come at the wrong moment, each against a real Hub process."""

from __future__ import annotations

import os
import re
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest
import requests

from hubprocess import SLOW_LAUNCH, HubProcess, until
from launched import launched

ONE = {"fgpu": "1", "cpu": "0.1", "memory_mib": 256}
WHOLE = {**ONE, "fgpu": "2"}

FURTHER_SERVERS_HAVE_A_SLOW_HOOK = """
import asyncio

async def hook(spawner):
    if spawner.name:
        await asyncio.sleep(8)

c.Spawner.pre_spawn_hook = hook
"""

THE_DATABASE_IS_SLOW = """
import time
from fgpu_scheduler.store.store import Store

submit = Store.submit

def slow(self, *args, **kwargs):
    print("the database is asked to submit", flush=True)
    time.sleep(6)
    return submit(self, *args, **kwargs)

Store.submit = slow
"""

THE_PROXY_IS_SLOW = """
import asyncio
from jupyterhub.proxy import ConfigurableHTTPProxy

class SlowProxy(ConfigurableHTTPProxy):
    async def delete_user(self, user, server_name=""):
        await asyncio.sleep(4)
        await super().delete_user(user, server_name)

c.JupyterHub.proxy_class = SlowProxy
"""


def in_the_background(function: Callable[[], Any]) -> threading.Thread:
    """Run a request that the Hub answers late."""
    thread = threading.Thread(target=function)
    thread.start()
    return thread


def test_asking_again_right_after_a_cancel_never_runs_two_launches(
    make_hub: Callable[..., HubProcess],
) -> None:
    hub = make_hub(service=False, after=SLOW_LAUNCH).start()
    hub.add_user("alice")
    hub.add_user("bob")
    first = in_the_background(lambda: hub.spawn("alice", options=WHOLE))
    until(lambda: hub.states() == {"alice/": "PREPARING"}, what="the first launch is under way")
    cancel = in_the_background(lambda: hub.stop("alice"))
    until(lambda: "DELETE /hub/api/users/alice" in hub.log_text() or "Interrupting" in hub.log_text())
    hub.spawn("alice", options=WHOLE)
    (hub.folder / "go").touch()
    cancel.join()
    first.join()
    hub.stop("alice")
    hub.spawn("bob", options=WHOLE)
    # The GPU is one: who runs now must be the only one, from here until bob's session answers.
    seen: list[dict[int, int]] = []

    def bob_runs() -> bool:
        seen.append(launched(hub, "local"))
        return hub.states().get("bob/") == "RUNNING"

    until(bob_runs, what="bob's session runs")
    assert all(sum(counts.values()) <= 1 for counts in seen), seen


def test_further_sessions_keep_their_places_and_can_be_cancelled_while_a_hook_runs(
    make_hub: Callable[..., HubProcess],
) -> None:
    hub = make_hub(after=FURTHER_SERVERS_HAVE_A_SLOW_HOOK).start()
    hub.add_user("alice")
    hub.add_user("bob")
    first = in_the_background(lambda: hub.spawn("alice", options={**ONE, "count": 2}))
    until(lambda: "alice/gpu-2" in hub.states())
    hub.spawn("bob", options=ONE)
    assert hub.states()["bob/"] == "PENDING", "who asked later does not overtake"
    first.join()
    assert hub.stop("alice", "gpu-2").status_code in (202, 204)
    hub.reach({"alice/": "RUNNING", "bob/": "RUNNING"})


@pytest.mark.parametrize("crash", [False, True], ids=["the Hub runs on", "the Hub is killed meanwhile"])
def test_a_stop_outlives_a_database_that_is_away(make_hub: Callable[..., HubProcess], crash: bool) -> None:
    hub = make_hub(service=False)
    hub.settings["db_url"] = f"sqlite:///{hub.data / 'fgpu.sqlite'}?timeout=1"
    hub.start()
    hub.add_user("alice")
    hub.spawn("alice", options=ONE)
    hub.reach({"alice/": "RUNNING"})
    with closing(sqlite3.connect(hub.data / "fgpu.sqlite", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        assert hub.stop("alice").status_code in (202, 204)
        until(lambda: "alice cannot be ended yet, trying on" in hub.log_text())
        if crash:
            until(lambda: not hub.servers("alice"), what="the Hub has forgotten the server")
            hub.kill()
        other.execute("ROLLBACK")
    if crash:
        hub.start()
    hub.reach({})
    assert launched(hub, "local") == {}


def test_a_second_hub_on_the_same_data_or_database_is_refused_and_changes_nothing(
    make_hub: Callable[..., HubProcess],
) -> None:
    hub = make_hub().start()
    for user in ("a", "b", "c"):
        hub.add_user(user)
        hub.spawn(user, options=ONE)
    hub.reach({"a/": "RUNNING", "b/": "RUNNING", "c/": "PENDING"})
    second = started(hub)
    assert second.returncode == 1
    assert second.stderr.splitlines()[-1] == (
        f"fgpuspawner: c.FGPU.data_dir: another Hub is running on {hub.data}; end it, or give this one another folder"
    )
    other = make_hub(db_url=f"sqlite:///{hub.data / 'fgpu.sqlite'}")
    refused = started(other)
    assert refused.returncode == 1
    assert refused.stderr.splitlines()[-1] == (
        f"fgpuspawner: c.FGPU.db_url: another Hub serves the sessions of sqlite:///{hub.data / 'fgpu.sqlite'}; "
        "end it, or give this one another database"
    )
    assert not (other.data / "jupyterhub.sqlite").exists()
    assert not any(s.held for s in hub.sessions().values())
    assert {path.stat().st_mode & 0o077 for path in hub.data.glob("*.sqlite*")} == {0}
    hub.stop("a")
    hub.reach({"b/": "RUNNING", "c/": "RUNNING"})


def started(hub: HubProcess) -> subprocess.CompletedProcess[str]:
    """Run a Hub that must be refused, until it ends."""
    return subprocess.run(
        [sys.executable, "-m", "jupyterhub", "-f", str(hub.write_config())],
        cwd=hub.folder,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_no_page_can_be_framed_and_a_forms_ticket_is_good_for_forecasts_only(
    make_hub: Callable[..., HubProcess],
) -> None:
    hub = make_hub().start()
    token = hub.add_user("alice")
    service = f"{hub.url}/services/fgpu/"
    headers = {"Authorization": f"token {token}"}
    page = until(lambda: (r := requests.get(service, headers=headers, timeout=60)).ok and r, what="the page")
    assert "frame-ancestors 'none'" in page.headers["Content-Security-Policy"]
    browser = hub.browser("alice")
    form = browser.get(f"{hub.url}/hub/spawn", timeout=60).text
    found = re.search(r'data-ticket="([^"]+)"', form)
    assert found, form[:2000]
    ticket = {"X-FGPU-Ticket": found[1]}
    forecast = browser.get(f"{service}api/v1/forecast?fgpu=1", headers=ticket, timeout=60)
    assert forecast.json()["starts_now"] is True
    forged = {"X-FGPU-Ticket": found[1][:-1] + ("0" if found[1][-1] != "0" else "1")}
    assert requests.get(f"{service}api/v1/forecast?fgpu=1", headers=forged, timeout=60).status_code == 401
    for path in ("sessions", "queue", "capacity", "me", "events"):
        assert requests.get(f"{service}api/v1/{path}", headers=ticket, timeout=60).status_code == 401
    # A waiting page of a later log-in has a ticket of that log-in.
    xsrf = {"X-XSRFToken": browser.cookies.get("_xsrf", path="/hub/")}
    many = {"user_options": {**WHOLE, "count": 2}}
    assert browser.post(f"{hub.url}/hub/api/users/alice/server", json=many, headers=xsrf, timeout=60).ok
    hub.reach({"alice/": "RUNNING", "alice/gpu-2": "PENDING"})
    later = hub.browser("alice")
    waiting = re.search(r'data-ticket="([^"]+)"', later.get(f"{hub.url}/hub/spawn-pending/alice/gpu-2").text)
    assert waiting
    asked = {"X-FGPU-Ticket": waiting[1]}
    assert later.get(f"{service}api/v1/forecast?fgpu=1", headers=asked, timeout=60).status_code == 200
    browser.get(f"{hub.url}/hub/logout", timeout=60)
    for anybody in (browser, requests):
        late = anybody.get(f"{service}api/v1/forecast?fgpu=1", headers=ticket, timeout=60)
        assert (late.status_code, late.json()["error"]["code"]) == (401, "bad_ticket")
    # Neither the Hub nor the service keeps a body that is larger than anything they take.
    for url, most in (
        (f"{service}api/v1/private-images/1/share", "1 MiB"),
        (f"{hub.url}/hub/api/users/alice/activity", "64 KiB"),
    ):
        large = requests.post(url, data=b"x" * 3_000_000, headers=headers, timeout=60)
        assert (large.status_code, large.json()["message"]) == (
            413,
            f"the request has more than {most}; send less",
        )


def test_the_hub_waits_for_a_database_that_is_away_when_it_starts(
    make_hub: Callable[..., HubProcess],
) -> None:
    hub = make_hub(
        before="""
from fgpu_scheduler import StoreUnavailable
from fgpu_scheduler.store.store import Store
hold_waiting, first = Store.hold_waiting, [True]
def fails_once(self, *args, **kwargs):
    if first and os.environ.get("FAIL_ONCE"):
        first.clear()
        raise StoreUnavailable("server closed the connection unexpectedly")
    return hold_waiting(self, *args, **kwargs)
Store.hold_waiting = fails_once
"""
    ).start()
    hub.add_user("alice")
    hub.spawn("alice", options=ONE)
    hub.reach({"alice/": "RUNNING"})
    before = launched(hub, "local")
    hub.kill()
    hub.env["FAIL_ONCE"] = "1"
    hub.start()
    until(lambda: hub.ready("alice"), what="the running session is adopted")
    assert "The scheduler cannot start yet, trying on" in hub.log_text()
    assert launched(hub, "local") == before


def test_cancel_during_a_submission_of_several_leaves_no_orphans(
    make_hub: Callable[..., HubProcess],
) -> None:
    hub = make_hub(after=THE_DATABASE_IS_SLOW).start()
    hub.add_user("alice")
    hub.add_user("bob")
    first = in_the_background(lambda: hub.spawn("alice", options={**ONE, "count": 2}))
    until(lambda: "the database is asked to submit" in hub.log_text(), what="the submission is under way")
    hub.stop("alice")
    first.join()
    # The second one was submitted beside the first: it goes on, with a server, and can be ended like any other.
    hub.reach({"alice/gpu-2": "RUNNING"})
    until(lambda: hub.ready("alice", "gpu-2"), what="the Hub has its server")
    until(lambda: hub.stop("alice", "gpu-2").status_code in (202, 204))
    hub.reach({})


def test_start_during_the_hubs_clean_up_keeps_the_new_session(
    make_hub: Callable[..., HubProcess],
) -> None:
    hub = make_hub(service=False, after=THE_PROXY_IS_SLOW).start()
    hub.add_user("alice")
    assert hub.spawn("alice", options=ONE).status_code in (201, 202)
    hub.reach({"alice/": "RUNNING"})
    old = hub.sessions()["alice/"]
    until(lambda: hub.ready("alice"), what="the server is up")
    os.kill(int((hub.data / "run" / f"{old.id}-{old.attempt}@local").read_text()), signal.SIGKILL)
    hub.reach({})
    assert hub.spawn("alice", options=ONE).status_code in (201, 202)
    hub.reach({"alice/": "RUNNING"})
    until(lambda: hub.ready("alice"), what="the new server is up")
    # Longer than the proxy takes: what the Hub had to do about the end is done.
    time.sleep(5)
    assert hub.states() == {"alice/": "RUNNING"}
    assert hub.sessions()["alice/"].id != old.id
