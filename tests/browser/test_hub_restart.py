"""The Hub is killed: a waiting page comes back by itself, and `make run` starts the Hub again."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
from playwright.sync_api import expect

import makerun
from fgpu_scheduler import EndCause, SessionState, Store
from hubprocess import HubProcess, running, until
from steps import START_MS, Person, place, start_by
from watching import Faults

MINI = Path(__file__).parents[1] / "hub" / "miniserver.py"
LITTLE = {"cpu": "0.1", "memory_mib": 256}


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[HubProcess]:
    """A Hub with immediate starts and one simulated GPU of 2 fGPU."""
    with running(tmp_path, after=f"c.Spawner.cmd = ['python', {str(MINI)!r}]\n") as found:
        yield found


@pytest.mark.timeout(600)
def test_waiting_page_survives_a_hub_restart(
    hub: HubProcess, log_in: Callable[..., Person], faults: Faults
) -> None:
    for user, fgpu in (("holder", "2"), ("first", "1")):
        hub.add_user(user)
        hub.spawn(user, options={"fgpu": fgpu, **LITTLE})
    hub.reach({"holder/": "RUNNING", "first/": "PENDING"})
    iris = log_in(hub.url, "iris", "test-password")
    page = iris.page
    start_by(page, iris.link(fgpu="1", **LITTLE))
    expect(place(page)).to_have_text("2nd in the queue")

    # The page of a request that ends while the Hub is away also recovers.
    jane = log_in(hub.url, "jane", "test-password")
    other = jane.page
    start_by(other, jane.link(fgpu="1", **LITTLE))
    expect(place(other)).to_have_text("3rd in the queue")

    # While the Hub is gone, what the pages ask for fails.
    faults.allow(r"(failed|status|console) \S* ?\S+/hub/")
    hub.kill()
    message = page.locator("#progress-message")
    expect(message).to_have_text("The Hub is restarting. You keep your place in the queue", timeout=START_MS)
    page.evaluate("window.beforeTheRestart = true")
    expect(other.locator("#progress-message")).to_contain_text("The Hub is restarting", timeout=START_MS)
    ended = hub.sessions()["jane/"].id
    late: dict[str, Any] = {"cause": EndCause.QUEUE_TIMEOUT, "message": "it waited too long"}
    store = Store(f"sqlite:///{hub.data / 'fgpu.sqlite'}")
    store.connect()
    store.move(ended, SessionState.CANCELLED, now_s=int(time.time()), **late)
    store.close()
    hub.start()
    expect(other.locator("#fgpu-last-word")).to_contain_text("it waited too long", timeout=START_MS)
    page.wait_for_function("!window.beforeTheRestart", timeout=START_MS)
    expect(page.get_by_role("heading", name="Waiting in the queue")).to_be_visible(timeout=START_MS)
    expect(place(page)).to_have_text("2nd in the queue", timeout=START_MS)
    expect(message).to_have_text("All GPUs are busy.")

    # Nothing of it needs a click, nor does the start.
    hub.stop("holder")
    page.wait_for_url("**/user/iris/**", timeout=START_MS)
    hub.reach({"first/": "RUNNING", "iris/": "RUNNING"})


@pytest.mark.timeout(600)
def test_make_run_restarts_a_killed_hub(tmp_path: Path) -> None:
    # That nothing is left at its end, `running` looks.
    with makerun.running(tmp_path) as run:
        proxy, hub = run.proxy(), run.hub()
        token = run.data / "proxy-token"
        assert token.stat().st_mode & 0o777 == 0o600
        assert token.read_text() not in " ".join(proxy.cmdline())
        (service,) = [p for p in hub.children() if "fgpuspawner.service" in p.cmdline()]
        hub.kill()
        until(lambda: "The Hub ended with -9; starting it again" in run.said(), what="it says so")
        until(lambda: answers(f"{run.url}/hub/health"), within_s=150, what="there is a Hub again")
        assert run.hub().pid != hub.pid
        assert run.proxy() == proxy
        until(lambda: not service.is_running(), what="the service of the Hub that died has ended")


def answers(url: str) -> bool:
    """Return whether a Hub answers there, through the proxy."""
    try:
        return requests.get(url, timeout=30).status_code == 200
    except (requests.ConnectionError, requests.Timeout):
        return False
