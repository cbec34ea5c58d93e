"""The meter and what is made of it, through a real Hub: sessions that hold memory of simulated GPUs."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest
import requests
from inside import CUDA, Inside

from fgpu_scheduler import Session
from hubprocess import MINI, HubProcess, running, until

pytestmark = pytest.mark.usefixtures("libfgpu_built")

HALF = {"fgpu": "0.5", "cpu": "0.2", "memory_mib": 256}
"""A quarter of a GPU of 8192 MiB that is worth 2 fGPU: 2048 MiB, 25 %."""


@pytest.fixture(scope="module")
def module_hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubProcess]:
    with running(tmp_path_factory.mktemp("hub"), after=MINI, meter_every_s=1) as found:
        yield found


@pytest.fixture
def hub(module_hub: HubProcess) -> Iterator[HubProcess]:
    yield module_hub
    module_hub.end_all()


def ask(hub: HubProcess, token: str, path: str, **kwargs: Any) -> Any:
    url, headers = f"{hub.url}/services/fgpu/api/v1/{path}", {"Authorization": f"token {token}"}

    def answers() -> list[requests.Response]:
        answer = requests.get(url, headers=headers, timeout=60, **kwargs)
        # That its database was busy for a moment is no answer yet.
        return [answer] if answer.status_code != 503 else []

    (answer,) = until(answers, what="the service answers")
    assert answer.status_code == 200, answer.text
    return answer.json()


def start(hub: HubProcess, user: str) -> Session:
    answer = hub.spawn(user, options=HALF)
    assert answer.status_code in (201, 202), answer.text
    until(lambda: hub.ready(user), what=f"{user}'s server is ready:\n{hub.log_text()[-3000:]}")
    # The service starts beside the Hub, and may need longer than a session.
    health = f"{hub.url}/services/fgpu/health"
    until(lambda: requests.get(health, timeout=60).status_code == 200, what="the service answers")
    return hub.sessions()[f"{user}/"]


def test_a_session_shows_its_use_and_leaves_a_receipt_and_several_an_advice(
    hub: HubProcess, inside: Inside
) -> None:
    alice, bob = hub.add_user("alice"), hub.add_user("bob")

    def held(session_id: int) -> int:
        return (ask(hub, alice, "meters")["meters"].get(str(session_id)) or {}).get("memory_used_mib") or 0

    # A peak of a third of what was asked for, three times.
    for _ in range(3):
        session = start(hub, "alice")
        child = inside.holding(hub, session, 600)
        until(lambda i=session.id: held(i) >= 600, what="its memory is seen")  # type: ignore[misc]
        detail = ask(hub, alice, f"sessions/{session.id}/meter")
        assert detail["points"][-1]["memory_used_mib"] >= 600
        (process,) = detail["processes"]
        assert (process["pid"], process["memory_mib"] >= 600) == (child.pid, True)
        assert process["name"].startswith("python")
        assert (detail["every_s"], detail["simulated"]) == (10, True)
        now = ask(hub, alice, f"sessions/{session.id}")["session"]["meter"]
        assert (now["memory_limit_mib"], now["compute_entitled_percent"]) == (2048, 25)
        assert (now["sm_percent"], now["trouble"]) == (0, None)
        child.kill()
        hub.stop("alice")
        until(lambda: hub.states() == {}, what="the session has ended")

    def measured() -> Any:
        found = ask(hub, alice, "history")["receipts"]
        # What was counted last is written with the look after the end.
        counted = [r for r in found if (r["memory_peak_mib"] or 0) >= 600]
        return found if len(counted) == 3 else None

    receipts = until(measured, what="all three were measured to their end")
    newest = receipts[0]
    assert [r["session_id"] for r in receipts] == sorted((r["session_id"] for r in receipts), reverse=True)
    assert newest["session_id"] == session.id
    assert newest["memory_p95_mib"] <= newest["memory_peak_mib"] <= 2048
    assert newest["gpu_memory_mib"] == 2048
    assert newest["energy_wh"] is None, "simulated GPUs use none"
    hours = newest["gpu_hours"] * 3600
    until_it_ran_s = newest["started_at_s"] - newest["submitted_at_s"]
    assert 0.25 * newest["run_s"] <= hours + 0.4 <= 0.25 * (newest["run_s"] + until_it_ran_s + 3) + 0.4
    assert ask(hub, alice, f"sessions/{session.id}/receipt")["receipt"] == newest

    (advice,) = ask(hub, alice, "advice")["advice"]
    assert (advice["runs"], advice["asked_fgpu"], advice["enough_fgpu"]) == (3, "0.5", "0.2")
    assert "0.2 fGPU would have been enough" in advice["text"]
    assert ask(hub, bob, "advice")["advice"] == ask(hub, bob, "history")["receipts"] == []
    assert ask(hub, bob, "meters")["meters"] == {}


COMPUTE = (
    CUDA
    + """
module, kernel = ctypes.c_void_p(), ctypes.c_void_p()
text = b".version 6.0\\n.target sm_50\\n.address_size 64\\n.visible .entry spin_1ms()\\n{\\nret;\\n}\\n"
call("cuModuleLoadData", ctypes.byref(module), text)
call("cuModuleGetFunction", ctypes.byref(kernel), module, b"spin_1ms")
while True:
    call("cuLaunchKernel", kernel, 1, 1, 1, 1, 1, 1, 0, None, None, None)
    call("cuCtxSynchronize")
"""
)


def test_what_sessions_lend_each_other_is_shown_to_each_of_itself_only(
    hub: HubProcess, inside: Inside
) -> None:
    tokens = {user: hub.add_user(user) for user in ("carol", "dave")}
    sessions = {user: start(hub, user) for user in tokens}

    def meter(user: str) -> Any:
        return ask(hub, tokens[user], f"sessions/{sessions[user].id}")["session"]["meter"] or {}

    inside.popen(hub, sessions["carol"], sys.executable, "-c", COMPUTE)
    until(lambda: (meter("carol").get("compute_borrowed_percent") or 0) > 20, what="carol is lent more")
    until(lambda: (meter("dave").get("compute_lent_percent") or 0) > 5, what="dave lends")
    assert (meter("carol")["compute_lent_percent"], meter("dave")["compute_borrowed_percent"]) == (0, 0)
    assert set(ask(hub, tokens["dave"], "meters")["meters"]) == {str(sessions["dave"].id)}
    receipt = ask(hub, tokens["dave"], f"sessions/{sessions['dave'].id}/receipt")["receipt"]
    assert (receipt["compute_entitled_percent"], receipt["compute_borrowed_percent"]) in ((25, None), (25, 0))
