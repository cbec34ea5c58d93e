"""What the files of images and containers say: an image's user, and what a session has installed. Everything blocks.

Nothing is run in a session, because its programs could lie; and a session can change millions of files.
"""

from __future__ import annotations

import contextlib
import io
import json
import tarfile
from collections.abc import Iterator, Mapping
from typing import Any

from docker.errors import DockerException, NotFound

from fgpuspawner.engines.docker.client import GONE
from fgpuspawner.engines.docker.create import is_root
from fgpuspawner.images import recipe
from fgpuspawner.images.recipe import DPKG, Base

MOST_BYTES = 32 * 2**20
MOST_CHANGES = 500_000
PIECE_BYTES = 2**18
PASSWD = "/etc/passwd"
MOST_OF_PASSWD = 1 << 20


def changed_files(client: Any, container: str) -> dict[str, int]:
    """Return the changed paths with the kind of change: 0 modified, 1 added, 2 deleted.

    Raises:
        DockerException: the engine does not answer.
        ValueError: there are too many.
    """
    answer = client._get(client._url("/containers/{0}/changes", container), stream=True)
    with contextlib.closing(answer):
        client._raise_for_status(answer)
        listed = bytearray()
        for piece in answer.iter_content(PIECE_BYTES):
            listed += piece
            if len(listed) > MOST_BYTES:
                raise ValueError(
                    f"too many files have changed; at most {MOST_BYTES >> 20} MiB of their names are looked at"
                )
    text = listed.decode("utf-8", "replace")
    # Decoded one by one, so that other threads can run.
    decode = json.JSONDecoder().raw_decode
    found: dict[str, int] = {}
    at = text.find("{")
    while at >= 0:
        entry, at = decode(text, at)
        found[str(entry["Path"])] = int(entry["Kind"])
        if len(found) > MOST_CHANGES:
            raise ValueError(f"more than {MOST_CHANGES} files have changed, and no more are looked at")
        at = text.find("{", at)
    return found


def read_file(client: Any, container: str, path: str, most_bytes: int) -> bytes:
    """Return a regular file's content; empty if it is none.

    Raises:
        DockerException: the engine does not answer.
        ValueError: it is larger.
    """
    try:
        stream, _ = client.get_archive(container, path)
    except NotFound:
        return b""
    packed = io.BytesIO()
    for chunk in stream:
        packed.write(chunk)
        if packed.tell() > most_bytes:
            raise ValueError(f"{path} is larger than {most_bytes} bytes")
    packed.seek(0)
    with tarfile.open(fileobj=packed) as tar:
        entry = tar.next()
        found = tar.extractfile(entry) if entry is not None and entry.isreg() else None
        return found.read() if found is not None else b""


@contextlib.contextmanager
def _never_started(client: Any, image: str, name: str) -> Iterator[None]:
    """Make a container that is never started: only the image's files are read."""
    # A killed Hub may have left it.
    with contextlib.suppress(NotFound):
        client.remove_container(name, force=True, v=True)
    client.create_container(image, ["true"], network_disabled=True, name=name)
    try:
        yield
    finally:
        client.remove_container(name, force=True, v=True)


def has_roots_number(client: Any, image: Mapping[str, Any], *, helper: str) -> bool:
    """Return whether an image's ``USER`` is root, by any name, or cannot be looked up.

    ``helper`` names a container that is made for this if necessary, and removed.
    """
    name = str((image.get("Config") or {}).get("User") or "").split(":")[0]
    if is_root(name) or (name.isascii() and name.isdigit()):
        return is_root(name)
    with _never_started(client, image["Id"], helper):
        try:
            numbers = numbers_of(name, read_file(client, helper, PASSWD, MOST_OF_PASSWD))
        except ValueError:
            return True
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


def base_of(image: Mapping[str, Any], reference: str) -> Base:
    """Return the image that a recipe builds on."""
    digests = image.get("RepoDigests") or []
    user = str((image.get("Config") or {}).get("User") or "root")
    return Base(digests[0] if digests else reference, str(image["Id"]), user, bool(digests))


def recorded(
    client: Any, container: str, base: Base, *, name: str, helper: str, before: str | None = None
) -> str:
    """Return the Dockerfile of what a session has installed, or one that says why there is none.

    ``helper`` names a container that is made for this if necessary, and removed; ``before`` is the recipe of the image
    that the session was started from.
    """
    try:
        changed = changed_files(client, container)
        apt: tuple[dict[str, str], list[str]] = ({}, [])
        if DPKG in changed:
            with _never_started(client, client.inspect_container(container)["Image"], helper):
                files = [read_file(client, one, DPKG, recipe.MOST_BYTES) for one in (helper, container)]
            apt = recipe.packages_changed(*files)
        return recipe.dockerfile(recipe.read_changes(changed, *apt), base, name=name, before=before)
    except (DockerException, ValueError, tarfile.TarError, OSError, *GONE) as e:
        return recipe.not_written(e, base, name=name, before=before)
