"""Run inside a container of an image (`images/build.sh NAME --smoke`): is it fit for a session?

Prints one line for each fact checked and ends with status 1 at the first that does not hold.
Standard library, plus what the image itself promises.
"""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import sys
import time
from pathlib import Path


def check(what: str, holds: bool, found: object) -> None:
    """Print the fact; end the run where it does not hold."""
    print(f"{'ok  ' if holds else 'FAIL'} {what}: {found}", flush=True)
    if not holds:
        sys.exit(1)


def output_of(*command: str) -> str:
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    return (done.stdout if done.returncode == 0 else done.stderr).strip()


def check_user() -> None:
    check("user id", os.getuid() == 1000, os.getuid())
    account = pwd.getpwuid(1000)
    check("account", account.pw_name == "jovyan", account.pw_name)
    homes = {os.getcwd(), account.pw_dir, os.environ["HOME"]}
    check("home", homes == {"/home/jovyan"}, " ".join(sorted(homes)))
    probe = Path.home() / ".fgpu-smoke"
    probe.touch()
    probe.unlink()
    check("home is writable", True, "yes")
    first = Path("/proc/1/comm").read_text(encoding="ascii").strip()
    check("process 1", first == "tini", first)


def check_system() -> None:
    programs = ("bash", "cat", "env", "grep", "ls", "ps", "sed", "tini")
    missing = [name for name in programs if shutil.which(name) is None]
    check("programs", not missing, " ".join(missing or programs))
    listed = output_of("bash", "-c", "ps -e -o comm= | sed -n 1p | grep tini")
    check("bash, ps, sed, grep work", listed == "tini", listed)
    # JupyterLab's terminals are login shells.
    python = output_of("bash", "-lc", "which python")
    check("python in a terminal", python == "/opt/fgpu/bin/python", python)
    bundle = Path("/etc/ssl/certs/ca-certificates.crt").read_text(encoding="ascii")
    count = bundle.count("BEGIN CERTIFICATE")
    check("certificate authorities", count > 50, count)
    site = Path.home() / f".local/lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages"
    site.mkdir(parents=True)
    (site / "json5.py").write_text("broken = True\n", encoding="ascii")
    (site / "fgpu_smoke.py").write_text("", encoding="ascii")
    code = "import fgpu_smoke, json5; print(json5.__file__.startswith('/opt/fgpu/'))"
    found = output_of("python", "-c", code)
    check("packages at home are found, after the server's own", found == "True", found)
    named = output_of("python", "-c", "import socket; print(socket.gethostbyname('localhost'))")
    check("localhost resolves", named == "127.0.0.1", named)


def check_server() -> None:
    version = output_of("jupyterhub-singleuser", "--version")
    check("jupyterhub-singleuser", version[:1].isdigit(), version)
    begun_s = time.monotonic()
    # The stale or missing byte code that this would reveal costs every start 1.5 s.
    code = "import jupyterhub.singleuser, sys; print('lark' in sys.modules)"
    eager = output_of(sys.executable, "-c", code)
    check("grammars are left for later", eager == "False", f"{time.monotonic() - begun_s:.2f} s")
    code = (
        "import jsonschema as j; check = j.FormatChecker(['iri']).conforms;"
        "print(check('http://example.org/ü', 'iri'), check('no address', 'iri'))"
    )
    answers = output_of(sys.executable, "-W", "ignore", "-c", code)
    check("and work when needed", answers == "True False", answers)
    extensions = output_of("jupyter", "server", "extension", "list")
    check("JupyterLab is on", "jupyterlab" in extensions, "yes")
    try:
        from importlib.metadata import version as version_of

        extension = version_of("jupyterlab-fgpu")
    except ModuleNotFoundError:
        check("jupyterlab-fgpu", True, "not in this image")
        return
    listed = subprocess.run(["jupyter", "labextension", "list"], check=False, capture_output=True, text=True)
    lines = [line for line in (listed.stdout + listed.stderr).splitlines() if "fgpu" in line]
    works = any("enabled" in line and "OK" in line for line in lines)
    check(f"jupyterlab-fgpu {extension}", works, "; ".join(line.strip() for line in lines))


def check_kernel() -> None:
    from jupyter_client.manager import start_new_kernel

    begun_s = time.monotonic()
    manager, client = start_new_kernel(kernel_name="python3", startup_timeout=60)
    printed: list[str] = []
    try:
        client.execute_interactive(
            "import sys; print(sys.version.split()[0])",
            timeout=60,
            output_hook=lambda message: printed.append(message["content"].get("text", "")),
        )
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
    said = "".join(printed).strip()
    check("kernel", said.startswith("3."), f"Python {said} in {time.monotonic() - begun_s:.2f} s")


def main() -> None:
    check_user()
    check_system()
    check_server()
    check_kernel()
    import pynvml

    check("nvidia-ml-py", hasattr(pynvml, "nvmlInit"), "present")


if __name__ == "__main__":
    main()
