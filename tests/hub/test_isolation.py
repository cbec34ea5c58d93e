"""Sessions as local processes, held by libfgpu on simulated GPUs, through a real Hub."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest
from inside import CUDA, HOLD, Inside, server_of

from fgpu_scheduler import Audit, AuditLine, Session
from fgpuspawner.isolation import limits
from fgpuspawner.isolation.choice import VERDICTS
from fgpuspawner.isolation.files import write_whole
from fgpuspawner.meter.model import METERS
from hubprocess import MINI, WITHOUT_SERVICE, HubProcess, running, until

pytestmark = pytest.mark.usefixtures("libfgpu_built")

HALF = {"fgpu": "0.5", "cpu": "0.2", "memory_mib": 256}
"""A quarter of a GPU of 8192 MiB that is worth 2 fGPU: 2048 MiB, 25 %."""

NVML_TOTAL = """
import pynvml
pynvml.nvmlInit()
print(pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(0)).total // 2**20)
"""
Make = Callable[..., HubProcess]


def start(hub: HubProcess, user: str, server: str = "", **options: Any) -> Session:
    hub.add_user(user)
    answer = hub.spawn(user, server, options={**HALF, **options})
    assert answer.status_code in (201, 202), answer.text
    until(lambda: hub.ready(user, server), what=f"{user}/{server} is ready:\n{hub.log_text()[-3000:]}")
    return hub.sessions()[f"{user}/{server}"]


# --- The slice is real ---


def test_a_session_is_verified_its_programs_see_their_slice_and_nothing_is_left_of_it(
    shared_hub: HubProcess, inside: Inside
) -> None:
    session = start(shared_hub, "alice")
    assert f"Session {session.id} is verified: interposer" in shared_hub.log_text()
    (verdict,) = (v for v in VERDICTS.read(shared_hub.data) if v.session_id == session.id)
    assert (verdict.node_id, verdict.problems) == ("local", ())
    assert inside.run(shared_hub, session, sys.executable, "-c", NVML_TOTAL) == (0, "2048\n")
    whole = inside.run(shared_hub, session, sys.executable, "-c", NVML_TOTAL, without="LD_PRELOAD")
    assert whole == (0, "8192\n"), (
        "the simulated driver knows whole devices only: the slice is libfgpu's doing"
    )
    # What is beyond fails with an ordinary error, and the program goes on.
    status, said = inside.run(
        shared_hub,
        session,
        sys.executable,
        "-c",
        CUDA
        + textwrap.dedent("""
            first = take(1500)
            pointer = ctypes.c_uint64()
            print(cuda.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(600 * 2**20)))
            second = take(500)
            print("goes on")
        """),
    )
    assert (status, said) == (0, "2\ngoes on\n")
    own = shared_hub.data / "limits" / str(session.id)
    account = (own / "accounting").resolve()
    assert account.parts[:3] == ("/", "dev", "shm")
    shared_hub.stop("alice")
    until(lambda: not own.exists() and not account.parent.exists(), what="its folders are gone")
    shared_hub.reach({})


# --- A limit that is not in force ---


SCRIPTS = {
    "exec": f'unset LD_PRELOAD\nexec {sys.executable} "$@"',
    # Until then it looks as it should.
    "later": f'sleep 2\nunset LD_PRELOAD\nexec {sys.executable} "$@"',
    "child": f'env -u LD_PRELOAD {sys.executable} "$@"',
    "another": f'export LD_PRELOAD=/no/such/library.so\nexec {sys.executable} "$@" 2>/dev/null',
    # As JupyterLab starts programs to see which language servers there are.
    "honest": f'env -i sleep 600 &\nexec {sys.executable} "$@"',
}
ENTRY = """[[image]]
slug = "{name}"
name = "{name}"
framework = "python"
version = "3.11"
python = "3.11"
reference = "fgpuspawner/base:0.1"
environment = "{folder}"
"""


@pytest.fixture(scope="module")
def scripts_hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubProcess]:
    """A Hub with images where Python is one of `SCRIPTS`."""
    folder = tmp_path_factory.mktemp("scripts")
    for name, script in SCRIPTS.items():
        program = folder / name / "bin" / "python"
        program.parent.mkdir(parents=True)
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
    entries = "".join(ENTRY.format(name=name, folder=folder / name) for name in SCRIPTS)
    (folder / "catalogue.toml").write_text(f"{entries}default = true\n")
    after = MINI + WITHOUT_SERVICE
    with running(folder / "hub", after=after, catalogue=str(folder / "catalogue.toml")) as hub:
        yield hub


@pytest.mark.parametrize("image", ["exec", "later", "child", "another"])
def test_session_without_limits_in_force_is_ended_with_the_reason(
    scripts_hub: HubProcess, image: str
) -> None:
    hub = scripts_hub
    hub.add_user(image)
    answer = hub.spawn(image, options={**HALF, "image": image})
    (ended,) = until(lambda: hub.store.ended(user=image, limit=1), what="the session has ended")
    assert (ended.state, ended.end_cause) == ("ERROR", "ISOLATION_FAILED")
    (verdict,) = (v for v in VERDICTS.read(hub.data) if v.session_id == ended.id)
    assert any("CUDA reported 8192 MiB" in problem for problem in verdict.problems)
    assert ended.message == (
        "your session was ended because its GPU limit of 2048 MiB was not in force (CUDA reported 8192 MiB); this is "
        f"usually the fault of the image ({image}): try another one, or ask an administrator"
    )
    assert ended.started_at_s is None, "it was never handed out"
    # The request is answered at once, or with a waiting page: see the next test.
    if answer.status_code == 500:
        assert answer.json()["message"] == ended.message
    assert not hub.ready(image)
    until(lambda: not list((hub.data / "run").iterdir()), what="its process is gone")
    assert hub.states() == {}


def test_child_without_the_environment_is_not_the_server(scripts_hub: HubProcess) -> None:
    session = start(scripts_hub, "alice", image="honest")
    assert session.state == "RUNNING"
    scripts_hub.stop("alice")
    scripts_hub.reach({})


def test_failed_probe_ends_the_session(make_hub: Make) -> None:
    hub = make_hub(service=False, verify_timeout_s=60).start()
    session = start(hub, "alice")
    hub.stop("alice")
    until(lambda: hub.states() == {}, what="it has ended")
    # The machine's driver is gone by the next launch.
    (hub.data / "simulated" / "local" / "libcuda.so.1").unlink()
    hub.spawn("alice", options=HALF)
    ended = until(
        lambda: [s for s in hub.store.ended(user="alice", limit=2) if s.id != session.id],
        what="the session has ended",
    )[0]
    assert ended.end_cause == "ISOLATION_FAILED"
    assert "CUDA could not be asked: missing" in str(ended.message)


# --- The watchdog ---


@pytest.fixture(scope="module")
def module_hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubProcess]:
    folder, after = tmp_path_factory.mktemp("watched"), MINI + WITHOUT_SERVICE
    with running(folder, after=after, watchdog_every_s=1, watchdog_tolerance_mib=128) as hub:
        yield hub


@pytest.fixture
def watched_hub(module_hub: HubProcess) -> Iterator[HubProcess]:
    """A Hub with a watchdog that checks every second and tolerates 128 MiB."""
    yield module_hub
    module_hub.end_all()


def audited(hub: HubProcess, session: Session) -> list[AuditLine]:
    """Return the watchdog's lines about a session, the newest first."""
    lines = Audit(hub.store).lines(limit=99)
    return [a for a in lines if a.actor == "the watchdog" and f"session {session.id} " in a.target]


def test_session_that_bypasses_its_limit_is_warned_and_ended(watched_hub: HubProcess, inside: Inside) -> None:
    hub = watched_hub
    thief, neighbour = start(hub, "mallory"), start(hub, "alice")
    inside.holding(hub, neighbour, 2000)
    inside.holding(hub, thief, 3000, without="LD_PRELOAD")
    (ended,) = until(lambda: hub.store.ended(user="mallory", limit=1), what="the session was ended")
    assert (ended.id, ended.state, ended.end_cause) == (thief.id, "ERROR", "ISOLATION_FAILED")
    assert ended.message == (
        "your session was ended because it held 3000 MiB of GPU memory, above its limit of 2048 MiB, also after a "
        "warning; its programs took memory that the limit does not count, or got around it"
    )
    events = [e for e in hub.store.events(limit=1000) if e.session_id == thief.id]
    kinds = [e.kind for e in events]
    assert kinds.index("warned") < len(kinds) - 2, "warned first"
    lines = until(
        lambda: [a for a in audited(hub, thief) if a.action == "watchdog.end"], what="it is in the audit log"
    )
    strikes = [a.details for a in audited(hub, thief) if a.action == "watchdog.strike"]
    assert (lines[0].actor, lines[0].target) == (
        "the watchdog",
        f"session {thief.id} (Python 1) of mallory",
    )
    assert [d.rpartition("; ")[2] for d in reversed(strikes)] == ["1.0 of 3 strikes", "2.0 of 3 strikes"]
    assert f"Session {thief.id} holds 3000 MiB of GPU GPU-simulated-local-0" in hub.log_text()
    until(lambda: not server_alive(hub, thief), what="its server is gone")
    assert hub.states() == {"alice/": "RUNNING"}
    assert neighbour.id == hub.sessions()["alice/"].id


EAGER = (
    CUDA
    + """
image = b".version 8.0\\n.target sm_90\\n.visible .entry one()\\n{ ret; }\\n"
modules = [ctypes.c_void_p() for _ in range(3)]
for module in modules:
    call("cuModuleLoadData", ctypes.byref(module), image)
taken = 0
while cuda.cuMemAlloc_v2(ctypes.byref(ctypes.c_uint64()), ctypes.c_size_t(16 * 2**20)) == 0:
    taken += 16
free, total = ctypes.c_size_t(), ctypes.c_size_t()
call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
print("refused", taken, free.value // 2**20, total.value // 2**20, flush=True)
for line in sys.stdin:
    print(cuda.cuMemAlloc_v2(ctypes.byref(ctypes.c_uint64()), ctypes.c_size_t(16 * 2**20)), flush=True)
"""
)
"""A program that loads all code at its start, as with CUDA_MODULE_LOADING=EAGER, and then fills its slice."""


@pytest.fixture
def much_code(watched_hub: HubProcess) -> Iterator[None]:
    """The simulated driver counts 384 MiB for each module of code."""
    machine = watched_hub.data / "simulated" / "local" / "machine"
    before = machine.read_text()
    text = before.replace(" context_mib=0 ", " context_mib=0 code_mib=384 ")
    write_whole(machine, text.encode(), mode=0o444)
    yield
    write_whole(machine, before.encode(), mode=0o444)


def test_program_with_much_code_that_fills_its_slice_is_refused_and_not_ended(
    watched_hub: HubProcess, much_code: None, inside: Inside
) -> None:
    hub = watched_hub
    honest, neighbour = start(hub, "alice"), start(hub, "bob")
    inside.holding(hub, neighbour, 2000 - 384)
    program = inside.popen(hub, honest, sys.executable, "-c", EAGER)
    assert program.stdout is not None
    assert program.stdin is not None
    assert program.stdout.readline() == f"refused {2048 - 3 * 384} 0 2048\n", (
        "by its own error, within its slice"
    )
    code = until(
        lambda: limits.read(hub.data / "limits" / str(honest.id)).devices[0].code_mib,
        what="the host has counted the code",
    )
    assert code == 3 * 384
    meter = until(
        lambda: (
            (live := (METERS.read(hub.data).sessions or {}).get(honest.id)) and live.now.memory_context_mib
        ),
        what="the meter shows it",
    )
    assert meter == 3 * 384
    told = inside.run(hub, honest, "fgpu-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits")
    assert told == (0, "2048\n")
    program.stdin.write("\n")
    program.stdin.flush()
    assert program.stdout.readline() == "2\n", "still out of memory, and still there"
    assert hub.states() == {"alice/": "RUNNING", "bob/": "RUNNING"}
    assert not audited(hub, honest)
    program.kill()
    until(
        lambda: limits.read(hub.data / "limits" / str(honest.id)).devices[0].code_mib == 0,
        what="its code is gone with it",
    )


def server_alive(hub: HubProcess, session: Session) -> bool:
    try:
        return server_of(session, hub).is_running()
    except (OSError, psutil.NoSuchProcess):
        return False


def test_child_without_environment_counts_for_its_session(watched_hub: HubProcess, inside: Inside) -> None:
    hub = watched_hub
    thief = start(hub, "eve")
    library = hub.data / "simulated" / "local" / "libcuda.so.1"
    program = HOLD.replace("libcuda.so.1", str(library))
    # Its environment is empty; its parent's is not.
    child = inside.popen(
        hub, thief, "/bin/sh", "-c", 'env -i "$0" -c "$1" 3000; true', sys.executable, program
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "taken\n"
    (forgetful,) = psutil.Process(child.pid).children()
    (ended,) = until(lambda: hub.store.ended(user="eve", limit=1), what="the session was ended")
    assert (ended.id, ended.end_cause) == (thief.id, "ISOLATION_FAILED")
    until(lambda: not forgetful.is_running() or forgetful.status() == "zombie", what="it was ended as well")


# --- What an administrator sees and sets ---


def test_without_isolation_a_session_has_the_whole_gpu_and_the_log_says_so(
    make_hub: Make, inside: Inside
) -> None:
    hub = make_hub(service=False, isolation="none", watchdog_every_s=1, watchdog_tolerance_mib=0).start()
    assert "Node local: isolation none: NOTHING holds a session to its slice (set so)" in hub.log_text()
    session = start(hub, "alice")
    assert f"Session {session.id} is not verified: its isolation is none" in hub.log_text()
    assert inside.run(hub, session, sys.executable, "-c", NVML_TOTAL) == (0, "8192\n")
