"""`fgpu services` under systemd. None runs where tests do: stand-ins answer in its form, and note what they are asked."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from commandline import failure, fgpu, write_config
from fgpu_scheduler import BadSettings
from fgpuspawner.cli.services import main_pid

SYSTEMCTL = """#!/bin/sh
echo "systemctl $*" >> {noted}
case "$1 $2" in
"show jupyterhub.service") printf 'MainPID=%s\\nLoadState=loaded\\n' "$(cat {pid})";;
"show jupyterhub-proxy.service") printf 'MainPID=0\\nLoadState=loaded\\n';;
"start jupyterhub-proxy.service")
  echo 'Failed to start jupyterhub-proxy.service: Interactive authentication required.' >&2; exit 1;;
"stop jupyterhub.service") echo 0 > {pid};;
esac
"""
JOURNAL = """#!/bin/sh
echo "journalctl $*" >> {noted}
cat <<'END'
[I 2026-11-23 23:32:08.590 JupyterHub app:3944] JupyterHub is now running at https://:443
[E 2026-11-23 23:32:09 fgpu] The database cannot be read
[E 2026-11-23 23:33:08.590 JupyterHub app:12] Failed to start \x1b[31mservice
23:34:00.000 [ConfigProxy] \x1b[31merror\x1b[39m: 503 GET /user/a/ connect ECONNREFUSED
END
"""


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[subprocess.Popen[bytes]]:
    """A process that systemd says is the Hub; its proxy is stopped."""
    for name, text in (("systemctl", SYSTEMCTL), ("journalctl", JOURNAL)):
        (tmp_path / name).write_text(text.format(noted=tmp_path / "noted", pid=tmp_path / "pid"))
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        (tmp_path / "pid").write_text(str(process.pid))
        yield process
        process.kill()


def test_a_unit_that_runs_one_that_does_not_and_one_that_there_is_not() -> None:
    assert main_pid("MainPID=4711\nLoadState=loaded\n") == 4711
    assert main_pid("MainPID=0\nLoadState=loaded\n") == 0
    for shown in ("MainPID=0\nLoadState=not-found\n", "MainPID=0\nLoadState=masked\n", ""):
        with pytest.raises(BadSettings, match="systemd has no units"):
            main_pid(shown)


def test_units_are_told_and_asked_of_systemd(
    hub: subprocess.Popen[bytes], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = ("--config", write_config(tmp_path))
    status, out, _ = fgpu(capsys, "services", "status", *config)
    found = {line.split()[0]: line for line in out.splitlines()}
    assert status == 1
    assert found["hub"].split()[1] == "running"
    assert "Failed to start service" in found["hub"]
    assert found["proxy"].split()[1] == "stopped"
    assert "ECONNREFUSED" in found["proxy"]
    assert "The database cannot be read" in found["service"]
    assert found["engine"].split()[1:3] == ["not", "known"]

    assert fgpu(capsys, "services", "logs", "service", *config)[1] == (
        "[E 2026-11-23 23:32:09 fgpu] The database cannot be read\n"
    )
    assert failure(capsys, "services", "start", "proxy", *config) == (
        1,
        "systemctl start jupyterhub-proxy.service: Failed to start jupyterhub-proxy.service: "
        "Interactive authentication required.",
    )
    assert fgpu(capsys, "services", "stop", "hub", *config) == (0, "hub: stopped\n", "")
    noted = (tmp_path / "noted").read_text().splitlines()
    assert "systemctl stop jupyterhub.service" in noted
    assert "journalctl --output=cat --no-pager --unit=jupyterhub.service --lines=2000" in noted


def test_the_hub_is_asked_where_its_sessions_reach_it_as_on_the_address_of_the_engines_network(
    hub: subprocess.Popen[bytes], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Healthy(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/hub/health" else 404)
            self.end_headers()
            self.wfile.write(b'{"engine": "some machines are silent"}')

        def log_message(self, format: str, *args: object) -> None:
            """Say nothing."""

    config = write_config(tmp_path)
    (tmp_path / "data").mkdir(exist_ok=True)
    with HTTPServer(("127.0.0.2", 0), Healthy) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.2:{server.server_port}"
        (tmp_path / "data/hub-urls.json").write_text(json.dumps([f"{url}/hub/api", f"{url}/services/fgpu/"]))
        out = fgpu(capsys, "services", "status", "engine", "--config", config)[1]
        assert "some machines are silent" in out
        server.shutdown()
    (tmp_path / "data/hub-urls.json").write_text("[]")
    assert "not known" in fgpu(capsys, "services", "status", "engine", "--config", config)[1]
