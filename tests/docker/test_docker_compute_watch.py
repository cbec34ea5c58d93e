"""In real containers: a program that computes without libfgpu is ended, and a session with many data loaders never is."""

from __future__ import annotations

import io
import json
import subprocess
import tarfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from dockerhub import MINI, PYTHON, DockerHub, Engine, Running, until

pytestmark = pytest.mark.usefixtures("libfgpu_built")


HERE = Path(__file__).parent
SIMULATED = HERE.parent.parent / "isolation" / "simulated"
LOADERS = """
import ctypes, os, sys, time
GPU_LOADERS, CPU_LOADERS = 8, 8
def work(seconds):
    cuda = ctypes.CDLL("libcuda.so.1")
    context, module, kernel = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
    text = b".version 6.0\\n.target sm_50\\n.address_size 64\\n.visible .entry spin_5ms()\\n{\\nret;\\n}\\n"
    for status in (cuda.cuInit(0), cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0),
                   cuda.cuCtxSetCurrent(context), cuda.cuModuleLoadData(ctypes.byref(module), text),
                   cuda.cuModuleGetFunction(ctypes.byref(kernel), module, b"spin_5ms")):
        assert status == 0, status
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        assert cuda.cuLaunchKernel(kernel, 1, 1, 1, 1, 1, 1, 0, None, None, None) == 0
        assert cuda.cuCtxSynchronize() == 0
def idle(seconds):
    time.sleep(seconds)
def short_programs(seconds):
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        child = os.fork()
        if child == 0:
            work(0.3)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
seconds = float(sys.argv[1])
children = []
for task in [work] * GPU_LOADERS + [idle] * CPU_LOADERS + [short_programs]:
    child = os.fork()
    if child == 0:
        task(seconds)
        os._exit(0)
    children.append(child)
print(*children, flush=True)
work(seconds)
for child in children:
    assert os.waitpid(child, 0)[1] == 0
print("all is well", flush=True)
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A program that is linked statically, and computes as fast as it can."""
    path = tmp_path_factory.mktemp("around") / "around"
    sources = sorted([*SIMULATED.glob("cuda*.c"), *SIMULATED.glob("machine*.c")])
    flags = ["-std=gnu11", "-D_GNU_SOURCE", "-O1", "-w", "-static", f"-I{SIMULATED.parent / 'include'}"]
    words = ["gcc", *flags, "-o", path, HERE / "aroundlibfgpu.c", *sources, "-pthread"]
    subprocess.run(words, check=True, capture_output=True)
    return path.read_bytes()


def begin(engine: Engine, running: Running, program: bytes, way: str = "") -> None:
    """Have a session run the program beside its server, in one of its ways."""
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        entry = tarfile.TarInfo("around")
        entry.size, entry.mode = len(program), 0o755
        tar.addfile(entry, io.BytesIO(program))
    engine.client.put_archive(running.id, "/tmp", archive.getvalue())
    made = engine.client.exec_create(
        running.id, ["/tmp/around", way], environment={"FGPU_SIMULATED_MACHINE": "/run/fgpu/simulated"}
    )
    engine.client.exec_start(made["Id"], detach=True)


def events_of(hub: DockerHub, running: Running) -> list[str]:
    return [e.kind for e in hub.store.events(limit=10_000) if e.session_id == running.session.id]


def test_static_program_beyond_its_share_is_warned_and_ended(
    engine: Engine, make_hub: Callable[..., DockerHub], program: bytes
) -> None:
    hub = make_hub(after=MINI).start()
    neighbour = hub.running("alice", fgpu="0.5")
    thieves = {way: hub.running(f"mallory{way}", fgpu="0.2") for way in ("", "thread", "relay", "kill")}
    for way, thief in thieves.items():
        begin(engine, thief, program, way)
    began_s = time.monotonic()
    for way, thief in thieves.items():
        user = f"mallory{way}"
        ended = until(lambda user=user: hub.store.ended(user=user, limit=1), within_s=120, what="an end")[0]
        print(f"{user} ended after {time.monotonic() - began_s:.1f} s at most")
        assert (ended.id, ended.state, ended.end_cause) == (thief.session.id, "ERROR", "ISOLATION_FAILED")
        assert "of a GPU around its share of 10 %, also after a warning; a statically linked program" in str(
            ended.message
        )
        assert events_of(hub, thief).count("warned") >= 1
        until(lambda thief=thief: engine.inspect(thief.name) is None, what="its container is gone")
    assert hub.states() == {"alice/": "RUNNING"}
    assert events_of(hub, neighbour).count("warned") == 0
    hub.end("alice")


@pytest.mark.parametrize(
    ("compute", "seconds"), [("elastic", "40"), pytest.param("strict", "30", marks=pytest.mark.slow)]
)
def test_a_session_with_sixteen_data_loaders_and_short_programs_is_never_warned(
    engine: Engine, make_hub: Callable[..., DockerHub], compute: str, seconds: str
) -> None:
    hub = make_hub(after=f'{MINI}\nc.FGPU.compute = "{compute}"\n', watchdog_every_s=1).start()
    running = hub.running("alice", fgpu="0.5", cpu="0.7", memory_mib=700)
    made = engine.client.exec_create(running.id, [PYTHON, "-c", LOADERS, seconds])
    pieces = engine.client.exec_start(made["Id"], stream=True)
    children = [int(word) for word in next(pieces).decode().split()]
    assert len(children) == 17
    computing = set(children[:8])
    asked = ["/run/fgpu/probe-static", "--accounting", "/run/fgpu/written/accounting", "--processes"]

    def slots() -> bool:
        status, said = engine.run_in(running.id, *asked, ",".join(map(str, children)))
        assert status == 0, said
        told = json.loads(said)
        assert set(told["running"]) == set(children)
        assert computing >= set(told["slots"]) & set(children), "who only forks has no slot"
        return computing <= set(told["slots"])

    until(slots, within_s=60, what="each that computes has a slot, though it holds no memory")
    assert b"".join(pieces).decode() == "all is well\n"
    assert events_of(hub, running).count("warned") == 0
    assert hub.states() == {"alice/": "RUNNING"}
    hub.end("alice")
