"""What of a user's home is code to the session's own server: nothing. Its programs run as kernels and terminals."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import nbformat
import requests

from hubprocess import HubProcess, until

TRACED = """
import os, sys
if "jupyterlab_fgpu.start" in sys.orig_argv:
    log = os.open({log!r}, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    server = os.getpid()
    def saw(event, args):
        if os.getpid() != server:
            return
        if event == "exec":
            os.write(log, f"code {{args[0].co_filename}}\\n".encode())
        elif event in ("open", "ctypes.dlopen", "os.chdir"):
            os.write(log, f"{{event}} {{args[0]}}\\n".encode())
    sys.addaudithook(saw)
"""
"""Has the server log each file that it opens, and the file of each piece of code that it runs."""

STARTED = """
import json, os, sys
server = os.path.join(os.path.dirname(sys.executable), "jupyterhub-singleuser")
identity = {"version": 1, "argv": [server, *sys.argv[1:]], "environment": dict(os.environ)}
reading, writing = os.pipe()
os.write(writing, json.dumps(identity).encode() + b"\\n")
os.dup2(reading, 0)
for name in [name for name in os.environ if name.startswith("JUPYTERHUB")]:
    del os.environ[name]
os.execv(sys.executable, [sys.executable, "-P", "-m", "jupyterlab_fgpu.start", "--preload", "--within", "60"])
"""
"""Starts the server as in a container: its identity comes over standard input."""

DATA = re.compile(
    r"""open[ ](
        \w+\.ipynb
        | \.jupyter/(migrated | jupyter_server_config\.json | jupyter_server_config\.d/own\.json)
        | \.local/share/jupyter/(notebook_secret | kernels/own/kernel\.json
            | runtime/(jpserver-\d+(-open\.html | \.json) | jupyter_cookie_secret | kernel-[\w-]+\.json))
    )""",
    re.VERBOSE,
)
"""What the server opens at home. The configuration among it is read for the command lines of language servers only."""

TEMPLATE = "{{ cycler.__init__.__globals__.os.environ.update(OWNED='1') or 'owned' }}"
CODE = "import os; os.environ['OWNED'] = '1'\n"
KINDS = ("html", "slides", "markdown", "latex", "rst", "script", "python")
EXPORTERS = {"dotted": "own.Own", "ipython": "IPython.start_ipython", "app": "nbconvert.nbconvertapp.main"}
PAGES = (
    *(f"nbconvert/{kind}/plain.ipynb" for kind in KINDS),
    *(
        "lab",
        "lab/tree/plain.ipynb",
        "lab/api/settings",
        "lab/api/workspaces",
        "lab/api/themes",
        "lab/api/licenses",
    ),
    *("lab/api/translations/de", "api/kernelspecs", "api/contents", "api/config/notebook", "api/terminals"),
    *("lsp/status", "metrics", "view/plain.ipynb", "fgpu/api/status?details=1"),
)


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def fill(home: Path) -> None:
    """Write into a home what Jupyter's programs would run, wherever they would look for it."""
    for place in (".", ".local/share/jupyter/nbconvert/templates", ".jupyter", "templates"):
        for name in (*KINDS, "lab", "base", "classic"):
            for file in ("index.html.j2", "index.py.j2", "index.md.j2", "index.tex.j2", "base.html.j2"):
                write(home / place / name / file, TEMPLATE)
        for page in ("page.html", "login.html", "error.html", "404.html", "index.html"):
            write(home / place / page, TEMPLATE)
    for name in ("server_config", "lab_config", "nbconvert_config", "singleuser_config", "config"):
        write(home / f".jupyter/jupyter_{name}.py", CODE)
        write(home / f"jupyter_{name}.py", CODE)
    enabled = json.dumps({"ServerApp": {"jpserver_extensions": {"own": True}}})
    write(home / ".jupyter/jupyter_server_config.d/own.json", enabled)
    write(home / ".jupyter/jupyter_server_config.json", enabled)
    write(home / ".jupyter/labconfig/page_config.json", '{"fullStaticUrl": "files/own"}')
    write(home / ".local/share/jupyter/labextensions/own/package.json", '{"name": "own", "version": "1.0.0"}')
    for name in ("own", "sitecustomize", "usercustomize", "jinja2", "nbconvert"):
        write(home / f"{name}.py", CODE)
    write(home / ".ipython/profile_default/startup/00-own.py", CODE)
    write(home / ".ipython/profile_default/ipython_config.py", CODE)
    kernel = {"argv": ["touch", "kernel-began-here"], "display_name": "own", "language": "python"}
    write(home / ".local/share/jupyter/kernels/own/kernel.json", json.dumps(kernel))
    for name, exporter in {"plain": None, **EXPORTERS}.items():
        notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("1")])
        if exporter is not None:
            notebook.metadata["language_info"] = {"name": "python", "nbconvert_exporter": exporter}
        write(home / f"{name}.ipynb", nbformat.writes(notebook))


def test_files_at_home_are_not_run_by_the_server(make_hub: Callable[..., HubProcess], tmp_path: Path) -> None:
    log = tmp_path / "traced.log"
    write(tmp_path / "traced/sitecustomize.py", TRACED.format(log=str(log)))
    write(tmp_path / "started.py", STARTED)
    started = f"c.Spawner.cmd = ['python', {str(tmp_path / 'started.py')!r}]\n"
    traced = f"c.Spawner.environment = {{'PYTHONPATH': {str(tmp_path / 'traced')!r}}}\n"
    hub = make_hub(mini=False, after=f"{started}{traced}c.Spawner.notebook_dir = '.'\n")
    home = hub.data / "home" / "alice"
    fill(home)
    hub.start()
    headers = {"Authorization": f"token {hub.add_user('alice')}"}
    hub.spawn("alice", options={"fgpu": "1", "cpu": "0.5", "memory_mib": 512})
    until(lambda: hub.ready("alice"), within_s=120, what="alice's server is ready")

    def ask(page: str) -> requests.Response:
        return requests.get(f"{hub.url}/user/alice/{page}", headers=headers, timeout=60)

    for page in PAGES:
        answer = ask(page)
        assert answer.ok, page
        assert "owned" not in answer.text, page
        assert "files/own" not in answer.text, page
    # A notebook may name its exporter. It is one of nbconvert's, and not any function of any module.
    for name in EXPORTERS:
        assert "Unknown exporter" in ask(f"nbconvert/script/{name}.ipynb").text
    assert "plain.ipynb" in ask("api/contents").text
    # Its programs begin in the home all the same.
    url = f"{hub.url}/user/alice/api/kernels"
    assert requests.post(url, headers=headers, json={"name": "own"}, timeout=60).status_code == 201
    until((home / "kernel-began-here").exists, what="a kernel without a notebook has begun in the home")
    lines = log.read_text(errors="replace").splitlines()
    assert [line for line in lines if line.startswith("os.chdir")][-1] == "os.chdir /"
    at_home = {line.replace(f" {home}/", " ") for line in lines if f" {home}/" in line}
    assert "open plain.ipynb" in at_home
    assert {line for line in at_home if not DATA.fullmatch(line)} == set()
    # Terminals open there, too, also in a folder that is named like one of the machine's.
    (home / "tmp").mkdir()
    began = tmp_path / "shell-began"
    write(home / ".bash_profile", f"pwd > {began}.new && mv {began}.new {began}\n")
    for asked, folder in (
        ({}, home),
        ({"cwd": ""}, home),
        ({"cwd": "tmp"}, home / "tmp"),
        ({"cwd": "gone"}, home),
    ):
        answer = requests.post(f"{hub.url}/user/alice/api/terminals", headers=headers, json=asked, timeout=60)
        assert answer.ok, asked
        until(began.exists, what="a shell has begun")
        assert began.read_text() == f"{folder}\n", asked
        began.unlink()
