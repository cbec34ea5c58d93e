"""Parked sessions through a real Hub and its service: local processes held by libfgpu, on the simulated driver."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from inside import Inside
from test_fgpu_command import Person

from fgpu_scheduler import Session
from fgpuspawner.isolation import limits, native
from hubprocess import MINI, HubProcess, running, until

WHOLE = {"fgpu": "2", "cpu": "0.2", "memory_mib": 256}
HELD_MIB = 64

PROGRAM = """
import ctypes, hashlib, sys
cuda = ctypes.CDLL("libcuda.so.1")
device, context, address = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_uint64()
size = int(sys.argv[1]) << 20
filled = (b"a GPU keeps what it is given" * (size // 28 + 1))[:size]
assert cuda.cuInit(0) == cuda.cuDeviceGet(ctypes.byref(device), 0) == 0
print("began", flush=True)
assert cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device) == cuda.cuCtxSetCurrent(context) == 0
assert cuda.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(size)) == 0
assert cuda.cuMemcpyHtoD_v2(address, filled, ctypes.c_size_t(size)) == 0
print("filled", flush=True)
for line in sys.stdin:
    read = ctypes.create_string_buffer(size)
    status = cuda.cuMemcpyDtoH_v2(read, address, ctypes.c_size_t(size))
    print(status, "same" if read.raw == filled else "other", flush=True)
"""


class Program:
    """A program of a session that fills GPU memory, and reads it back when it is asked."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        assert self.says() == "began"

    def read_back(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write("read\n")
        self._process.stdin.flush()

    def says(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubProcess]:
    """A Hub with one GPU of 2 fGPU, which parks a session after ten seconds if another one waits."""
    if native.find() is None:
        pytest.skip(native.NOT_BUILT)
    with running(
        tmp_path_factory.mktemp("hub"),
        after=MINI,
        parked_memory_mib=1024,
        reclaim={"*": {"park": "when needed", "park_after_s": 10, "park_opt_out": True}},
        meter_every_s=1,
    ) as hub:
        yield hub


def person(hub: HubProcess, name: str, home: Path) -> Person:
    home = home / name
    home.mkdir()
    found = Person(hub, name, hub.add_user(name), home)
    until(found.is_answered, what="the service answers")
    return found


@pytest.fixture
def alice(hub: HubProcess, tmp_path: Path) -> Iterator[Person]:
    found = person(hub, "alice", tmp_path)
    yield found
    found.end_all()


@pytest.fixture
def bob(hub: HubProcess, tmp_path: Path) -> Iterator[Person]:
    found = person(hub, "bob", tmp_path)
    yield found
    found.end_all()


def begun(hub: HubProcess, name: str, **more: Any) -> Session:
    hub.spawn(name, options={**WHOLE, **more})
    until(lambda: hub.states().get(f"{name}/") == "RUNNING", what=f"the session of {name} runs")
    return hub.sessions()[f"{name}/"]


def filling(hub: HubProcess, inside: Inside, session: Session) -> Program:
    return Program(inside.popen(hub, session, sys.executable, "-c", PROGRAM, str(HELD_MIB)))


@pytest.fixture
def program(hub: HubProcess, alice: Person, inside: Inside) -> Program:
    found = filling(hub, inside, begun(hub, "alice"))
    assert found.says() == "filled"
    return found


def test_a_session_is_parked_by_its_owner_and_gets_its_memory_back_by_a_call(
    hub: HubProcess, alice: Person, bob: Person, program: Program
) -> None:
    own = hub.sessions()["alice/"]
    alice.fgpu("park", str(own.id))
    hub.reach({"alice/": "PARKED"})
    found = alice.json("show", str(own.id))["session"]
    assert found["parked"] == {"since_s": found["parked"]["since_s"], "memory_mib": HELD_MIB, "wanted": False}
    assert alice.fgpu("park", str(own.id), "--never")[0].startswith(
        f"session {own.id} is parked; when it has"
    )
    assert alice.json("show", str(own.id))["session"]["never_park"] is True
    assert bob.json("park", str(own.id), "--allow", status=1)["error"]["code"] == "no_such_session"
    alice.fgpu("park", str(own.id), "--allow")
    assert alice.json("show", str(own.id))["session"]["never_park"] is False
    begun(hub, "bob")
    program.read_back()
    until(lambda: alice.json("show", str(own.id))["session"]["parked"]["wanted"], what="the call is noticed")
    assert hub.sessions()["alice/"].state == "PARKED", "bob holds the GPU"
    bob.end_all()
    assert program.says() == "0 same"
    hub.reach({"alice/": "RUNNING"})
    assert not limits.gate_closed(hub.data / "limits" / str(own.id))


def test_an_idle_session_is_parked_for_one_that_waits(
    hub: HubProcess, alice: Person, bob: Person, program: Program
) -> None:
    hub.spawn("bob", options=WHOLE)
    hub.reach({"bob/": "RUNNING", "alice/": "PARKED"})
    program.read_back()
    # Now bob's session is the idle one.
    hub.reach({"bob/": "PARKED", "alice/": "RUNNING"})
    assert program.says() == "0 same"


def test_a_parked_session_survives_a_kill_of_the_hub(
    hub: HubProcess, alice: Person, program: Program
) -> None:
    own = hub.sessions()["alice/"]
    alice.fgpu("park", str(own.id))
    hub.reach({"alice/": "PARKED"})
    hub.kill()
    hub.start()
    until(alice.is_answered, what="the service answers")
    hub.reach({"alice/": "PARKED"})
    program.read_back()
    assert program.says() == "0 same"
    hub.reach({"alice/": "RUNNING"})


def test_a_closed_gate_of_a_running_session_opens_after_a_kill_of_the_hub(
    hub: HubProcess, alice: Person, program: Program
) -> None:
    own = hub.sessions()["alice/"]
    hub.kill()
    limits.close_gate(hub.data / "limits" / str(own.id))
    hub.start()
    until(alice.is_answered, what="the service answers")
    program.read_back()
    assert program.says() == "0 same"


def test_a_session_on_demand_opens_on_a_full_gpu_and_gets_it_for_its_first_call(
    hub: HubProcess, alice: Person, bob: Person, inside: Inside
) -> None:
    begun(hub, "bob")
    hub.spawn("alice", options={**WHOLE, "gpu": "on-demand"})
    hub.reach({"alice/": "PARKED", "bob/": "RUNNING"})
    program = filling(hub, inside, hub.sessions()["alice/"])
    until(lambda: hub.sessions()["alice/"].wanted_at_s, what="the context is noticed")
    bob.end_all()
    assert program.says() == "filled"
    hub.reach({"alice/": "RUNNING"})
