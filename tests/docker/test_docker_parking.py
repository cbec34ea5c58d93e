"""A container's GPU memory goes to the host and back: by its user, by a call that waits, with the container's limit."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from dockerhub import USES_A_GPU, DockerHub, Engine, Running

from fgpu_scheduler import SessionState
from hubprocess import until

MIB = 2**20
HELD_MIB = 32
PROGRAM = f"""{USES_A_GPU}
size = {HELD_MIB} << 20
filled = (b"a GPU keeps what it is given" * (size // 28 + 1))[:size]
assert take({HELD_MIB}) == cuda.cuMemcpyHtoD_v2(address, filled, ctypes.c_size_t(size)) == 0
open("/tmp/filled", "w").close()
while not os.path.exists("/tmp/read"):
    time.sleep(0.05)
read = ctypes.create_string_buffer(size)
status = cuda.cuMemcpyDtoH_v2(read, address, ctypes.c_size_t(size))
print(status, "same" if read.raw == filled else "other")
"""


ASK_AS_SESSION = "open('/run/fgpu/lending/wanted', 'r+b', buffering=0).write(bytes([255] * 8))"


@pytest.fixture(scope="module")
def hub(make_hub: Callable[..., DockerHub]) -> DockerHub:
    return make_hub(parked_memory_mib=1024, meter_every_s=1).start()


@pytest.fixture
def half(hub: DockerHub) -> Iterator[Running]:
    yield hub.running("alice", fgpu="0.5", cpu="0.7", memory_mib=300)
    hub.end("alice")


def has_state(hub: DockerHub, state: SessionState) -> None:
    until(lambda: hub.sessions()["alice/"].state is state, what=f"the session is {state}")


def park(hub: DockerHub, half: Running) -> None:
    with hub.writing() as store:
        store.ask_to_park(half.session.id, now_s=int(time.time()))
    has_state(hub, SessionState.PARKED)


def memory_limit_mib(engine: Engine, half: Running) -> int:
    return int(engine.client.inspect_container(half.id)["HostConfig"]["Memory"]) // MIB


def test_a_parked_container_keeps_its_gpu_memory_beside_its_own_limit(
    engine: Engine, hub: DockerHub, half: Running
) -> None:
    with ThreadPoolExecutor(1) as threads:
        program = threads.submit(engine.python_in, half.id, PROGRAM)
        there = engine.run_in
        until(lambda: there(half.id, "test", "-e", "/tmp/filled")[0] == 0, what="the memory is filled")
        park(hub, half)
        assert hub.sessions()["alice/"].parked_mib == HELD_MIB
        assert memory_limit_mib(engine, half) >= 300 + HELD_MIB
        there(half.id, "touch", "/tmp/read")
        assert program.result(90) == "0 same"
        has_state(hub, SessionState.RUNNING)
    until(lambda: memory_limit_mib(engine, half) == 300, what="the memory limit is the session's own again")


def test_a_parked_session_can_ask_for_its_own_gpu_and_nothing_else(
    engine: Engine, hub: DockerHub, half: Running
) -> None:
    park(hub, half)
    # A time that has not come is no call that waits.
    engine.python_in(half.id, ASK_AS_SESSION)
    status, _ = engine.run_in(half.id, "bash", "-c", "printf x > /run/fgpu/revision")
    assert status != 0, "the gate is the Hub's"
    grown = "open('/run/fgpu/lending/wanted', 'r+b').truncate(1 << 20)"
    engine.python_in(half.id, grown)
    assert hub.sessions()["alice/"].wanted_at_s is None
    assert hub.sessions()["alice/"].state is SessionState.PARKED
