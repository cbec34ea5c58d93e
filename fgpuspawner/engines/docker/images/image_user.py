"""The user that an image's server runs as. A user name says little, as any name can have root's number."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import docker

from fgpuspawner.engines.docker.images.changed_files import read_file

PASSWD = "/etc/passwd"
MOST_BYTES = 1 << 20


def is_root(user: str) -> bool:
    """Return whether an image's ``USER`` (name or number, perhaps with a group) is root or missing."""
    name = user.split(":")[0]
    try:
        return int(name) == 0  # The engine also parses 00 as a number.
    except ValueError:
        return name in ("", "root")


def has_roots_number(client: docker.APIClient, image: Mapping[str, Any], *, helper: str) -> bool:
    """Return whether an image's ``USER`` is a name with root's number, or cannot be looked up. Blocks.

    Creates the container ``helper``, never starts it, and removes it.
    """
    name = str((image.get("Config") or {}).get("User") or "").split(":")[0]
    if is_root(name) or (name.isascii() and name.isdigit()):
        return is_root(name)
    client.create_container(image["Id"], ["true"], network_disabled=True, name=helper)
    try:
        numbers = numbers_of(name, read_file(client, helper, PASSWD, MOST_BYTES))
    except ValueError:
        return True
    finally:
        client.remove_container(helper, force=True, v=True)
    return not numbers or 0 in numbers


def numbers_of(name: str, passwd: bytes) -> list[int]:
    """Return a user's numbers in a passwd file, in its order; an invalid one is 0."""
    found = []
    # Parsed as the engine does: only line feeds end lines, surrounding space is ignored, a missing number is 0.
    for line in passwd.decode(errors="replace").split("\n"):
        fields = [*line.strip().split(":"), "", ""]
        if fields[0] == name:
            found.append(int(fields[2]) if fields[2].isascii() and fields[2].isdigit() else 0)
    return found
