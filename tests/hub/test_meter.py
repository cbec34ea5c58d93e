"""The meter and what is made of it, through a real Hub: sessions that hold memory of simulated GPUs."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import psutil
import pytest
import requests

from fgpu_scheduler import Session
from hubprocess import HubProcess, until

pytestmark = pytest.mark.usefixtures("libfgpu_built")

Make = Callable[..., HubProcess]
HALF = {"fgpu": "0.5", "cpu": "0.2", "memory_mib": 256}
"""A quarter of a GPU of 8192 MiB that is worth 2 fGPU: 2048 MiB, 25 %."""

WORK = """
import ctypes, sys, time
cuda = ctypes.CDLL("libcuda.so.1")
def call(name, *arguments):
    status = getattr(cuda, name)(*arguments)
    assert status == 0, (name, status)
context, device, pointer = ctypes.c_void_p(), ctypes.c_int(), ctypes.c_uint64()
call("cuInit", 0)
call("cuDeviceGet", ctypes.byref(device), 0)
call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
call("cuCtxSetCurrent", context)
call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(int(sys.argv[1]) << 20))
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def hub(make_hub: Make) -> HubProcess:
    return make_hub(meter_every_s=1, simulated_gpus="1").start()


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


def holding(hub: HubProcess, session: Session, mib: int) -> subprocess.Popen[str]:
    """Return a program of the session that holds so much until its input ends."""
    note = hub.data / "run" / f"{session.id}-{session.attempt}@local"
    env = psutil.Process(int(note.read_text())).environ()
    words = [sys.executable, "-c", WORK, str(mib)]
    child = subprocess.Popen(
        words, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=hub.folder
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "held\n"
    return child


def test_a_session_shows_what_its_programs_hold(hub: HubProcess) -> None:
    token = hub.add_user("alice")
    session = start(hub, "alice")

    def meter() -> Any:
        return ask(hub, token, f"sessions/{session.id}")["session"]["meter"]

    until(lambda: (meter() or {}).get("memory_used_mib") == 0, what="nothing is held, and that is known")
    with holding(hub, session, 1000) as child:
        until(lambda: meter()["memory_used_mib"] >= 1000, what="its 1000 MiB are seen")
        found = meter()
        assert (found["memory_limit_mib"], found["compute_entitled_percent"]) == (2048, 25)
        assert found["sm_percent"] == 0
        assert found["trouble"] is None
        child.kill()


def test_a_session_that_has_ended_leaves_a_receipt_and_several_an_advice(hub: HubProcess) -> None:
    alice, bob = hub.add_user("alice"), hub.add_user("bob")
    # A peak of a third of what was asked for, three times.
    for _ in range(3):
        session = start(hub, "alice")
        with holding(hub, session, 600) as child:
            until(
                lambda i=session.id: (
                    (  # type: ignore[misc]
                        (ask(hub, alice, "meters")["meters"].get(str(i)) or {}).get("memory_used_mib") or 0
                    )
                    >= 600
                ),
                what="its memory is seen",
            )
            detail = ask(hub, alice, f"sessions/{session.id}/meter")
            assert detail["points"][-1]["memory_used_mib"] >= 600
            (process,) = detail["processes"]
            assert (process["pid"], process["memory_mib"] >= 600) == (child.pid, True)
            assert process["name"].startswith("python")
            assert (detail["every_s"], detail["simulated"]) == (10, True)
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


COMPUTE = """
import ctypes
cuda = ctypes.CDLL("libcuda.so.1")
context, module, kernel = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
text = b".version 6.0\\n.target sm_50\\n.address_size 64\\n.visible .entry spin_1ms()\\n{\\nret;\\n}\\n"
for status in (cuda.cuInit(0), cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0),
               cuda.cuCtxSetCurrent(context), cuda.cuModuleLoadData(ctypes.byref(module), text),
               cuda.cuModuleGetFunction(ctypes.byref(kernel), module, b"spin_1ms")):
    assert status == 0, status
while True:
    assert cuda.cuLaunchKernel(kernel, 1, 1, 1, 1, 1, 1, 0, None, None, None) == 0
    assert cuda.cuCtxSynchronize() == 0
"""


def test_what_sessions_lend_each_other_is_shown_to_each_of_itself_only(make_hub: Make) -> None:
    hub = make_hub(meter_every_s=1, simulated_gpus="1").start()
    tokens = {user: hub.add_user(user) for user in ("alice", "bob")}
    sessions = {user: start(hub, user) for user in tokens}

    def meter(user: str) -> Any:
        return ask(hub, tokens[user], f"sessions/{sessions[user].id}")["session"]["meter"] or {}

    alice = sessions["alice"]
    note = hub.data / "run" / f"{alice.id}-{alice.attempt}@local"
    env = psutil.Process(int(note.read_text())).environ()
    with subprocess.Popen([sys.executable, "-c", COMPUTE], env=env, cwd=hub.folder) as child:
        try:
            until(
                lambda: (meter("alice").get("compute_borrowed_percent") or 0) > 20, what="alice is lent more"
            )
            until(lambda: (meter("bob").get("compute_lent_percent") or 0) > 5, what="bob lends")
            assert (meter("alice")["compute_lent_percent"], meter("bob")["compute_borrowed_percent"]) == (
                0,
                0,
            )
            assert set(ask(hub, tokens["bob"], "meters")["meters"]) == {str(sessions["bob"].id)}
        finally:
            child.kill()
    receipt = ask(hub, tokens["bob"], f"sessions/{sessions['bob'].id}/receipt")["receipt"]
    assert (receipt["compute_entitled_percent"], receipt["compute_borrowed_percent"]) in ((25, None), (25, 0))
