"""Start the example Hub, say where it is and how to log in, and end everything on Ctrl-C."""

from __future__ import annotations

import http.client
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
STOP_WITHIN_S = 60


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
    # In a process group of its own: Ctrl-C reaches the Hub once, through us.
    hub = subprocess.Popen(
        [sys.executable, "-m", "jupyterhub", "-f", str(ROOT / "jupyterhub_config.py")],
        cwd=ROOT,
        env=env,
        start_new_session=True,
    )
    stopping = False

    def stop(number: int, frame: object) -> None:
        nonlocal stopping
        if not stopping:
            stopping = True
            print("\nEnding the Hub and all sessions", flush=True)
            hub.terminate()

    signal.signal(signal.SIGINT, stop)
    signal.signal(signal.SIGTERM, stop)
    # First the Hub itself, then through its proxy, which has no route to it before the very end.
    # With containers the Hub itself listens on their network only.
    local = (env.get("RUNTIME") or "local") == "local"
    for where in (int(port) + 1, int(port)) if local else (int(port),):
        while hub.poll() is None and not stopping and not answers(where):
            time.sleep(0.2)
    if hub.poll() is None and not stopping:
        print(banner(int(port), data, env.get("RUNTIME") or "local"), flush=True)
    while hub.poll() is None:
        try:
            hub.wait(1)
        except subprocess.TimeoutExpired:
            continue
    return 0 if stopping else hub.returncode


if __name__ == "__main__":
    sys.exit(main())
