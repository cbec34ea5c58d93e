"""A running session's slice changes in place: through a real Hub and its service, in local processes held by libfgpu."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from inside import CUDA, Inside, server_of
from test_fgpu_command import Person

from fgpu_scheduler import Amount, Resizes, Session, Store
from fgpuspawner.isolation import limits, native
from hubprocess import MINI, HubProcess, running, until

HALF = {"fgpu": "0.5", "cpu": "0.2", "memory_mib": 256}
"""A quarter of a GPU of 8192 MiB that is worth 2 fGPU: 2048 MiB, 25 %."""

HOLDER = (
    CUDA
    + """
held = []
for line in sys.stdin:
    word, mib = line.split()
    if word == "take":
        address = ctypes.c_uint64()
        status = cuda.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(int(mib) << 20))
        held += [address] if status == 0 else []
        print(status, flush=True)
    else:
        print(cuda.cuMemFree_v2(held.pop()), flush=True)
"""
)


class Holder:
    """A program of a session, which takes and gives back GPU memory as it is told."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def ask(self, word: str, mib: int = 0) -> int:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{word} {mib}\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubProcess]:
    """A Hub with one GPU of 2 fGPU; each user may hold 1.5."""
    if native.find() is None:
        pytest.skip(native.NOT_BUILT)
    with running(tmp_path_factory.mktemp("hub"), after=MINI, quotas=[{"user": "*", "max_fgpu": 1.5}]) as hub:
        yield hub


@pytest.fixture
def alice(hub: HubProcess, tmp_path: Path) -> Iterator[Person]:
    person = Person(hub, "alice", hub.add_user("alice"), tmp_path)
    until(person.is_answered, what="the service answers")
    yield person
    person.end_all()


@pytest.fixture
def session(hub: HubProcess, alice: Person) -> Session:
    hub.spawn("alice", options=HALF)
    hub.reach({"alice/": "RUNNING"})
    return hub.sessions()["alice/"]


def folder_of(hub: HubProcess, session: Session) -> Path:
    return hub.data / "limits" / str(session.id)


@pytest.fixture
def holder(hub: HubProcess, session: Session, inside: Inside) -> Holder:
    return Holder(inside.popen(hub, session, sys.executable, "-c", HOLDER))


def shown(alice: Person, session: Session) -> Any:
    return alice.json("show", str(session.id))["session"]


def test_a_session_grows_and_shrinks_while_its_program_runs(
    hub: HubProcess, alice: Person, session: Session, holder: Holder
) -> None:
    number = str(session.id)
    assert [holder.ask("take", 2048), holder.ask("take", 1)] == [0, 2]
    before = shown(alice, session)
    assert before["resize"]["amounts"][-1] == "1.5", "as much as the quota allows"
    out, _ = alice.fgpu("grow", number, "1", "--wait")
    assert out == f"session {number} has 1 fGPU\n"
    assert [holder.ask("take", 2048), holder.ask("take", 1)] == [0, 2]
    after = shown(alice, session)
    assert (after["amount"], after["gpu_memory_mib"], after["compute_percent"]) == ("1 fGPU", 4096, 50)
    assert after["resize"]["state"] == "DONE"
    _, err = alice.fgpu("grow", number, "0.5", "--wait", status=1)
    assert err == "fgpu: The session uses 4 GiB of GPU memory: choose at least 1, or free memory first.\n"
    assert limits.read(folder_of(hub, session)).devices[0].memory_mib == 4096
    assert shown(alice, session)["amount"] == "1 fGPU"
    assert holder.ask("give") == 0
    found = alice.json("grow", number, "0.5", "--wait")["session"]
    assert (found["amount"], found["resize"]["state"]) == ("0.5 fGPU", "DONE")
    assert holder.ask("take", 1) == 2
    assert limits.read(folder_of(hub, session)).devices[0].memory_mib == 2048


def test_impossible_resize_is_refused_with_possible_amounts(alice: Person, session: Session) -> None:
    number = str(session.id)

    def refused(*words: str) -> str:
        return alice.fgpu("grow", number, *words, "--wait", status=1)[1].removeprefix("fgpu: ").strip()

    assert refused("1.6") == "fgpu: 1.6 fGPU is above 1.5, the quota of each user"
    assert "in steps of 0.1" in refused("0.55")
    assert refused("0") == "fgpu: must be above 0; end the session to give all of it back"
    assert refused("x") == "fgpu: 'x' is not a number such as 0.5"
    assert "resize it in the same terms" in refused("--gpu-memory-mib", "2048")
    assert alice.fgpu("grow", number, status=2)[1].startswith("fgpu: name the new amount")


def test_growth_takes_free_shares_only(hub: HubProcess, alice: Person, session: Session) -> None:
    hub.add_user("bob")
    hub.spawn("bob", options={**HALF, "fgpu": "1.2"})
    until(lambda: hub.states().get("bob/") == "RUNNING", what="bob's session runs")
    _, err = alice.fgpu("grow", str(session.id), "1", "--wait", status=1)
    assert err == "fgpu: 0.3 fGPU are free on this GPU: choose at most 0.8.\n"
    alice.fgpu("grow", str(session.id), "0.8", "--wait")
    hub.stop("bob")
    until(lambda: "bob/" not in hub.states(), what="bob's session has ended")


def test_a_session_resizes_itself_and_no_other_of_its_owner(
    hub: HubProcess, alice: Person, session: Session, tmp_path: Path
) -> None:
    hub.spawn("alice", "gpu-2", options=HALF)
    hub.reach({"alice/": "RUNNING", "alice/gpu-2": "RUNNING"})
    other = hub.sessions()["alice/gpu-2"]
    for own, beside in ((session, other), (other, session)):
        inside = Person(hub, "alice", server_of(own, hub).environ()["JUPYTERHUB_API_TOKEN"], tmp_path)
        _, err = inside.fgpu("grow", str(beside.id), "0.1", "--wait", status=1)
        assert err == (
            "fgpu: a session's own token resizes that session only; use the sessions page, or a token of yours\n"
        )
        assert shown(alice, beside)["resize"]["state"] is None
        assert limits.read(folder_of(hub, beside)).devices[0].memory_mib == 2048
    inside = Person(hub, "alice", server_of(session, hub).environ()["JUPYTERHUB_API_TOKEN"], tmp_path)
    assert inside.fgpu("grow", str(session.id), "0.6", "--wait")[0] == f"session {session.id} has 0.6 fGPU\n"


def test_restarted_hub_completes_a_resize_request(hub: HubProcess, alice: Person, session: Session) -> None:
    """The request is a row in the database: after any crash it is carried out, and the limits file matches the
    record.
    """
    hub.kill()
    store = Store(f"sqlite:///{hub.data / 'fgpu.sqlite'}")
    store.connect()
    Resizes(store).ask(session.id, Amount(1000), by="alice", now_s=0)
    store.close()
    # As a Hub leaves it that dies between the smaller file and its record.
    found = limits.read(folder_of(hub, session))
    smaller = replace(found.devices[0], memory_mib=128, compute_percent=1, slots=((0, 1),))
    limits.change(folder_of(hub, session), replace(found, devices=(smaller,)))
    hub.start()
    until(alice.is_answered, what="the service answers")
    until(lambda: shown(alice, session)["amount"] == "1 fGPU", what="the session has grown")
    until(lambda: shown(alice, session)["resize"]["state"] == "DONE", what="that is in force")
    assert limits.read(folder_of(hub, session)).devices[0].memory_mib == 4096
