"""A session's files on another machine: copied there into volumes of its engine.

A container can only mount what is on its own machine. So a session's files are copied into a volume there, and mounted
from the folder in which the engine keeps the volume. What the sessions of a node share (a simulated machine's ledger)
is in a volume of the node, named after its content. All functions raise `DockerException` if the engine fails.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import tarfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath

import docker
from docker.errors import APIError, NotFound

from fgpuspawner.isolation.base import Mount
from fgpuspawner.isolation.native import WRITTEN_BY_SESSIONS

LABEL = "fgpu.files"
"""Not a label that identifies sessions."""
NODE = "fgpu.node"
AT = "/fgpu"
SUFFIX = "-files"


def volume_of(container: str) -> str:
    return f"{container}{SUFFIX}"


def containers_of_volumes(client: docker.APIClient, installation: str) -> dict[str, str]:
    """Return the containers for which files were copied, whether or not they exist, with their nodes. Blocks."""
    listed = client.volumes(filters={"label": f"{LABEL}={installation}"})["Volumes"] or ()
    return {
        v["Name"].removesuffix(SUFFIX): (v.get("Labels") or {}).get(NODE, "")
        for v in listed
        if v["Name"].endswith(SUFFIX)
    }


def ship(
    client: docker.APIClient,
    *,
    container: str,
    image: str,
    installation: str,
    node: str,
    mounts: Sequence[Mount],
    shared: Path | None = None,
) -> tuple[Mount, ...]:
    """Copy the sources of ``mounts`` to the engine and return the mounts with their paths there. Blocks.

    What is below ``shared`` goes into the node's volume, if that is new. ``image`` is any image there: files get into a
    volume through a container of it, which is never started.
    """
    common = [m for m in mounts if shared is not None and m.source.is_relative_to(shared)]
    own = [m for m in mounts if m not in common]
    labels = {LABEL: installation, NODE: node}
    files = {str(n): m.source for n, m in enumerate(own)}
    place = _filled(client, volume_of(container), image, labels, files)
    found = [replace(m, source=place / str(n)) for n, m in enumerate(own)]
    if common:
        assert shared is not None
        volume = ship_machine(client, image=image, installation=installation, folder=shared)
        place = Path(client.inspect_volume(volume)["Mountpoint"])
        found += [replace(m, source=place / m.source.relative_to(shared)) for m in common]
    by_target = {m.target: m for m in found}
    return tuple(by_target[m.target] for m in mounts)


def ship_machine(client: docker.APIClient, *, image: str, installation: str, folder: Path) -> str:
    """Copy a simulated machine to the engine if it is missing, and return its volume. Blocks."""
    volume = f"fgpu-{installation}-machine-{folder.name}-{_digest(folder)}"
    _filled(client, volume, image, {LABEL: installation}, {".": folder})
    return volume


def unship(client: docker.APIClient, container: str) -> None:
    """Remove the files of a container that is gone; idempotent."""
    with contextlib.suppress(NotFound):
        client.remove_container(_carrier(volume_of(container)), v=True, force=True)
    with contextlib.suppress(NotFound):
        client.remove_volume(volume_of(container), force=True)


def _carrier(volume: str) -> str:
    return f"{volume}-carrier"


def _filled(
    client: docker.APIClient, volume: str, image: str, labels: dict[str, str], files: dict[str, Path]
) -> Path:
    """Return the engine's folder of a volume with these files; a complete one is reused."""
    with contextlib.suppress(NotFound):
        found = client.inspect_volume(volume)
        if _is_complete(client, volume):
            return Path(found["Mountpoint"])
        client.remove_volume(volume, force=True)
    client.create_volume(volume, labels=labels)
    carrier = _carrier(volume)
    with contextlib.suppress(NotFound):
        client.remove_container(carrier, v=True, force=True)
    client.create_container(
        image,
        command=["true"],
        name=carrier,
        labels=labels,
        volumes=[AT],
        host_config=client.create_host_config(
            binds={volume: {"bind": AT, "mode": "rw,nocopy"}}, network_mode="none"
        ),
    )
    client.put_archive(carrier, AT, _packed(files))
    # The carrier's absence marks the volume as complete.
    client.remove_container(carrier, v=True, force=True)
    return Path(client.inspect_volume(volume)["Mountpoint"])


def _is_complete(client: docker.APIClient, volume: str) -> bool:
    try:
        client.inspect_container(_carrier(volume))
    except NotFound:
        return True
    except APIError:
        return False
    return False


def _packed(files: dict[str, Path]) -> bytes:
    def rooted(info: tarfile.TarInfo) -> tarfile.TarInfo:
        info.uid = info.gid = 0
        info.uname = info.gname = ""
        return info

    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for name, source in files.items():
            tar.add(source.resolve(), arcname=str(PurePosixPath(name)), filter=rooted)
    return packed.getvalue()


def _digest(folder: Path) -> str:
    """Return a short digest of a simulated machine, without the files that sessions write."""
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if path.name not in WRITTEN_BY_SESSIONS:
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]
