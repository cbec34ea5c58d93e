"""What goes wrong on an engine, and what its owner reads: within five seconds of the engine saying so.

Each fault frees its share exactly once, and the next in the queue starts.
"""

from __future__ import annotations

import asyncio
import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from docker.errors import DockerException
from dockerhub import MINI, ONE, WHOLE_FIVE, DockerHub, Engine, until
from imageregistry import ImageRegistry
from simulator import world

from fgpu_scheduler import ENDED, Session, SessionState
from fgpuspawner.engines.docker.containers import Containers

TOLD_WITHIN_S = 5
BUSY_S = 40
"""Added for a machine that runs other tests at the same time; the time taken is printed."""
NO_GPU_RUNTIME = "this server's Docker engine has no GPU runtime; ask an administrator to install it"
ASKS_FOR_WHAT_IS_NOT_THERE = """
c.FGPUSpawner.extra_host_config = lambda spawner: (
    {"runtime": "nvidia"} if spawner.name == "no-runtime" else {}
)
c.FGPUSpawner.stop_timeout_s = 2
# Users have used GPUs in earlier tests; that must not decide which one starts.
c.FGPU.policies = {"*": {"order": "fifo"}}
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


def wait_in_line(hub: DockerHub, user: str, server: str = "", **options: str) -> Session:
    """Queue a session behind the one that holds all of group ``five``."""
    hub.add_user(user)
    hub.wait_free(user, server)
    assert hub.spawn(user, server, options={**WHOLE_FIVE, **options}).status_code in (201, 202)
    hub.wait_state(user, server, "PENDING")
    return hub.sessions()[f"{user}/{server}"]


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


def spoil(engine: Engine, container: str, fault: str) -> None:
    if fault == "removed":
        engine.client.remove_container(container, force=True)
    else:
        engine.client.kill(container, fault)


@pytest.mark.parametrize(
    ("fault", "cause", "words"),
    [
        ("SIGUSR1", "OOM", "the session used more than its 256 MiB of memory and was ended"),
        ("SIGUSR2", "EXITED", "the session's server ended with status 0$"),
        ("SIGKILL", "EXITED", "the session's server ended with status 137"),
        # The first, where it was seen between its death and its removal.
        ("removed", "EXITED", "the session's (server ended with status 137|container .*was removed outside)"),
    ],
    ids=["memory", "memory of a child", "killed", "removed"],
)
def test_dead_session_frees_its_share_and_is_reported(
    hub: DockerHub, engine: Engine, deaths: Deaths, fault: str, cause: str, words: str
) -> None:
    running = hub.running("alice", **WHOLE_FIVE)
    waiting = wait_in_line(hub, "bob")
    spoil(engine, running.id, fault)
    found, at = ended(hub, running.session)
    told_s = at - deaths.of(running.name)
    assert found.end_cause == cause
    assert re.match(words, str(found.message)), found.message
    freed_once_and_the_next_one_runs(hub, running.session, waiting)
    until(lambda: not hub.ready("alice"), what="the Hub knows it, too")
    print(f"{cause}: told {told_s:.2f} s after the engine's own word")
    assert told_s <= TOLD_WITHIN_S + BUSY_S


@pytest.mark.parametrize("server", ["exits", "exits-soon"])
def test_server_that_ends_before_it_answers_is_reported(hub: DockerHub, deaths: Deaths, server: str) -> None:
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


@pytest.mark.parametrize(
    ("server", "slug", "words"),
    [
        ("no-runtime", "python", NO_GPU_RUNTIME),
        ("no-program", "empty", "the container could not be started: .*/no/such/program"),
    ],
    ids=["no GPU runtime", "no program"],
)
def test_container_that_the_engine_cannot_start_is_reported(
    hub: DockerHub, engine: Engine, server: str, slug: str, words: str
) -> None:
    holder = hub.running("holder", **WHOLE_FIVE)
    session = wait_in_line(hub, "alice", server, image=slug)
    waiting = wait_in_line(hub, "bob")
    hub.stop("holder")
    until(lambda: hub.store.session(session.id).state is not SessionState.PENDING)  # type: ignore[union-attr]
    began = time.monotonic()
    found, at = ended(hub, session)
    assert found.end_cause == "LAUNCH_FAILED"
    assert re.match(words, str(found.message)), found.message
    print(f"told {at - began:.2f} s after its launch began")
    assert at - began <= TOLD_WITHIN_S + BUSY_S
    freed_once_and_the_next_one_runs(hub, session, waiting)
    engine.wait_gone(holder.name)
    only = {f"fgpu-{hub.installation}-{waiting.id}-1"}
    until(
        lambda: set(engine.of_installation(hub.installation)) == only, what="the one that failed is removed"
    )


def test_removed_image_is_reported_with_the_engines_reason(
    hub: DockerHub, engine: Engine, image: str, empty_registry: ImageRegistry
) -> None:
    hub.running("holder", **WHOLE_FIVE)
    name = f"{empty_registry.host}/fgpu-test/missing:1"
    engine.client.tag(image, name)
    hub.add_user("alice")
    asks = {**WHOLE_FIVE, "image": "missing"}
    until(lambda: hub.spawn("alice", options=asks).status_code == 202, what="the Hub has seen the image")
    hub.wait_state("alice", "", "PENDING")
    session = hub.sessions()["alice/"]
    engine.client.remove_image(name)
    waiting = wait_in_line(hub, "bob")
    hub.end("holder")
    found, _ = ended(hub, session)
    assert (found.state, found.end_cause) == ("ERROR", "PULL_FAILED")
    words = f"image {name} is not on the engine and could not be fetched: the registry has no such image: "
    assert str(found.message).startswith(words)
    assert "manifest unknown" in str(found.message)
    freed_once_and_the_next_one_runs(hub, session, waiting)


def test_slow_server_is_waited_for(hub: DockerHub) -> None:
    hub.add_user("ivan")
    hub.spawn("ivan", "slow", options=ONE)
    until(
        lambda: hub.ready("ivan", "slow") or hub.store.ended(user="ivan", limit=1),
        what="it is ready, or has failed",
    )
    assert hub.states() == {"ivan/slow": "RUNNING"}


async def test_last_output_has_no_control_characters(engine: Engine) -> None:
    said = "\x1b[2Jgone\x07 a name: caf\u00e9"
    container = engine.start(f"{engine.prefix}-says", code=f"print({said!r})")
    engine.client.wait(container)
    tail = await Containers(engine.client, installation=engine.prefix).log_tail(container)
    assert tail == ["\N{REPLACEMENT CHARACTER}[2Jgone\N{REPLACEMENT CHARACTER} a name: caf\u00e9"]


async def test_concurrent_removals_of_a_container_all_succeed(engine: Engine, image: str) -> None:
    containers = Containers(engine.client, installation=engine.prefix)
    name = f"{engine.prefix}-removed"
    for _ in range(5):
        engine.start(name)
        removals = [containers.remove_named(name, now=True) for _ in range(8)]
        assert await asyncio.gather(*removals) == [True] * 8
    containers.executor.shutdown()


async def test_slow_stops_delay_no_other_call(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fgpuspawner.engines.docker.containers.THREADS", 1)
    containers = Containers(engine.client, installation=engine.prefix, stop_timeout_s=60)
    stubborn = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); signal.pause()"
    one = world().running("a", "0.5").sessions[0]
    sessions = [replace(one, id=n, attempt=1) for n in (1, 2)]
    for session in sessions:
        container = engine.start(containers.name(session), code=stubborn)
        assert next(engine.client.logs(container, stream=True, follow=True)) == b"up\n"
    going = [asyncio.create_task(containers.end_session(session, now=False)) for session in sessions]
    await asyncio.sleep(0.5)
    await asyncio.wait_for(containers.call(engine.client.version), 45)
    assert not any(end.done() for end in going)
    for session in sessions:
        engine.client.kill(containers.name(session), "SIGKILL")
    assert await asyncio.gather(*going) == [True, True]
    await asyncio.gather(*containers._in_removal.values())
