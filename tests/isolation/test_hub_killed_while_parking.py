"""Sessions that compete for few slices, and a Hub that is killed at each step of parking and resuming them."""

from __future__ import annotations

import os
import secrets
import select
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from random import Random

import psutil
import pytest
import sqlalchemy as sa
from parkinghub import ENDS, NODE, PROGRAM_KILLED, SLICE_MIB, STEPS
from sessionfolders import MakePath

from fgpu_scheduler import Session, SessionState, Snapshot, Store, holds_shares
from fgpuspawner.isolation import limits, native
from fgpuspawner.isolation.nvml_reader import DeviceUse, NvmlReader
from fgpuspawner.isolation.report import Answer, CheckpointReport, checkpoint_command, read_answer

S = SessionState
MIB = 2**20
HUB = Path(__file__).parent / "parkinghub.py"


class Lab:
    """Sessions on two simulated GPUs with two slices each, and the Hub that parks them."""

    def __init__(self, folder: Path, worker: Path, sessions: int) -> None:
        self.folder, self.sessions = folder, sessions
        self.data = folder / "data"
        # The workers run until the last writer of these is closed.
        for number in range(sessions):
            os.mkfifo(folder / f"work{number}")
        self._work = [os.open(folder / f"work{number}", os.O_RDWR) for number in range(sessions)]
        with (folder / "errors").open("w") as errors:
            self._starter = subprocess.Popen(
                [sys.executable, str(HUB), str(folder), str(sessions), str(worker)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                bufsize=1,
            )
        self._hub: int | None = None
        self._store: Store | None = None
        self._reader = NvmlReader(str(native.machine_folder(self.data, NODE.id) / "libnvidia-ml.so.1"))

    def start(self, step: str = "", count: int = 1) -> None:
        """Start the Hub, which kills itself at the step if one is given."""
        (self.folder / "up").unlink(missing_ok=True)
        assert self._starter.stdin is not None
        print(step, count, sep=",", file=self._starter.stdin, flush=True)
        self._hub = int(self._says())

    def up(self) -> None:
        until((self.folder / "up").exists, self.told)

    def killed(self) -> None:
        """Wait until the Hub has killed itself."""
        assert int(self._says()) == -signal.SIGKILL, self.told()
        self._hub = None

    def kill(self) -> None:
        assert self._hub is not None
        os.kill(self._hub, signal.SIGKILL)
        self.killed()

    def is_dead(self) -> bool:
        assert self._starter.stdout is not None
        return bool(select.select([self._starter.stdout], [], [], 0)[0])

    def _says(self) -> str:
        assert self._starter.stdout is not None
        assert select.select([self._starter.stdout], [], [], 120)[0], self.told()
        return self._starter.stdout.readline()

    def told(self) -> str:
        files = [self.folder / name for name in ("errors", "hub.log")]
        return "\n".join(file.read_text()[-6000:] for file in files if file.exists())

    def quiet(self, now: bool) -> None:
        """Ask no session to park, or do again."""
        (self.folder / "quiet").touch()
        if not now:
            (self.folder / "quiet").unlink()

    # -- what the record and the driver say ---------------------------------------------------------------

    @property
    def store(self) -> Store:
        if self._store is None:
            self._store = Store(f"sqlite:///{self.data / 'fgpu.sqlite'}")
            self._store.connect_readonly()
        return self._store

    def snapshot(self) -> Snapshot:
        return self.store.snapshot(int(time.time()))

    def live(self) -> tuple[Session, ...]:
        return self.snapshot().sessions

    def changes(self) -> Counter[tuple[str, str]]:
        """Return how often each state followed each other one."""
        with sa.create_engine(f"sqlite:///{self.data / 'fgpu.sqlite'}").connect() as database:
            rows = database.execute(sa.text("SELECT from_state, to_state FROM fgpu_events")).all()
        return Counter((str(a), str(b)) for a, b in rows)

    def parks(self) -> int:
        """Return how often a session was parked and came back since."""
        changes = self.changes()
        return min(changes["RUNNING", "PARKED"], changes["RESUMING", "RUNNING"])

    def ready(self) -> int:
        """Return how many workers have filled their memory."""
        logs = (self.data / "logs").glob("*.log")
        return sum(log.read_text().split().count("ready") for log in logs)

    def sessions_of(self) -> dict[int, int]:
        """Return the session of each process."""
        found = {}
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                environment = process.environ()
                if (
                    str(self.folder) in environment.get("FGPU_LIMITS_FILE", "")
                    and "FGPU_SESSION_ID" in environment
                ):
                    found[process.pid] = int(environment["FGPU_SESSION_ID"])
        return found

    def held_by(self) -> dict[int, int]:
        """Return the bytes that each session holds of a GPU, as the driver says."""
        found: Counter[int] = Counter()
        owners = self.sessions_of()
        for uuid, use in self._reader.device_uses([d.uuid for d in NODE.devices], {}).items():
            assert isinstance(use, DeviceUse), (uuid, use)
            for process in use.processes:
                assert process.used_bytes is not None
                found[owners[process.pid]] += process.used_bytes
        return {session_id: held for session_id, held in found.items() if held}

    def driver_states(self, session: Session) -> list[str]:
        own = self.data / "limits" / str(session.id)
        words = checkpoint_command("n", str(own / "accounting"), "state", timeout_s=20)
        done = subprocess.run(
            [own / words[0], *words[1:]],
            env={"LD_PRELOAD": str(own / "libfgpu.so"), "LD_LIBRARY_PATH": str(own / "simulated")},
            capture_output=True,
            check=False,
        )
        return [
            process.state
            for process in read_answer(CheckpointReport, Answer(done.stdout, done.returncode), "n").processes
        ]

    # -- what has to be true ------------------------------------------------------------------------------

    def check_shares(self) -> None:
        """Check that no share is held twice. Only while the Hub is dead: then the record does not change."""
        live = {s.id: s for s in self.live()}
        held_milli: Counter[str] = Counter()
        for session in filter(holds_shares, live.values()):
            assert session.placement is not None
            for share in session.placement.shares:
                held_milli[share.device_uuid] += share.fgpu_milli
        assert all(milli <= 1000 for milli in held_milli.values()), held_milli
        for session_id, held in self.held_by().items():
            assert holds_shares(live[session_id]), (live[session_id], held)
            assert held <= SLICE_MIB * MIB

    def settled(self) -> bool:
        """Return whether each session runs with an open gate, or is parked with a closed one on a GPU without room."""
        live, running = self.live(), self.homes(S.RUNNING)
        return all(
            (s.state, limits.gate_closed(self.data / "limits" / str(s.id)))
            in ((S.RUNNING, False), (S.PARKED, True))
            for s in live
        ) and all(running[gpu] == min(2, number) for gpu, number in self.homes(S.RUNNING, S.PARKED).items())

    def homes(self, *states: SessionState) -> Counter[str]:
        """Return how many sessions in these states each GPU has; it has room for two."""
        return Counter(
            s.placement.shares[0].device_uuid for s in self.live() if s.placement and s.state in states
        )

    def check_processes(self) -> None:
        """Check that no process is locked or checkpointed unless its session is parked."""
        live = self.live()
        assert len(live) == self.sessions, self.told()
        for session in live:
            allowed = {"running"} if session.state is S.RUNNING else {"checkpointed"}
            assert set(self.driver_states(session)) <= allowed, (session, self.told())
        assert set(self.held_by()) <= {s.id for s in live if s.state is S.RUNNING}

    def asked(self) -> bool:
        return any(s.state is S.RUNNING and s.park_asked_at_s is not None for s in self.live())

    def settle(self) -> None:
        """Wait until the Hub has repaired what an earlier one left, and check it, unless it is dead again."""
        until(lambda: self.settled() or self.is_dead(), self.told)
        if not self.is_dead():
            self.check_processes()

    def finish(self) -> list[int]:
        """Let all sessions check all their memory and end; return the rounds of each worker."""
        self.close_work()
        until(lambda: not self.live(), self.told, within_s=300)
        rounds = []
        for log in (self.data / "logs").glob("*.log"):
            *said, statuses = ["", *log.read_text().splitlines()]
            if statuses.startswith("statuses"):
                assert statuses in ("statuses [0]", "statuses [0, 0]"), log.read_text()
                rounds += [int(line) for line in said if line.isdigit()]
        return rounds

    def close_work(self) -> None:
        while self._work:
            os.close(self._work.pop())

    def restart_machine(self) -> None:
        """End all processes of sessions, and empty the files in memory."""
        self.end_processes()
        shutil.rmtree(self.folder / "memory" / next((self.folder / "memory").iterdir()))

    def end_processes(self) -> None:
        for pid in self.sessions_of():
            with suppress(psutil.Error):
                psutil.Process(pid).kill()

    def close(self) -> None:
        if self._hub is not None:
            with suppress(ProcessLookupError):
                os.kill(self._hub, signal.SIGKILL)
        self._starter.communicate()
        self._reader.close()
        self.close_work()
        self.end_processes()
        if self._store is not None:
            self._store.close()


def until(what: Callable[[], object], told: Callable[[], str], within_s: float = 120) -> None:
    end = time.monotonic() + within_s
    while not what():
        assert time.monotonic() < end, told()
        time.sleep(0.05)


@pytest.fixture
def make_lab(compile_c: MakePath, tmp_path: Path) -> Iterator[Callable[[int], Lab]]:
    built = native.find()
    if built is None:
        pytest.skip(native.NOT_BUILT)
    worker = compile_c("tests/park_worker.c", built.simulated["libcuda.so.1"], "-pthread")
    memory = Path(f"/dev/shm/fgpu-test-{secrets.token_hex(6)}")
    made: list[Lab] = []

    def make(sessions: int) -> Lab:
        memory.mkdir()
        (tmp_path / "memory").symlink_to(memory)
        made.append(Lab(tmp_path, worker, sessions))
        return made[-1]

    yield make
    for lab in made:
        lab.close()
    shutil.rmtree(memory, ignore_errors=True)


def test_a_hub_killed_at_each_step_leaves_no_share_held_twice_and_no_process_locked(
    make_lab: Callable[[int], Lab],
) -> None:
    lab = make_lab(8)
    lab.start()
    lab.up()
    until(lambda: lab.ready() == 10 and lab.parks() >= 8, lab.told)
    lab.kill()
    for step in STEPS:
        lab.start(step)
        lab.killed()
        lab.check_shares()
    lab.quiet(True)
    lab.start()
    lab.settle()
    # A worker that had little of a GPU has made no round, but has checked all its memory.
    assert len(lab.finish()) == 10


def test_a_session_ended_at_any_step_leaves_nothing_and_harms_no_other(
    make_lab: Callable[[int], Lab],
) -> None:
    lab, ended = make_lab(13), len([step for step in STEPS if not step.endswith(PROGRAM_KILLED)])
    lab.start(ENDS)
    lab.up()
    until(lambda: len(lab.live()) <= lab.sessions - ended, lab.told)
    lab.sessions -= ended
    lab.quiet(True)
    until(lambda: not lab.asked() and lab.settled(), lab.told)
    lab.check_processes()
    own = {str(session.id) for session in lab.live()}
    assert set(map(str, lab.sessions_of().values())) == own
    assert len(lab.finish()) >= lab.sessions


def test_sessions_of_a_machine_that_was_restarted_end_and_hold_nothing(
    make_lab: Callable[[int], Lab],
) -> None:
    lab = make_lab(6)
    lab.start()
    lab.up()
    until(lambda: lab.parks() >= 6, lab.told)
    lab.kill()
    assert {S.RUNNING, S.PARKED} <= {session.state for session in lab.live()}
    lab.restart_machine()
    lab.start()
    until(lambda: not lab.live(), lab.told)
    assert lab.held_by() == {}
    lab.close_work()


@pytest.mark.slow
def test_thousand_parks_of_sixteen_sessions_on_four_slices_lose_no_byte(
    make_lab: Callable[[int], Lab], record_property: Callable[[str, object], None]
) -> None:
    lab, draw, began_s = make_lab(16), Random(1), time.monotonic()
    lab.start()
    lab.up()
    lab.kill()
    kills: Counter[str] = Counter()
    while lab.parks() < 1000 or min(kills[step] for step in STEPS) < 5:
        for step in draw.sample(STEPS, len(STEPS)):
            lab.quiet(True)
            lab.start(step, draw.randrange(1, 21))
            lab.settle()
            lab.quiet(False)
            lab.killed()
            lab.check_shares()
            kills[step] += 1
    lab.quiet(True)
    lab.start()
    lab.settle()
    assert not lab.is_dead()
    parks, rounds = lab.parks(), lab.finish()
    assert len(rounds) == 20
    assert min(rounds) > 0
    found = {
        "parks": parks,
        "kills": sum(kills.values()),
        "rounds": sum(rounds),
        "wakes": lab.changes()["RESUMING", "RUNNING"],
    }
    record_property("figures", found)
    print(found, f"{time.monotonic() - began_s:.0f} s")
