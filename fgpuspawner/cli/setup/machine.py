"""The machine, or a folder in its place: what is there, and how it is changed."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from fgpu_scheduler import BadSettings

LONGEST_S = 1800


@dataclass(frozen=True, slots=True)
class Machine:
    """Files are below ``root``. Only with "/" is anything started, stopped or asked of the engine."""

    root: Path

    @property
    def is_real(self) -> bool:
        """Return whether this is the machine itself."""
        return self.root == Path("/")

    def at(self, path: str) -> Path:
        """Return where a path of the installation is."""
        return self.root / path.lstrip("/")

    def read(self, path: str) -> str | None:
        """Return a file's text, None where there is none."""
        try:
            return self.at(path).read_text()
        except FileNotFoundError:
            return None

    def number(self, name: str, *, of: str) -> int | None:
        """Return the number of a user (``passwd``) or a group (``group``), None where there is none."""
        for line in (self.read(f"/etc/{of}") or "").splitlines():
            words = line.split(":")
            if words[0] == name:
                return int(words[2])
        return None

    def write(self, path: str, text: str, mode: int, group: int | None) -> None:
        """Write a file whole or not at all. Nobody reads it before it has its rights."""
        place = self.at(path)
        place.parent.mkdir(parents=True, exist_ok=True, mode=0o755)
        there = place.with_name(f".{place.name}.{secrets.token_hex(4)}")
        descriptor = os.open(there, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        try:
            with open(descriptor, "w") as file:
                file.write(text)
                file.flush()
                if group is not None and os.geteuid() == 0:
                    os.fchown(descriptor, 0, group)
                os.fchmod(descriptor, mode)
                os.fsync(descriptor)
            there.replace(place)
        except BaseException:
            with contextlib.suppress(OSError):
                there.unlink()
            raise

    def do(self, *words: str | Path) -> str:
        """Run a program and return what it prints.

        Raises:
            BadSettings: it is not there, or failed; one line with its last words.
        """
        done = self.tried(*words)
        if done.returncode:
            last = ((done.stderr or done.stdout).strip().splitlines() or ["no words"])[-1]
            shown = " ".join(map(str, words))
            raise BadSettings(
                f"{shown} ended with {done.returncode}: {last}; mend it and run fgpu setup again"
            )
        return done.stdout

    def tried(self, *words: str | Path) -> subprocess.CompletedProcess[str]:
        """Run a program and return what became of it."""
        try:
            return subprocess.run(
                [str(word) for word in words], capture_output=True, text=True, check=False, timeout=LONGEST_S
            )
        except FileNotFoundError:
            return subprocess.CompletedProcess([], 127, "", f"there is no {words[0]} here")
        except subprocess.TimeoutExpired:
            return subprocess.CompletedProcess([], 124, "", f"not done within {LONGEST_S} s")

    def systemctl(self, *words: str) -> None:
        """Have systemd do something; on a folder only what needs no running one."""
        self.do("systemctl", *([] if self.is_real else [f"--root={self.root}"]), *words)

    def is_on(self, unit: str) -> bool:
        """Return whether a unit starts with the machine, and runs."""
        root = [] if self.is_real else [f"--root={self.root}"]
        enabled = self.tried("systemctl", *root, "is-enabled", "--quiet", unit).returncode == 0
        if not self.is_real:
            return enabled
        return enabled and self.tried("systemctl", "is-active", "--quiet", unit).returncode == 0


def program(name: str, *folders: Path) -> Path | None:
    """Return where a program is: in these folders, or on PATH."""
    path = os.pathsep.join([*map(str, folders), os.environ.get("PATH", os.defpath)])
    found = shutil.which(name, path=path)
    return Path(found).absolute() if found else None
