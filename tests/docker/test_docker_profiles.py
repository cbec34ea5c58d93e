"""The lines of docs/security.md reach their profiles as they stand there; and what they do to an engine works.

With user namespaces root in a container is an unprivileged user of its machine. So nothing that is mounted or carried
into a session is its own there.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import machines
import pytest
from dockerhub import BASE, MINI, ONE, PYTHON, DockerHub, Engine, Running, entry, until
from machines import Machine
from test_docker_isolation import ALLOCATE
from test_docker_session import ATTEMPTS

from fgpu_scheduler import ImageQuota, ImageState, PrivateImages, Store
from fgpuspawner.hub.checks import Profile
from hubprocess import ROOT

SECURITY = (ROOT / "docs/security.md").read_text(encoding="utf-8")
PLACE = "# the lines of your profile\n"
GPU = {"simulated": 1, "memory_mib": 8192}


def blocks(heading: str, language: str) -> list[str]:
    """Return the blocks of code below a heading, up to the next one."""
    section = re.split(r"^##+ ", SECURITY.partition(f"\n{heading}\n")[2], maxsplit=1, flags=re.MULTILINE)[0]
    return re.findall(rf"```{language}\n(.*?)```", section, flags=re.DOTALL)


def check(folder: Path, profile: Profile, *, docker_host: str = "") -> str:
    """Return what `fgpu check` says of the lines of a profile, and of those before it."""
    (frame,) = blocks("## Profiles", "python")
    assert PLACE in frame
    upto = list(Profile)[: list(Profile).index(profile) + 1]
    lines = "".join(block for own in upto for block in blocks(f"### {own}", "python"))
    config = folder / "jupyterhub_config.py"
    text = frame.replace(PLACE, lines).replace("/var/lib/fgpu", str(folder / "data"))
    config.write_text(text + "\nc.Authenticator.allow_all = True\n")
    env = {**os.environ, "CONFIGPROXY_AUTH_TOKEN": "secret"} | (
        {"DOCKER_HOST": docker_host} if docker_host else {}
    )
    fgpu = Path(sys.executable).parent / "fgpu"
    done = subprocess.run(
        [fgpu, "check", "--config", config], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.partition("  security: ")[2]


@pytest.mark.parametrize("profile", [Profile.LAB, Profile.DEPARTMENT])
def test_settings_of_a_profile_meet_it(image: str, tmp_path: Path, profile: Profile) -> None:
    said = check(tmp_path, profile)
    own = list(Profile)[: list(Profile).index(profile) + 1]
    assert [one for one in own if f" for {one}: " in said] == []
    assert " for class: " in said
    assert "unknown for " not in said


@pytest.fixture(scope="module")
def machine(engine: Engine, image: str) -> Iterator[Machine]:
    """A machine with an engine that has the settings of the strictest profile, word for word."""
    (settings,) = blocks("### class", "json")
    assert json.loads(settings) == {"userns-remap": "default"}
    with machines.running(engine.client, tls=True, daemon_json=settings) as made:
        yield made


@pytest.fixture(scope="module")
def catalogue(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("catalogue") / "catalogue.toml"
    path.write_text(entry("python", BASE))
    return path


@pytest.fixture(scope="module")
def there(machine: Machine) -> Engine:
    # The machine goes with all that is on it.
    return Engine(machine.client)


@pytest.fixture(scope="module")
def hub(
    machine: Machine, there: Engine, catalogue: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[DockerHub]:
    """A Hub on that machine, with homes in volumes and a folder of the host's."""
    folder = tmp_path_factory.mktemp("hub")
    shared = folder / "shared"
    shared.mkdir()
    os.chown(shared, 101000, 101000)
    volumes = {"home-{username}": "/home/jovyan", str(shared): "/srv/shared"}
    found = DockerHub(
        folder,
        there,
        catalogue=str(catalogue),
        before=machine.within() + f"c.FGPUSpawner.volumes = {volumes!r}\n",
        after=MINI,
        nodes=[{"name": "box", "cpu": 16, "gpus": GPU}],
        groups={"default": {}},
        fgpu_per_gpu=2,
        env={"DOCKER_HOST": machine.socket},
    )
    found.before += f"c.JupyterHub.bind_url = 'http://{machine.address}:{found.port}'\n"
    found.url = f"http://{machine.address}:{found.port}"
    try:
        yield found.start()
    finally:
        found.close()


@pytest.fixture(scope="module")
def alice(hub: DockerHub) -> Running:
    return hub.running("alice", fgpu="0.5", memory_mib=500)


@pytest.mark.slow
def test_settings_of_the_strictest_profile_meet_it(machine: Machine, tmp_path: Path) -> None:
    assert check(tmp_path, Profile.CLASS, docker_host=machine.socket).endswith("nothing else is missing\n")


@pytest.mark.slow
def test_root_in_a_session_is_unprivileged_on_the_machine(there: Engine, alice: Running) -> None:
    pid = alice.container["State"]["Pid"]
    status = Path(f"/proc/{pid}/status").read_text()
    assert re.search(r"^Uid:\s+101000\s", status, re.MULTILINE)
    assert there.run_in(alice.id, "cat", "/proc/self/uid_map", user="root")[1].split() == [
        "0",
        "100000",
        "65536",
    ]


@pytest.mark.slow
def test_root_cannot_change_the_slice(there: Engine, alice: Running) -> None:
    assert alice.session.placement is not None
    for megabytes, answer in (("2049", "2"), ("512", "0")):
        assert there.run_in(alice.id, PYTHON, "-c", ALLOCATE, megabytes) == (0, f"{answer}\n")
    for user in ("", "root"):
        attempts = ATTEMPTS.replace("/tmp/forged", f"/tmp/forged-{user}")
        status, output = there.run_in(alice.id, PYTHON, "-c", attempts, user=user)
        assert status == 0, output
        done = {name for name, code in json.loads(output).items() if code == "done"}
        assert done <= {"become root"}, "who is root already becomes it"


@pytest.mark.slow
def test_its_home_and_a_folder_of_the_hosts_are_its_own(
    there: Engine, hub: DockerHub, alice: Running
) -> None:
    for place in ("/home/jovyan", "/srv/shared"):
        there.python_in(alice.id, f"open('{place}/mine', 'w').write('x')")
    assert (hub.folder / "shared" / "mine").stat().st_uid == 101000


@pytest.mark.slow
def test_session_with_user_namespaces_can_be_saved_and_started(
    there: Engine, hub: DockerHub, alice: Running
) -> None:
    there.python_in(alice.id, "open('/opt/env/kept', 'w').write('kept')")
    store = Store(f"sqlite:///{hub.data / 'fgpu.sqlite'}")
    store.connect()
    images = PrivateImages(store)
    wished = images.request(alice.session.id, name="more", asked_by="test", quota=ImageQuota(), now_s=1)

    def made() -> bool:
        found = images.get(wished.id)
        assert found.state is not ImageState.FAILED, found
        return found.state is ImageState.READY

    until(made, within_s=120, what="it is made")
    until(lambda: " is saved as " in hub.log_text(), what="it is offered")
    again = hub.running("alice", "again", image=images.get(wished.id).name, fgpu="0.5", memory_mib=500)
    assert there.python_in(again.id, "print(open('/opt/env/kept').read())") == "kept"
    assert there.run_in(again.id, "stat", "-c", "%u", "/opt/env/kept")[1] == "1000\n"
    store.close()


@pytest.mark.slow
def test_a_hub_elsewhere_has_sessions_there_and_watches_them(
    engine: Engine, machine: Machine, catalogue: Path, tmp_path: Path
) -> None:
    hub = DockerHub(
        tmp_path,
        engine,
        catalogue=str(catalogue),
        nodes=[machine.node("there", gpus=GPU)],
        groups={"default": {}},
        fgpu_per_gpu=2,
        hub_address=machine.hub_address,
        watchdog_every_s=1,
    )
    try:
        hub.start()
        hub.add_user("bob")
        assert hub.spawn("bob", options=ONE).status_code in (201, 202)
        hub.wait_ready("bob")
        name = hub.container_name(hub.sessions()["bob/"])
        there = Engine(machine.client)
        assert there.run_in(name, PYTHON, "-c", ALLOCATE, "4097") == (0, "2\n")
        assert there.run_in(name, "sh", "-c", "echo x >> /run/fgpu/limits")[0] != 0
        until(lambda: there.inspect(f"fgpu-{hub.installation}-outpost-there"), what="the driver is asked")
        until((hub.data / "meters.json").exists, what="it was looked at")
        assert "does not answer" not in hub.log_text()
        hub.end("bob")
    finally:
        hub.close()
