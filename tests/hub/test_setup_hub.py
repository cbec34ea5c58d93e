"""A Hub that runs from the very files that `fgpu setup` wrote, up to the first session."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import requests

from hubprocess import PROXY, HubProcess, until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        not (shutil.which("systemctl") and shutil.which("systemd-sysusers")),
        reason="there is no systemd here",
    ),
]


class SetUpHub(HubProcess):
    """A machine in a folder. What systemd would take from the units it takes, but for user, limits and hardening."""

    def set_up(self) -> None:
        """Have `fgpu setup` write everything."""
        arguments = [
            "--root",
            self.folder,
            "--yes",
            "--runtime",
            "local",
            "--tls",
            "none",
            "--login",
            "password",
        ]
        arguments += ["--simulated", "1", "--admin", "zoe", "--data", self.data]
        arguments += ["--port", str(self.port), "--ports", str(self.port + 1)]
        done = subprocess.run(
            [Path(sys.executable).with_name("fgpu"), "setup", *arguments],
            env={**os.environ, "PATH": f"{PROXY.parent}{os.pathsep}{os.environ['PATH']}"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr

    def started(self, unit: str) -> subprocess.Popen[bytes]:
        """Start a unit's program in the environment that the unit gives it, and no other."""
        text = (self.folder / "etc/systemd/system" / unit).read_text().replace("\\\n", " ")
        lines = [
            line.partition("=")[::2] for line in text.splitlines() if "=" in line and line[0] not in "#["
        ]
        env = {"HOME": str(self.folder)}
        for name, value in lines:
            if name == "Environment":
                env.update(word.split("=", 1) for word in shlex.split(value))
            elif name == "EnvironmentFile":
                env.update(line.split("=", 1) for line in self._here(value).read_text().splitlines())
        (command,) = (value for name, value in lines if name == "ExecStart")
        words = [str(self._here(word)) if word.startswith("/etc/") else word for word in shlex.split(command)]
        with self.log.open("ab") as output:
            return subprocess.Popen(
                words, cwd=self.folder, env=env, stdout=output, stderr=output, start_new_session=True
            )

    def _here(self, path: str) -> Path:
        return self.folder / path.lstrip("/")


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[SetUpHub]:
    found = SetUpHub(tmp_path / "machine", runtime="local")
    try:
        yield found
    finally:
        found.close()


def test_the_first_session_is_ready_with_nothing_but_what_setup_wrote(hub: SetUpHub) -> None:
    hub.set_up()
    hub.proxy = hub.started("jupyterhub-proxy.service")
    hub.process = hub.started("jupyterhub.service")  # type: ignore[assignment]

    def up() -> bool:
        assert hub.process is not None
        assert hub.process.poll() is None, hub.log_text()[-4000:]
        try:
            return requests.get(f"{hub.url}/hub/health", timeout=10).status_code == 200
        except (requests.ConnectionError, requests.Timeout):
            return False

    until(up, within_s=120, what="the Hub answers through its proxy")
    password = (hub.folder / "etc/jupyterhub/password").read_text().strip()
    browser = requests.Session()
    browser.get(f"{hub.url}/hub/login", timeout=60)
    form = {"username": "ann", "password": password, "_xsrf": browser.cookies.get("_xsrf", path="/hub/")}
    login = browser.post(f"{hub.url}/hub/login?next=/hub/home", data=form, timeout=60)
    assert login.url == f"{hub.url}/services/fgpu/"
    browser.headers["X-XSRFToken"] = str(browser.cookies.get("_xsrf", path="/hub/"))
    browser.headers["Referer"] = f"{hub.url}/hub/home"
    api = f"{hub.url}/hub/api/users/ann"
    asked = browser.post(
        f"{api}/server", json={"user_options": {"image": "python", "fgpu": "0.5"}}, timeout=60
    )
    assert asked.status_code in (201, 202), asked.text
    until(
        lambda: browser.get(api, timeout=60).json().get("servers", {}).get("", {}).get("ready"),
        within_s=120,
        what="ann's server is ready",
    )
    (session,) = hub.store.snapshot(int(time.time())).sessions
    assert (session.request.user, session.request.fgpu_milli, session.state) == ("ann", 500, "RUNNING")
