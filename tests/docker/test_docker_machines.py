"""Several machines, each with an engine of its own: sessions on all of them, and one that is cut off."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import machines
import pytest
import requests
from dockerhub import BASE, MINI, ONE, PYTHON, QUICK, DockerHub, Engine, until
from machines import Machine
from test_docker_isolation import ALLOCATE, OWN_LOADER

from fgpu_scheduler import BadSettings, NodeState
from fgpuspawner.engines.docker import client as execs
from fgpuspawner.engines.docker.address import Address
from fgpuspawner.engines.docker.daemon import Daemon
from fgpuspawner.engines.docker.remote_machine import RemoteDriver
from fgpuspawner.isolation.nvml_reader import NvmlUnknown

HERE = {"name": "here", "cpu": 16, "gpus": {"simulated": 1}}
WHOLE = {**ONE, "fgpu": "2"}
BY_EVENTS_ALONE = """
from functools import partial
import fgpuspawner.hub.runtime
fgpuspawner.hub.runtime.Deadlines = partial(fgpuspawner.hub.runtime.Deadlines, reconcile_every_s=600)
c.Spawner.poll_interval = 600
"""
"""Lines of a Hub that looks at what runs when an engine has told it of something, and next to never besides."""

SILENT_LATE = """
import fgpuspawner.engines.docker.daemon
fgpuspawner.engines.docker.daemon.LOOK_TIMEOUT_S = 300
c.Spawner.poll_interval = 600
"""
"""Lines of a Hub that waits longer for an engine that hangs than whatever does not wait for it can take."""


@pytest.fixture(scope="module")
def there(engine: Engine, image: str) -> Iterator[Machine]:
    """Another machine, with the default image."""
    with machines.running(engine.client, tls=True) as machine:
        yield machine


@pytest.fixture(scope="module")
def hub_of_two(
    request: pytest.FixtureRequest, make_hub: Callable[..., DockerHub], there: Machine
) -> Iterator[DockerHub]:
    """A Hub with a GPU here and a GPU there; with lines before its configuration where a test gives some."""
    hub = make_hub(
        before=QUICK + getattr(request, "param", ""),
        nodes=[HERE, there.node("there", gpus={"simulated": 1})],
        groups={"default": {}},
        fgpu_per_gpu=2,
        hub_address=there.hub_address,
        watchdog_every_s=1,
        watchdog_tolerance_mib=128,
        after=MINI,
    )
    yield hub
    hub.kill()


@pytest.fixture
def two(hub_of_two: DockerHub, there: Machine) -> Iterator[DockerHub]:
    """That Hub, with nothing on either machine before and after."""
    with idle(hub_of_two, there):
        yield hub_of_two


@contextlib.contextmanager
def idle(hub: DockerHub, there: Machine) -> Iterator[None]:
    """Have a Hub and both of its machines as they are when nothing has happened yet; and so again after a test."""
    if hub.process is None or hub.process.poll() is not None:
        hub.start()
    until(lambda: state_of(hub, "there") is NodeState.READY, within_s=120, what="the machine answers")
    yield
    there.mend()
    there.thaw()
    hub.end_all_but(set())
    until(
        lambda: not any(u["servers"] for u in hub.api("GET", "users").json()),
        what="the Hub has done with all",
    )


def started(hub: DockerHub, user: str, node: str, **options: object) -> None:
    """Ask for a whole GPU and wait until it runs on this node."""
    hub.add_user(user)
    hub.wait_free(user)
    assert hub.spawn(user, options={**WHOLE, **options}).status_code in (201, 202)
    hub.wait_ready(user)
    assert node_of(hub, user) == node


def node_of(hub: DockerHub, user: str) -> str | None:
    placement = hub.sessions()[f"{user}/"].placement
    return placement.node_id if placement else None


def state_of(hub: DockerHub, node: str) -> NodeState:
    return next(n.state for n in hub.store.snapshot(0).nodes if n.id == node)


def answers(hub: DockerHub, user: str) -> bool:
    """Return whether the user's server answers through the proxy."""
    try:
        return requests.get(f"{hub.url}/user/{user}/api", timeout=30).status_code == 200
    except (requests.ConnectionError, requests.Timeout):
        return False


def both(hub: DockerHub, there: Machine) -> tuple[str, str]:
    """Start a session on each machine and return their users, the one that is there last."""
    for user in ("alice", "bob"):
        hub.add_user(user)
        hub.spawn(user, options=WHOLE)
        hub.wait_ready(user)
    nodes = {node_of(hub, user): user for user in ("alice", "bob")}
    assert set(nodes) == {"here", "there"}
    return str(nodes["here"]), str(nodes["there"])


def container_there(hub: DockerHub, there: Machine, user: str) -> dict[str, object]:
    session = hub.sessions()[f"{user}/"]
    return dict(there.client.inspect_container(hub.container_name(session)))


def test_sessions_run_on_both_machines_with_limits_and_leave_nothing(two: DockerHub, there: Machine) -> None:
    here_user, there_user = both(two, there)
    assert answers(two, there_user), "through the proxy, at the port that the machine publishes"
    session = two.sessions()[f"{there_user}/"]
    found = container_there(two, there, there_user)
    name = two.container_name(session)
    mounts = {m["Destination"]: m for m in found["Mounts"]}  # type: ignore[index,attr-defined]
    assert mounts["/run/fgpu/limits"]["RW"] is False
    status, output = exec_there(there, name, "cat", "/run/fgpu/limits")
    assert status == 0
    assert f"session={session.id}\n" in output
    assert "memory_mib=8192" in output
    status, output = exec_there(there, name, "sh", "-c", "echo x >> /run/fgpu/limits")
    assert status != 0
    log = two.log_text()
    assert f"Session {session.id} is verified: interposer" in log
    volume = f"{name}-files"
    assert there.client.inspect_volume(volume)
    two.end(there_user)
    two.end(here_user)
    until(lambda: not [v for v in there.client.volumes()["Volumes"] or [] if v["Name"].startswith(name)])
    own = {"label": f"fgpu.installation={two.installation}"}
    until(lambda: there.client.containers(all=True, filters=own) == [], what="the container is removed")


def exec_there(there: Machine, name: str, *words: str) -> tuple[int, str]:
    both = (execs.STDOUT, execs.STDERR)
    answer = execs.run_in(there.client, name, words, most_bytes=1 << 26, streams=both)
    assert answer.status is not None
    return answer.status, answer.output.decode()


@pytest.mark.parametrize("hub_of_two", [BY_EVENTS_ALONE], indirect=True, ids=["by-events-alone"])
def test_end_on_another_machine_frees_its_share_at_once(two: DockerHub, there: Machine) -> None:
    _, user = both(two, there)
    two.add_user("carol")
    two.spawn("carol", options=WHOLE)
    two.wait_state("carol", "", "PENDING")
    session = two.sessions()[f"{user}/"]
    there.client.kill(two.container_name(session), "SIGKILL")
    died = time.monotonic()
    until(lambda: session.id not in [s.id for s in two.sessions().values()], what="its share is free")
    print(f"its share was free after {time.monotonic() - died:.2f} s")
    two.wait_ready("carol")
    assert node_of(two, "carol") == "there"
    ended = two.last(user)
    assert (ended.end_cause, ended.id) == ("EXITED", session.id)


@pytest.mark.parametrize("hub_of_two", [SILENT_LATE], indirect=True, ids=["silent-late"])
def test_hanging_engine_delays_no_end_and_no_start_elsewhere(
    two: DockerHub, there: Machine, engine: Engine
) -> None:
    user, user_there = both(two, there)
    session = two.sessions()[f"{user}/"]
    there.freeze()
    engine.client.kill(two.container_name(session), "SIGKILL")
    until(lambda: session.id not in [s.id for s in two.sessions().values()], what="its share is free")
    two.add_user("carol")
    two.spawn("carol", options=WHOLE)
    two.wait_ready("carol")
    assert node_of(two, "carol") == "here"
    assert state_of(two, "there") is NodeState.READY, "nothing is known of it yet"
    there.thaw()
    until(lambda: answers(two, user_there), what="the session there answers")


@pytest.mark.parametrize(
    "for_s", [3, pytest.param(60, marks=pytest.mark.slow), pytest.param(600, marks=pytest.mark.slow)]
)
def test_unreachable_machine_keeps_its_shares_and_comes_back(
    two: DockerHub, there: Machine, for_s: int
) -> None:
    here_user, user = both(two, there)
    before = two.sessions()[f"{user}/"]
    there.cut()
    until(lambda: state_of(two, "there") is NodeState.LOST, within_s=120, what="the node is lost")
    two.add_user("carol")
    two.spawn("carol", options=WHOLE)
    two.end(here_user)
    two.wait_ready("carol")
    assert node_of(two, "carol") == "here", "what waits goes elsewhere"
    two.add_user("dave")
    two.spawn("dave", options=WHOLE)
    time.sleep(for_s)
    assert two.states() == {f"{user}/": "RUNNING", "carol/": "RUNNING", "dave/": "PENDING"}
    there.mend()
    until(lambda: state_of(two, "there") is NodeState.READY, within_s=120, what="the node is back")
    after = two.sessions()[f"{user}/"]
    assert (after.id, after.attempt, after.state) == (before.id, before.attempt, before.state)
    assert answers(two, user)
    two.end(user)
    two.wait_ready("dave")
    assert node_of(two, "dave") == "there"


def test_machine_that_was_silent_at_the_start_is_used_when_it_answers(
    make_hub: Callable[..., DockerHub], there: Machine
) -> None:
    hub = make_hub(
        nodes=[there.node("there", gpus={"simulated": 1}, group="other")],
        groups={"other": {}},
        fgpu_per_gpu=2,
        hub_address=there.hub_address,
        after=MINI,
    )
    there.freeze()
    try:
        hub.start()
        (node,) = hub.store.snapshot(0).nodes
        assert (node.state, node.cpu_milli, node.memory_mib) == (NodeState.LOST, 0, 0)
        there.thaw()
        until(lambda: hub.store.snapshot(0).nodes[0].cpu_milli > 0, within_s=120)
        started(hub, "alice", "there", group="other")
    finally:
        there.thaw()
        hub.end_all_but(set())
        hub.kill()


def test_restarted_engine_keeps_its_sessions_or_reports_their_end(
    two: DockerHub, there: Machine, tmp_path: Path
) -> None:
    _, user = both(two, there)
    session = two.sessions()[f"{user}/"]
    there.stop_engine()
    there.start_engine()
    # Without live-restore the engine ends its containers: that is an end like any other, and not a loss.
    until(lambda: session.id not in [s.id for s in two.sessions().values()], within_s=120)
    ended = two.last(user)
    assert ended.id == session.id
    assert ended.message
    until(lambda: state_of(two, "there") is NodeState.READY, within_s=120)
    started(two, user, "there")


def test_administrator_marks_a_machine_as_gone(two: DockerHub, there: Machine) -> None:
    _, user = both(two, there)
    session = two.sessions()[f"{user}/"]
    refused = fgpu(two, "node", "there", "gone")
    assert refused.returncode == 1
    assert refused.stderr == "fgpu: node 'there' is READY; gone is for a node that is LOST\n"
    there.cut()
    until(lambda: state_of(two, "there") is NodeState.LOST, within_s=120)
    said = fgpu(two, "node", "there", "gone")
    assert (said.returncode, said.stdout) == (
        0,
        "node there: the Hub ends its sessions within a few seconds\n",
    )
    two.wait_state(user, "", None)
    ended = two.last(user)
    assert (ended.id, ended.state, ended.end_cause) == (session.id, "ERROR", "NODE_LOST")
    assert ended.message == "the session's machine was lost, and the session with it"
    until(lambda: not two.ready(user), what="the Hub has learned it")
    assert state_of(two, "there") is NodeState.LOST
    # The machine was not gone after all: its container no longer has a session.
    there.mend()
    until(lambda: state_of(two, "there") is NodeState.READY, within_s=120)
    until(lambda: not containers_there(two, there), what="the ghost is removed")


def containers_there(hub: DockerHub, there: Machine) -> list[str]:
    found = there.client.containers(all=True, filters={"label": f"fgpu.installation={hub.installation}"})
    return [entry["Names"][0] for entry in found]


def fgpu(hub: DockerHub, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(Path(sys.executable).parent / "fgpu"), *words, "--config", str(hub.write_config())],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **hub.env},
    )


def test_the_watchdog_sees_what_sessions_hold_on_another_machine(two: DockerHub, there: Machine) -> None:
    two.add_user("alice")
    two.spawn("alice", options=WHOLE)
    two.wait_ready("alice")
    assert node_of(two, "alice") == "here"
    two.add_user("mallory")
    two.spawn("mallory", options={**ONE, "fgpu": "0.5"})
    two.wait_ready("mallory")
    assert node_of(two, "mallory") == "there"
    session = two.sessions()["mallory/"]
    name = two.container_name(session)
    assert exec_there(there, name, PYTHON, "-c", OWN_LOADER)[0] == 0
    _, python = exec_there(
        there, name, PYTHON, "-c", "import sys, os; print(os.path.realpath(sys.executable))"
    )
    holds = f"{ALLOCATE}signal.pause()\n"
    made = there.client.exec_create(name, ["/tmp/ld.so", python.strip(), "-c", holds, "3000"])
    there.client.exec_start(made["Id"], detach=True)
    ended = two.last("mallory")
    assert (ended.id, ended.end_cause) == (session.id, "ISOLATION_FAILED")
    assert "it held 3000 MiB of GPU memory, above its limit of 2048 MiB" in str(ended.message)
    outpost = there.client.inspect_container(f"fgpu-{two.installation}-outpost-there")
    assert outpost["HostConfig"]["CapDrop"] == ["ALL"]
    assert outpost["HostConfig"]["NetworkMode"] == "none"


def test_another_machine_says_which_gpus_it_has(two: DockerHub, there: Machine) -> None:
    outpost = RemoteDriver(
        lambda: there.client,
        installation=two.installation,
        node_id="there",
        images=lambda: ["fgpu-test/not-there:1", BASE],
        machine=two.data / "simulated" / "there",
    )
    (found,) = outpost.devices()
    (known,) = next(n.devices for n in two.store.snapshot(0).nodes if n.id == "there")
    assert (found.uuid, found.model, found.memory_mib) == (known.uuid, known.model, known.memory_mib)
    without = RemoteDriver(
        lambda: there.client, installation=two.installation, node_id="x", images=lambda: [BASE]
    )
    with pytest.raises(NvmlUnknown, match="no NVIDIA runtime and no CDI devices"):
        without.devices()
    nothing = RemoteDriver(
        lambda: there.client, installation=two.installation, node_id="x", images=lambda: ["a/b:1"]
    )
    with pytest.raises(NvmlUnknown, match="pull one there, such as a/b:1"):
        nothing.devices()


def test_both_sides_accept_only_certificates_of_the_right_authority(there: Machine) -> None:
    def engine(tls: dict[str, str]) -> Daemon:
        return Daemon(Address(there.url, ("there",), tls, there.address), installation="none")

    right = engine(there.tls())
    right.connect()
    assert right.answers
    right.close()
    wrong = there.tls("stranger", "others")
    for tls in ({**there.tls(), "ca": wrong["ca"]}, {**wrong, "ca": there.tls()["ca"]}):
        stranger = engine(tls)
        with pytest.raises(BadSettings, match=r"the Docker engine of there .* does not answer"):
            stranger.connect()
        assert not stranger.answers
    with pytest.raises(BadSettings, match="tls of 'there'"):
        engine({**there.tls(), "cert": "/no/such/file"}).connect()
