"""The command ``fgpu top``: what is on the screen, wide and narrow, and what its keys do in a real terminal."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from commandline import fgpu
from fgpuspawner.cli.top_frame import View, frame

AT_S = 1_790_000_000
PROGRAM = Path(sys.executable).parent / "fgpu"


def session(number: int, user: str, state: str = "RUNNING", **more: Any) -> dict[str, Any]:
    gpu = {"uuid": "GPU-0", "model": "Tesla T4", "fgpu": "0.5", "memory_mib": 2048, "compute_percent": 25}
    return {
        "id": number, "user": user, "server_name": "", "display_name": "default server", "state": state,
        "image": "python", "amount": "0.5 fGPU", "node": "local", "gpus": [gpu], "gpu_memory_mib": 2048,
        "compute_percent": 25, "started_at_s": AT_S - 3600, "submitted_at_s": AT_S - 3700, "warning": None,
        "message": None, **more,
    }  # fmt: skip


def meter(memory_mib: int, received: float | None) -> dict[str, Any]:
    return {"memory_used_mib": memory_mib, "compute_received_percent": received}


def found() -> dict[str, Any]:
    """Two sessions on one GPU, of which one is not measured, and two that wait."""
    device = {"uuid": "GPU-0", "node": "local", "index": 0, "model": "Tesla T4", "memory_mib": 8192}
    device |= {"fgpu_total": "2", "fgpu_used": "1", "cordoned": False}
    group = {
        "name": "default", "used": {"fgpu": "1"}, "total": {"fgpu": "2"}, "waiting": 2, "nodes_lost": 0,
        "largest_fgpu_now": None, "devices": [device],
    }  # fmt: skip
    entry = {
        "position": 1, "id": 14, "user": "carol", "amount": "2 fGPU", "submitted_at_s": AT_S - 60,
        "wait_reason": "RESOURCES", "expected_start_at_s": AT_S + 900, "early_start_at_s": AT_S + 600,
        "late_start_at_s": AT_S + 1200,
    }  # fmt: skip
    other = {**entry, "position": 2, "id": None, "user": None, "expected_start_at_s": None}
    return {
        "version": 1, "at_s": AT_S, "all": True,
        "me": {"user": "admin", "banner": None, "admin": True, "administers": []},
        "capacity": {"groups": [group], "simulated": True},
        "sessions": [session(12, "alice"), session(13, "bob\x1b[31m", warning="it ends at 15:00")],
        "meters": {"12": meter(1331, 14.1), "13": meter(512, None)},
        "queues": [{"group": "default", "entries": [entry, other]}],
    }  # fmt: skip


def shown(view: View = View(), width: int = 160, height: int | None = None) -> list[str]:  # noqa: B008
    return [line.text for line in frame(found(), view, width=width, height=height)]


def test_gpus_sessions_and_the_queue_are_shown_with_what_is_entitled_and_received() -> None:
    text = "\n".join(shown())
    gpu = next(line for line in shown() if "Tesla T4" in line).split()
    assert gpu == [
        "0",
        "local",
        "Tesla",
        "T4",
        "[#####-----]",
        "1/2",
        "50",
        "%",
        "?",
        "1843",
        "MiB",
        "8",
        "GiB",
    ]
    assert "default: 1 of 2 fGPU in use, 2 waiting; nothing would start now" in text
    alice, bob = (next(line for line in shown() if name in line) for name in ("alice", "bob"))
    assert "1331/2048 MiB" in alice
    assert "14/25 %" in alice
    # What is not measured is not 0; and nobody's name tells a terminal what to do.
    assert "?/25 %" in bob
    assert "bob?[31m" in bob
    assert "it ends at 15:00" in bob
    carol, other = (next(line for line in shown() if name in line) for name in ("carol", "somebody"))
    assert "2026-09-21 14:23 to 14:33Z" in carol
    assert " ? " in other


@pytest.mark.parametrize("width", [200, 120, 80, 60, 40, 20, 8, 1])
@pytest.mark.parametrize("height", [50, 24, 10, 4])
def test_every_size_of_terminal_is_kept_to(width: int, height: int) -> None:
    lines = shown(width=width, height=height)
    assert max(map(len, lines)) <= width
    assert len(lines) <= max(height, 6)
    if width >= 60:
        narrow = "\n".join(shown(width=width))
        assert "1331/2048" in narrow
        assert "alice" in narrow


def test_sessions_are_sorted_and_filtered() -> None:
    def order(view: View) -> list[str]:
        return [name for line in shown(view) for name in ("alice", "bob", "carol") if f" {name}" in line]

    assert order(View()) == ["alice", "bob", "carol"]
    assert order(View(sort="memory")) == ["alice", "bob", "carol"]
    one = found()
    one["meters"]["13"]["memory_used_mib"] = 2000
    lines = [line.text for line in frame(one, View(sort="memory"), width=160, height=None)]
    assert [n for line in lines for n in ("alice", "bob") if n in line] == ["bob", "alice"]
    assert order(View(words="ALI")) == ["alice"]
    assert order(View(words="carol")) == ["carol"]


# -- In a terminal ------------------------------------------------------------------------------------


class Service(BaseHTTPRequestHandler):
    """The API, of a world that a test changes."""

    world: dict[str, Any]
    away = False

    def do_GET(self) -> None:
        known = type(self).world
        name = urlsplit(self.path).path.rpartition("/")[2]
        said: Any = {
            "me": {**known["me"], "administers": []},
            "capacity": known["capacity"],
            "sessions": {"sessions": known["sessions"]},
            "meters": {"meters": known["meters"]},
            "queue": known["queues"][0],
        }[name]
        data = json.dumps(said).encode()
        self.send_response(503 if type(self).away else 200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    Service.world, Service.away = found(), False
    server = ThreadingHTTPServer(("127.0.0.1", 0), Service)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    url = f"http://127.0.0.1:{server.server_address[1]}"
    monkeypatch.setenv("FGPU_HUB_URL", url)
    monkeypatch.setenv("JUPYTERHUB_API_TOKEN", "t0ken")
    yield url
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_file_gets_one_frame_and_json_one_object_a_look(
    hub: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, _ = fgpu(capsys, "top")
    assert (status, "alice" in out, "q: quit" in out) == (0, True, False)
    told = json.loads(fgpu(capsys, "top", "--once", "--json")[1])
    assert [s["id"] for s in told["sessions"]] == [12, 13]
    with subprocess.Popen(
        [str(PROGRAM), "top", "--json", "--every", "2"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert json.loads(process.stdout.readline())["queues"][0]["entries"][0]["user"] == "carol"
        Service.away = True
        assert json.loads(process.stdout.readline())["trouble"] == "the Hub answered 503"
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait() == 0
    Service.away = False
    assert fgpu(capsys, "top", "--every", "1")[0] == 2


@pytest.fixture
def tmux(tmp_path: Path) -> Iterator[Callable[..., str]]:
    """A terminal multiplexer of the test's own."""
    if shutil.which("tmux") is None:
        pytest.skip("tmux is not installed; apt-get install tmux")

    def call(*words: str) -> str:
        own = ["tmux", "-S", str(tmp_path / "tmux"), "-f", "/dev/null", *words]
        return subprocess.run(own, capture_output=True, text=True, timeout=30, check=True).stdout

    yield call
    subprocess.run(["tmux", "-S", str(tmp_path / "tmux"), "kill-server"], capture_output=True, check=False)


def test_it_lives_in_a_terminal_and_answers_keys(hub: str, tmux: Callable[..., str]) -> None:
    def screen_with(*words: str, without: str = "\0") -> str:
        until = time.monotonic() + 60
        while True:
            text = tmux("capture-pane", "-p", "-t", "top")
            if all(word in text for word in words) and without not in text:
                return text
            assert time.monotonic() < until, text
            time.sleep(0.1)

    own = f"FGPU_HUB_URL={hub} JUPYTERHUB_API_TOKEN=t0ken {PROGRAM} top --every 2; echo ended: $?; cat"
    tmux("new-session", "-d", "-s", "top", "-x", "150", "-y", "30", own)
    screen_with("alice", "bob?[31m", "carol", "q: quit", "sort (session)", "it ends at 15:00")
    tmux("send-keys", "-t", "top", "s")
    screen_with("sort (user)")
    tmux("send-keys", "-t", "top", "/", "ali", "Enter")
    screen_with("filter (ali)", "alice", without="carol")
    tmux("send-keys", "-t", "top", "/", "Escape")
    screen_with("carol", without="filter (ali)")

    tmux("resize-window", "-t", "top", "-x", "45", "-y", "20")
    narrow = screen_with("1331/2048", without="default server")
    assert max(map(len, narrow.splitlines())) <= 45

    Service.world["sessions"].append(session(15, "erin"))
    tmux("resize-window", "-t", "top", "-x", "100", "-y", "30")
    screen_with("erin")
    Service.away = True
    screen_with("the Hub answered 503; asking again", "erin")
    Service.away = False
    screen_with("erin", without="asking again")
    tmux("send-keys", "-t", "top", "q")
    screen_with("ended: 0", without="erin")
