"""Failures: each ends the session, says why in words, and frees its share for the next."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from docker.errors import APIError
from dockerhub import ONE, WHOLE_FIVE, DockerHub, Engine, until
from imageregistry import ImageRegistry
from simulator import world

from fgpu_scheduler import Session
from fgpuspawner.engines.docker.containers import Containers
from fgpuspawner.engines.docker.endings import refusal_words


def wait_in_line(hub: DockerHub, user: str, server: str = "", **options: object) -> None:
    """Queue a session behind one that holds all of group ``five``."""
    hub.add_user(user)
    hub.wait_free(user, server)
    assert hub.spawn(user, server, options={**WHOLE_FIVE, **options}).status_code == 202
    hub.wait_state(user, server, "PENDING")


def why(session: Session) -> tuple[str, str | None]:
    return session.state.value, session.end_cause.value if session.end_cause else None


def test_request_for_a_removed_image_fails_with_the_engines_reason_and_the_next_one_starts(
    hub: DockerHub, engine: Engine, image: str, empty_registry: ImageRegistry
) -> None:
    hub.running("holder", **WHOLE_FIVE)
    name = f"{empty_registry.host}/fgpu-test/missing:1"
    engine.client.tag(image, name)
    hub.add_user("alice")
    asks = {**WHOLE_FIVE, "image": "missing"}
    until(lambda: hub.spawn("alice", options=asks).status_code == 202, what="the Hub has seen the image")
    hub.wait_state("alice", "", "PENDING")
    engine.client.remove_image(name)
    wait_in_line(hub, "bob")
    hub.end("holder")
    hub.wait_ready("bob")
    ended = hub.last("alice")
    assert why(ended) == ("ERROR", "PULL_FAILED")
    assert ended.message is not None
    beginning = (
        f"image {name} is not on the engine and could not be fetched: the registry has no such image: "
    )
    assert ended.message.startswith(beginning)
    assert "manifest unknown" in ended.message
    moves = [e.reason for e in hub.store.events(limit=10000) if e.session_id == ended.id]
    assert "PULL_FAILED" in moves


def test_slow_server_is_waited_for(hub: DockerHub) -> None:
    hub.add_user("ivan")
    hub.spawn("ivan", "slow", options=ONE)
    until(
        lambda: hub.ready("ivan", "slow") or hub.store.ended(user="ivan", limit=1),
        what="it is ready, or has failed",
    )
    assert hub.states() == {"ivan/slow": "RUNNING"}


def test_container_that_ends_at_once_leaves_its_last_output(hub: DockerHub) -> None:
    hub.add_user("judy")
    hub.spawn("judy", options={**ONE, "image": "dies"})
    ended = hub.last("judy")
    assert why(ended) == ("ERROR", "LAUNCH_FAILED")
    assert ended.message == "the session's server ended with status 7; its last words: no luck"


def test_image_without_its_program_fails_with_the_engines_reason_and_leaves_no_container(
    hub: DockerHub, engine: Engine
) -> None:
    hub.add_user("kate")
    hub.spawn("kate", options={**ONE, "image": "empty"})
    ended = hub.last("kate")
    assert why(ended) == ("ERROR", "LAUNCH_FAILED")
    assert ended.message is not None
    assert ended.message.startswith("the container could not be started: ")
    assert "/no/such/program" in ended.message
    until(lambda: engine.of_installation(hub.installation) == {}, what="its container is removed")


def test_server_that_ends_after_a_childs_oom_kill_is_not_reported_as_oom(
    hub: DockerHub, engine: Engine
) -> None:
    running = hub.running("alice")
    engine.client.kill(running.id, "SIGUSR2")
    hub.wait_state("alice", "", None)
    ended = hub.last("alice")
    assert (ended.id, ended.end_cause) == (running.session.id, "EXITED")
    assert ended.message == "the session's server ended with status 0"


def test_container_removed_from_outside_frees_its_share(hub: DockerHub, engine: Engine) -> None:
    running = hub.running("alice", **WHOLE_FIVE)
    wait_in_line(hub, "bob")
    engine.client.remove_container(running.id, force=True)
    hub.wait_ready("bob")
    ended = hub.last("alice")
    assert (ended.id, ended.end_cause) == (running.session.id, "EXITED")
    # The first, where it was seen between its death and its removal.
    assert ended.message in (
        "the session's server ended with status 137",
        "the session's container was removed outside JupyterHub",
        "the session's container or process was removed outside JupyterHub",
    )


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


@pytest.mark.parametrize(
    ("engine_says", "owner_reads"),
    [
        (
            'could not select device driver "nvidia" with capabilities: [[gpu compute utility]]',
            "this server's Docker engine has no GPU runtime; ask an administrator to install it",
        ),
        (
            "unknown or invalid runtime name: nvidia",
            "this server's Docker engine has no GPU runtime; ask an administrator to install it",
        ),
        (
            "failed to create shim: write /var/lib/docker/x: no space left on device: unknown",
            "the server's disk is full; ask an administrator",
        ),
        (
            'unable to start container process: exec: "jupyterhub-singleuser": executable file not found in $PATH',
            "this image has no server environment: jupyterhub-singleuser is not in it, or cannot run; ask an "
            "administrator to build it with `fgpu images build` (docs/images.md), or choose another image",
        ),
        (
            'exec: "/no/such/program": stat /no/such/program: no such file or directory',
            'the container could not be started: exec: "/no/such/program": stat /no/such/program: no such file or '
            "directory",
        ),
        ("invalid mount config", "the container could not be started: invalid mount config"),
    ],
)
def test_refusal_of_the_engine_is_explained_to_the_owner(engine_says: str, owner_reads: str) -> None:
    assert refusal_words(APIError("500 Server Error", explanation=engine_says)) == owner_reads
