"""The Hub as a unit of systemd, and its user: commands that root runs write and judge as that user."""

from __future__ import annotations

import contextlib
import grp
import os
import pwd
import subprocess
from collections.abc import Iterator
from pathlib import Path

HUB, PROXY = "jupyterhub.service", "jupyterhub-proxy.service"
"""As `fgpu setup` writes them."""


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
    """Be the owner of the Hub's data folder for a while, if this is root: what is written is then the Hub's.

    ``lent`` are folders of this process, which that user can use afterwards.
    """
    if os.geteuid() != 0 or not data.is_dir() or (owner := data.stat()).st_uid == 0:
        yield
        return
    user, group = owner.st_uid, owner.st_gid
    for path in (path for folder in lent for path in (folder, *folder.rglob("*"))):
        os.chown(path, user, group)
    before, groups = os.getgroups(), [group]
    with contextlib.suppress(KeyError):
        name = pwd.getpwuid(user).pw_name
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
