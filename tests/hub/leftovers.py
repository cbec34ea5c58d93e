"""What a Hub of containers leaves on a machine when it is killed."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable
from functools import partial

from fgpuspawner.engines.docker import firewall
from hubprocess import until

LISTED_AND_REMOVED = (
    (["ps", "--all"], ["rm", "--force", "--volumes"]),
    (["network", "ls"], ["network", "rm"]),
)


def remove_leftovers(installation: str, engines: Iterable[str] = ("",)) -> None:
    """Remove an installation's containers and networks on these engines, and its rules on this machine.

    A hundred unused networks, with their rules, slow down later tests.
    """
    for host in engines:
        cli = ["docker", *(["--host", host] if host else [])]
        for listing, removal in LISTED_AND_REMOVED:
            gone = partial(_removed, installation, [*cli, *listing], [*cli, *removal])
            until(gone, within_s=180)
    if firewall.can_apply():
        firewall.run(firewall.removal(installation))


def _removed(installation: str, listing: list[str], removal: list[str]) -> bool:
    words = [*listing, "--quiet", "--no-trunc", "--filter", f"label=fgpu.installation={installation}"]
    found = subprocess.run(words, capture_output=True, text=True, check=True, timeout=300).stdout.split()
    if found:
        # A container that another process is removing is refused.
        subprocess.run([*removal, *found], capture_output=True, check=False, timeout=300)
    return not found
