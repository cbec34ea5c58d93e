"""A Hub that starts while another machine is away, and what is left on a machine."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import machines
import pytest
from dockerhub import BASE, MINI, DockerHub, Engine, until
from machines import Machine
from test_docker_machines import HERE, WHOLE, answers, both, fgpu, idle, node_of, state_of

from fgpu_scheduler import NodeState
from fgpuspawner.engines.docker.checks import enforcement
from fgpuspawner.settings import FGPU

IMPATIENT = "c.Spawner.http_timeout = 3\n"
"""The Hub waits for this time, when it starts, for a server that it knows to be up; then it stops the server."""


@pytest.fixture(scope="module")
def there(engine: Engine, image: str) -> Iterator[Machine]:
    with machines.running(engine.client) as machine:
        yield machine


@pytest.fixture(scope="module")
def hub_of_two(make_hub: Callable[..., DockerHub], there: Machine) -> DockerHub:
    return make_hub(
        nodes=[HERE, there.node("there", gpus={"simulated": 1})],
        groups={"default": {}},
        fgpu_per_gpu=2,
        hub_address=there.hub_address,
        after=MINI + IMPATIENT,
    )


@pytest.fixture
def two(hub_of_two: DockerHub, there: Machine) -> Iterator[DockerHub]:
    nodes = hub_of_two.settings["nodes"]
    with idle(hub_of_two, there):
        yield hub_of_two
    if hub_of_two.settings["nodes"] != nodes:
        hub_of_two.kill()
        hub_of_two.settings["nodes"] = nodes


def test_a_session_outlives_a_restart_of_the_hub_while_its_machine_is_cut_off(
    two: DockerHub, there: Machine
) -> None:
    here_user, user = both(two, there)
    before = {key: (s.id, s.attempt) for key, s in two.sessions().items()}
    two.kill()
    there.cut()
    two.start()
    until(lambda: answers(two, here_user), what="what is here goes on")
    time.sleep(10)
    assert {key: (s.id, s.attempt) for key, s in two.sessions().items()} == before
    assert set(two.states().values()) == {"RUNNING"}
    there.mend()
    until(lambda: state_of(two, "there") is NodeState.READY)
    until(lambda: answers(two, user), what="the Hub has taken it up")
    assert set(two.states().values()) == {"RUNNING"}


@pytest.mark.parametrize("by", ["its owner", "an administrator"])
def test_sessions_of_a_silent_machine_can_be_ended_after_a_restart_of_the_hub(
    two: DockerHub, there: Machine, by: str
) -> None:
    here_user, user = both(two, there)
    session = two.sessions()[f"{user}/"]
    two.end(here_user)
    two.kill()
    there.cut()
    two.start()
    time.sleep(5)
    assert two.states().get(f"{user}/") == "RUNNING"
    if by == "its owner":
        assert two.stop(user).status_code in (202, 204)
        until(lambda: two.states().get(f"{user}/") == "TERMINATING", what="its share stays held")
    else:
        assert fgpu(two, "node", "there", "gone").returncode == 0
        until(lambda: f"{user}/" not in two.states())
        assert (two.last(user).id, two.last(user).end_cause) == (session.id, "NODE_LOST")
    # The Hub has learned it: it starts another server, on the machine that is there.
    until(lambda: two.spawn(user, options=WHOLE).status_code in (201, 202))
    two.wait_ready(user)
    assert node_of(two, user) == "here"
    # The check of the old one, which still ran, ends nothing of the new one.
    time.sleep(3)
    assert two.states().get(f"{user}/") == "RUNNING"


def test_session_of_a_node_that_is_no_longer_configured_runs_on_and_can_be_ended(
    two: DockerHub, there: Machine
) -> None:
    _, user = both(two, there)
    session = two.sessions()[f"{user}/"]
    two.kill()
    two.settings["nodes"] = [HERE]
    two.start()
    until(lambda: answers(two, user))
    assert two.states().get(f"{user}/") == "RUNNING"
    assert two.stop(user).status_code in (202, 204)
    until(lambda: two.states().get(f"{user}/") == "TERMINATING", what="nobody here can know that it is gone")
    assert fgpu(two, "node", "there", "gone").returncode == 0
    until(lambda: f"{user}/" not in two.states())
    assert two.last(user).id == session.id


def test_copied_files_without_a_container_are_removed(two: DockerHub, there: Machine) -> None:
    _, user = both(two, there)
    own = f"fgpu-{two.installation}-999-1"
    labels = {"fgpu.files": two.installation, "fgpu.node": "there"}
    # The container before the volume, which is what is looked for.
    there.client.create_container(BASE, ["true"], name=f"{own}-files-carrier", labels=labels)
    there.client.create_volume(f"{own}-files", labels=labels)
    until(lambda: f"{own}-files" not in volumes_there(there))
    left = [n for entry in there.client.containers(all=True) for n in entry["Names"]]
    assert not [name for name in left if own in name]
    name = two.container_name(two.sessions()[f"{user}/"])
    assert f"{name}-files" in volumes_there(there), "who runs keeps its own"
    assert two.states().get(f"{user}/") == "RUNNING"


def volumes_there(there: Machine) -> list[str]:
    return [v["Name"] for v in there.client.volumes()["Volumes"] or []]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_session_outlives_a_restart_of_a_docker_that_keeps_containers(
    make_hub: Callable[..., DockerHub], engine: Engine
) -> None:
    with machines.running(engine.client, flags=("--live-restore",)) as machine:
        hub = make_hub(
            nodes=[{"name": "there", "gpus": {"simulated": 1}, "engine": machine.url, "tls": False}],
            groups={"default": {}},
            hub_address=machine.hub_address,
            after=MINI + IMPATIENT,
        ).start()
        assert "live-restore" not in str(enforcement(machine.client.info(), FGPU()))
        assert "live-restore" in str(enforcement(engine.client.info(), FGPU()))
        user = "alice"
        hub.add_user(user)
        assert hub.spawn(user, options=WHOLE).status_code in (201, 202)
        hub.wait_ready(user)
        machine.stop_engine()
        until(lambda: state_of(hub, "there") is NodeState.LOST)
        assert answers(hub, user)
        machine.start_engine()
        until(lambda: state_of(hub, "there") is NodeState.READY)
        assert hub.states() == {f"{user}/": "RUNNING"}
        assert answers(hub, user)
        # It is still ours to end.
        hub.end(user)
        hub.close()
