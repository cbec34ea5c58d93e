"""What is ours, what is not, and what survives the Hub: ghosts go, strangers stay, running sessions are adopted."""

from __future__ import annotations

import contextlib
import os
import secrets
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from docker.errors import APIError
from dockerhub import MINI, DockerHub, Engine, until


@pytest.fixture(scope="module")
def own_hub(make_hub: Callable[..., DockerHub]) -> DockerHub:
    """A Hub that tests may kill and start again."""
    return make_hub(after=MINI + "c.Spawner.poll_interval = 2\n").start()


@dataclass(frozen=True)
class Strangers:
    """Containers that were there while the Hub looked at least twice."""

    ghost: str
    earlier_attempt: str
    forged: str
    other: str
    running_id: str


@pytest.fixture(scope="module")
def strangers(own_hub: DockerHub, engine: Engine) -> Strangers:
    """A ghost of an ended session, one of a running session, a forgery and a neighbour's container.

    They are seen before a second ghost is made; when that is gone, they have been seen twice.
    """
    hub, ours, neighbour = own_hub, own_hub.installation, secrets.token_hex(6)
    hub.running("alice")
    hub.end("alice")
    ended = hub.last("alice")
    running = hub.running("bob")

    def start(name: str, installation: str, session: int, attempt: int) -> str:
        labels = {"installation": installation, "session": session, "attempt": attempt, "node": "two"}
        # A container with our labels and no session may be removed before it is started.
        with contextlib.suppress(APIError):
            engine.start(name, labels={f"fgpu.{key}": str(value) for key, value in labels.items()})
        return name

    found = Strangers(
        forged=start(f"{engine.prefix}-forged", ours, ended.id, 1),
        other=start(f"fgpu-{neighbour}-1-1", neighbour, 1, 1),
        earlier_attempt=start(f"fgpu-{ours}-{running.session.id}-9", ours, running.session.id, 9),
        ghost=start(f"fgpu-{ours}-{ended.id}-1", ours, ended.id, 1),
        running_id=running.id,
    )
    until(lambda: engine.inspect(found.ghost) is None, what="the ghost is removed")
    again = start(f"fgpu-{ours}-999999-1", ours, 999999, 1)
    until(lambda: engine.inspect(again) is None, what="the second ghost is removed")
    return found


def test_a_container_of_an_ended_session_is_removed_and_logged(
    own_hub: DockerHub, strangers: Strangers
) -> None:
    log = own_hub.log_text()
    assert f"Removing the ghost {strangers.ghost} of session" in log
    assert "its session has ended or never was" in log


def test_container_of_another_attempt_is_removed_and_the_session_stays(
    own_hub: DockerHub, engine: Engine, strangers: Strangers
) -> None:
    # Several are removed side by side, each in its own time.
    engine.wait_gone(strangers.earlier_attempt)
    assert "it is of attempt 9, and its session is at attempt 1" in own_hub.log_text()
    assert own_hub.states() == {"bob/": "RUNNING"}
    running = engine.inspect(strangers.running_id)
    assert running is not None
    assert running["State"]["Running"]


def test_a_container_with_our_labels_under_another_name_is_left_alone_and_logged_once(
    own_hub: DockerHub, engine: Engine, strangers: Strangers
) -> None:
    found = engine.inspect(strangers.forged)
    assert found is not None
    assert found["State"]["Running"]
    said = f"Container {strangers.forged} carries our labels, but it is not ours; it is left alone"
    assert own_hub.log_text().count(said) == 1


def test_a_container_of_another_installation_is_left_alone(
    own_hub: DockerHub, engine: Engine, strangers: Strangers
) -> None:
    found = engine.inspect(strangers.other)
    assert found is not None
    assert found["State"]["Running"]
    assert strangers.other not in own_hub.log_text()


def test_hub_logs_other_installations_sessions_at_its_start(own_hub: DockerHub, strangers: Strangers) -> None:
    own_hub.kill()
    own_hub.start()
    said = said_of(strangers)
    until(lambda: said in own_hub.log_text(), what="the Hub says whose sessions it does not count")


def said_of(strangers: Strangers) -> str:
    """Return what is told of a neighbour's container."""
    return f"Sessions of another installation, {strangers.other.split('-')[1]}, run on the Docker engine of "


def test_check_reports_other_installations_sessions_and_what_to_do(
    own_hub: DockerHub, strangers: Strangers, tmp_path: Path
) -> None:
    hub, config = own_hub, tmp_path / "jupyterhub_config.py"
    # That of the tests' Hub leaves the service out.
    config.write_text(
        "from fgpuspawner.config import configure\nc = get_config()  # noqa: F821\n"
        f"c.Authenticator.allow_all = True\nconfigure(c, data_dir={str(hub.data)!r}, **{hub.settings!r})\n"
    )
    hub.running("carol")

    def checked() -> list[str]:
        words = [Path(sys.executable).parent / "fgpu", "check", "--config", config]
        env = {**os.environ, "CONFIGPROXY_AUTH_TOKEN": "secret"}
        done = subprocess.run(words, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return [line for line in done.stdout.splitlines() if "another installation" in line]

    (line,) = [line for line in checked() if said_of(strangers) in line]
    assert line.startswith("  WARNING: ")
    other = strangers.other.split("-")[1]
    assert line.endswith(f"docker rm -f $(docker ps -q --filter label=fgpu.installation={other})")
    assert not [line for line in checked() if hub.installation in line]
    # Its own are another's once its configuration names another database.
    database = hub.data / "fgpu.sqlite"
    hub.kill()
    database.rename(database.with_suffix(".away"))
    try:
        (line,) = [line for line in checked() if hub.installation in line]
        assert "set c.FGPU.db_url back to go on with them" in line
    finally:
        database.with_suffix(".away").rename(database)
        hub.start()
    hub.end("carol")


def test_restarted_hub_adopts_running_sessions_and_ends_missing_ones(
    own_hub: DockerHub, engine: Engine
) -> None:
    hub = own_hub
    hub.end_all_but(set())
    alice = hub.running("alice")
    bob = hub.running("bob")
    hub.kill()
    engine.remove(bob.id)
    hub.start()
    hub.wait_ready("alice")
    hub.reach({"alice/": "RUNNING"})
    session = hub.sessions()["alice/"]
    assert (session.id, session.attempt) == (alice.session.id, 1)
    container = engine.inspect(alice.name)
    assert container is not None
    assert container["Id"] == alice.id
    assert container["State"]["Running"]
    ended = hub.last("bob")
    assert (ended.id, ended.state, ended.end_cause) == (bob.session.id, "TERMINATED", "EXITED")
    assert not hub.ready("bob")
    hub.end("alice")
    engine.wait_gone(alice.id)
    assert engine.of_installation(hub.installation).keys() <= {f"{engine.prefix}-forged"}
