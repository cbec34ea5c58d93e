"""fgpu-start as a container runs it: a process with a pipe on its standard input."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from jupyterlab_fgpu.app import hub_token
from jupyterlab_fgpu.start import LARGEST_BYTES, BadIdentity, read_identity

CANARY = "canary-0123456789abcdef"
TELL = (
    "import json, os, sys; token = os.environ.get('JUPYTERHUB_API_TOKEN');"
    "print(json.dumps([sys.argv[1:], os.getcwd(), token, sys.stdin.read()]))"
)


def start(said: bytes, *arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run fgpu-start with this on its standard input."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("JUPYTERHUB")}
    done = subprocess.run(
        [sys.executable, "-m", "jupyterlab_fgpu.start", *arguments],
        input=said,
        capture_output=True,
        timeout=60,
        check=False,
        cwd=cwd,
        env={**env, "PYTHONPATH": str(Path(__file__).parents[1])},
    )
    return subprocess.CompletedProcess(done.args, done.returncode, done.stdout.decode(), done.stderr.decode())


def line(**changes: Any) -> bytes:
    said = {
        "version": 1,
        "argv": [sys.executable, "-c", TELL, "--port=1"],
        "environment": {"JUPYTERHUB_API_TOKEN": CANARY},
        **changes,
    }
    return json.dumps(said).encode() + b"\n"


def test_a_program_gets_arguments_environment_and_folder_and_nothing_on_its_input(
    tmp_path: Path,
) -> None:
    done = start(line() + b"more that is nobody's business\n", "--within", "10", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [["--port=1"], str(tmp_path), CANARY, ""]


def test_without_an_identity_it_ends_with_a_clear_message_and_in_time() -> None:
    reading, writing = os.pipe()
    try:
        done = subprocess.run(
            [sys.executable, "-m", "jupyterlab_fgpu.start", "--within", "0.3"],
            stdin=reading,
            capture_output=True,
            timeout=60,
            check=False,
            cwd=Path(__file__).parents[1],
        )
    finally:
        os.close(reading)
        os.close(writing)
    assert done.returncode == 1
    assert b"fgpu-start: the Hub did not say in time which session this is" in done.stderr


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (b"", "standard input ended before"),
        (line()[:-1], "standard input ended before"),
        (CANARY.encode() + b"\n", "not JSON"),
        (line(version=2), "another version"),
        (line(argv=[]), "argv"),
        (line(argv=[CANARY, 1]), "argv"),
        (line(environment={"A": 1, "B": CANARY}), "environment"),
        (line(argv=["/no/such/program"]), "/no/such/program cannot be run"),
        # Its name would be an environment variable of pytest, longer than one may be.
        pytest.param(b"x" * (LARGEST_BYTES + 1), "longer than", id="too long"),
    ],
)
def test_what_is_no_identity_is_refused_without_repeating_it(said: bytes, words: str) -> None:
    done = start(said, "--within", "10")
    assert done.returncode == 1
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert CANARY not in done.stderr + done.stdout


def test_an_identity_is_not_printed_with_its_environment() -> None:
    assert CANARY not in repr(read_identity(line()))
    with pytest.raises(BadIdentity):
        read_identity(b"[]")


def test_the_extension_takes_the_token_of_the_servers_own_identity() -> None:
    class Has:
        def __init__(self, **found: Any) -> None:
            self.__dict__.update(found)

    assert hub_token(Has(identity_provider=Has(hub_auth=Has(api_token=CANARY)))) == CANARY
    assert hub_token(Has(identity_provider=Has(), hub_auth=Has(api_token=CANARY))) == CANARY
    assert hub_token(Has(identity_provider=Has())) == ""
