"""fgpu-verify behind a read-only preload, as in a container: each of its checks is a result."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable

import pytest
from check import NATIVE
from insession import SYSTEM_PYTHON, in_container
from slices import ROOT, Gpu, Slice

VERIFY = ROOT / "labextension" / "jupyterlab_fgpu" / "verify.py"
LISTED = subprocess.run(
    [sys.executable, str(VERIFY), "--list"], capture_output=True, text=True, check=True
).stdout


@pytest.fixture(scope="module")
def checks(gpu: Gpu, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    """What each check said."""
    folder = tmp_path_factory.mktemp("verify")
    session = Slice(folder / "session", NATIVE, gpu, memory_mib=gpu.memory_mib // 4, slots="0-25")
    done = in_container(session.folder, folder, SYSTEM_PYTHON, str(VERIFY), "--json")
    if not done.stdout:
        raise RuntimeError(done.stderr)
    return {check["name"]: check for check in json.loads(done.stdout)["checks"]}


@pytest.mark.parametrize("name", [line.split()[0] for line in LISTED.splitlines()])
def test_it_holds(checks: dict[str, dict[str, str]], record_property: Callable[..., None], name: str) -> None:
    found = checks[name]
    record_property("said", f"{found['verdict']}: {found['text']}")
    if found["verdict"] == "NOT TRIED":
        pytest.skip(found["text"])
    assert found["verdict"] != "FAILED", found["text"]
