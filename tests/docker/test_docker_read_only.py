"""JupyterLab with a root file system that cannot be written to."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from dockerhub import HALF, PYTHON, DockerHub, Engine, Running

WRITE = "from pathlib import Path; p = Path({path!r}); p.write_text('x'); print(p.read_text())"


@pytest.fixture(scope="module")
def read_only_hub(make_hub: Callable[..., DockerHub], engine: Engine) -> Iterator[DockerHub]:
    volume = f"{engine.prefix}-home"
    settings = f"""
c.FGPUSpawner.read_only_root = True
c.FGPUSpawner.volumes = {{{volume!r}: "/home/jovyan"}}
"""
    hub = make_hub(after=settings).start()
    yield hub
    hub.end_all_but(set())
    engine.remove_volume(volume)


@pytest.fixture(scope="module")
def alice(read_only_hub: DockerHub) -> Running:
    return read_only_hub.running("alice", **HALF)


def test_jupyterlab_and_a_kernel_work(engine: Engine, read_only_hub: DockerHub, alice: Running) -> None:
    assert alice.host["ReadonlyRootfs"] is True
    lab = read_only_hub.ask(alice, "lab")
    assert lab.status_code == 200
    assert "jupyter-config-data" in lab.text
    body = {"type": "file", "format": "text", "content": "here"}
    written = read_only_hub.ask(alice, "api/contents/kept.txt", "PUT", json=body)
    assert written.status_code == 201, written.text
    code = "from jupyter_client.manager import run_kernel\nwith run_kernel() as c: c.execute_interactive('print(6 * 7)')"
    assert engine.python_in(alice.id, code).splitlines()[-1] == "42"


@pytest.mark.parametrize("path", ["/opt/fgpu/x", "/etc/x", "/x", "/usr/lib/x"])
def test_the_root_cannot_be_written_to_even_by_root(engine: Engine, alice: Running, path: str) -> None:
    for user in ("", "0:0"):
        status, output = engine.run_in(alice.id, PYTHON, "-c", WRITE.format(path=path), user=user)
        assert status != 0, (user, output)
    assert "Read-only file system" in output


def test_home_and_what_is_in_memory_can_be_written_to(engine: Engine, alice: Running) -> None:
    for path in ("/home/jovyan/x", "/tmp/x", "/var/tmp/x"):
        assert engine.python_in(alice.id, WRITE.format(path=path)) == "x"
    code = "import os, subprocess; os.symlink('/bin/true', '/tmp/true'); print(subprocess.call('/tmp/true'))"
    assert engine.python_in(alice.id, code) == "0", "programs run from /tmp, as builds do"


def test_the_isolations_files_are_in_place_below_what_is_in_memory(engine: Engine, alice: Running) -> None:
    code = "print(open('/run/fgpu/limits').read())"
    assert engine.python_in(alice.id, code) != ""
