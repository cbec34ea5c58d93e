"""The machine that ``fgpu setup`` sets up, or a folder in its place, and the record of what it has done there."""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fgpu_scheduler import BadSettings

RECORD = "/etc/jupyterhub/fgpu-setup.json"
VERSION = 1
LONGEST_S = 1800


@dataclass(frozen=True, slots=True)
class Machine:
    """The machine, or a folder in its place. Only with "/" is anything started, stopped or asked of the engine."""

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
        return self.at(path).read_text() if self.at(path).exists() else None

    def number(self, name: str, *, of: str) -> int | None:
        """Return the number of a user (``passwd``) or a group (``group``), None where there is none."""
        lines = (line.split(":") for line in (self.read(f"/etc/{of}") or "").splitlines())
        return next((int(words[2]) for words in lines if words[0] == name), None)

    def tried(self, *words: str | Path) -> subprocess.CompletedProcess[str]:
        """Run a program and return what became of it. On a folder systemctl changes only files."""
        if words[0] == "systemctl" and not self.is_real:
            words = ("systemctl", f"--root={self.root}", *words[1:])
        try:
            return subprocess.run(words, capture_output=True, text=True, check=False, timeout=LONGEST_S)
        except FileNotFoundError:
            return subprocess.CompletedProcess([], 127, "", f"there is no {words[0]} here")
        except subprocess.TimeoutExpired:
            return subprocess.CompletedProcess([], 124, "", f"not done within {LONGEST_S} s")

    def do(self, *words: str | Path) -> str:
        """Run a program and return what it prints."""
        done = self.tried(*words)
        if done.returncode:
            last = ((done.stderr or done.stdout).strip().splitlines() or ["no words"])[-1]
            shown = " ".join(map(str, words))
            raise BadSettings(
                f"{shown} ended with {done.returncode}: {last}; mend it and run fgpu setup again"
            )
        return done.stdout

    def is_on(self, unit: str) -> bool:
        """Return whether a unit starts with the machine, and runs."""
        asked = ("is-enabled", "is-active") if self.is_real else ("is-enabled",)
        return not any(self.tried("systemctl", how, "--quiet", unit).returncode for how in asked)


@dataclass(slots=True)
class Record:
    """What setup has done to a machine, and the answers that it got."""

    answers: dict[str, Any] = field(default_factory=dict)
    written: dict[str, str] = field(default_factory=dict)
    """The digest of each file, as it was written."""
    before: dict[str, str] = field(default_factory=dict)
    """Where what was there before the first setup is kept, by the path that it is put back to."""
    made_user: str = ""
    folders: list[str] = field(default_factory=list)


def read_record(machine: Machine) -> Record | None:
    """Return the record; None where nothing was set up."""
    path, text = machine.at(RECORD), machine.read(RECORD)
    try:
        found = None if text is None else json.loads(text)
    except ValueError:
        raise BadSettings(
            f"{path} is damaged; restore it from a backup, or remove it to set up again"
        ) from None
    if text is not None and (not isinstance(found, dict) or found.pop("version", None) != VERSION):
        raise BadSettings(f"{path} is of another version of fgpuspawner; use that one's fgpu setup")
    return Record(**found) if found is not None else None
