"""A real Hub with its real service over a database with many sessions: what the pages' bench looks at.

The sessions are written by the store, as the scheduler writes them, but nothing was launched for them; so after the Hub's
start, when the nodes answer once, its launcher is told to see nothing, and to conclude nothing from that.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scheduler"), str(ROOT / "tests" / "hub"), str(ROOT / "bench")]

from fgpu_scheduler import (  # noqa: E402
    EndCause,
    Policy,
    Request,
    SessionState,
    StaleVersion,
    Store,
    plan,
)
from hubprocess import HubProcess  # noqa: E402

NODES, GPUS_EACH = 10, 5
USERS = 60
IMAGES = 40
SEED = 7

QUIET = """
from fgpu_scheduler import Seen
from fgpuspawner.engines.local.engine import LocalEngine

answers = [Seen((), {nodes!r})]
async def observe(self):
    return answers.pop() if answers else Seen((), (), {nodes!r})
LocalEngine.observe = observe
c.JupyterHub.log_level = "INFO"
"""


def catalogue(count: int) -> str:
    """Return a catalogue with this number of images of five frameworks."""
    frameworks = ("Python", "PyTorch", "TensorFlow", "JAX", "RAPIDS")
    entries = []
    for n in range(count):
        framework, version = frameworks[n % len(frameworks)], f"{1 + n // len(frameworks)}.{n}"
        entries.append(
            f'[[image]]\nslug = "image-{n}"\nname = "{framework} {version}"\nframework = "{framework.lower()}"\n'
            f'version = "{version}"\npython = "3"\nreference = "bench/image:{n}"\nenvironment = "{sys.prefix}"\n'
            f'description = "{framework} {version} with what goes with it, for the course number {n}."\n'
            + ("default = true\n" if n == 0 else "minimum = { gpu_memory_mib = 1024, memory_mib = 2048 }\n")
        )
    return "\n".join(entries)


@contextmanager
def hub(folder: Path) -> Iterator[HubProcess]:
    """Run the Hub, with 50 simulated GPUs of 2 fGPU."""
    names = [f"node-{n}" for n in range(NODES)]
    nodes = [
        {"name": name, "cpu": 64, "memory_mib": 262144, "gpus": {"simulated": GPUS_EACH}} for name in names
    ]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "catalogue.toml").write_text(catalogue(IMAGES))
    found = HubProcess(
        folder,
        after=QUIET.format(nodes=names),
        env={"PYTHONPATH": f"{ROOT}:{ROOT / 'scheduler'}"},
        nodes=nodes,
        fgpu_per_gpu=2,
        catalogue=str(folder / "catalogue.toml"),
        presets=[{"name": "Course", "image": "image-1", "fgpu": "0.5", "cpu": 2, "memory_mib": 8192}],
        quotas=[{"user": "*", "max_fgpu": 8, "max_sessions": 12}],
        max_pending_per_user=1000,
    )
    try:
        yield found.start()
    finally:
        found.close()


def fill(found: HubProcess, *, running: int, waiting: int) -> None:
    """Write this number of running and waiting sessions, after a few that have ended; each user has some of them."""
    store = Store(f"sqlite:///{found.data / 'fgpu.sqlite'}")
    store.connect()
    draw = random.Random(SEED)
    now_s = int(time.time())
    try:
        for n in range(20):
            (session,) = store.submit([_request(draw, n, "0.5", f"ended-{n}")], now_s=now_s - 9000)
            _start(store, [session.id], now_s - 9000)
            store.move(session.id, SessionState.TERMINATING, now_s=now_s - 1800, cause=EndCause.USER)
            store.move(session.id, SessionState.TERMINATED, now_s=now_s - 1800)
        for first in range(0, running, 20):
            asked = [_request(draw, n, "0.5", f"runs-{n}") for n in range(first, min(first + 20, running))]
            began_s = now_s - draw.randrange(60, 7000)
            _start(store, [s.id for s in store.submit(asked, now_s=began_s)], began_s)
        amounts = ("0.2", "0.5", "0.5", "1", "1", "2", "4")
        asked = [_request(draw, n, draw.choice(amounts), f"waits-{n}") for n in range(waiting)]
        store.submit(asked, now_s=now_s - 600)
        live = store.snapshot(now_s).sessions
        runs = sum(s.state is SessionState.RUNNING for s in live)
        waits = sum(s.state is SessionState.PENDING for s in live)
        assert (runs, waits) == (running, waiting), (runs, waits)
    finally:
        store.close()


def _request(draw: random.Random, n: int, fgpu: str, name: str) -> Request:
    limit_s = draw.choice((None, 3600, 4 * 3600, 24 * 3600))
    milli = int(float(fgpu) * 1000)
    # Most take what the form preselects with the amount; the others what they think of.
    cpu, memory = milli * 6400 // 1000, milli * 26112 // 1000 // 256 * 256
    if draw.random() < 0.3:
        cpu, memory = draw.choice((1000, 2000, 4000)), draw.choice((4096, 8192, 16384))
    return Request(
        user=f"user-{n % USERS}",
        server_name=name,
        image=f"image-{draw.randrange(IMAGES)}",
        resource_group="default",
        fgpu_milli=milli,
        cpu_milli=cpu,
        memory_mib=memory,
        time_limit_s=limit_s,
    )


def _start(store: Store, ids: list[int], now_s: int) -> None:
    """Place these and have them run; the Hub may place them first."""
    while True:
        snapshot = store.snapshot(now_s)
        states = {s.id: s.state for s in snapshot.sessions}
        if all(states[i] is not SessionState.PENDING for i in ids):
            break
        with suppress(StaleVersion):
            store.commit(plan(snapshot, Policy()), now_s=now_s)
    for session_id in ids:
        store.move(session_id, SessionState.PREPARING, now_s=now_s)
        store.move(session_id, SessionState.RUNNING, now_s=now_s)
