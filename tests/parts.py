#!/usr/bin/env python3
"""The slow parts of the tests, and which of them have changed since they last passed.

parts.py              lists the parts: when each last passed, in how many seconds, and whether its sources have changed
parts.py names        prints the names of all parts;  changed: of the changed ones
parts.py hash         prints each part's name and the hash of its sources, as JSON
parts.py passed FILE SECONDS NAME...    records that these passed, with the hashes that `hash` wrote to FILE
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parent
RECORD = HERE / "parts.json"


@dataclass(frozen=True)
class Part:
    """A slow part of the tests; tests/parts.toml explains its fields."""

    name: str
    sources: list[str]
    tests: tuple[str, ...] = ()
    fast: tuple[str, ...] = ()
    marker: str | None = None

    def has(self, path: str, markers: set[str]) -> bool:
        """Return whether a test belongs to this part. `path` is its file's path below tests/."""
        return self.marker in markers or (
            path.startswith(tuple(f"{t}/" for t in self.tests)) and path not in self.fast
        )

    def digest(self) -> str:
        """Return a hash of the paths and contents of the sources: all files that git tracks or would add."""
        command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *self.sources]
        names = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split(
            "\0"
        )
        found = sha256()
        for name in sorted(n for n in set(names) if n and (ROOT / n).is_file()):
            found.update(f"{name}\0{sha256((ROOT / name).read_bytes()).hexdigest()}\n".encode())
        return found.hexdigest()


@cache
def parts() -> list[Part]:
    """Return the parts, in the order of tests/parts.toml."""
    return [Part(name, **known) for name, known in tomllib.loads((HERE / "parts.toml").read_text()).items()]


def part_of(path: str, markers: set[str]) -> str | None:
    """Return the name of the first part that has the test, or None if `make test` always runs it."""
    return next((p.name for p in parts() if p.has(path, markers)), None)


def record() -> dict[str, dict[str, Any]]:
    """Return the record of each part that has ever passed."""
    return json.loads(RECORD.read_text()) if RECORD.exists() else {}


def changed() -> list[str]:
    """Return the names of the parts with sources that changed since they passed."""
    known = record()
    return [p.name for p in parts() if known.get(p.name, {}).get("hash") != p.digest()]


def passed(hashes: dict[str, str], seconds: int, names: Iterable[str]) -> None:
    """Record that these parts passed today, in one run of this length."""
    run = {"date": time.strftime("%Y-%m-%d", time.gmtime()), "run_s": seconds}
    known = record() | {name: {"hash": hashes[name], **run} for name in names}
    RECORD.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")


def main(arguments: list[str]) -> None:
    """Do what the module's docstring says."""
    match arguments:
        case []:
            stale, known = changed(), record()
            for part in parts():
                when = f"passed on {known[part.name]['date']}" if part.name in known else "has not passed yet"
                print(
                    f"{part.name:<12} {when}{', its sources have changed since' if part.name in stale else ''}"
                )
        case ["names"]:
            print(*(p.name for p in parts()))
        case ["changed"]:
            print(*changed())
        case ["hash"]:
            print(json.dumps({p.name: p.digest() for p in parts()}))
        case ["passed", file, seconds, *names]:
            passed(json.loads(Path(file).read_text()), int(seconds), names)
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
