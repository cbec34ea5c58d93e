"""The shape of a warm container, and whether it suits a session: see `warm_pool.py`."""

from __future__ import annotations

import json
import os
import posixpath
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fgpuspawner.engines.docker.containers import LABEL
from fgpuspawner.engines.docker.homes import Home

LARGEST_FILE_BYTES = 64 * 1024
CHANGEABLE = ("Memory", "MemorySwap", "CpuPeriod", "CpuQuota", "NanoCpus", "PidsLimit", "CpuShares")
"""Keys of a container's HostConfig that the engine can change while it runs."""
FOLDER, WORDS = "{folder}", "{words}"
"""Placeholders in the sources of mounts, for the session's folder and for its lending folder."""


class Unpoolable(Exception):
    """The reason why a session starts cold."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What the engine is asked for, without what can be changed later.

    ``kwargs`` are docker-py's, as JSON has them, with placeholders for the session's own paths. ``targets`` are the
    paths of homes.
    """

    image_id: str
    kwargs: Mapping[str, Any]
    targets: tuple[str, ...]

    @property
    def mounts(self) -> list[dict[str, Any]]:
        return self.kwargs["host_config"].get("Mounts") or []

    def lent_devices(self) -> int:
        """Return the number of devices with a file in the lending folder."""
        return sum(mount.get("Source", "").startswith(f"{WORDS}/") for mount in self.mounts)

    def stamps(self) -> tuple[tuple[str, int, int], ...]:
        """Return path, device and inode of the host's files that it mounts, without the session's own. Blocks."""
        sources = {mount.get("Source", "") for mount in self.mounts}
        sources |= {bind.split(":")[0] for bind in self.kwargs["host_config"]["Binds"]}
        found = ((source, os.stat(source)) for source in sorted(sources) if source.startswith("/"))
        return tuple((source, seen.st_dev, seen.st_ino) for source, seen in found)


@dataclass(frozen=True, slots=True)
class Recipe:
    """A shape, and the files of a session's folder before its limits are written."""

    shape: Shape
    files: tuple[tuple[str, int, str | None], ...]
    """Path in the folder, mode, and content (None for a folder)."""
    shared_memory_bytes: int = 0
    """Size of ``/dev/shm``. A larger one does no harm: its content counts as the session's memory."""

    def covers(self, other: Recipe) -> bool:
        """Return whether a container made like this suits a session that would be started like ``other``."""
        same = (self.shape, self.files) == (other.shape, other.files)
        return same and self.shared_memory_bytes >= other.shared_memory_bytes


def shape_of(
    kwargs: Mapping[str, Any],
    *,
    image_id: str,
    slice_environment: Mapping[str, str],
    folders: Mapping[str, Path | None],
) -> tuple[Shape, tuple[Home, ...]]:
    """Return the shape of a container that is about to be made, and its homes.

    ``slice_environment`` has the variables that describe the session; ``folders`` are its own, by placeholder.

    Raises:
        Unpoolable: it has something that a running container cannot be given.
    """
    if kwargs.get("networking_config"):
        raise Unpoolable("its network is configured in another way")
    host = {**(kwargs.get("host_config") or {})}
    homes, binds = [], []
    for bind in host.pop("Binds", None) or []:
        source, target, mode = (*bind.split(":"), "rw", "rw")[:3]
        if mode == "rw":
            homes.append(Home(source, posixpath.normpath(target)))
        else:
            binds.append(bind)
    targets = [*(home.target for home in homes), *_targets(host, binds)]
    for home in homes:
        # The home's mount would hide it.
        if any(target.startswith(home.target.rstrip("/") + "/") for target in targets):
            raise Unpoolable(f"something else is mounted within {home.target}")
    own = {str(folder): word for word, folder in folders.items() if folder is not None}
    host["Binds"], host["Mounts"] = binds, with_sources(host.get("Mounts") or (), own)
    environment = {k: v for k, v in (kwargs.get("environment") or {}).items() if k not in slice_environment}
    labels = {k: v for k, v in (kwargs.get("labels") or {}).items() if not k.startswith(f"{LABEL}.")}
    made = {k: v for k, v in kwargs.items() if k not in ("name", "command", "networking_config")}
    changeable = (*CHANGEABLE, "NetworkMode", "ShmSize")
    made |= {
        "environment": environment,
        "labels": labels,
        "host_config": {k: v for k, v in host.items() if k not in changeable},
    }
    try:
        as_json = json.loads(json.dumps(made))
    except TypeError:
        raise Unpoolable("its configuration has values that are no JSON") from None
    return Shape(image_id, as_json, tuple(h.target for h in homes)), tuple(homes)


def with_sources(mounts: Sequence[Mapping[str, Any]], places: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return mounts with sources at and below some folders moved to others."""

    def moved(source: str) -> str:
        for folder, place in places.items():
            if source == folder or source.startswith(f"{folder}/"):
                return place + source.removeprefix(folder)
        return source

    return [{**mount, "Source": moved(str(mount.get("Source", "")))} for mount in mounts]


def _targets(host: Mapping[str, Any], binds: Sequence[str]) -> list[str]:
    mounts = [str(mount.get("Target", "")) for mount in host.get("Mounts") or []]
    named = [bind.split(":")[1] for bind in binds]
    return [posixpath.normpath(path) for path in (*mounts, *named, *(host.get("Tmpfs") or {}))]


def files_of(folder: Path) -> tuple[tuple[str, int, str | None], ...]:
    """Return the content of a session's folder without its limits. Blocks.

    Raises:
        Unpoolable: something in it cannot be recreated.
    """
    found: list[tuple[str, int, str | None]] = []
    for path in sorted(folder.rglob("*")):
        mode = path.lstat().st_mode & 0o777
        name = str(path.relative_to(folder))
        if path.is_symlink() or not (path.is_dir() or path.is_file()):
            raise Unpoolable(f"{name} in its folder is a link")
        if path.is_dir():
            found.append((name, mode, None))
        elif name != "limits":
            if path.stat().st_size > LARGEST_FILE_BYTES:
                raise Unpoolable(f"{name} in its folder is large")
            found.append((name, mode, path.read_text("ascii")))
    return tuple(found)
