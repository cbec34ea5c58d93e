"""What sessions as local processes install goes into their user's own environment, and the Hub's stays as it is."""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest
import requests

from hubprocess import HubProcess, until
from notebooks import Kernel
from smallwheels import wheel

SMALL = {"fgpu": "0.5", "cpu": "0.5", "memory_mib": 512}
OTHER = "99.9"


def hubs_environment() -> dict[str, tuple[int, int]]:
    """Return size and time of each file of the Hub's environment, but for what Python compiles."""
    found = {}
    for root, folders, names in os.walk(sys.prefix):
        folders[:] = [name for name in folders if name not in ("__pycache__", "node_modules")]
        for path in (os.path.join(root, name) for name in names):
            status = os.lstat(path)
            found[path] = status.st_size, status.st_mtime_ns
    return found


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubProcess]:
    found = HubProcess(tmp_path_factory.mktemp("hub"))
    try:
        yield found.start()
    finally:
        found.close()


def started(hub: HubProcess, user: str, server: str = "") -> str:
    token = hub.add_user(user)
    assert hub.spawn(user, server, options=SMALL, token=token).status_code in (201, 202)
    until(lambda: hub.ready(user, server), within_s=40, what=f"{user}'s server is ready")
    return token


def shell(kernel: Kernel, command: str) -> str:
    """Return what a command of the session prints, on both outputs."""
    return kernel.run(f"print('!') or '\\n'.join(get_ipython().getoutput({command + ' 2>&1; true'!r}))")


def test_packages_that_a_session_installs_are_its_users_own(hub: HubProcess, tmp_path: Path) -> None:
    tiny, newer, third = (wheel(tmp_path, name) for name in ("fgpu-tiny", "fgpu-second", "fgpu-third"))
    # A package that the Hub has, in another version.
    replaced = wheel(tmp_path, "iniconfig", OTHER)
    before, hubs = hubs_environment(), sysconfig.get_path("purelib")
    token = started(hub, "alice")
    own = hub.data / "packages/alice/python"
    kernel = Kernel(hub, "alice", token)
    assert kernel.run("import sys; sys.prefix") == repr(str(own))
    # The Hub's packages are found, also those of the notebook itself.
    assert kernel.run("import jupyterlab_fgpu; jupyterlab_fgpu.__file__").startswith("'/")
    options = "--quiet --no-index --disable-pip-version-check"
    kernel.run(f"get_ipython().run_line_magic('pip', 'install {options} {tiny}') or 'done'")
    assert kernel.run("import fgpu_tiny; fgpu_tiny.__file__").startswith(f"'{own}/")
    assert shell(kernel, f"pip install {options} {newer} && python -c 'import fgpu_second'") == "''"
    uv = f"{Path(sys.executable).parent}/uv"
    assert "fgpu-third" in shell(kernel, f"{uv} pip install --no-index {third}")
    assert kernel.run("import fgpu_third; fgpu_third.__file__").startswith(f"'{own}/")
    # Another version of what the Hub has goes before it, and nothing of the Hub's is removed.
    said = shell(kernel, f"$(which python) -m pip install --no-index {replaced}")
    assert "outside environment" in said, said
    assert shell(kernel, "python -c 'import iniconfig; print(iniconfig.version)'") == f"'{OTHER}'"
    for package in ("traitlets", "fgpuspawner"):
        assert "outside environment" in shell(kernel, f"pip uninstall --yes {package}")
    # Programs of the image run in the user's environment.
    assert shell(kernel, "ipython --quick -c 'import fgpu_tiny; print(fgpu_tiny.version)'") == "'1.0'"
    extension = "@jupyterlab/running-extension"
    shell(kernel, f"jupyter labextension disable {extension}")
    assert extension in (own / "etc/jupyter/labconfig/page_config.json").read_text()
    # JupyterLab's own pages of extensions and plugins change nothing of other users.
    server, headers = f"{hub.url}/user/alice/lab/api", {"Authorization": f"token {token}"}
    for command, name in (("install", "fgpu-tiny"), ("disable", extension)):
        asked = {"cmd": command, "extension_name": name}
        requests.post(f"{server}/extensions", headers=headers, json=asked, timeout=60)
    asked = {"cmd": "disable", "plugin_name": f"{extension}:plugin"}
    answer = requests.post(f"{server}/plugins", headers=headers, json=asked, timeout=60)
    assert answer.status_code >= 400, answer.text
    logo = requests.get(f"{hub.url}/user/alice/kernelspecs/python3/logo-svg.svg", headers=headers, timeout=60)
    assert logo.status_code == 200
    made = requests.post(f"{hub.url}/user/alice/api/terminals", headers=headers, timeout=60)
    assert made.status_code == 200

    others = Kernel(hub, "bob", started(hub, "bob"))
    assert others.run("import importlib.util as u; u.find_spec('fgpu_tiny') is None") == "True"
    assert OTHER not in others.run(
        "import iniconfig; iniconfig.__file__ + str(vars(iniconfig).get('version'))"
    )
    # A later session of the same user has it.
    second = Kernel(hub, "alice/more", started(hub, "alice", "more"))
    assert second.run("import fgpu_tiny; fgpu_tiny.version") == "'1.0'"
    for one in (kernel, others, second):
        one.close()
    assert Path(hubs).is_relative_to(sys.prefix)
    assert hubs_environment() == before


def test_where_it_cannot_be_made_the_start_fails_with_words(hub: HubProcess) -> None:
    (hub.data / "packages").mkdir(exist_ok=True)
    (hub.data / "packages/carl").write_text("a file")
    hub.spawn("carl", options=SMALL, token=hub.add_user("carl"))
    until(lambda: hub.store.ended(user="carl", limit=1), within_s=40, what="the session has failed")
    (ended,) = hub.store.ended(user="carl", limit=1)
    assert ended.message is not None
    assert "the folder for your packages cannot be made" in ended.message
