"""Start the example Hub and its proxy, say where it is and how to log in, and end everything on Ctrl-C.

The proxy is a process beside the Hub. So a Hub that dies is started again while open notebooks stay connected.
"""

from __future__ import annotations

import http.client
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO

import psutil

from fgpuspawner.logs import cut_back

ROOT = Path(__file__).parents[1]
LOOK_EVERY_S = 0.2
PROXY_ENDS_WITHIN_S = 10
MOST_RESTARTS, RESTARTS_WITHIN_S = 5, 60
"""A Hub that dies more often than this is not started again."""
PORTS = 4
LOG, LARGEST_LOG = "make-run.log", 20 << 20
RUNNING = "make-run.json"
"""Processes of a data folder's run, each by its id and start time."""
LAST_WORDS = 15


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


def routes(api_port: int, token: str) -> dict[str, object] | None:
    """Return what the proxy on this API port routes, if it is ours; None while it does not answer."""
    connection = http.client.HTTPConnection("127.0.0.1", api_port, timeout=2)
    try:
        connection.request("GET", "/api/routes", headers={"Authorization": f"token {token}"})
        answer = connection.getresponse()
        return dict(json.loads(answer.read())) if answer.status == 200 else None
    except (OSError, ValueError):
        return None
    finally:
        connection.close()


def whose(port: int) -> str | None:
    """Return the program that listens on this port, in words, or None."""
    for found in psutil.net_connections("tcp"):
        if found.status == psutil.CONN_LISTEN and found.laddr and found.laddr.port == port:
            try:
                name = psutil.Process(found.pid).name() if found.pid else ""
                return f"{name} (process {found.pid})" if name else "another user's program"
            except psutil.Error:
                return "another program"
    return None


def known(process: psutil.Process | subprocess.Popen[bytes]) -> list[float]:
    """Return what identifies a process beyond its id, as ids are used again."""
    return [process.pid, psutil.Process(process.pid).create_time()]


def of_earlier(data: Path) -> dict[str, psutil.Process]:
    """Return processes left from this data folder's last run, by kind: run, hub, proxy."""
    try:
        noted = json.loads((data / RUNNING).read_text())
    except (OSError, ValueError):
        return {}
    found = {}
    for what, (pid, began) in noted.items():
        try:
            process = psutil.Process(int(pid))
            if process.create_time() == began and process.status() != psutil.STATUS_ZOMBIE:
                found[what] = process
        except psutil.Error:
            pass
    return found


def end_earlier(data: Path) -> str | None:
    """End what a killed run has left; sessions go on. Return the reason if an earlier run still goes on."""
    left = of_earlier(data)
    if "run" in left:
        return f"A Hub with the data in {data} runs already (process {left['run'].pid}); end it with Ctrl-C there"
    # As when a Hub dies: the next one takes its sessions over.
    for process in left.values():
        process.kill()
    psutil.wait_procs(list(left.values()), timeout=PROXY_ENDS_WITHIN_S)
    return None


def open_log(data: Path) -> IO[bytes]:
    """Return the log file of the Hub and the proxy; only its owner can read it."""
    path = data / LOG
    path.touch(mode=0o600)
    return path.open("ab")


def last_words(data: Path) -> str:
    """Return the end of the log."""
    return "\n".join((data / LOG).read_text(errors="replace").splitlines()[-LAST_WORDS:])


def can_be_asked_to_end(pid: int) -> bool:
    """Return whether a process handles SIGTERM. A Hub that is still starting would just die."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return True  # It has ended, or this is no Linux.
    caught = next((line.split()[1] for line in lines if line.startswith("SigCgt:")), "0")
    return bool(int(caught, 16) >> (signal.SIGTERM - 1) & 1)


def proxy_token(data: Path) -> str:
    """Return the token between Hub and proxy, made the first time; only the owner can read the file."""
    data.mkdir(parents=True, exist_ok=True, mode=0o700)
    path = data / "proxy-token"
    if not path.exists():
        path.touch(mode=0o600)
        path.write_text(secrets.token_urlsafe(32))
    return path.read_text().strip()


def banner(port: int, data: Path, runtime: str) -> str:
    """Return the text for a newcomer: addresses and passwords."""
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

    def __init__(self, port: int, env: Mapping[str, str], token: str, data: Path) -> None:
        self.port = port
        self.data = data
        self.log = open_log(data)
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
        # Not an argument: other users of the machine can see those.
        env = {**self.env, "CONFIGPROXY_AUTH_TOKEN": self.token}
        self.proxy = self._start(words, env)
        while self.proxy.poll() is None and not self.stopping and self._routes() is None:
            time.sleep(LOOK_EVERY_S)

    def _routes(self) -> dict[str, object] | None:
        return routes(self.port + 2, self.token)

    def _start(self, words: list[str], env: Mapping[str, str]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            words, cwd=ROOT, env=dict(env), stdout=self.log, stderr=self.log, start_new_session=True
        )

    def note(self) -> None:
        """Record our processes, for the run after one that was killed."""
        ours = {"run": psutil.Process(), "proxy": self.proxy, "hub": self.hub}
        noted = {what: known(p) for what, p in ours.items() if p is not None and psutil.pid_exists(p.pid)}
        (self.data / RUNNING).write_text(json.dumps(noted))

    def start_hub(self) -> None:
        """Start the Hub."""
        words = [sys.executable, "-m", "jupyterhub", "-f", str(ROOT / "jupyterhub_config.py")]
        self.hub = self._start(words, self.env)
        self.note()

    def stop(self, number: int, frame: object) -> None:
        """Have the Hub ended, and with it all sessions. For signals; `until_ended` does it."""
        if not self.stopping:
            self.stopping = True
            print("\nEnding the Hub and all sessions", flush=True)

    def until_up(self) -> bool:
        """Wait until the Hub is up, and return whether it is."""
        assert self.hub is not None
        # The proxy gets its route last: earlier requests through it find nothing.
        while self.hub.poll() is None and not self.stopping and not (self._routes() and answers(self.port)):
            time.sleep(LOOK_EVERY_S)
        self._was_up = self.hub.poll() is None and not self.stopping
        return self._was_up

    def until_ended(self) -> int:
        """Restart what dies, until the Hub was told to end or cannot be kept up. Return its exit status."""
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
                self.note()
            cut_back(self.data / LOG, most_bytes=LARGEST_LOG)
            time.sleep(LOOK_EVERY_S)

    def _may_start_again(self) -> bool:
        now = time.monotonic()
        self._died_at = [at for at in self._died_at if now - at < RESTARTS_WITHIN_S] + [now]
        return self._was_up and len(self._died_at) <= MOST_RESTARTS

    def end_proxy(self) -> None:
        """End the proxy, once it has no routes left."""
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
    env = dict(os.environ, PORT=port)
    data = Path(env.setdefault("FGPU_DATA", str(ROOT / "data"))).absolute()
    programs = [ROOT / ".node" / "node_modules" / ".bin", ROOT / ".node" / "bin", Path(sys.prefix) / "bin"]
    env["PATH"] = os.pathsep.join([*map(str, programs), env.get("PATH", os.defpath)])
    token = proxy_token(data)
    if why_not := end_earlier(data):
        print(why_not, file=sys.stderr)
        return 1
    for number in range(int(port), int(port) + PORTS):
        if program := whose(number):
            print(f"Port {number} is used by {program}; use others: make run PORT=9000", file=sys.stderr)
            return 1
    print(f"Starting, in about ten seconds. What the Hub says is in {data / LOG}", flush=True)
    run = Run(int(port), env, token, data)
    signal.signal(signal.SIGINT, run.stop)
    signal.signal(signal.SIGTERM, run.stop)
    try:
        run.start_proxy()
        if run.proxy is not None and run.proxy.poll() is not None:
            print(f"The proxy ended as it started; its last words:\n{last_words(data)}", file=sys.stderr)
            return 1
        if run.stopping:
            return 0
        run.start_hub()
        if run.until_up():
            print(banner(int(port), data, env.get("RUNTIME") or "local"), flush=True)
        status = run.until_ended()
        if status:
            print(f"The Hub ended with {status}; its last words:\n{last_words(data)}", file=sys.stderr)
        return status
    finally:
        run.end_proxy()
        (data / RUNNING).unlink(missing_ok=True)


if __name__ == "__main__":
    sys.exit(main())
