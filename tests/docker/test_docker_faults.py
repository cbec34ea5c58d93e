"""What goes wrong on an engine, and what its owner reads: within five seconds of the engine saying so.

Each fault frees its share exactly once, and the next in the queue starts. It is the table in the notes on how a
spawner of containers fails, row by row.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import machines
import pytest
from docker.errors import DockerException
from dockerhub import MINI, ONE, WHOLE_FIVE, DockerHub, Engine, until
from machines import Machine

from fgpu_scheduler import ENDED, Session, SessionState

TOLD_WITHIN_S = 5
BUSY_S = 40
"""So much longer it may take on a machine that runs other tests meanwhile; how long it was is printed."""
NO_GPU_RUNTIME = "this server's Docker engine has no GPU runtime; ask an administrator to install it"
ASKS_FOR_WHAT_IS_NOT_THERE = """
c.FGPUSpawner.extra_host_config = lambda spawner: (
    {"runtime": "nvidia"} if spawner.name == "no-runtime" else {}
)
c.FGPUSpawner.stop_timeout_s = 2
"""


class Deaths(threading.Thread):
    """Notes when an engine says that a container has died."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(daemon=True)
        self._events = engine.client.events(decode=True, filters={"type": "container", "event": "die"})
        self.at: dict[str, float] = {}

    def run(self) -> None:
        try:
            for event in self._events:
                self.at.setdefault(event["Actor"]["Attributes"]["name"], time.monotonic())
        except (DockerException, OSError, ValueError):
            return

    def of(self, name: str) -> float:
        """Return when a container died, as soon as it is heard here, too."""
        at = until(lambda: self.at.get(name), what=f"the engine says that {name} has died")
        assert at is not None
        return at

    def close(self) -> None:
        self._events.close()


@pytest.fixture(scope="module")
def hub_(make_hub: Callable[..., DockerHub]) -> DockerHub:
    """A Hub for all of these tests."""
    return make_hub(after=MINI + ASKS_FOR_WHAT_IS_NOT_THERE).start()


@pytest.fixture
def hub(hub_: DockerHub) -> Iterator[DockerHub]:
    """The Hub, without sessions before and after."""
    yield hub_
    hub_.end_all_but(set())


@pytest.fixture
def deaths(engine: Engine) -> Iterator[Deaths]:
    """What the engine says of deaths."""
    listening = Deaths(engine)
    listening.start()
    yield listening
    listening.close()


def wait_in_line(hub: DockerHub, user: str) -> Session:
    """Queue a session behind the one that holds all of group ``five``."""
    hub.add_user(user)
    assert hub.spawn(user, options=WHOLE_FIVE).status_code == 202
    hub.wait_state(user, "", "PENDING")
    return hub.sessions()[f"{user}/"]


def ended(hub: DockerHub, session: Session) -> tuple[Session, float]:
    """Wait until a session has ended, and return it with the instant."""

    def over() -> Session | None:
        now = hub.store.session(session.id)
        return now if now is not None and now.state in ENDED else None

    found = until(over, within_s=60, what=f"session {session.id} has ended")
    return found, time.monotonic()


def freed_once_and_the_next_one_runs(hub: DockerHub, session: Session, waiting: Session) -> None:
    """Look that the share went to the next in the queue, and was given back once."""
    user = waiting.request.user
    hub.wait_ready(user)
    assert hub.sessions()[f"{user}/"].id == waiting.id
    moves = [e.to_state for e in hub.store.events(limit=10000) if e.session_id == session.id and e.to_state]
    assert sum(1 for state in moves if state in ENDED) == 1, moves
    assert moves.count(SessionState.TERMINATING) == 1, moves


@pytest.mark.parametrize(
    ("fault", "cause", "words"),
    [
        ("SIGUSR1", "OOM", "the session used more than its 256 MiB of memory and was ended"),
        ("SIGKILL", "EXITED", "the session's server ended with status 137"),
    ],
    ids=["memory", "killed"],
)
def test_a_running_session_that_dies(
    hub: DockerHub, engine: Engine, deaths: Deaths, fault: str, cause: str, words: str
) -> None:
    running = hub.running("alice", **WHOLE_FIVE)
    waiting = wait_in_line(hub, "bob")
    engine.client.kill(running.id, fault)
    found, at = ended(hub, running.session)
    told_s = at - deaths.of(running.name)
    assert found.end_cause == cause
    assert found.message is not None
    assert found.message.startswith(words)
    freed_once_and_the_next_one_runs(hub, running.session, waiting)
    until(lambda: not hub.ready("alice"), what="the Hub knows it, too")
    print(f"{cause}: told {told_s:.2f} s after the engine's own word")
    assert told_s <= TOLD_WITHIN_S + BUSY_S


@pytest.mark.parametrize("server", ["exits", "exits-soon"])
def test_a_server_that_ends_instead_of_answering(hub: DockerHub, deaths: Deaths, server: str) -> None:
    hub.add_user("alice")
    asked = threading.Thread(target=hub.spawn, args=("alice", server), kwargs={"options": WHOLE_FIVE})
    asked.start()
    session = until(lambda: asked_for(hub, "alice", server), what="it is asked for")
    assert session is not None
    waiting = wait_in_line_or_run(hub, "bob")
    found, at = ended(hub, session)
    asked.join()
    assert found.message == "the session's server ended with status 1; its last words: no kernel here"
    assert found.end_cause == "LAUNCH_FAILED"
    told_s = at - deaths.of(f"fgpu-{hub.installation}-{session.id}-1")
    print(f"{server}: told {told_s:.2f} s after the engine's own word")
    assert told_s <= TOLD_WITHIN_S + BUSY_S
    freed_once_and_the_next_one_runs(hub, session, waiting)


def asked_for(hub: DockerHub, user: str, server: str) -> Session | None:
    """Return the session of a server, also where it is over by now."""
    over = [s for s in hub.store.ended(user=user, limit=5) if s.request.server_name == server]
    return hub.sessions().get(f"{user}/{server}") or next(iter(over), None)


def wait_in_line_or_run(hub: DockerHub, user: str) -> Session:
    """Queue a session behind one that may be over by now."""
    hub.add_user(user)
    assert hub.spawn(user, options=WHOLE_FIVE).status_code in (201, 202)
    return until(lambda: hub.sessions().get(f"{user}/"))


def test_an_engine_without_the_runtime_that_is_set_refuses(hub: DockerHub, engine: Engine) -> None:
    holder = hub.running("holder", **WHOLE_FIVE)
    hub.add_user("alice")
    assert hub.spawn("alice", "no-runtime", options=WHOLE_FIVE).status_code == 202
    hub.wait_state("alice", "no-runtime", "PENDING")
    session = hub.sessions()["alice/no-runtime"]
    waiting = wait_in_line(hub, "bob")
    hub.stop("holder")
    until(lambda: hub.store.session(session.id).state is not SessionState.PENDING)  # type: ignore[union-attr]
    began = time.monotonic()
    found, at = ended(hub, session)
    assert found.end_cause == "LAUNCH_FAILED"
    assert str(found.message).startswith(NO_GPU_RUNTIME)
    print(f"told {at - began:.2f} s after its launch began")
    assert at - began <= TOLD_WITHIN_S + BUSY_S
    freed_once_and_the_next_one_runs(hub, session, waiting)
    engine.wait_gone(holder.name)
    only = {f"fgpu-{hub.installation}-{waiting.id}-1"}
    until(
        lambda: set(engine.of_installation(hub.installation)) == only, what="the one that failed is removed"
    )


def test_stop_then_start_at_once(hub: DockerHub) -> None:
    seen = [hub.running("alice", **WHOLE_FIVE).session.id]
    for _ in range(5):
        assert hub.stop("alice").status_code in (202, 204)
        answers = until(
            lambda: (a := hub.spawn("alice", options=WHOLE_FIVE)).status_code in (201, 202) and a,
            what="it may be asked for again",
        )
        assert answers is not None
        hub.wait_ready("alice")
        seen.append(hub.sessions()["alice/"].id)
    assert seen == sorted(set(seen)), "each is a session of its own"
    assert "Conflict" not in hub.log_text()
    assert "already in use" not in hub.log_text()


@pytest.fixture(scope="module")
def small_disk(engine: Engine, image: str) -> Iterator[Machine]:
    """A machine whose disk has little room beside the image."""
    # While the image is loaded it is there twice.
    with machines.running(engine.client, disk_mib=1200) as machine:
        yield machine


@pytest.mark.slow
def test_a_full_disk(make_hub: Callable[..., DockerHub], small_disk: Machine) -> None:
    hub = make_hub(
        nodes=[{"name": "there", "gpus": {"simulated": 1}, "engine": small_disk.url, "tls": False}],
        groups={"default": {}},
        fgpu_per_gpu=2,
        hub_address=small_disk.hub_address,
        after=MINI,
    ).start()
    whole = {**ONE, "fgpu": "2"}
    # It is the session that fills it: its server ends, and says why.
    hub.add_user("alice")
    began = time.monotonic()
    hub.spawn("alice", "writes", options=whole)
    found = hub.last("alice")
    assert "No space left on device" in str(found.message)
    assert time.monotonic() - began < 40 + BUSY_S
    # It is full when a session is to start there.
    filler = small_disk.data / "filler"
    with filler.open("wb", buffering=0) as file:
        try:
            while file.write(bytes(2**20)):
                pass
            while file.write(bytes(512)):
                pass
        except OSError:
            pass  # That is the fault.
    hub.add_user("bob")
    began = time.monotonic()
    hub.spawn("bob", options=whole)
    found = hub.last("bob")
    assert found.message == "the server's disk is full; ask an administrator"
    assert time.monotonic() - began < 10 + BUSY_S
    filler.unlink()
    hub.add_user("carol")
    hub.spawn("carol", options=whole)
    hub.wait_ready("carol")


@pytest.fixture(scope="module")
def live_restore(engine: Engine, image: str) -> Iterator[Machine]:
    """A machine whose engine keeps its containers while it restarts."""
    with machines.running(engine.client, flags=("--live-restore",)) as machine:
        yield machine


@pytest.mark.slow
def test_an_engine_that_keeps_its_containers_restarts_and_so_do_all_sessions_go_on(
    make_hub: Callable[..., DockerHub], live_restore: Machine
) -> None:
    hub = make_hub(
        nodes=[{"name": "there", "gpus": {"simulated": 1}, "engine": live_restore.url, "tls": False}],
        groups={"default": {}},
        fgpu_per_gpu=2,
        hub_address=live_restore.hub_address,
        after=MINI,
    ).start()
    hub.add_user("alice")
    hub.spawn("alice", options=ONE)
    hub.wait_ready("alice")
    before = hub.sessions()["alice/"]
    # One is in the middle of its launch: it never answers.
    hub.add_user("bob")
    hub.spawn("bob", "hangs", options=ONE)
    hub.wait_state("bob", "hangs", "PREPARING")
    live_restore.stop_engine()
    live_restore.start_engine()
    until(lambda: hub.ready("alice"), what="it goes on")
    time.sleep(6)  # So long a look at the engine takes to come round.
    after = hub.sessions()["alice/"]
    assert (after.id, after.attempt, after.state) == (before.id, before.attempt, SessionState.RUNNING)
    hub.end("bob", "hangs")
    hub.end("alice")
    mine = {"label": f"fgpu.installation={hub.installation}"}
    # A share is free once its container has ended; that is removed after it.
    until(
        lambda: not live_restore.client.containers(all=True, filters=mine), what="their containers are gone"
    )
