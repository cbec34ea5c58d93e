"""A user's own environment over the image of a local session."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import IO, Any

import pytest
from traitlets.config import Config

from fgpu_scheduler import Placement, Request, Session, SessionState
from fgpuspawner.engines.base import Installation, LaunchFailed, LaunchSpec
from fgpuspawner.engines.local.engine import LocalEngine
from fgpuspawner.engines.local.packages import own_environment
from fgpuspawner.images.model import Catalogue, Image
from fgpuspawner.isolation.base import Prepared
from fgpuspawner.isolation.limits import Limits
from fgpuspawner.settings import FGPU


@pytest.fixture
def image(tmp_path: Path) -> Path:
    base = tmp_path / "image"
    (base / "bin").mkdir(parents=True)
    (base / "bin/python").symlink_to(sys.executable)
    (base / "bin/ipython").write_text("#!/usr/bin/python3\n")
    return base


def test_a_kernel_that_jupyter_cannot_read_is_left_out(image: Path, tmp_path: Path) -> None:
    for name, argv in (("good", ["python"]), ("bad", None)):
        (image / "share/jupyter/kernels" / name).mkdir(parents=True)
        (image / "share/jupyter/kernels" / name / "kernel.json").write_text(json.dumps({"argv": argv}))
    own = tmp_path / "own"
    assert own_environment(image, own) == own
    assert [path.name for path in (own / "share/jupyter/kernels").iterdir()] == ["good"]


def test_an_image_with_python3_alone_gets_an_environment(image: Path, tmp_path: Path) -> None:
    (image / "bin/python").rename(image / "bin/python3")
    kernel = image / "share/jupyter/kernels/own/kernel.json"
    kernel.parent.mkdir(parents=True)
    kernel.write_text(json.dumps({"argv": [str(image / "bin/python3"), "-m", "kernel"]}))
    own = tmp_path / "own"
    assert own_environment(image, own) == own
    assert os.path.realpath(own / "bin/python") == os.path.realpath(sys.executable)
    found = json.loads((own / "share/jupyter/kernels/own/kernel.json").read_text())
    assert found["argv"][0] == str(own / "bin/python")


@pytest.mark.parametrize(
    ("python", "logged"),
    [
        ("#!/bin/sh\necho no module named encodings >&2\nexit 3\n", "no module named encodings"),
        ("#!/bin/sh\necho 5\n", "non-iterable"),
        ("not a program", "Exec format error"),
    ],
    ids=["fails", "answers nonsense", "is no program"],
)
async def test_an_image_whose_python_does_not_run_is_named_and_the_details_are_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, python: str, logged: str
) -> None:
    base = tmp_path / "image"
    (base / "bin").mkdir(parents=True)
    for name, text in (("python", python), ("jupyterhub-singleuser", "#!/bin/sh\n")):
        (base / "bin" / name).write_text(text)
        (base / "bin" / name).chmod(0o755)
    installation = Installation("i", FGPU(data_dir=str(tmp_path)), Config(), lambda: Catalogue(()))
    engine = LocalEngine(installation, stop_timeout_s=1)
    request = Request("me", "", "old", "default", 500, 1000, 256)
    session = Session(1, request, SessionState.PREPARING, 0, placement=Placement("one", ()))
    image = Image("old", "Old one", "python", "3", "3", "r", environment=str(base))
    prepared = Prepared("none", Limits(1, "charge", ()))
    spec = LaunchSpec(session, image, (), (), {"HOME": str(tmp_path)}, {}, prepared, (), tmp_path / "1", 1)
    with pytest.raises(LaunchFailed) as failed:
        await engine.start(spec)
    assert str(failed.value) == (
        "image Old one: its Python does not run; ask an administrator to repair or rebuild its environment"
    )
    assert str(base / "bin/python") in caplog.text
    assert logged in caplog.text


def test_a_program_that_the_hub_may_not_read_is_left_out(
    image: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (image / "bin/sudo").write_text("")
    opened = Path.open

    def open_as_a_user(path: Path, *args: Any, **more: Any) -> IO[Any]:
        if path.name == "sudo":
            raise PermissionError(13, "Permission denied", str(path))
        return opened(path, *args, **more)

    monkeypatch.setattr(Path, "open", open_as_a_user)
    own = tmp_path / "own"
    assert own_environment(image, own) == own
    assert (own / "bin/ipython").exists()
    assert not (own / "bin/sudo").exists()
