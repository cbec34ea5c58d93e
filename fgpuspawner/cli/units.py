"""The Hub as a unit of systemd, and its user: commands that root runs write and judge as that user."""

from __future__ import annotations

import contextlib
import grp
import os
import pwd
import re
import subprocess
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from fgpuspawner.text.tables import printable

HUB, PROXY = "jupyterhub.service", "jupyterhub-proxy.service"
"""As `fgpu setup` writes them."""
FAILS_WITHIN_S = 60.0
"""A unit that was restarted and runs for a shorter time is not known to work."""
LINES = 200
ERROR = re.compile(r"fgpuspawner: |\[[EC] |[\d:.]+ \[ConfigProxy\] error|\s*[\w.]+(Error|Exception): ")
COLOURS = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True, slots=True)
class UnitState:
    """How a unit is: "running", "starting", "restarting", "failed" or "stopped"; with the reason where it is known."""

    name: str
    state: str
    restarts: int = 0
    reason: str = ""

    def words(self) -> str:
        """Return the state as one line."""
        times = f" ({self.restarts} time{'s' * (self.restarts != 1)})" if self.restarts else ""
        why = f": {self.reason}" if self.reason else ""
        if self.state == "failed":
            name = self.name.removesuffix(".service")
            why += f"; systemd has given up. Fix it, then run: systemctl reset-failed {name}; systemctl start {name}"
        return f"{self.name}: {self.state}{times}{why}"


def unit_states() -> list[UnitState]:
    """Return how the units of Hub and proxy are; empty where systemd has none of them."""
    return [_state(name, found) for name in (HUB, PROXY) if (found := unit(name))]


def _state(name: str, found: Mapping[str, str]) -> UnitState:
    restarts, active = int(found["NRestarts"]), found["ActiveState"]
    runs_s = time.monotonic() - int(found["ActiveEnterTimestampMonotonic"]) / 1e6
    if active == "active" and not (restarts and runs_s < FAILS_WITHIN_S):
        return UnitState(name, "running", restarts)
    if active == "activating" and not restarts and found["SubState"] != "auto-restart":
        return UnitState(name, "starting")
    if active not in ("active", "activating", "failed"):
        return UnitState(name, "stopped")
    killed = found["Result"] not in ("success", "exit-code")
    reason = f"ended, as systemd says, by {found['Result']}" if killed else _last_error(name)
    return UnitState(name, "failed" if active == "failed" else "restarting", restarts, reason)


def _last_error(name: str) -> str:
    """Return the last error that a unit's programs logged, or else their last line; empty where it cannot be read."""
    words = f"journalctl _SYSTEMD_UNIT={name} --output=cat --no-pager --quiet --lines={LINES}"
    with contextlib.suppress(FileNotFoundError):
        done = subprocess.run(words.split(), capture_output=True, text=True, errors="replace", check=False)
        lines = [COLOURS.sub("", line).strip() for line in reversed(done.stdout.splitlines())]
        return printable(next((line for line in lines if ERROR.match(line)), lines[0] if lines else ""))
    return ""


def unit(name: str) -> dict[str, str]:
    """Return the properties of a unit; empty where there is none of that name, or no systemd runs."""
    try:
        done = subprocess.run(["systemctl", "show", name], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return {}
    found = {key: value for key, _, value in (line.partition("=") for line in done.stdout.splitlines())}
    return found if found.get("LoadState") == "loaded" else {}


@contextlib.contextmanager
def as_hub_user(data: Path, *lent: Path) -> Iterator[None]:
    """Act as the owner of the Hub's data folder during the block, if this is root: what is written is then the Hub's.

    That user's home is the process's, too. ``lent`` are folders of this process, which that user can use afterwards.
    """
    if os.geteuid() != 0 or not data.is_dir() or (owner := data.stat()).st_uid == 0:
        yield
        return
    user, group = owner.st_uid, owner.st_gid
    # The folder last: its owner could replace a file by a link, and root would follow that.
    for path in [path for folder in lent for path in (folder, *folder.rglob("*"))][::-1]:
        os.chown(path, user, group, follow_symlinks=False)
    before, groups, home = os.getgroups(), [group], os.environ.get("HOME", "/root")
    with contextlib.suppress(KeyError):
        name, *_, os.environ["HOME"], _ = pwd.getpwuid(user)
        groups = os.getgrouplist(name, group)
        hub = unit(HUB)
        if hub.get("User") == name:
            groups += [grp.getgrnam(of).gr_gid for of in hub["SupplementaryGroups"].split()]
    os.setgroups(groups)
    # Root stays the saved user, so that this process can come back. Programs that it starts cannot.
    os.setresgid(group, group, 0)
    os.setresuid(user, user, 0)
    try:
        yield
    finally:
        os.setresuid(0, 0, 0)
        os.setresgid(0, 0, 0)
        os.setgroups(before)
        os.environ["HOME"] = home
