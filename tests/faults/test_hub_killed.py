"""The Hub is killed, at random and between every two durable steps, with sessions in all states.

No session is lost, none runs twice, no device is over its capacity, the order of the queue is kept, and the
notebooks that are open stay connected: the proxy is outside the Hub, as `make run` has it.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress

import pytest
import requests

from fgpu_scheduler import HOLDING, EndCause, SessionState
from hubprocess import HubProcess, until
from launched import launched, processes_of
from notebooks import Notebooks
from servers import ECHO, MACHINES, ON_ONE_ENGINE

ONE = {"fgpu": "1", "cpu": "0.1", "memory_mib": 256}
USERS = [f"u{n}" for n in range(8)]
CAPACITY_MILLI = 4000
# The window in which nothing is placed ends when all are back: long, so that a slow start does not end it.
CAMPAIGN = {"resume_grace_s": 120, "outer_proxy": True, "server": ECHO}


@contextmanager
def watched(hub: HubProcess, kind: str) -> Iterator[None]:
    """Look all the time, from outside, that no device is over its capacity and nothing runs twice."""
    wrong: list[str] = []
    done = threading.Event()

    def watch() -> None:
        store = hub.store
        while not done.is_set():
            snapshot = store.snapshot(int(time.time()))
            held: dict[str, int] = {}
            for session in snapshot.sessions:
                if session.state in HOLDING and session.placement is not None:
                    for share in session.placement.shares:
                        held[share.device_uuid] = held.get(share.device_uuid, 0) + share.fgpu_milli
            wrong.extend(f"device {uuid} holds {milli}" for uuid, milli in held.items() if milli > 2000)
            running = launched(hub, kind)
            wrong.extend(f"session {i} runs {n} times" for i, n in running.items() if n > 1)
            if 1000 * len(running) > CAPACITY_MILLI:
                wrong.append(f"{len(running)} sessions of 1 fGPU run on {CAPACITY_MILLI}: {sorted(running)}")
            done.wait(0.2)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()
    assert not wrong, wrong


def ask(hub: HubProcess, users: list[str]) -> None:
    """Request a session for each user at once; the Hub may be killed in between."""

    def one(user: str) -> None:
        with suppress(requests.RequestException):
            hub.spawn(user, options=ONE)

    with ThreadPoolExecutor(len(users)) as threads:
        list(threads.map(one, users))


def settled(hub: HubProcess, users: list[str]) -> dict[str, SessionState]:
    """Wait until every user's one session runs or waits, as many as fit run, and return the states."""
    wanted = {f"{user}/" for user in users}
    fit = CAPACITY_MILLI // 1000

    def found() -> dict[str, SessionState] | None:
        sessions = hub.sessions()
        states = {key: s.state for key, s in sessions.items()}
        if set(states) != wanted or any(s.held for s in sessions.values()):
            return None
        runs = [key for key, state in states.items() if state is SessionState.RUNNING]
        waits = [key for key, state in states.items() if state is SessionState.PENDING]
        if len(runs) != min(fit, len(wanted)) or len(runs) + len(waits) != len(wanted):
            return None
        return states

    try:
        return until(found, within_s=120)
    except AssertionError:
        shown = {k: (s.id, s.state.value, s.held, s.attempt) for k, s in hub.sessions().items()}
        raise AssertionError(f"not settled: {shown}\n{hub.log_text()[-8000:]}") from None


def started_in_order(hub: HubProcess) -> None:
    """Check in the event log that equal requests were placed in the order of submission."""
    order: list[int] = []
    after = 0
    while events := hub.store.events(after_id=after, limit=500):
        after = events[-1].id
        for event in events:
            if event.to_state is SessionState.SCHEDULED and event.session_id is not None:
                order.append(event.session_id)
    assert order == sorted(order), f"placed in the order {order}"


def check_all(hub: HubProcess, kind: str, users: list[str], ids: dict[str, int]) -> None:
    """Check that everybody still has the session they asked for, and that what runs is what should."""
    states = settled(hub, users)
    sessions = hub.sessions()
    for key, session_id in ids.items():
        if key in sessions:
            assert sessions[key].id == session_id, f"{key} was lost and asked for again"
    should = {sessions[key].id for key, state in states.items() if state is SessionState.RUNNING}
    until(lambda: set(launched(hub, kind)) == should, what="exactly the running sessions have a server")
    for key, state in states.items():
        user = key.split("/")[0]
        if state is SessionState.RUNNING:
            until(lambda user=user: hub.ready(user), what=f"the Hub says that {user} is ready")
    started_in_order(hub)


def ids_of(hub: HubProcess) -> dict[str, int]:
    """Return the session of each server that has one now."""
    return {key: s.id for key, s in hub.sessions().items() if s.state is not SessionState.TERMINATING}


def look_in(hub: HubProcess, notebooks: Notebooks) -> None:
    """Look that the notebooks that were open are connected still, and open those of the sessions that run now."""
    running = {s.id: s.request.user for s in hub.sessions().values() if s.state is SessionState.RUNNING}
    for session_id in notebooks.known():
        if session_id in running:
            notebooks.say(session_id)
        else:
            notebooks.forget(session_id)
    for session_id, user in running.items():
        notebooks.open(user, session_id)
        notebooks.say(session_id)


@pytest.mark.timeout(3000)
@pytest.mark.parametrize("rounds", [2, pytest.param(50, marks=pytest.mark.slow)])
def test_killed_at_random_instants_with_sessions_in_all_states(
    make_hub: Callable[..., HubProcess], kind: str, rounds: int
) -> None:
    seed = 20261121
    print("seed", seed)
    chance = random.Random(seed)
    hub = make_hub(**CAMPAIGN).start()
    for user in USERS:
        hub.add_user(user)
    ask(hub, USERS)
    settled(hub, USERS)
    with watched(hub, kind), Notebooks(hub) as notebooks:
        for _ in range(rounds):
            look_in(hub, notebooks)
            # One that runs is ended, and asked for again: then there are some that end, wait and launch.
            victim = chance.choice(
                [k for k, s in sorted(hub.sessions().items()) if s.state is SessionState.RUNNING]
            ).split("/")[0]
            instant = chance.uniform(0.0, 1.5)
            worker = threading.Thread(target=stop_then_ask, args=(hub, victim))
            worker.start()
            time.sleep(instant)  # The instant of the fault is what is tested; nothing is waited for.
            before = ids_of(hub)
            hub.kill()
            worker.join()
            restored = {s.id for s in hub.sessions().values() if s.state is SessionState.RUNNING}
            for session_id in sorted(notebooks.known() & restored):
                notebooks.say(session_id)
            hub.start()
            # What was asked of a Hub that died without answering may not have been done; ask again.
            before.pop(f"{victim}/", None)
            if f"{victim}/" not in ids_of(hub):
                ask(hub, [victim])
            check_all(hub, kind, USERS, before)
            # Those that ran before and run still are connected still.
            look_in(hub, notebooks)
    print(f"{rounds} rounds, {notebooks.asked} questions over {notebooks.opened} connections")


def stop_then_ask(hub: HubProcess, user: str) -> None:
    """End a user's session and request another; the Hub may be killed in between."""
    with suppress(requests.RequestException):
        hub.stop(user)
        hub.spawn(user, options=ONE)


DIES = """
import os
from pathlib import Path

DIE_AT, MARK = os.environ["DIE_AT"], Path(os.environ["DIE_MARK"])

def die(point):
    if DIE_AT == point and not MARK.exists():
        MARK.write_text(point)
        os.kill(os.getpid(), 9)

def dies_after(cls, name, point):
    original = getattr(cls, name)
    async def step(self, *args, **kwargs):
        result = await original(self, *args, **kwargs)
        die(point)
        return result
    setattr(cls, name, step)

def dies_before(cls, name, point):
    original = getattr(cls, name)
    def step(self, *args, **kwargs):
        die(point)
        return original(self, *args, **kwargs)
    setattr(cls, name, step)

from fgpu_scheduler.service.scheduler import Scheduler
from fgpu_scheduler.store.store import Store
from fgpuspawner.engines.docker.engine import DockerEngine
from fgpuspawner.engines.local.engine import LocalEngine
from fgpuspawner.spawner.launch import Launch

dies_after(Scheduler, "submit", "submitted")
dies_after(Scheduler, "prepare", "prepared")
dies_after(Scheduler, "running", "acknowledged")
dies_after(Scheduler, "end", "ending")
dies_after(Scheduler, "gone", "gone")
dies_after(DockerEngine, "_made", "created")
dies_before(DockerEngine, "_send", "started")
dies_after(LocalEngine, "start", "started")
dies_after(Launch, "_answers", "answered")
for engine in (DockerEngine, LocalEngine):
    dies_after(engine, "stop", "taken down")

commit = Store.commit
def commit_and_die(self, *args, **kwargs):
    placed = commit(self, *args, **kwargs)
    if placed:
        die("committed")
    return placed
Store.commit = commit_and_die
"""

STARTING = ["submitted", "prepared", "created", "started", "answered", "acknowledged"]
ENDING = ["ending", "taken down", "gone", "committed"]
"""Committed is the plan that starts the next in the queue; a request that waits for none is placed as it is submitted."""
# A process is created and started in one step: "started" is that one.
STEPS = [
    (kind, point)
    for kind in ("local", "docker", "machines")
    for point in (*STARTING, *ENDING)
    if (kind, point) != ("local", "created")
]
SHORT = [*(("local", point) for point in ("committed", "acknowledged", "taken down")), ("docker", "created")]
"""Those of `make test`: each step of one engine is durable in the same database. The others are slow."""


def marks(kind: str, point: str) -> list[pytest.MarkDecorator]:
    slow = [] if (kind, point) in SHORT else [pytest.mark.slow]
    return [*slow, MACHINES] if kind == "machines" else slow


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("kind", "point"),
    [pytest.param(kind, point, marks=marks(kind, point)) for kind, point in STEPS],
    indirect=["kind"],
)
def test_killed_between_two_durable_steps(
    make_hub: Callable[..., HubProcess], kind: str, point: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    mark = tmp_path_factory.mktemp("mark") / "died"
    hub = make_hub(**CAMPAIGN, before=DIES, env={"DIE_AT": "", "DIE_MARK": str(mark)})
    others, last = USERS[:5], USERS[5]
    hub.start()
    for user in [*others, last]:
        hub.add_user(user)
    # Three run before; the fourth is the one that is launched, or ended, when the Hub dies; two wait.
    for user in others[:3]:
        hub.spawn(user, options=ONE)
    until(lambda: list(hub.states().values()).count("RUNNING") == 3)
    if point in ENDING:
        hub.spawn(others[3], options=ONE)
        until(lambda: list(hub.states().values()).count("RUNNING") == 4)
        for user in (others[4], last):
            hub.spawn(user, options=ONE)
        until(lambda: list(hub.states().values()).count("PENDING") == 2)
    with watched(hub, kind), Notebooks(hub) as notebooks:
        look_in(hub, notebooks)
        hub.terminate()
        hub.env["DIE_AT"] = point
        hub.start()
        until(lambda: hub.ready(others[0]))
        if point in ENDING:
            until(lambda: not any(s.held for s in hub.sessions().values()))
            before = {k: v for k, v in ids_of(hub).items() if k != f"{others[3]}/"}
            stop_only(hub, others[3])
        else:
            before = ids_of(hub)
            ask(hub, [others[3]])
        assert hub.process is not None
        until(
            lambda: hub.process is not None and hub.process.poll() is not None,
            what=f"the Hub dies at {point!r}",
        )
        assert mark.read_text() == point, "the point was hit"
        hub.start()
        left = [*others[:3], others[4], last] if point in ENDING else others[:4]
        if point in ENDING:
            stop_only(hub, others[3])
        check_all(hub, kind, left, before)
        look_in(hub, notebooks)


def stop_only(hub: HubProcess, user: str) -> None:
    """End a user's session; the Hub may be killed in between, or has ended it already."""
    with suppress(requests.RequestException):
        hub.stop(user)


@ON_ONE_ENGINE
def test_a_terminated_hub_leaves_sessions_and_queue_and_takes_them_up_again(
    make_hub: Callable[..., HubProcess], kind: str
) -> None:
    hub = make_hub(**CAMPAIGN).start()
    for user in USERS:
        hub.add_user(user)
    ask(hub, USERS)
    settled(hub, USERS)
    before, running = ids_of(hub), launched(hub, kind)
    hub.terminate()
    assert launched(hub, kind) == running, "sessions outlive the Hub"
    hub.start()
    check_all(hub, kind, USERS, before)
    assert launched(hub, kind) == running, "and are the same ones"


@pytest.mark.parametrize("kind", ["local"], indirect=True)
def test_a_sessions_token_ends_with_it_also_where_the_hub_is_another_by_then(
    make_hub: Callable[..., HubProcess], kind: str
) -> None:
    hub = make_hub(**CAMPAIGN).start()
    user = USERS[0]
    hub.add_user(user)
    hub.spawn(user, options=ONE)
    hub.reach({f"{user}/": "RUNNING"})
    (server,) = processes_of(hub, hub.sessions()[f"{user}/"].id)
    token = server.environ()["JUPYTERHUB_API_TOKEN"]
    hub.kill()
    hub.start()
    until(lambda: hub.ready(user))
    assert hub.api("GET", "user", token=token).status_code == 200
    hub.stop(user)
    until(lambda: not hub.servers(user), what="the server has ended")
    assert hub.api("GET", "user", token=token).status_code == 403


@ON_ONE_ENGINE
def test_a_hub_that_cleans_up_ends_sessions_and_cancels_requests(
    make_hub: Callable[..., HubProcess], kind: str
) -> None:
    hub = make_hub(**CAMPAIGN, before="c.JupyterHub.cleanup_servers = True\n").start()
    for user in USERS:
        hub.add_user(user)
    ask(hub, USERS)
    settled(hub, USERS)
    hub.terminate()
    assert launched(hub, kind) == {}
    assert hub.states() == {}
    ended = hub.store.ended(user=None, limit=1000)
    assert {session.end_cause for session in ended} == {EndCause.HUB_STOPPED}, (
        "and nobody is said to have asked for it"
    )
