"""Start the example Hub and its proxy, say where it is and how to log in, and end everything on Ctrl-C.

The proxy is a process beside the Hub. So a Hub that dies is started again while open notebooks stay connected.
"""

from __future__ import annotations

import http.client
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
LOOK_EVERY_S = 0.2
PROXY_ENDS_WITHIN_S = 10
MOST_RESTARTS, RESTARTS_WITHIN_S = 5, 60
"""A Hub that dies more often than this is not started again."""


def answers(port: int) -> bool:
    """Return whether a Hub answers on this port."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=2)
    try:
        connection.request("GET", "/hub/health")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


def proxy_answers(api_port: int, token: str) -> bool:
    """Return whether the proxy on this API port is ours."""
    connection = http.client.HTTPConnection("127.0.0.1", api_port, timeout=2)
    try:
        connection.request("GET", "/api/routes", headers={"Authorization": f"token {token}"})
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


def can_be_asked_to_end(pid: int) -> bool:
    """Return whether a process does something of its own at SIGTERM. A Hub that still starts would just be gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return True  # It has ended, or this is no Linux.
    caught = next((line.split()[1] for line in lines if line.startswith("SigCgt:")), "0")
    return bool(int(caught, 16) >> (signal.SIGTERM - 1) & 1)


def proxy_token(data: Path) -> str:
    """Return what the Hub proves itself to the proxy with, made the first time; only the owner can read it."""
    data.mkdir(parents=True, exist_ok=True, mode=0o700)
    path = data / "proxy-token"
    if not path.exists():
        path.touch(mode=0o600)
        path.write_text(secrets.token_urlsafe(32))
    return path.read_text().strip()


def banner(port: int, data: Path, runtime: str) -> str:
    """Return what a newcomer has to know."""
    user, admin = (data / "password").read_text(), (data / "admin-password").read_text()
    lines = [
        "",
        f"  fgpuspawner is running:   http://127.0.0.1:{port}",
        f"  log in with any name and  {user}",
        f"  as `admin` with           {admin}",
        "",
    ]
    if runtime == "local":
        lines += [
            "  Sessions run as local processes of one system user: fine for one person or a demo.",
            "  `make run RUNTIME=docker` runs them in containers.",
        ]
    lines += [f"  Data is in {data}. Ctrl-C ends the Hub and all sessions.", ""]
    return "\n".join(lines)


class Run:
    """The proxy and the Hub, each in a process group of its own: Ctrl-C reaches them through us, in order."""

    def __init__(self, port: int, env: Mapping[str, str], token: str) -> None:
        self.port = port
        self.env = dict(env)
        self.token = token
        self.stopping = False
        self.proxy: subprocess.Popen[bytes] | None = None
        self.hub: subprocess.Popen[bytes] | None = None
        self._was_up = False
        self._asked = False
        self._died_at: list[float] = []

    def start_proxy(self) -> None:
        """Start the proxy and wait until it answers, or has ended."""
        here, api = ("--ip", "127.0.0.1"), ("--api-ip", "127.0.0.1", "--api-port", str(self.port + 2))
        pages = ("--error-path", str(ROOT / "fgpuspawner" / "proxy_pages"))
        words = [
            "configurable-http-proxy",
            *here,
            "--port",
            str(self.port),
            *api,
            *pages,
            "--log-level",
            "warn",
        ]
        # Not among its arguments: others on the machine can see those.
        env = {**self.env, "CONFIGPROXY_AUTH_TOKEN": self.token}
        self.proxy = subprocess.Popen(words, cwd=ROOT, env=env, start_new_session=True)
        while (
            self.proxy.poll() is None and not self.stopping and not proxy_answers(self.port + 2, self.token)
        ):
            time.sleep(LOOK_EVERY_S)

    def start_hub(self) -> None:
        """Start the Hub."""
        words = [sys.executable, "-m", "jupyterhub", "-f", str(ROOT / "jupyterhub_config.py")]
        self.hub = subprocess.Popen(words, cwd=ROOT, env=self.env, start_new_session=True)

    def stop(self, number: int, frame: object) -> None:
        """Have the Hub ended, and with it all sessions. For signals; `until_ended` does it."""
        if not self.stopping:
            self.stopping = True
            print("\nEnding the Hub and all sessions", flush=True)

    def until_up(self) -> bool:
        """Wait until the Hub can be used, and return whether it can."""
        assert self.hub is not None
        # First the Hub itself, then through the proxy, which has no route to it before the very end.
        # With containers the Hub itself listens on their network only.
        local = (self.env.get("RUNTIME") or "local") == "local"
        for where in (self.port + 1, self.port) if local else (self.port,):
            while self.hub.poll() is None and not self.stopping and not answers(where):
                time.sleep(LOOK_EVERY_S)
        self._was_up = self.hub.poll() is None and not self.stopping
        return self._was_up

    def until_ended(self) -> int:
        """Start again what dies, until the Hub was told to end or cannot be kept up. Returns its exit status."""
        assert self.hub is not None
        while True:
            status = self.hub.poll()
            if self.stopping and not self._asked and status is None and can_be_asked_to_end(self.hub.pid):
                self._asked = True
                self.hub.terminate()
            if status is not None and (self.stopping or not self._may_start_again()):
                return 0 if self.stopping else status
            if status is not None:
                print(
                    f"The Hub ended with {status}; starting it again. Sessions go on",
                    file=sys.stderr,
                    flush=True,
                )
                self.start_hub()
            if self.proxy is not None and self.proxy.poll() is not None and not self.stopping:
                print("The proxy has ended; starting it again", file=sys.stderr, flush=True)
                self.start_proxy()
            time.sleep(LOOK_EVERY_S)

    def _may_start_again(self) -> bool:
        now = time.monotonic()
        self._died_at = [at for at in self._died_at if now - at < RESTARTS_WITHIN_S] + [now]
        return self._was_up and len(self._died_at) <= MOST_RESTARTS

    def end_proxy(self) -> None:
        """End the proxy, when nobody is routed to any more."""
        if self.proxy is None or self.proxy.poll() is not None:
            return
        self.proxy.terminate()
        try:
            self.proxy.wait(PROXY_ENDS_WITHIN_S)
        except subprocess.TimeoutExpired:
            self.proxy.kill()
            self.proxy.wait()


def main() -> int:
    """Run the Hub until it ends or is told to."""
    port = os.environ.get("PORT") or "8000"
    if not port.isdigit() or not 1 <= int(port) <= 65532:
        print(f"PORT is {port!r}; it must be a number between 1 and 65532", file=sys.stderr)
        return 2
    if answers(int(port)):
        print(f"Something answers on port {port} already; use another: make run PORT=9000", file=sys.stderr)
        return 1
    env = dict(os.environ, PORT=port)
    data = Path(env.setdefault("FGPU_DATA", str(ROOT / "data"))).absolute()
    programs = [ROOT / ".node" / "node_modules" / ".bin", ROOT / ".node" / "bin", Path(sys.prefix) / "bin"]
    env["PATH"] = os.pathsep.join([*map(str, programs), env.get("PATH", os.defpath)])
    run = Run(int(port), env, proxy_token(data))
    signal.signal(signal.SIGINT, run.stop)
    signal.signal(signal.SIGTERM, run.stop)
    try:
        run.start_proxy()
        if run.proxy is not None and run.proxy.poll() is not None:
            print(f"The proxy could not be started on ports {port} and {int(port) + 2}", file=sys.stderr)
            return 1
        if run.stopping:
            return 0
        run.start_hub()
        if run.until_up():
            print(banner(int(port), data, env.get("RUNTIME") or "local"), flush=True)
        return run.until_ended()
    finally:
        run.end_proxy()


if __name__ == "__main__":
    sys.exit(main())
