"""What the Hub process has one of: what fails as it starts is had later, and what hangs does not hang the rest."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from traitlets.config import Config
from waiting import eventually

from fgpu_scheduler import (
    EndCause,
    NodeState,
    Observed,
    Policy,
    Request,
    Seen,
    SessionState,
    StoreUnavailable,
    plan,
)
from fgpuspawner.engines.base import Launched, ServerToken
from fgpuspawner.engines.local.spawner import LocalFGPUSpawner
from fgpuspawner.hub import runtime as module
from fgpuspawner.hub.runtime import Runtime
from fgpuspawner.settings import FGPU
from fgpuspawner.spawner import launch_form as asking
from fgpuspawner.spawner.launch_form import LaunchFormSpawner

LAB = {"name": "lab", "cpu": 4, "memory_mib": 4096, "gpus": {"simulated": 1}}


class Api(BaseHTTPRequestHandler):
    """Session 1's server, where its answer is 200."""

    answer = 404

    def do_GET(self) -> None:
        self.send_response(self.answer if self.path == "/user/alice/api" else 404)
        self.end_headers()

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def api() -> Iterator[ThreadingHTTPServer]:
    """What listens where session 1's server did."""
    with ThreadingHTTPServer(("127.0.0.1", 0), type("Own", (Api,), {})) as found:
        threading.Thread(target=found.serve_forever, args=(0.02,), daemon=True).start()
        yield found
        found.shutdown()


@pytest.fixture
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, api: ThreadingHTTPServer) -> Iterator[Runtime]:
    """The runtime of a Hub that starts after its predecessor ended while session 1 ran."""
    monkeypatch.setattr(Runtime, "_current", None)
    monkeypatch.setattr(module, "START_AGAIN_S", 0.01)
    settings = FGPU(data_dir=str(tmp_path), accounting_dir=str(tmp_path / "shm"), nodes=[LAB])
    made = Runtime(settings, config=Config(), spawner_class=LocalFGPUSpawner)
    made.open(lambda installation: None)
    store = made.store
    store.set_nodes(made.nodes, now_s=0)
    (session,) = store.submit([Request("alice", "", "python", "default", 500, 100, 256)], now_s=0)
    store.commit(plan(store.snapshot(0), Policy()), now_s=0)
    store.move(session.id, SessionState.PREPARING, now_s=0)
    token = ServerToken("prefix", "hash", (), "secret", "/user/alice/oauth_callback", ())
    launched = Launched("127.0.0.1", api.server_port, "none", token).to_json()
    store.move(session.id, SessionState.RUNNING, now_s=0, launched=launched)
    yield made
    store.close()


@asynccontextmanager
async def started(runtime: Runtime) -> AsyncIterator[None]:
    """Start it like a Hub that knows no servers."""
    others = asyncio.all_tasks()
    runtime.start([])
    try:
        await asyncio.wait_for(runtime.ready(), 60)
        yield
    finally:
        await runtime.queue.stop()
        await runtime.background.close()
        ours = asyncio.all_tasks() - others
        for task in ours:
            task.cancel()
        await asyncio.gather(*ours, return_exceptions=True)


def fails_once(function: Callable[..., Any], error: Exception) -> Callable[..., Any]:
    """Return the function as one that first fails."""
    errors = [error]

    def failing(*args: Any, **kwargs: Any) -> Any:
        if errors:
            raise errors.pop()
        return function(*args, **kwargs)

    return failing


@pytest.mark.parametrize(
    ("step", "error"),
    [
        ("set_quotas", StoreUnavailable("server closed the connection unexpectedly")),
        ("set_quotas", ValueError("of which nobody knew")),
        ("move", StoreUnavailable("server closed the connection unexpectedly")),
    ],
)
async def test_failed_step_of_the_start_is_repeated(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch, step: str, error: Exception
) -> None:
    monkeypatch.setattr(runtime.store, step, fails_once(getattr(runtime.store, step), error))
    async with started(runtime):
        # Either way: because the Hub has no server for it, or because there is no process.
        assert (await runtime.queue.session(1)).end_cause is EndCause.EXITED


async def test_start_waits_while_a_session_unknown_to_the_engine_answers(runtime: Runtime, api: Any) -> None:
    api.RequestHandlerClass.answer = 200
    runtime.start([("alice", "")])
    starting, wrong = asyncio.ensure_future(runtime.ready()), runtime.checked
    assert wrong is not None
    await eventually(lambda: "1 sessions answer that the engine does not know (1)" in wrong.wrong)
    assert not runtime.has_begun
    assert runtime.why_not_all() == "a machine runs sessions that this Hub does not know; its log names them"
    assert (await runtime.queue.session(1)).state is SessionState.RUNNING
    api.RequestHandlerClass.answer = 404
    await starting
    await eventually(lambda: runtime.store.session(1).end_cause)  # type: ignore[union-attr]
    assert runtime.why_not_all() == ""
    await runtime.queue.stop()
    await runtime.background.close()


async def test_unknown_sessions_of_a_late_engine_are_not_removed(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, checked, removed = runtime.engine, runtime.checked, []
    assert checked is not None
    newer, own = Observed("lab", 2, 1, "2-1@lab", True), Observed("lab", 1, 1, "1-1@lab", True)
    seen = Seen((), ())

    async def observe() -> Seen:
        return seen

    async def remove(thing: Observed) -> bool:
        removed.append(thing)
        return True

    monkeypatch.setattr(engine, "observe", observe)
    monkeypatch.setattr(checked, "remove", remove)

    def state() -> NodeState:
        (node,) = runtime.store.snapshot(0).nodes
        return node.state

    runtime.start([("alice", "")])
    await runtime.ready()
    assert state() is NodeState.LOST
    # Another session has the id by now, and waits for a place.
    request = Request("bob", "", "python", "default", 500, 100, 256)
    assert (await runtime.queue.submit([request]))[0].id == 2
    seen = Seen((newer, own), ("lab",))
    runtime.queue.reconcile_soon()
    await eventually(lambda: "1 sessions run that this database has never had (2)" in checked.wrong)
    assert runtime.why_not_all()
    assert runtime.has_begun
    assert (state(), removed) == (NodeState.LOST, [])
    seen = Seen((own,), ("lab",))
    runtime.queue.reconcile_soon()
    await eventually(lambda: state() is NodeState.READY)
    assert (await runtime.queue.session(1)).state is SessionState.RUNNING
    assert removed == []
    await runtime.queue.stop()
    await runtime.background.close()


async def test_files_of_ended_sessions_do_not_refuse_the_start(runtime: Runtime) -> None:
    left = runtime.isolation.folder(1).parent
    shutil.rmtree(left, ignore_errors=True)
    left.write_text("no folder, so that what is in it cannot be listed")
    async with started(runtime):
        assert await runtime.queue.live() is not None


@contextmanager
def few_threads(*, busy: int = 0) -> Iterator[threading.Event]:
    """Give the event loop two threads for all that has none of its own; the first ``busy`` wait for the event."""
    over, threads = threading.Event(), ThreadPoolExecutor(2)
    asyncio.get_running_loop().set_default_executor(threads)
    for _ in range(busy):
        threads.submit(over.wait)
    try:
        yield over
    finally:
        over.set()


async def test_launches_and_ends_continue_while_other_threads_hang(
    runtime: Runtime,
) -> None:
    session = runtime.store.session(1)
    assert session is not None
    folder = runtime.isolation.folder(session.id)
    async with started(runtime):
        with few_threads(busy=2):
            async with asyncio.timeout(60):
                await runtime.prepare(session)
                assert folder.exists()
                assert (await runtime.engine.observe()).nodes == ("lab",)
                assert await runtime.engine.remove(Observed("lab", 1, 1, "1-1@lab", True))
                await runtime.clear(session)
            assert not folder.exists()


async def test_launch_forms_that_hang_leave_threads_to_other_work(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asking, "READ_WITHIN_S", 0.05)
    spawner = LaunchFormSpawner()
    spawner.user, spawner.name = SimpleNamespace(name="alice"), ""
    with few_threads() as over:
        monkeypatch.setattr(runtime.store, "serving", lambda *args: over.wait())
        assert not any(await asyncio.gather(*(spawner.has_ended() for _ in range(20))))
        async with asyncio.timeout(60):
            assert await asyncio.to_thread(lambda: "done")


A_HUB_THAT_ENDS = """
import sys, threading, time
from traitlets.config import Config
from fgpuspawner.engines.local.spawner import LocalFGPUSpawner
from fgpuspawner.hub.runtime import Runtime
from fgpuspawner.isolation import nvml_reader
from fgpuspawner.settings import FGPU

nvml_reader.child_command = lambda *_: [sys.executable, "-c", "import time; time.sleep(3600)"]
data, lab = sys.argv[1], {"name": "lab", "cpu": 4, "memory_mib": 4096, "gpus": {"simulated": 1}}
settings = FGPU(data_dir=data, accounting_dir=f"{data}/shm", nodes=[lab])
runtime = Runtime(settings, config=Config(), spawner_class=LocalFGPUSpawner)
runtime.open(lambda installation: None)
(source,) = runtime.drivers.sources()
reader = runtime.drivers.reader(source)
threading.Thread(target=reader.ask_here, args=({"do": "look"},), daemon=True).start()
while reader._child is None:
    time.sleep(0.01)
print(reader._child.pid)
"""


def test_a_process_that_hangs_in_the_driver_ends_with_the_hub(tmp_path: Path) -> None:
    words = [sys.executable, "-c", A_HUB_THAT_ENDS, str(tmp_path)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as hub:
        assert hub.stdout is not None
        # A busy machine may take long to come here; from here on only the end is left.
        child = int(hub.stdout.readline())
        try:
            assert hub.wait(60) == 0
        finally:
            hub.kill()
    assert not psutil.pid_exists(child)
