"""Parked sessions: their GPU memory is on the host, their calls wait, and all is as it was when they are back."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from sessionfolders import ISOLATION, UUID, MakePath, preloaded
from test_hooks_accounting import Program
from test_nvml_in_python import look, reading

from fgpuspawner.isolation import limits
from fgpuspawner.isolation.nvml_reader import NvmlReader
from fgpuspawner.isolation.report import Answer, CheckpointReport, checkpoint_command, read_answer

MIB = 2**20
UNAVAILABLE = 46
"""CUDA_ERROR_DEVICE_UNAVAILABLE."""
PARKS = 1000
MACHINE = "gpu uuid=GPU-simulated-test-0 memory_mib=8192 name=Simulated GPU\n"


class Session:
    """The folder of a session that can be parked, and what the Hub does with it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        limits.begin_revisions(folder)
        (folder / "lending").mkdir()
        self.word = folder / "lending" / "wanted"
        self.word.write_bytes(bytes(8))

    def move(self, what: str, *, timeout_s: int = 20) -> CheckpointReport:
        words = checkpoint_command("n", str(self.folder / "accounting"), what, timeout_s=timeout_s)
        done = subprocess.run(
            [self.folder / words[0], *words[1:]], env=preloaded(self.folder), capture_output=True, check=False
        )
        return read_answer(CheckpointReport, Answer(done.stdout, done.returncode), "n")

    def park(self, **more: int) -> CheckpointReport:
        limits.close_gate(self.folder)
        return self.move("park", **more)

    def wake(self) -> CheckpointReport:
        found = self.move("resume")
        if found.done:
            limits.open_gate(self.folder)
        return found

    def wanted_at_ms(self) -> int:
        return int.from_bytes(self.word.read_bytes(), "little")


def states(found: CheckpointReport) -> list[str]:
    return [process.state for process in found.processes]


def until(what: Callable[[], object], within_s: float = 20) -> None:
    end = time.monotonic() + within_s
    while not what():
        assert time.monotonic() < end, "in vain"
        time.sleep(0.005)


@pytest.fixture
def parkable(session_folder: MakePath) -> Callable[..., Session]:
    """Make sessions that can be parked."""
    return lambda mib=2048, **more: Session(session_folder(devices=[(UUID, mib)], **more))


@pytest.fixture
def working(compile_c: MakePath, isolation_build: Path) -> Any:
    """Run workers that check each byte of their memory; at the end each has to have found none wrong."""
    program = compile_c("tests/park_worker.c", isolation_build / "simulated" / "libcuda.so.1", "-pthread")

    @contextmanager
    def working(session: Session, seed: int = 1, mib: int = 4) -> Iterator[subprocess.Popen[str]]:
        process = subprocess.Popen(
            [program, str(seed), str(mib)],
            env=preloaded(session.folder),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "ready\n"
            yield process
            if process.returncode is None:
                out, errors = process.communicate(timeout=60)
                assert (process.returncode, errors) == (0, "")
                assert int(out) > 0
        finally:
            process.kill()
            with process:
                pass

    return working


def seen_by(host: NvmlReader) -> dict[int, int]:
    """Return what each process holds of the device, as the host's driver says."""
    found: dict[int, int] = look(host, UUID)[UUID]
    return found


@pytest.fixture
def begin() -> Iterator[Callable[..., Program]]:
    """Run Python programs in sessions, until the test ends."""
    with ExitStack() as stack:
        yield lambda session, code, **more: stack.enter_context(Program(session.folder, code, **more))


# --- Memory that comes back ---


def test_thousand_parks_of_several_processes_lose_no_byte_and_hold_no_memory(
    parkable: Any, working: Any
) -> None:
    first = parkable(machine=MACHINE)
    second = parkable(machine=first.folder)
    neighbour = parkable(machine=first.folder)
    parks = longest_ms = 0
    with ExitStack() as stack:
        host = stack.enter_context(reading(first.folder / "simulated"))
        workers = [
            (session, stack.enter_context(working(session, seed=seed)))
            for seed, session in enumerate([first] * 4 + [second] * 4 + [neighbour])
        ]
        pids = {session: sorted(p.pid for s, p in workers if s is session) for session in (first, second)}
        while parks < PARKS:
            for session in (first, second):
                found = session.park()
                assert (found.done, found.why, states(found)) == (True, None, ["checkpointed"] * 4)
                assert sorted(p.pid for p in found.processes) == pids[session]
                assert not set(seen_by(host)) & set(pids[session])
                found = session.wake()
                assert (found.done, found.why, states(found)) == (True, None, ["running"] * 4)
                parks += 4
                longest_ms = max(longest_ms, *(p.ms for p in found.processes))
        assert set(seen_by(host)) >= {*pids[first], *pids[second]}
    assert longest_ms < 5000


def test_room_of_a_parked_session_is_its_neighbours_and_comes_back_when_there_is_room(
    parkable: Any, begin: Any
) -> None:
    session = parkable(6144, machine=MACHINE)
    other = parkable(6144, machine=session.folder)
    ours = begin(session, "cuda.alloc(6000); say(ready=1); input(); cuda.alloc(1); say(done=1)")
    assert ours.line() == "ready=1"
    theirs = begin(other, "input(); at = cuda.alloc(6000); say(ready=1); input(); cuda.cuMemFree_v2(at)")
    assert states(session.park()) == ["checkpointed"]
    theirs.go()
    assert theirs.line() == "ready=1"
    found = session.wake()
    assert (found.done, states(found)) == (False, ["checkpointed"])
    assert [p.error for p in found.processes] == ["CUDA_ERROR_OUT_OF_MEMORY"]
    assert re.fullmatch(r"the driver refuses process \d+ \(error 2\)", found.why)
    ours.go()
    theirs.go()
    theirs.end()
    assert states(session.wake()) == ["running"]
    assert ours.line() == "done=1"


def test_time_to_move_memory_is_by_its_size(parkable: Any, begin: Any) -> None:
    session = parkable(machine=MACHINE + "checkpoint_mib_s=2000\n")
    program = begin(session, "cuda.alloc(1000); say(ready=1); input()")
    assert program.line() == "ready=1"
    for found in (session.park(), session.wake()):
        assert 500 <= found.processes[0].ms < 5000
    program.go()
    program.end()


# --- The gate ---

WANTING = {
    "a launch": "cuda.cuLaunchKernel(kernel, 1, 1, 1, 1, 1, 1, 0, stream, byref(argument), None)",
    "an allocation": "cuda.alloc(1)",
    "an allocation of a pool": "cuda.new('cuMemAllocAsync', MIB, stream)",
    "a copy": "cuda.cuMemcpyDtoH_v2(byref(c_uint64()), at, 8)",
    "a fill": "cuda.cuMemsetD8_v2(at, 7, 64)",
    "a wait": "cuda.cuStreamSynchronize(stream)",
    "an event": "cuda.new('cuEventCreate', 0)",
    "a module": "cuda.new('cuModuleLoadData', IMAGE, kind=c_void_p)",
    "a context": "cuda.new('cuCtxCreate_v2', 0, 0, kind=c_void_p)",
    "the memory that is free": "cuda.info()",
    "a graph": "cuda.cuGraphLaunch(graph, stream)",
}
PREPARED = """
IMAGE = b".version 8.0\\n.target sm_90\\n.visible .entry spin_50us(.param .u64 x)\\n{ ret; }\\n"
stream, at = cuda.stream(), cuda.alloc(1)
module = cuda.new("cuModuleLoadData", IMAGE, kind=c_void_p)
kernel = cuda.new("cuModuleGetFunction", module, b"spin_50us", kind=c_void_p)
argument = c_void_p(ctypes.addressof(c_uint64()))
graph = cuda.instantiate(cuda.new("cuGraphCreate", 0))
say(ready=1)
input()
"""


@pytest.mark.parametrize("call", WANTING)
@pytest.mark.parametrize("percent", [100, 25])
def test_call_waits_says_that_it_wants_the_gpu_and_goes_on(
    parkable: Any, begin: Any, call: str, percent: int
) -> None:
    timed = {"compute_percent": 25, "mode": "memory+compute", "slots": "0-25"} if percent == 25 else {}
    session = parkable(**timed)
    program = begin(session, f"{PREPARED}{WANTING[call]}\nsay(done=1)")
    assert program.line() == "ready=1"
    assert session.park().done
    assert session.wanted_at_ms() == 0
    program.go()
    until(session.wanted_at_ms)
    first = session.wanted_at_ms()
    assert 0 <= time.monotonic_ns() // 10**6 - first < 1000
    until(lambda: session.wanted_at_ms() > first, within_s=2)
    assert states(session.wake()) == ["running"]
    assert program.line() == "done=1"
    last = session.wanted_at_ms()
    program.end()
    assert session.wanted_at_ms() == last


def test_first_context_of_a_session_that_is_parked_from_birth_waits(parkable: Any, begin: Any) -> None:
    session = parkable()
    limits.close_gate(session.folder)
    code = """
    cuda = Cuda()
    cuda.cuInit(0)
    counts = cuda.new("cuDeviceGetCount", kind=c_int), cuda.new("cuDeviceTotalMem_v2", 0, kind=c_size_t) // MIB
    version, name, flags, active = c_int(), ctypes.create_string_buffer(99), c_uint(), c_int()
    cuda.cuDriverGetVersion(byref(version))
    cuda.cuDeviceGetName(name, 99, 0)
    cuda.cuDeviceGetAttribute(byref(version), 16, 0)
    cuda.cuDevicePrimaryCtxGetState(0, byref(flags), byref(active))
    cuda.cuCtxGetCurrent(byref(c_void_p()))
    cuda.cuCtxSetCurrent(None)
    say(counts=counts)
    input()
    start()
    cuda.alloc(1)
    say(done=1)
    """
    for start in ("cuda.start", "cuda.start_by_table"):
        program = begin(session, code.replace("start()", f"{start}()"), start=False)
        assert program.line() == "counts=(1, 2048)"
        assert session.wanted_at_ms() == 0
        program.go()
        until(session.wanted_at_ms)
        assert session.wake().done
        assert program.line() == "done=1"
        program.end()
        session.word.write_bytes(bytes(8))
        limits.close_gate(session.folder)


INTERRUPTED = """
import signal, threading
seen = []
signal.signal(signal.SIGINT, lambda *_: seen.append("int"))
signal.signal(signal.SIGCHLD, lambda *_: seen.append("chld"))
signal.signal(signal.SIGALRM, lambda *_: seen.append("alrm"))
signal.setitimer(signal.ITIMER_REAL, 0.01, 0.01)
say(result=cuda.result("cuMemAlloc_v2", byref(c_uint64()), MIB))
signal.setitimer(signal.ITIMER_REAL, 0)
say(seen=sorted(set(seen)))
input()
cuda.alloc(1)
"""


def test_stopping_a_cell_ends_the_wait_and_other_signals_do_not(parkable: Any, begin: Any) -> None:
    session = parkable()
    program = begin(session, PREPARED + INTERRUPTED)
    assert program.line() == "ready=1"
    assert session.park().done
    program.go()
    until(session.wanted_at_ms)
    pid = program._process.pid
    os.kill(pid, signal.SIGCHLD)
    first = session.wanted_at_ms()
    until(lambda: session.wanted_at_ms() > first, within_s=2)
    os.kill(pid, signal.SIGINT)
    assert program.line() == f"result={UNAVAILABLE}"
    assert program.line() == "seen=['alrm', 'chld', 'int']"
    assert session.wake().done
    program.go()
    program.end()


def test_waiting_thread_stops_no_other_thread_and_no_fork(parkable: Any, begin: Any) -> None:
    session = parkable()
    code = """
    import threading
    waiting = [threading.Thread(target=lambda: cuda.result("cuCtxSynchronize")) for _ in range(3)]
    for thread in waiting:
        thread.start()
    say(ready=1)
    input()
    pid = os.fork()
    if pid == 0:
        os._exit(cuda.result("cuInit", 0))
    say(child=os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), devices=cuda.new("cuDeviceGetCount", kind=c_int))
    for thread in waiting:
        thread.join()
    say(done=1)
    """
    program = begin(session, PREPARED + code.replace("\n    ", "\n"))
    assert program.line() == "ready=1"
    assert session.park().done
    program.go()
    assert program.line() == "ready=1"
    until(session.wanted_at_ms)
    program.go()
    # In a child of a process that has started the driver, it can be used no more: 3.
    assert program.line() == "child=3 devices=1"
    assert session.wake().done
    assert program.line() == "done=1"
    program.end()


GATED = re.findall(r"GATED\((cu\w+)\)", (ISOLATION / "libfgpu" / "gated.h").read_text())
NEED_NO_GPU = {
    "cuGetProcAddress",
    "cuGetProcAddress_v2",
    "cuInit",
    "cuCtxSetCurrent",
    "cuDeviceTotalMem",
    "cuDeviceTotalMem_v2",
    # Without parameters they are refused at once.
    "cuLaunchKernelEx",
    "cuLaunchKernelEx_ptsz",
    "cuLaunchCooperativeKernelMultiDevice",
}
ALL_WAIT = """
import signal, threading
signal.signal(signal.SIGINT, lambda *_: None)
def press():
    while True:
        time.sleep(0.002)
        os.kill(os.getpid(), signal.SIGINT)
threading.Thread(target=press, daemon=True).start()
there = [name for name in NAMES if hasattr(cuda.library, name)]
print(len(there), *(name for name in there if getattr(cuda.library, name)() != 46), flush=True)
os._exit(0)
"""


def test_each_gated_function_waits_whatever_its_parameters_are(parkable: Any, begin: Any) -> None:
    session = parkable()
    hooks = re.findall(r"HOOK\(CUDA, (cu\w+)", (ISOLATION / "libfgpu" / "hooks.h").read_text())
    names = [*GATED, *(name for name in hooks if name not in NEED_NO_GPU)]
    limits.close_gate(session.folder)
    program = begin(session, f"import time\ncuda = Cuda()\nNAMES = {names}\n{ALL_WAIT}", start=False)
    tested, *others = program.end().split()
    assert (int(tested) > 250, others) == (True, [])


def test_gate_of_an_older_spawner_is_open(parkable: Any, begin: Any) -> None:
    session = parkable()
    (session.folder / "revision").unlink()
    (session.folder / "revision").write_bytes(bytes(8))
    begin(session, "cuda.alloc(1)").end()
    (session.folder / "revision").unlink()
    begin(session, "cuda.alloc(1)").end()


# --- Refusals ---


@pytest.mark.parametrize(
    ("machine", "code", "error"),
    [
        ("", "cuda.new('cuMemAllocManaged', MIB, 1)", "CUDA_ERROR_NOT_SUPPORTED"),
        ("checkpoint=lock-stuck\n", "", "CUDA_ERROR_NOT_READY"),
    ],
    ids=["managed memory", "a lock in vain"],
)
def test_process_that_cannot_be_parked_is_named_and_all_others_run_on(
    parkable: Any, begin: Any, working: Any, machine: str, code: str, error: str
) -> None:
    session = parkable(machine=MACHINE)
    with working(session):
        program = begin(session, f"cuda.alloc(1)\n{code}\nsay(ready=1)\ninput()")
        assert program.line() == "ready=1"
        path = session.folder / "simulated" / "machine"
        path.chmod(0o644)
        path.write_text(MACHINE + machine)
        found = session.park(timeout_s=3)
        assert not found.done
        assert found.why is not None
        refused = [p for p in found.processes if p.error is not None]
        assert [(p.error, p.state) for p in refused] == [(error, "running")]
        assert [p.state for p in found.processes if p.error is None] == ["running"]
        limits.open_gate(session.folder)
        program.go()
        program.end()


def test_process_that_the_driver_broke_is_told_and_does_not_keep_the_others_parked(
    parkable: Any, begin: Any, working: Any
) -> None:
    session = parkable(machine=MACHINE + "checkpoint=fails\n")
    program = begin(
        session, "cuda.alloc(1); say(ready=1); input(); say(after=cuda.result('cuCtxSynchronize'))"
    )
    assert program.line() == "ready=1"
    found = session.park()
    assert [(p.state, p.error) for p in found.processes] == [("failed", "CUDA_ERROR_UNKNOWN")]
    limits.open_gate(session.folder)
    with working(session):
        # Again there is something that cannot be parked, and what can is as it was.
        found = session.park()
        assert (found.done, sorted(states(found))) == (False, ["failed", "running"])
        found = session.wake()
        assert (found.done, sorted(states(found))) == (True, ["failed", "running"])
    program.go()
    assert program.line() == "after=999"


def test_refused_restore_leaves_all_parked_and_the_next_one_brings_them_back(
    parkable: Any, working: Any
) -> None:
    session = parkable(machine=MACHINE)
    path = session.folder / "simulated" / "machine"
    path.chmod(0o644)
    with working(session, 1), working(session, 2):
        assert session.park().done
        path.write_text(MACHINE + "checkpoint=restore-fails\n")
        for _ in range(2):
            found = session.wake()
            assert (found.done, states(found)) == (False, ["checkpointed"] * 2)
            assert [p.error for p in found.processes] == ["CUDA_ERROR_UNKNOWN", None]
        path.write_text(MACHINE)
        assert session.wake().done


@pytest.mark.parametrize("machine", ["driver=565.10\n", "checkpoint=none\n"])
def test_driver_without_checkpoints_is_told(parkable: Any, begin: Any, machine: str) -> None:
    session = parkable(machine=MACHINE + machine)
    program = begin(session, "say(ready=1); input()")
    assert program.line() == "ready=1"
    found = session.park()
    assert (found.done, found.processes, found.why) == (False, (), "the driver cannot checkpoint processes")
    program.go()
    program.end()


def test_session_without_processes_is_parked_at_once(parkable: Any, tmp_path: Path) -> None:
    session = parkable()
    for what in ("park", "state", "resume"):
        assert session.move(what) == CheckpointReport(1, True, (), None, "n")
    (session.folder / "accounting").unlink()
    assert session.move("park").done
    (session.folder / "accounting").write_bytes(b"short")
    assert session.move("park").why == "libfgpu's accounting file cannot be read"


# --- Faults ---


@pytest.mark.parametrize("delay_ms", range(0, 130, 10))
def test_mover_killed_at_any_point_is_made_good_by_the_next_one(
    parkable: Any, working: Any, delay_ms: int
) -> None:
    session = parkable(machine=MACHINE + "checkpoint_mib_s=500\n")
    command = checkpoint_command("n", str(session.folder / "accounting"), "park", timeout_s=20)
    with working(session, 1), working(session, 2):
        limits.close_gate(session.folder)
        for what, after in (("park", "checkpointed"), ("resume", "running")):
            words = [str(session.folder / "probe"), *command[1:]]
            words[-2] = f"--{what}"
            mover = subprocess.Popen(words, env=preloaded(session.folder), stdout=subprocess.DEVNULL)
            time.sleep(delay_ms / 1000)
            mover.kill()
            mover.wait()
            found = session.move(what)
            assert (found.done, states(found)) == (True, [after] * 2)
            assert states(session.move(what)) == [after] * 2
        limits.open_gate(session.folder)


def test_move_waits_for_one_that_an_earlier_hub_began(parkable: Any, working: Any) -> None:
    session = parkable(machine=MACHINE + "checkpoint_mib_s=50\n")
    command = checkpoint_command("n", str(session.folder / "accounting"), "park", timeout_s=20)
    with working(session):
        words = [str(session.folder / "probe"), *command[1:]]
        with subprocess.Popen(words, env=preloaded(session.folder), stdout=subprocess.DEVNULL):
            until(lambda: states(session.move("state")) != ["running"])
            found = session.move("resume")
        assert (found.done, states(found)) == (True, ["running"])
        assert states(session.move("state")) == ["running"]


def test_process_killed_while_parked_leaves_nothing(parkable: Any, working: Any) -> None:
    session = parkable()
    with working(session, 1) as first, working(session, 2):
        assert session.park().done
        first.kill()
        first.wait()
        found = session.wake()
        assert (found.done, states(found)) == (True, ["running"])
    with reading(session.folder / "simulated") as host:
        until(lambda: not seen_by(host))


def test_neighbour_is_neither_stopped_nor_wanted(parkable: Any, working: Any) -> None:
    session = parkable(machine=MACHINE)
    other = parkable(machine=session.folder)
    with working(session), working(other) as neighbour:
        assert session.park().done
        out, errors = neighbour.communicate(timeout=30)
        assert (neighbour.returncode, errors) == (0, "")
        assert int(out) > 0
        assert other.wanted_at_ms() == 0
        assert states(other.move("state")) == []
        assert states(session.move("state")) == ["checkpointed"]
        assert session.wake().done
