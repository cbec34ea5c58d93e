"""A public course's image, from its Dockerfile to the browser: what it adds to JupyterLab works in both halves."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlencode

import pytest
import requests
from courseimage import course_base, course_image
from dockerhub import BASE, DockerHub, Engine, Running, entry
from playwright.sync_api import expect

from fgpuspawner.engines.docker.daemon import connect_here
from hubprocess import PATIENT
from labsteps import new_notebook, open_lab, run_last_cell
from steps import START_MS, Person, start_by
from watching import Faults

pytestmark = [pytest.mark.timeout(900), pytest.mark.xdist_group("images")]

LITTLE = {"fgpu": "0.5", "cpu": "1", "memory_mib": 2048}
SITE = "/home/jovyan/.local/lib/python3.11/site-packages"
PULL = {
    "repo": "/srv/course",
    "branch": "main",
    "urlpath": "lab/tree/course/first.ipynb",
    "targetpath": "course",
}


@pytest.fixture(scope="module")
def engine(docker_engine: None) -> Iterator[Engine]:
    found = Engine(connect_here({"timeout": 60}))
    yield found
    found.close()


@pytest.fixture(scope="module")
def base(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> str:
    return course_base(engine, BASE, tmp_path_factory.mktemp("public"))


def hostile_files() -> dict[str, str]:
    """Return what a user could write to have code run in the server, by path: it notes in which process it ran."""
    code = "import os; open('/tmp/ran-in-' + str(os.getpid()), 'w')\n"
    files = {
        f"/home/jovyan/.jupyter/{name}_config.py": code
        for name in ("jupyter_server", "jupyter", "jupyter_lab")
    }
    files |= {f"{SITE}/{name}.py": code for name in ("sitecustomize", "usercustomize", "simpervisor", "own")}
    for number, group in enumerate(("jupyter_serverproxy_servers", "jupyter_client.kernel_provisioners")):
        files[f"{SITE}/own-{number}.dist-info/entry_points.txt"] = f"[{group}]\nown = own:setup\n"
        files[f"{SITE}/own-{number}.dist-info/METADATA"] = "Metadata-Version: 2.1\nName: own\nVersion: 1\n"
    enabled = json.dumps({"ServerApp": {"jpserver_extensions": {"own": True}}})
    for folder in ("/home/jovyan/.jupyter", "/opt/env/etc/jupyter"):
        files[f"{folder}/jupyter_server_config.json"] = enabled
        files[f"{folder}/jupyter_server_config.d/own.json"] = enabled
    return {**files, "/opt/env/lib/python3.11/site-packages/own.py": code}


def hostile_image(engine: Engine, base: str) -> str:
    """Build an image with all that in it, so that it is there when the server starts."""
    write = f"import json, pathlib\nfor name, text in json.loads({json.dumps(hostile_files())!r}).items():\n"
    write += "    path = pathlib.Path(name); path.parent.mkdir(parents=True, exist_ok=True); path.write_text(text)\n"
    variables = f"ENV PYTHONPATH={SITE} PYTHONSTARTUP={SITE}/own.py JUPYTER_PREFER_ENV_PATH=0"
    settings = "/opt/fgpu/etc/jupyter/jupyter_server_config.json"
    # The Hub's default address counts where the image names none.
    forget = f"import json; p = {settings!r}; c = json.load(open(p)); del c['ServerApp']; json.dump(c, open(p, 'w'))"
    lines = [f"FROM {base}", variables, f"RUN {json.dumps(['python', '-c', write])}", "USER root"]
    return engine.build(
        "hostile",
        "\n".join([*lines, f"RUN {json.dumps(['python3', '-I', '-c', forget])}", "USER 1000:1000\n"]),
    )


@pytest.fixture(scope="module")
def hub(engine: Engine, base: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DockerHub]:
    folder = tmp_path_factory.mktemp("course")
    tag, said = course_image(engine, base, folder / "course", server=BASE)
    (warning,) = [line for line in said.splitlines() if "warning" in line]
    assert warning.startswith(
        "images: warning: jupyter-resource-usage 1.3.0 is in the image, and its server half is not"
    )
    course = entry("course", tag) + 'kernels = ["ir", "python3", "bash"]\n'
    hostile = entry("hostile", hostile_image(engine, tag))
    (folder / "catalogue.toml").write_text(entry("python", BASE) + course + hostile)
    found = DockerHub(
        folder / "hub",
        engine,
        before=PATIENT,
        after="c.Spawner.default_url = '/vscode/'\n",
        catalogue=str(folder / "catalogue.toml"),
    )
    try:
        yield found.start()
    finally:
        found.close()


@pytest.fixture(scope="module")
def running(hub: DockerHub) -> Running:
    return hub.running("ada", image="course", **LITTLE)


def test_server_halves_and_kernels_answer(hub: DockerHub, running: Running) -> None:
    def get(path: str) -> requests.Response:
        headers = {"Authorization": f"token {running.token}"}
        return requests.get(f"{hub.url}/user/ada/{path}", headers=headers, timeout=60)

    for path in (
        *("lab", "tree", "vscode/", "tensorboard/", "server-proxy/servers-info", "lsp/status"),
        *("git/settings", f"git-pull?{urlencode(PULL)}"),
    ):
        assert get(path).status_code == 200, path
    # Its front end is there, and the build has warned of it.
    assert "@jupyter-server/resource-usage" in get("lab").text
    assert get("api/metrics/v1").status_code == 404
    assert get("").url == f"{hub.url}/user/ada/tree"
    assert "TensorBoard" in get("tensorboard/").text
    found = get("api/kernelspecs").json()
    assert found["default"] == "ir"
    assert list(found["kernelspecs"]) == ["ir", "python3", "bash"]
    stranger = requests.get(f"{hub.url}/user/ada/vscode/", timeout=60, allow_redirects=False)
    assert stranger.status_code != 200
    listed = hub.engine.run_in(running.id, "jupyter", "server", "extension", "list")[1]
    assert " X " not in listed


def test_files_and_packages_of_users_are_not_run_by_the_server(hub: DockerHub, engine: Engine) -> None:
    found = hub.running("eve", image="hostile", **LITTLE)
    headers = {"Authorization": f"token {found.token}"}
    first = requests.get(f"{hub.url}/user/eve/", headers=headers, timeout=60)
    assert first.url == f"{hub.url}/user/eve/vscode/"
    for path in ("lab", "api/kernelspecs", "vscode/", "server-proxy/servers-info", "own/", "tree"):
        requests.get(f"{hub.url}/user/eve/{path}", headers=headers, timeout=60)
    servers = "for p in /proc/[0-9]*; do grep -qs fgpu-start $p/cmdline && basename $p; done; true"
    server = engine.run_in(found.id, "bash", "-c", servers)[1].split()
    assert server
    ran = engine.run_in(found.id, "bash", "-c", "ls /tmp")[1].split()
    # Programs of the session run them: the code is as it has to be.
    assert any(name.startswith("ran-in-") for name in ran)
    assert not {f"ran-in-{pid}" for pid in server} & set(ran), ran
    hub.end("eve")


def test_link_of_nbgitpuller_opens_its_notebook_on_the_first_kernel(
    hub: DockerHub, log_in: Callable[..., Person], faults: Faults, tmp_path: Path
) -> None:
    faults.allow(r".*")
    person = log_in(hub.url, f"bea{secrets.token_hex(3)}", "test-password")
    page = person.page
    start_by(page, person.link(image="course", **LITTLE))
    page.wait_for_url(f"**/user/{person.name}/tree*", timeout=START_MS)
    open_lab(hub, person)
    for card in ("R", "Bash", "Python 3.11"):
        expect(page.locator(f".jp-LauncherCard[data-category=Notebook][title^='{card}']")).to_be_visible()
    new_notebook(page)
    expect(run_last_cell(page, 'cat("R says", 6 * 7)')).to_contain_text("R says 42")
    page.goto(f"{hub.url}/hub/user-redirect/git-pull?{urlencode(PULL)}")
    expect(page.locator(".jp-NotebookPanel")).to_be_visible(timeout=START_MS)
    assert page.url.endswith("/lab/tree/course/first.ipynb")
    page.goto(f"{hub.url}/user/{person.name}/tensorboard/")
    expect(page).to_have_title("TensorBoard")
