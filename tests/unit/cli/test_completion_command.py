"""Completion of the command ``fgpu``, in the shells themselves."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from fgpuspawner.cli import main as cli

BIN = Path(sys.executable).parent
SESSION = {"id": 12, "display_name": "gpu-2", "image": "python", "state": "RUNNING"}
SAID = {
    "sessions": {"sessions": [SESSION, {**SESSION, "id": 13}]},
    "images": {"images": [{"slug": "python", "name": "Python"}, {"slug": "pytorch", "name": "PyTorch: 2"}]},
    "me": {"groups": ["default", "class"]},
}


class Service(BaseHTTPRequestHandler):
    """What the service says to a user with a token."""

    def do_GET(self) -> None:
        known = self.headers["Authorization"] == "token t0ken"
        said = json.dumps(SAID[self.path.rpartition("/")[2]] if known else {}).encode()
        self.send_response(200 if known else 403)
        self.send_header("Content-Length", str(len(said)))
        self.end_headers()
        self.wfile.write(said)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def hub() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Service)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()
    server.server_close()


def environment(url: str = "", token: str = "t0ken") -> dict[str, str]:
    return {"PATH": f"{BIN}:{os.environ['PATH']}", "FGPU_HUB_URL": url, "JUPYTERHUB_API_TOKEN": token}


def in_bash(line: str, **more: str) -> list[str]:
    """Return what a bash offers where Tab is pressed at the end of a line."""
    script = """
    eval "$(fgpu completion bash)"
    COMP_LINE="$1" COMP_POINT=${#1} COMP_TYPE=9
    read -ra COMP_WORDS <<< "$1"
    [[ "$1" == *" " ]] && COMP_WORDS+=("")
    COMP_CWORD=$(( ${#COMP_WORDS[@]} - 1 ))
    found=$(complete -p fgpu); [[ "$found" =~ -F\\ ([_a-z]+) ]]
    "${BASH_REMATCH[1]}" fgpu "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD-1]}"
    printf '%s\\n' "${COMPREPLY[@]}"
    """
    ended = subprocess.run(
        ["bash", "--norc", "-c", script, "bash", line],
        env=environment(**more),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    # That it is asked outside of a line is all that may be said.
    assert [said for said in ended.stderr.splitlines() if "compopt" not in said] == []
    return [word.strip() for word in ended.stdout.split()]


def test_bash_offers_the_commands_without_loading_them() -> None:
    assert in_bash("fgpu li") == ["list"]
    assert set(cli.COMMANDS) <= set(in_bash("fgpu "))


def test_bash_offers_options_and_choices() -> None:
    assert in_bash("fgpu run --gpu-me") == ["--gpu-memory-mib"]
    assert in_bash("fgpu completion z") == ["zsh"]
    assert in_bash("fgpu images ex") == ["export"]


def test_bash_completes_sessions_and_images_of_the_hub(hub: str) -> None:
    assert in_bash("fgpu show ", url=hub) == ["12", "13"]
    assert in_bash("fgpu run --image py", url=hub) == ["python", "pytorch"]
    assert in_bash("fgpu forecast --group c", url=hub) == ["class"]


def test_completion_is_silent_if_the_hub_fails(hub: str) -> None:
    assert in_bash("fgpu run --image py", url=hub, token="another") == []
    assert in_bash("fgpu run --image py", url=hub, token="") == []
    assert in_bash("fgpu run --image py", url="http://127.0.0.1:1") == []


def test_completion_gives_up_on_a_slow_hub() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        began = time.monotonic()
        assert in_bash("fgpu run --image py", url=f"http://127.0.0.1:{silent.getsockname()[1]}") == []
        # The Hub's clients wait for a minute otherwise; a slow machine for some seconds.
        assert time.monotonic() - began < 30


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_zsh_and_fish_complete_too(shell: str, hub: str, tmp_path: Path) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed; apt-get install {shell}")
    env = {**environment(hub), "HOME": str(tmp_path), "TERM": "xterm"}
    if shell == "fish":
        words = ["fish", "-c", "fgpu completion fish | source; complete -C 'fgpu run --image py'"]
        ended = subprocess.run(words, env=env, capture_output=True, text=True, timeout=60, check=True)
        assert [line.split("\t")[0] for line in ended.stdout.splitlines()] == ["python", "pytorch"]
        return
    # Its completion runs in its line editor alone.
    lines = """
    zmodload zsh/zpty
    zpty z zsh -f
    zpty -w z 'PS1=; autoload -Uz compinit && compinit -u; eval "$(fgpu completion zsh)"; setopt noautomenu'
    zpty -w z 'print -r READY-$((40+2))'
    zpty -r z found '*READY-42*'
    zpty -w -n z $'fgpu run --image pyto\\t'
    zpty -r z found '*pytorch*' && print -r -- "$found"
    """
    ended = subprocess.run(["zsh", "-f", "-c", lines], env=env, capture_output=True, text=True, timeout=60)
    assert "--image pytorch" in ended.stdout
