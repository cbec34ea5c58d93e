"""The real jupyterhub-singleuser in a container, through the proxy; and its token, looked for wherever it could show.

The engine, the owner's own programs and an image of the session must not have the token.
"""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import requests
from dockerhub import BASE, HALF, DockerHub, Engine, Running, entry, until

from fgpuspawner.engines.docker import handover
from notebooks import Kernel

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
def hub(make_hub: Callable[..., DockerHub], engine: Engine, catalogue: str, tokens: Path) -> DockerHub:
    """A Hub with the service that notes the tokens it gives out; image ``old`` cannot wait to be told who it is."""
    old = engine.build("old", f"FROM {BASE}\nLABEL fgpu.handover=\n")
    own = tokens / "catalogue.toml"
    own.write_text(Path(catalogue).read_text() + entry("old", old))
    after = CANARIES.format(folder=str(tokens), secret=SECRET)
    return make_hub(after=after, catalogue=str(own)).start()


@pytest.fixture(scope="module")
def alice(hub: DockerHub) -> Iterator[Running]:
    """A session with a kernel and a terminal."""
    running = hub.running("alice", **HALF)
    assert hub.ask(running, "api/status").json()["kernels"] == 0
    for what in ("kernels", "terminals"):
        assert hub.ask(running, f"api/{what}", "POST").status_code in (200, 201)
    yield running
    hub.end("alice")


@pytest.fixture(scope="module")
def secrets(alice: Running, tokens: Path) -> list[str]:
    return [(tokens / "alice").read_text(), SECRET]


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
    words = ("/opt/fgpu/bin/python", "-W", "ignore", "-c", IN_A_KERNEL, WHAT_A_PROGRAM_SEES)
    output = engine.output_of(alice.id, *words)
    found: dict[str, str] = json.loads(output.splitlines()[-1])
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


def test_jupyterlab_answers_through_the_proxy_and_programs_that_need_the_token_have_it(
    hub: DockerHub, alice: Running
) -> None:
    until(lambda: "POST /hub/api/users/alice/activity" in hub.log_text(), what="activity is reported")
    answer = hub.ask(alice, "fgpu/api/status").json()
    assert (answer["hub"], answer["hub_message"]) == ("ok", None)
    session = answer["session"]
    assert (session["id"], session["state"]) == (alice.session.id, "RUNNING")
    assert (session["fgpu"], session["gpu_memory_mib"], session["compute_percent"]) == ("0.5", 2048, 25)
    lab = hub.browser("alice").get(f"{hub.url}/user/alice/lab", timeout=30)
    assert lab.status_code == 200
    assert "jupyter-config-data" in lab.text
    assert "/user/alice/lab" in lab.url
    stranger = requests.get(f"{hub.url}/user/alice/api/status", timeout=30)
    assert stranger.status_code == 403


def test_the_lab_extension_is_enabled_in_both_halves(engine: Engine, alice: Running) -> None:
    listed = engine.run_in(alice.id, "jupyter", "labextension", "list")[1].splitlines()
    line = next(line for line in listed if "jupyterlab-fgpu" in line)
    assert "enabled" in line
    assert "OK" in line
    listed = engine.run_in(alice.id, "jupyter", "server", "extension", "list")[1].splitlines()
    assert "enabled" in next(line for line in listed if "jupyterlab_fgpu" in line)
    assert "OK" in next(line for line in listed if "jupyterlab_fgpu 0" in line)


@pytest.mark.parametrize("slug", ["plain", "plain-tini"])
def test_an_image_without_the_server_environment_ends_the_session_with_words(
    hub: DockerHub, slug: str
) -> None:
    # Each image has another user, so that an earlier end is not taken for this one.
    user = f"dave-{slug}"
    hub.add_user(user)
    hub.spawn(user, options={**HALF, "image": slug})
    ended = hub.last(user)
    assert (ended.request.image, ended.state.value) == (slug, "ERROR")
    assert str(ended.message).startswith("this image has no server environment: ")
    assert "fgpu images build" in str(ended.message)
    assert hub.states().get(f"{user}/") is None


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


# --- A user's own variables and start script ---

OWN_SECRET = "s3cret-value-of-carol"
SCRIPT = 'echo made by the script; echo "$API_SECRET" > ~/by-script\nexit 3\n'


def programs(running: Running) -> list[tuple[str, dict[str, str]]]:
    """Return the command line and the variables of each process in the container, as the host sees them."""
    first = psutil.Process(running.container["State"]["Pid"])
    found = []
    for process in (first, *first.children(recursive=True)):
        # The script and its programs end.
        with contextlib.suppress(psutil.NoSuchProcess):
            found.append((" ".join(process.cmdline()), process.environ()))
    return found


def test_kernels_and_terminals_get_own_variables_and_a_failed_script_is_told(
    hub: DockerHub, engine: Engine
) -> None:
    running = hub.running("carol", variables={"API_SECRET": OWN_SECRET}, script=SCRIPT, **HALF)
    kernel = Kernel(hub, "carol", running.token)
    assert kernel.run("import os; os.environ['API_SECRET']") == repr(OWN_SECRET)
    assert hub.ask(running, "api/terminals", "POST").status_code == 200
    until(lambda: any("bash" in line for line, _ in programs(running)), what="the terminal has begun")
    has = {line: env.get("API_SECRET") for line, env in programs(running)}
    told = re.compile(r"ipykernel|bash")
    assert {line: value == OWN_SECRET for line, value in has.items()} == {
        line: told.search(line) is not None for line in has
    }
    assert OWN_SECRET not in str(engine.inspect(running.id))
    assert OWN_SECRET not in engine.run_in(running.id, "env")[1]

    def script() -> object:
        return hub.ask(running, "fgpu/api/status").json()["script"]

    until(lambda: script() == {"state": "failed", "status": 3}, what="the script's failure is told")
    assert engine.output_of(running.id, "cat", "/home/jovyan/by-script") == OWN_SECRET
    # The session runs on, and its log has the failure and no value.
    assert kernel.run("6 * 7") == "42"
    url = f"{hub.url}/services/fgpu/api/v1/sessions/{running.session.id}/log"
    headers = {"Authorization": f"token {running.token}"}

    def log() -> str:
        text = requests.get(url, headers=headers, timeout=60).text
        return text if "failed with status 3" in text else ""

    found = until(log, what="the failure is in the log")
    assert "made by the script" in found
    assert OWN_SECRET not in found + hub.log_text()
    kernel.close()
    hub.end("carol")
