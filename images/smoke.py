"""Run inside a container of an image (`images/build.sh NAME --smoke`): is it fit for a session?

Prints one line for each fact checked and ends with status 1 at the first that does not hold.
Run by the server environment's own Python.
"""

from __future__ import annotations

import argparse
import os
import pwd
import shutil
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as version_of
from pathlib import Path

import pynvml
from jupyter_client.manager import start_new_kernel


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


def check_programs() -> None:
    shell = os.environ.get("SHELL", "")
    check("shell", os.access(shell, os.X_OK), shell)
    # JupyterLab's terminals are login shells.
    for name, place in (
        ("python", "/opt/env/bin/python"),
        ("pip", "/opt/env/bin/pip"),
        ("jupyterhub-singleuser", "/opt/fgpu/commands/jupyterhub-singleuser"),
    ):
        found = output_of(shell, "-lc", f"command -v {name}")
        check(f"{name} in a terminal", found == place, found)
        check(f"{name} on the PATH", shutil.which(name) == place, shutil.which(name))
    bundle = Path("/etc/ssl/certs/ca-certificates.crt").read_text(encoding="utf-8")
    count = bundle.count("BEGIN CERTIFICATE")
    check("certificate authorities", count > 50, count)


def check_own_libraries() -> None:
    """Nothing of the image's is in the server's processes: that is what lets them run in any."""
    code = (
        "import ctypes, ssl, sqlite3, socket, zmq, psutil, tornado.speedups, cryptography.x509, sqlalchemy;"
        "print(socket.gethostbyname('localhost'), ssl.create_default_context().cert_store_stats()['x509_ca'] > 50);"
        "print(*sorted({l.split()[-1] for l in open('/proc/self/maps') if '.so' in l}))"
    )
    said = output_of(sys.executable, "-I", "-c", code).splitlines()
    check("names and certificates", said[0] == "127.0.0.1 True", said[0])
    others = [path for path in said[-1].split() if not path.startswith("/opt/fgpu/")]
    check(
        "libraries of its own", len(said) == 2 and not others, " ".join(others) or f"{len(said[-1].split())}"
    )


def check_users_environment() -> None:
    """What users install goes to /opt/env or home, is seen by kernels, and cannot break the server."""
    python = "/opt/env/bin/python"
    version, site, home = output_of(
        python,
        "-c",
        "import sys, sysconfig, site; print('%d.%d' % sys.version_info[:2], sysconfig.get_path('purelib'),"
        "site.getusersitepackages())",
    ).split()
    writable = [path for path in ("/", "/opt", "/opt/fgpu", "/opt/fgpu/commands") if os.access(path, os.W_OK)]
    check("the server environment is root's", not writable, " ".join(writable) or "yes")
    check("the users' environment is writable", os.access("/opt/env", os.W_OK), "/opt/env")
    check("Python", site == f"/opt/env/lib/python{version}/site-packages", version)
    pip = output_of("/opt/env/bin/pip", "--version")
    there = pip.startswith("pip ") and f" /opt/env/lib/python{version}/site-packages/pip" in pip
    # Before Python 3.10 it needs distutils, which Debian and Ubuntu have in a package of its own.
    check("pip installs there", there, pip.splitlines()[-1].partition(" (")[0])
    # With --base host it has what the machine has of these.
    for tool in filter(shutil.which, ("curl", "editor", "git", "less", "nano")):
        said = output_of(tool, "--version").partition("\n")[0]
        check(f"{tool} runs", any(letter.isdigit() for letter in said), said)
    for folder in (site, home):
        Path(folder).mkdir(parents=True, exist_ok=True)
    (Path(home) / "traitlets.py").write_text("broken = True\n", encoding="ascii")
    (Path(home) / "fgpu_smoke_home.py").write_text("", encoding="ascii")
    (Path(site) / "fgpu_smoke_env.py").write_text("", encoding="ascii")
    code = "import fgpu_smoke_home, fgpu_smoke_env, traitlets; print(hasattr(traitlets, 'broken'))"
    found = output_of(python, "-c", code)
    check("packages at home come after the environment's", found == "False", found)
    found = output_of("jupyterhub-singleuser", "--version")
    check("and not into the server", found[:1].isdigit(), found)
    for path in (
        Path(home) / "traitlets.py",
        Path(home) / "fgpu_smoke_home.py",
        Path(site) / "fgpu_smoke_env.py",
    ):
        path.unlink()


def check_server() -> None:
    version = output_of("jupyterhub-singleuser", "--version")
    check("jupyterhub-singleuser", version[:1].isdigit(), version)
    begun_s = time.monotonic()
    # The stale or missing byte code that this would reveal costs every start 1.5 s.
    code = "import jupyterhub.singleuser, sys; print('lark' in sys.modules)"
    eager = output_of(sys.executable, "-I", "-c", code)
    check("grammars are left for later", eager == "False", f"{time.monotonic() - begun_s:.2f} s")
    code = (
        "import jsonschema as j; check = j.FormatChecker(['iri']).conforms;"
        "print(check('http://example.org/\u00fc', 'iri'), check('no address', 'iri'))"
    )
    answers = output_of(sys.executable, "-I", "-W", "ignore", "-c", code)
    check("and work when needed", answers == "True False", answers)
    extensions = output_of("jupyter", "server", "extension", "list")
    check("JupyterLab is on", "jupyterlab" in extensions, "yes")
    try:
        extension = version_of("jupyterlab-fgpu")
    except PackageNotFoundError:
        check("jupyterlab-fgpu", True, "not in this image")
        return
    listed = subprocess.run(["jupyter", "labextension", "list"], check=False, capture_output=True, text=True)
    lines = [line for line in (listed.stdout + listed.stderr).splitlines() if "fgpu" in line]
    works = any("enabled" in line and "OK" in line for line in lines)
    check(f"jupyterlab-fgpu {extension}", works, "; ".join(line.strip() for line in lines))


def check_kernel(module: str, wanted: str) -> None:
    """A notebook opens on the framework, and it says its version."""
    begun_s = time.monotonic()
    manager, client = start_new_kernel(startup_timeout=120)
    printed: list[str] = []
    code = "import sys\nprint('%d.%d' % sys.version_info[:2], sys.executable)"
    code += "\nprint('%fgpu', get_ipython().find_line_magic('fgpu') is not None)"
    if module:
        code += f"\nimport {module}\nprint('{module}', {module}.__version__)"
    try:
        client.execute_interactive(
            code,
            timeout=120,
            output_hook=lambda message: printed.append(message["content"].get("text", "")),
        )
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
    lines = "".join(printed).splitlines()
    first = next((line for line in lines if line.endswith("/opt/env/bin/python")), "")
    took = f"{time.monotonic() - begun_s:.2f} s"
    name = manager.kernel_spec.display_name
    has_extension = (Path("/opt/fgpu/kernel") / "jupyterlab_fgpu" / "widget.py").exists()
    check("%fgpu in the kernel", f"%fgpu {has_extension}" in lines, str(has_extension))
    check(
        "kernel", bool(first) and f"Python {first.split(' ')[0]}" in name, f"{name}: Python {first} in {took}"
    )
    if module:
        said = lines[-1] if lines else ""
        check("framework", said.startswith(f"{module} {wanted}"), said)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--module", default="", help="what the kernel imports")
    parser.add_argument("--version", default="", help="how the module's version begins")
    given = parser.parse_args()
    check_user()
    check_programs()
    check_own_libraries()
    check_users_environment()
    check_server()
    check_kernel(given.module, given.version)
    check("nvidia-ml-py", hasattr(pynvml, "nvmlInit"), "present")


if __name__ == "__main__":
    main()
