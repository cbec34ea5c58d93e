"""A slice that changes while a program in its container runs: it takes what was added, and not what was given back."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from dockerhub import USES_A_GPU, DockerHub, Engine, Running

from fgpu_scheduler import Amount, Resize, Resizes, ResizeState, Session
from hubprocess import until

PROGRAM = f"""{USES_A_GPU}
size, held, told = ctypes.c_size_t, [], {{}}
def take(mib):
    address = ctypes.c_uint64()
    status = cuda.cuMemAlloc_v2(ctypes.byref(address), size(mib << 20))
    held.extend([address] if status == 0 else [])
    return status
def total():
    free, total = size(), size()
    assert cuda.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total)) == 0
    return total.value >> 20
def until_total_is(mib):
    until_s = time.monotonic() + 60
    while total() != mib and time.monotonic() < until_s:
        time.sleep(0.02)
    return total()
told["before"] = [total(), take(2048), take(1)]
open("/tmp/begun", "w").close()
told["grown"] = [until_total_is(4096), take(2048), take(1)]
while held:
    cuda.cuMemFree_v2(held.pop())
open("/tmp/freed", "w").close()
told["shrunk"] = [until_total_is(1536), take(1537), take(1536)]
print(json.dumps(told))
"""


@pytest.fixture
def half(shared_hub: DockerHub) -> Iterator[Running]:
    """A session of half a unit where a GPU of 8 GiB is worth 2."""
    yield shared_hub.running("alice", fgpu="0.5", cpu="0.7", memory_mib=300)
    shared_hub.end("alice")


def ask(hub: DockerHub, session: Session, milli: int) -> None:
    with hub.writing() as store:
        Resizes(store).ask(session.id, Amount(milli), by="alice", now_s=0)


def answered(hub: DockerHub) -> Resize:
    def answer() -> Resize | None:
        (wish,) = Resizes(hub.store).of_live()
        return wish if wish.state is not ResizeState.ASKED else None

    return until(answer, what="the Hub has acted")


def test_a_program_in_a_container_takes_what_was_added_and_not_what_was_given_back(
    engine: Engine, shared_hub: DockerHub, half: Running
) -> None:
    with ThreadPoolExecutor(1) as threads:
        program = threads.submit(engine.python_in, half.id, PROGRAM)
        there = engine.run_in
        until(lambda: there(half.id, "test", "-e", "/tmp/begun")[0] == 0, what="the program has begun")
        ask(shared_hub, half.session, 1000)
        assert answered(shared_hub).state is ResizeState.DONE
        until(
            lambda: there(half.id, "test", "-e", "/tmp/freed")[0] == 0,
            what="the program has freed it",
        )
        ask(shared_hub, half.session, 400)
        assert answered(shared_hub).state is ResizeState.DONE, answered(shared_hub).message
        assert json.loads(program.result(90)) == {
            "before": [2048, 0, 2],
            "grown": [4096, 0, 2],
            "shrunk": [1536, 2, 0],
        }
    assert "memory_mib=1536 " in engine.run_in(half.id, "cat", "/run/fgpu/limits")[1]


def test_a_container_cannot_change_the_number_of_its_limits(engine: Engine, half: Running) -> None:
    tried = "echo x > /run/fgpu/revision || mv /run/fgpu/revision /tmp/ || rm -f /run/fgpu/revision"
    assert engine.run_in(half.id, "sh", "-c", tried, user="root")[0] != 0
