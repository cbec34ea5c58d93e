"""The part of a Hub that parks: queue, Parker, local engine and isolation in one process, over a simulated driver.

`parkinghub.py FOLDER SESSIONS WORKER`. Each session runs WORKER, which uses its GPU all the time and checks each byte.
Running sessions are asked to park again and again, so that all of them compete for few slices; while FOLDER/quiet
exists, none is asked. Each line of its input, STEP,COUNT, begins the Hub; with a STEP it kills itself when it has come
there COUNT times.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import psutil
from traitlets.config import Config

from fgpu_scheduler import (
    Deadlines,
    Device,
    EndCause,
    InvalidTransition,
    Node,
    Request,
    Scheduler,
    Session,
    SessionState,
    Store,
    SystemClock,
)
from fgpuspawner.concurrency.background import Background
from fgpuspawner.engines.base import HubSide, Installation, Launched, LaunchSpec
from fgpuspawner.engines.local.engine import LocalEngine
from fgpuspawner.hub import parking
from fgpuspawner.hub.gpu_observers import GpuIdleTimes
from fgpuspawner.hub.parking import Parker
from fgpuspawner.hub.session_probes import prover
from fgpuspawner.images.model import Catalogue, Image
from fgpuspawner.isolation import limits, native
from fgpuspawner.isolation.gpu_poller import Drivers, GpuPoller
from fgpuspawner.isolation.manager import Isolation
from fgpuspawner.settings import FGPU

S = SessionState
SLICE_MIB = 128
HELD_MIB = 96
"""So much that three sessions do not fit on a GPU."""
MOVED_MIB_S = 2000
NODE = Node(
    "lab",
    "default",
    64000,
    65536,
    tuple(
        Device(f"GPU-simulated-lab-{n}", "lab", n, "Simulated GPU", 2 * SLICE_MIB, 1000, True) for n in (0, 1)
    ),
)
CHECKPOINTED, LOCKED = 2, 1
STEPS = (
    "gate closed",
    "locked",
    "locked, and its program is killed",
    "checkpointed",
    "PARKED committed",
    "RESUMING committed",
    "restored",
    "restored, and its program is killed",
    "unlocked",
    "gate open",
    "RUNNING committed",
)
SERVER = """
import os, signal, socket, subprocess, sys
at = socket.create_server(("127.0.0.1", int(os.environ["PORT"])))
work = open(os.environ["WORK"], "rb", buffering=0)
signal.signal(signal.SIGTERM, lambda *_: os._exit(143))
words = os.environ["WORKER"], os.environ["SEED"], os.environ["MIB"]
workers = [subprocess.Popen(words, stdin=work) for _ in range(int(os.environ["WORKERS"]))]
found = [worker.wait() for worker in workers]
print("statuses", found, flush=True)
sys.exit(max(map(abs, found)))
"""


def settings(folder: Path) -> FGPU:
    return FGPU(
        data_dir=str(folder / "data"),
        accounting_dir=str(folder / "memory"),
        parked_memory_mib=16384,
        nodes=[{"name": NODE.id, "cpu": 64, "memory_mib": 65536, "gpus": {"simulated": 2}}],
    )


ENDS = "a session is ended at each step"
PROGRAM_KILLED = ", and its program is killed"


class Killer:
    """Kills this process at a step, or with `ENDS` has a session ended at each step."""

    def __init__(self, step: str, count: int) -> None:
        self._step, self._left = step, count
        self._ends = {step for step in STEPS if not step.endswith(PROGRAM_KILLED)} if step == ENDS else set()
        self._ended: set[int] = set()
        self.end: Callable[[int], object] = lambda session_id: None

    def at(self, step: str, session_id: int) -> None:
        if step in self._ends and session_id not in self._ended:
            self._ends.remove(step)
            self._ended.add(session_id)
            self.end(session_id)
        if step == self._step:
            self._left -= 1
            if self._left == 0:
                if step.endswith(PROGRAM_KILLED):
                    for child in psutil.Process().children():
                        if child.name() == "probe":
                            child.kill()
                os.kill(os.getpid(), signal.SIGKILL)

    def watches(self, step: str) -> bool:
        return step in self._ends or (self._step.startswith(step) and self._left > 0)


class Checkpoints:
    """The driver's view of processes, as any process of the machine has it."""

    def __init__(self, library: Path) -> None:
        self._cuda = ctypes.CDLL(str(library))
        assert self._cuda.cuInit(0) == 0

    def any_is(self, state: int, pids: list[int]) -> bool:
        found = ctypes.c_int()
        return any(
            self._cuda.cuCheckpointProcessGetState(pid, ctypes.byref(found)) == 0 and found.value == state
            for pid in pids
        )


def made_killing(killer: Killer, engine: Any, isolation: Any, queue: Any, driver: Checkpoints) -> None:
    """Have the process killed after the steps of the Parker."""

    def wrap(of: Any, name: str, step: str, *, waits: bool) -> None:
        real = getattr(of, name)

        def blocking(session: Session | int, *args: Any) -> Any:
            found = real(session, *args)
            killer.at(step, session if isinstance(session, int) else session.id)
            return found

        async def waiting(session_id: int, *args: Any) -> Any:
            found = await real(session_id, *args)
            killer.at(step, session_id)
            return found

        setattr(of, name, waiting if waits else blocking)

    wrap(isolation, "close_gate", "gate closed", waits=False)
    wrap(isolation, "open_gate", "gate open", waits=False)
    wrap(queue, "park", "PARKED committed", waits=True)
    wrap(queue, "resumed", "RUNNING committed", waits=True)
    real = engine.probe

    async def probe(session: Session, command: Any, **more: Any) -> Any:
        what = command[5].removeprefix("--") if len(command) > 5 else ""
        if what not in ("park", "resume"):
            return await real(session, command, **more)
        seen, ended = {"park": "locked", "resume": "restored"}[what], threading.Event()
        if what == "resume" and session.state is S.RESUMING:
            killer.at("RESUMING committed", session.id)

        def watch() -> None:
            server = psutil.Process(
                int(engine._processes._note(engine._processes.handle(session)).read_text())
            )
            pids = [child.pid for child in server.children(recursive=True)]
            while not ended.is_set():
                if driver.any_is(LOCKED, pids):
                    killer.at(seen, session.id)
                    killer.at(f"{seen}{PROGRAM_KILLED}", session.id)
                    return
                time.sleep(0.001)

        if killer.watches(seen):
            threading.Thread(target=watch, daemon=True).start()
        try:
            found = await real(session, command, **more)
        finally:
            ended.set()
        killer.at({"park": "checkpointed", "resume": "unlocked"}[what], session.id)
        return found

    engine.probe = probe


class ParkingHub:
    def __init__(self, folder: Path, worker: Path, killer: Killer) -> None:
        self._folder, self._worker, self._killer = folder, worker, killer
        self.settings = settings(folder)
        (folder / "data").mkdir(parents=True, exist_ok=True)
        self.store = Store(f"sqlite:///{folder / 'data' / 'fgpu.sqlite'}")
        self.store.open()
        self.image = Image("python", "Python", "python", "3", "3", "", enabled=True)
        made = Installation(
            self.store.installation_id, self.settings, Config(), lambda: Catalogue((self.image,))
        )
        self.engine = LocalEngine(made, stop_timeout_s=2)
        self.isolation = Isolation(self.settings, (NODE,))
        self.isolation.open(own_root=False, installation=made.id)
        machine = native.machine_folder(folder / "data", NODE.id)
        text = (machine / "machine").read_text() + f"checkpoint_mib_s={MOVED_MIB_S}\n"
        (machine / "draft").write_text(text)
        (machine / "draft").rename(machine / "machine")
        self.queue = Scheduler(
            self.store,
            policy=self.settings.policy(),
            caps=self.settings.caps(),
            rules=self.settings.rules(),
            launcher=self.engine,
            deadlines=Deadlines(reconcile_every_s=1),
        )
        self.drivers = Drivers(self.isolation, self.engine)
        made_killing(killer, self.engine, self.isolation, self.queue, Checkpoints(machine / "libcuda.so.1"))

    async def run(self, sessions: int) -> NoReturn:
        background = Background(logging.getLogger("fgpu"))
        self.engine.open(
            HubSide(self.isolation, self.queue, background, (), lambda: None, lambda limit: (), lambda: set())
        )
        loop = asyncio.get_running_loop()
        self._killer.end = lambda session_id: asyncio.run_coroutine_threadsafe(
            self.queue.end(session_id, EndCause.USER), loop
        )
        live = await self.queue.start((NODE,))
        await asyncio.to_thread(self.isolation.prune, [s.id for s in live])
        parker = Parker(
            self.queue,
            self.engine,
            self.isolation,
            self.drivers,
            GpuIdleTimes(SystemClock(), every_s=1),
            self.settings,
            prove=prover(self.engine, self.isolation, self.settings, simulated=lambda session: True),
        )
        poller = GpuPoller(self.drivers, self.queue.live, every_s=0.1)
        poller.begin(background, (parker.observe,))
        parker.begin(background)
        if not live:
            await asyncio.gather(*(self._launch(number, sessions) for number in range(sessions)))
        (self._folder / "up").touch()
        while True:
            if not (self._folder / "quiet").exists():
                for session in await self.queue.live():
                    if session.state is S.RUNNING and session.park_asked_at_s is None:
                        # It may have been ended since it was read.
                        with suppress(InvalidTransition):
                            self.store.ask_to_park(session.id, now_s=int(time.time()))
            await asyncio.sleep(0.1)

    async def _launch(self, number: int, sessions: int) -> None:
        on_demand = number >= sessions // 4
        asked = Request(f"user{number}", "", "python", "default", 500, 100, 256, on_demand=on_demand)
        (session,) = await self.queue.submit([asked])
        session = await self.queue.placed(session.id)
        with self.queue.launching(session.id):
            session = await self.queue.prepare(session.id)
            live = [s.id for s in await self.queue.live()]
            prepared = await asyncio.to_thread(self.isolation.prepare, session, live)
            folder = self.isolation.folder(session.id)
            described = limits.environment(session, limits_path=f"{folder}/{limits.NAME}", simulated=True)
            with socket.create_server(("127.0.0.1", 0)) as found:
                port = found.getsockname()[1]
            home = self._folder / "home" / str(number)
            home.mkdir(parents=True)
            work = self._folder / f"work{number}"
            workers = 2 if number % 4 == 1 else 1
            environment = {
                "HOME": str(home),
                "PATH": os.environ["PATH"],
                "PORT": str(port),
                "WORK": str(work),
                "WORKER": str(self._worker),
                "SEED": str(number + 1),
                "WORKERS": str(workers),
                # Each has three buffers.
                "MIB": str(HELD_MIB // 3 // workers),
            }
            spec = LaunchSpec(
                session,
                self.image,
                command=(sys.executable, "-c", SERVER),
                arguments=(),
                environment=environment,
                slice_environment=described,
                prepared=prepared,
                devices=(),
                folder=folder,
                port=port,
                simulated=True,
            )
            await self.engine.start(spec)
            while self.engine._processes.environment(session, port) is None:
                assert await self.engine.ended(session) is None
                await asyncio.sleep(0.02)
            note = Launched("127.0.0.1", port, "interposer").to_json()
            await self.queue.running(session.id, session.attempt, note)


def run(folder: Path, sessions: int, worker: Path, step: str, count: int) -> NoReturn:
    hub = ParkingHub(folder, worker, Killer(step, count))
    asyncio.run(hub.run(sessions))
    raise AssertionError("a Hub does not end")


def main() -> None:
    """Begin a Hub for each line of the input, and print what its end status was. The imports are done once."""
    folder, sessions, worker = Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    logging.basicConfig(
        filename=folder / "hub.log", level=logging.INFO, format="%(asctime)s %(name)s %(message)s"
    )
    parking.LOOK_EVERY_S = 0.05
    parking.SETTLED_AFTER_S = 1.0
    for line in sys.stdin:
        step, count = line.strip().rsplit(",", 1)
        pid = os.fork()
        if pid == 0:
            try:
                run(folder, sessions, worker, step, int(count))
            except BaseException:
                logging.exception("The Hub ended")
            os._exit(1)
        print(pid, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


if __name__ == "__main__":
    main()
