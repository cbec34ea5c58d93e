"""Sessions as local processes, held by libfgpu on simulated GPUs, through a real Hub."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from fgpu_scheduler import Audit, Session
from fgpuspawner.isolation import limits
from fgpuspawner.isolation.choice import VERDICTS
from fgpuspawner.isolation.files import write_whole
from fgpuspawner.meter.model import METERS
from hubprocess import HubProcess, until

pytestmark = pytest.mark.usefixtures("libfgpu_built")

HALF = {"fgpu": "0.5", "cpu": "0.2", "memory_mib": 256}
"""A quarter of a GPU of 8192 MiB that is worth 2 fGPU: 2048 MiB, 25 %."""

NVML_TOTAL = """
import pynvml
pynvml.nvmlInit()
print(pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(0)).total // 2**20)
"""
CUDA = """
import ctypes, signal, sys, time
cuda = ctypes.CDLL("libcuda.so.1")
def call(name, *arguments):
    status = getattr(cuda, name)(*arguments)
    if status:
        print(name, status, flush=True)
        sys.exit(status)
context, device = ctypes.c_void_p(), ctypes.c_int()
call("cuInit", 0)
call("cuDeviceGet", ctypes.byref(device), 0)
call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
call("cuCtxSetCurrent", context)
def take(mib):
    pointer = ctypes.c_uint64()
    call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(mib * 2**20))
    return pointer
"""
HOLD = CUDA + "taken = take(int(sys.argv[1]))\nprint('taken', flush=True)\nsignal.pause()\n"


Make = Callable[..., HubProcess]


def server_of(session: Session, hub: HubProcess) -> psutil.Process:
    """Return the process that the Hub noted as the session's server."""
    note = hub.data / "run" / f"{session.id}-{session.attempt}@local"
    return psutil.Process(int(note.read_text()))


def start(hub: HubProcess, user: str, server: str = "", **options: Any) -> Session:
    hub.add_user(user)
    answer = hub.spawn(user, server, options={**HALF, **options})
    assert answer.status_code in (201, 202), answer.text
    until(lambda: hub.ready(user, server), what=f"{user}/{server} is ready:\n{hub.log_text()[-3000:]}")
    return hub.sessions()[f"{user}/{server}"]


@pytest.fixture(autouse=True)
def nobody_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """What a test ends on the shared Hub is over before the next one begins."""
    yield
    if "shared_hub" in request.fixturenames:
        hub: HubProcess = request.getfixturevalue("shared_hub")
        until(lambda: hub.states() == {}, what="its sessions have ended")


class Inside:
    """Runs programs in a session, with the environment of its server; what still runs is ended with the test."""

    def __init__(self) -> None:
        self._running: list[subprocess.Popen[str]] = []

    def popen(
        self, hub: HubProcess, session: Session, *command: str, without: str = ""
    ) -> subprocess.Popen[str]:
        env = {k: v for k, v in server_of(session, hub).environ().items() if k != without}
        child = subprocess.Popen(
            command,
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=hub.folder,
            start_new_session=True,
        )
        self._running.append(child)
        return child

    def run(self, hub: HubProcess, session: Session, *command: str, without: str = "") -> tuple[int, str]:
        child = self.popen(hub, session, *command, without=without)
        output, _ = child.communicate(timeout=120)
        return child.returncode, output

    def holding(
        self, hub: HubProcess, session: Session, mib: int, *, without: str = ""
    ) -> subprocess.Popen[str]:
        """Return a program that holds so much GPU memory."""
        child = self.popen(hub, session, sys.executable, "-c", HOLD, str(mib), without=without)
        assert child.stdout is not None
        assert child.stdout.readline() == "taken\n"
        return child

    def close(self) -> None:
        for child in self._running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.communicate()


@pytest.fixture
def inside() -> Iterator[Inside]:
    found = Inside()
    yield found
    found.close()


# --- The slice is real ---


def test_programs_see_their_slice_and_cannot_take_more(shared_hub: HubProcess, inside: Inside) -> None:
    session = start(shared_hub, "alice")
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
    shared_hub.stop("alice")


def test_the_commands_are_there_and_on_simulated_gpus_nvidia_smi_too(
    shared_hub: HubProcess, inside: Inside
) -> None:
    session = start(shared_hub, "carol")
    for name in ("fgpu-smi", "nvidia-smi"):
        status, said = inside.run(shared_hub, session, name)
        assert status == 0, said
        assert "2048MiB" in said.replace(" ", ""), said
        assert "imulated" in said
    assert inside.run(shared_hub, session, "fgpu-verify", "--help")[0] == 0
    shared_hub.stop("carol")


def test_a_session_is_verified_before_it_is_ready(shared_hub: HubProcess) -> None:
    session = start(shared_hub, "dora")
    assert f"Session {session.id} is verified: interposer" in shared_hub.log_text()
    (verdict,) = (v for v in VERDICTS.read(shared_hub.data) if v.session_id == session.id)
    assert (verdict.node_id, verdict.problems) == ("local", ())
    shared_hub.stop("dora")


def test_nothing_is_left_of_a_session_that_has_ended(shared_hub: HubProcess) -> None:
    session = start(shared_hub, "hilda")
    own = shared_hub.data / "limits" / str(session.id)
    account = (own / "accounting").resolve()
    assert account.parts[:3] == ("/", "dev", "shm")
    shared_hub.stop("hilda")
    until(lambda: "hilda/" not in shared_hub.states(), what="the session has ended")
    until(lambda: not own.exists() and not account.parent.exists(), what="its folders are gone")


# --- A limit that is not in force ---


def environment(folder: Path, script: str) -> str:
    """Return lines for a catalogue with an image where Python is a script."""
    program = folder / "image" / "bin" / "python"
    program.parent.mkdir(parents=True)
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    fields = {
        "slug": "python",
        "name": "Stripped",
        "framework": "python",
        "version": "3.11",
        "python": "3.11",
        "reference": "fgpuspawner/base:0.1",
        "environment": str(program.parent.parent),
    }
    (folder / "catalogue.toml").write_text(
        "\n".join(["[[image]]", *(f'{key} = "{value}"' for key, value in fields.items()), "default = true\n"])
    )
    return str(folder / "catalogue.toml")


@pytest.mark.parametrize(
    "script",
    [
        f'unset LD_PRELOAD\nexec {sys.executable} "$@"',
        # Until then it looks as it should.
        f'sleep 2\nunset LD_PRELOAD\nexec {sys.executable} "$@"',
        f'env -u LD_PRELOAD {sys.executable} "$@"',
        f'export LD_PRELOAD=/no/such/library.so\nexec {sys.executable} "$@" 2>/dev/null',
    ],
    ids=["exec", "later", "child", "another"],
)
def test_session_without_limits_in_force_is_ended_with_the_reason(
    make_hub: Make, tmp_path: Path, script: str
) -> None:
    hub = make_hub(service=False, catalogue=environment(tmp_path, script)).start()
    hub.add_user("alice")
    answer = hub.spawn("alice", options=HALF)
    (ended,) = until(lambda: hub.store.ended(user="alice", limit=1), what="the session has ended")
    assert (ended.state, ended.end_cause) == ("ERROR", "ISOLATION_FAILED")
    (verdict,) = VERDICTS.read(hub.data)
    assert verdict.session_id == ended.id
    assert any("CUDA reported 8192 MiB" in problem for problem in verdict.problems)
    assert ended.message == (
        "your session was ended because its GPU limit of 2048 MiB was not in force (CUDA reported 8192 MiB); this is "
        "usually the fault of the image (python): try another one, or ask an administrator"
    )
    assert ended.started_at_s is None, "it was never handed out"
    # The request is answered at once, or with a waiting page: see the next test.
    if answer.status_code == 500:
        assert answer.json()["message"] == ended.message
    assert not hub.ready("alice")
    until(lambda: not list((hub.data / "run").iterdir()), what="its process is gone")
    assert hub.states() == {}


def test_child_without_the_environment_is_not_the_server(make_hub: Make, tmp_path: Path) -> None:
    # As JupyterLab starts programs to see which language servers there are.
    script = f'env -i sleep 600 &\nexec {sys.executable} "$@"'
    hub = make_hub(service=False, catalogue=environment(tmp_path, script)).start()
    session = start(hub, "alice")
    assert session.state == "RUNNING"
    hub.stop("alice")
    hub.reach({})


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


@pytest.fixture
def watched_hub(make_hub: Make) -> HubProcess:
    """A Hub with a watchdog that checks every second and tolerates 128 MiB."""
    return make_hub(service=False, watchdog_every_s=1, watchdog_tolerance_mib=128).start()


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
        lambda: [a for a in Audit(hub.store).lines(limit=9) if a.action == "watchdog.end"],
        what="it is in the audit log",
    )
    strikes = [a.details for a in Audit(hub.store).lines(limit=9, action="watchdog.strike")]
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


def code_takes(hub: HubProcess, mib: int) -> None:
    machine = hub.data / "simulated" / "local" / "machine"
    text = machine.read_text().replace(" context_mib=0 ", f" context_mib=0 code_mib={mib} ")
    write_whole(machine, text.encode(), mode=0o444)


def test_program_with_much_code_that_fills_its_slice_is_refused_and_not_ended(
    watched_hub: HubProcess, inside: Inside
) -> None:
    hub = watched_hub
    code_takes(hub, 384)
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
    assert not [a for a in Audit(hub.store).lines(limit=9) if a.action.startswith("watchdog")]
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
    thief = start(hub, "mallory")
    library = hub.data / "simulated" / "local" / "libcuda.so.1"
    program = HOLD.replace("libcuda.so.1", str(library))
    # Its environment is empty; its parent's is not.
    child = inside.popen(
        hub, thief, "/bin/sh", "-c", 'env -i "$0" -c "$1" 3000; true', sys.executable, program
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "taken\n"
    (forgetful,) = psutil.Process(child.pid).children()
    (ended,) = until(lambda: hub.store.ended(user="mallory", limit=1), what="the session was ended")
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
