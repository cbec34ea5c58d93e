"""A session's token, looked for wherever the engine, the owner's own programs or an image of it could show it."""

from __future__ import annotations

import contextlib
import json
import subprocess
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
from dockerhub import BASE, DockerHub, Engine, Running, entry, until

from fgpuspawner.engines.docker import handover

HALF = {"fgpu": "0.5", "cpu": "1", "memory_mib": 1024}
SECRET = "secret-of-the-lab-0123456789"
CANARIES = """
from pathlib import Path
def note(spawner):
    Path({folder!r}, spawner.user.name).write_text(spawner.api_token)
c.Spawner.pre_spawn_hook = note
c.Spawner.environment = {{"LAB_SECRET": {secret!r}, "JUPYTERHUB_ACTIVITY_INTERVAL": "1"}}
"""
IN_A_KERNEL = """
import glob, json, sys
from jupyter_client import BlockingKernelClient
found = sorted(glob.glob("/home/jovyan/.local/share/jupyter/runtime/kernel-*.json"))
client = BlockingKernelClient(connection_file=found[0])
client.load_connection_file()
# A kernel that is starting is waited for, and not taken for dead if the machine stands still for a moment.
client.hb_channel.time_to_dead = 60
client.start_channels()
client.wait_for_ready(timeout=120)
client.execute_interactive(sys.argv[1], timeout=60)
"""
WHAT_A_PROGRAM_SEES = """
import glob, os
found = {"its own": str(dict(os.environ))}
for path in glob.glob("/proc/[0-9]*/environ") + glob.glob("/proc/[0-9]*/cmdline"):
    try:
        found[path] = open(path, "rb").read().decode("utf-8", "replace")
    except OSError as e:
        found[path] = e.strerror
for root in ("/home", "/tmp", "/run", "/var", "/dev/shm"):
    for folder, _, files in os.walk(root):
        for file in files:
            path = os.path.join(folder, file)
            try:
                found[path] = open(path, "rb").read(1 << 20).decode("utf-8", "replace")
            except OSError as e:
                found[path] = e.strerror
import json
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tokens")


@pytest.fixture(scope="module")
def hub(
    make_hub: Callable[..., DockerHub], engine: Engine, tokens: Path, tmp_path_factory: pytest.TempPathFactory
) -> DockerHub:
    """A Hub that notes the tokens it gives out; one image cannot wait to be told who it is."""
    old = engine.build("old", f"FROM {BASE}\nLABEL fgpu.handover=\n")
    path = tmp_path_factory.mktemp("catalogue") / "catalogue.toml"
    path.write_text(entry("python", BASE) + entry("old", old))
    after = CANARIES.format(folder=str(tokens), secret=SECRET)
    return make_hub(after=after, catalogue=str(path)).start()


@pytest.fixture(scope="module")
def alice(hub: DockerHub) -> Iterator[Running]:
    """A session with a kernel and a terminal."""
    running = hub.running("alice", **HALF)
    for what in ("kernels", "terminals"):
        assert ask(hub, running, "POST", f"api/{what}").status_code in (200, 201)
    yield running
    hub.end("alice")


@pytest.fixture(scope="module")
def secrets(alice: Running, tokens: Path) -> list[str]:
    return [(tokens / "alice").read_text(), SECRET]


def ask(hub: DockerHub, running: Running, method: str, path: str) -> requests.Response:
    headers = {"Authorization": f"token {running.token}"}
    return requests.request(method, f"{hub.url}/user/alice/{path}", headers=headers, timeout=30)


def test_hub_accepts_the_token(hub: DockerHub, secrets: list[str]) -> None:
    assert hub.api("GET", "user", token=secrets[0]).json()["name"] == "alice"


def test_the_engine_does_not_know_the_token(
    hub: DockerHub, engine: Engine, alice: Running, secrets: list[str]
) -> None:
    client = engine.client
    known = {
        "inspect": json.dumps(client.inspect_container(alice.id)),
        "logs": client.logs(alice.id).decode(),
        "history": json.dumps(client.history(BASE)),
        "the Hub's log": hub.log_text(),
    }
    assert [what for what, text in known.items() if any(s in text for s in secrets)] == []
    assert '"OpenStdin": true' in known["inspect"]
    assert "JUPYTERHUB" not in known["inspect"], "no identity either"


def test_no_process_has_the_token_in_its_environment_not_even_for_root(
    engine: Engine, alice: Running, secrets: list[str]
) -> None:
    rows = engine.client.top(alice.id, ps_args="-eo pid,args")["Processes"]
    commands = " ".join(str(row) for row in rows)
    assert all(part in commands for part in ("tini", "fgpu-start", "ipykernel", "bash")), commands
    for pid, *_ in rows:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # It has ended.
            assert secrets[0] not in Path(f"/proc/{pid}/environ").read_text()
    first = next(pid for pid, *command in rows if "tini" in str(command))
    assert SECRET not in Path(f"/proc/{first}/environ").read_text()


def test_notebook_program_cannot_find_the_token(engine: Engine, alice: Running, secrets: list[str]) -> None:
    status, output = engine.run_in(
        alice.id, "/opt/fgpu/bin/python", "-W", "ignore", "-c", IN_A_KERNEL, WHAT_A_PROGRAM_SEES
    )
    assert status == 0, output
    found: dict[str, str] = json.loads(output.strip().splitlines()[-1])
    assert "JUPYTERHUB_USER" in found["its own"], "what is no secret is told as ever"
    assert SECRET in found["its own"], "an administrator's own settings are meant for it"
    assert any("jpserver-" in path for path in found), "where Jupyter Server writes its token elsewhere"
    assert [path for path, text in found.items() if secrets[0] in text] == []


def test_other_programs_of_the_session_cannot_read_the_servers_memory(engine: Engine, alice: Running) -> None:
    code = """
import glob
for path in glob.glob("/proc/[0-9]*/cmdline"):
    if b"fgpu-start" in open(path, "rb").read() and "tini" not in open(path.replace("cmdline", "comm")).read():
        open(path.replace("cmdline", "mem"), "rb")
"""
    status, output = engine.run_in(alice.id, "/opt/fgpu/bin/python", "-c", code)
    assert status != 0
    assert "PermissionError" in output


def test_an_image_made_of_the_session_has_no_token(
    engine: Engine, alice: Running, secrets: list[str]
) -> None:
    repository = f"{engine.prefix}/committed"
    engine.client.commit(alice.id, repository=repository, tag="1")
    engine.mine(f"{repository}:1")
    with tempfile.TemporaryDirectory() as folder:
        saved = Path(folder) / "image.tar"
        subprocess.run(["docker", "save", "-o", saved, f"{repository}:1"], check=True, timeout=120)
        with tarfile.open(saved) as archive:
            names = archive.getnames()
        # Layers are not compressed in there, so every byte of every file is looked at.
        found = subprocess.run(
            ["grep", "-c", "-a", "-F", "-e", secrets[0], "-e", "JUPYTERHUB_API_TOKEN=", saved],
            capture_output=True,
            text=True,
            check=False,
        )
    assert any(name.endswith(".json") for name in names)
    assert found.stdout.strip() == "0"


def test_programs_that_need_the_token_have_it(hub: DockerHub, alice: Running) -> None:
    until(lambda: "POST /hub/api/users/alice/activity" in hub.log_text(), what="activity is reported")
    answer = ask(hub, alice, "GET", "fgpu/api/status").json()
    assert (answer["hub"], answer["hub_message"]) == ("ok", None)
    lab = hub.browser("alice").get(f"{hub.url}/user/alice/lab", timeout=30)
    assert lab.status_code == 200
    assert "jupyter-config-data" in lab.text
    assert "/user/alice/lab" in lab.url


def test_image_without_handover_gets_its_environment_at_creation(hub: DockerHub, tokens: Path) -> None:
    running = hub.running("bob", image="old", **HALF)
    assert running.env["JUPYTERHUB_API_TOKEN"] == (tokens / "bob").read_text()
    hub.end("bob")


def test_container_without_an_identity_ends_and_says_why(engine: Engine) -> None:
    kwargs: dict[str, Any] = {"image": BASE, "command": ["jupyterhub-singleuser"], "environment": {}}
    made, _ = handover.split(kwargs, public=())
    made["command"] = handover.waiting(("jupyterhub-singleuser",), within_s=1)
    name = engine.client.create_container(name=f"{engine.prefix}-untold", **made)["Id"]
    try:
        engine.client.start(name)
        assert engine.client.wait(name, timeout=30)["StatusCode"] == 1
        assert "the Hub did not say in time which session this is" in engine.client.logs(name).decode()
    finally:
        engine.remove(name)
