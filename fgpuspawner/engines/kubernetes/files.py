"""A session's files in its pod, which may mount nothing of its node: a read-only volume of texts and ConfigMaps.

Small texts of one session are annotations of its pod. Large files (libfgpu, the probes, the simulated driver) are in
immutable ConfigMaps, named by their content: sessions share them, and each gets exactly its Hub's files.
"""

from __future__ import annotations

import base64
import hashlib
import posixpath
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fgpuspawner.engines.base import place_of
from fgpuspawner.engines.kubernetes.dialects.base import name_of
from fgpuspawner.isolation.base import IN_CONTAINER, Prepared
from fgpuspawner.settings.folders import SharedFolder

READ, WRITTEN = "fgpu-files", "fgpu-written"
LABEL = "fgpu.files"
"""On each ConfigMap of files."""
OUTSIDE = "outside"
"""The volume's folder for files that are mounted outside of the session's own folder."""
SMALL_BYTES = 4096
"""The annotations of a pod may hold 256 KiB together."""
MOST_BYTES = 1 << 20
"""What a ConfigMap may hold."""
WRITTEN_MIB = 32


@dataclass(frozen=True, slots=True)
class PodFiles:
    """The parts of a pod for its files, and the ConfigMaps that they need."""

    annotations: Mapping[str, str]
    config_maps: tuple[Mapping[str, Any], ...]
    volumes: tuple[Mapping[str, Any], ...]
    mounts: tuple[Mapping[str, Any], ...]

    @property
    def targets(self) -> frozenset[str]:
        """The paths in the session where our files are mounted."""
        return frozenset(str(mount["mountPath"]) for mount in self.mounts)


def pod_files(prepared: Prepared, shared: Sequence[SharedFolder] = ()) -> PodFiles:
    """Return how a session's files get into its pod; raises OSError if one cannot be read.

    Shared folders get a place to be mounted at.
    """
    annotations: dict[str, str] = {}
    texts: list[dict[str, Any]] = []
    large: dict[str, bytes] = {}
    places: dict[str, list[dict[str, Any]]] = {}
    mounts = [_mount(READ, IN_CONTAINER, "run")]
    written = set(prepared.in_memory)
    # A later mount covers an earlier one at the same place.
    for target, mount in sorted(
        {posixpath.normpath(mount.target): mount for mount in prepared.mounts}.items()
    ):
        if mount.source.is_dir():
            if target != IN_CONTAINER:
                raise OSError(f"{mount.source} is a folder, which cannot be put into pods")
            continue
        if not mount.read_only:
            # The program that writes the file makes it.
            written.add(posixpath.dirname(target))
            continue
        inside, content = _below(target), mount.source.read_bytes()
        item = {"path": inside, "mode": 0o555 if mount.source.stat().st_mode & 0o100 else 0o444}
        if len(content) <= SMALL_BYTES:
            name = f"fgpu.file-{len(annotations)}"
            annotations[name] = content.decode()
            texts.append({**item, "fieldRef": {"fieldPath": f"metadata.annotations['{name}']"}})
        else:
            digest = hashlib.sha256(content).hexdigest()
            large[digest] = content
            places.setdefault(digest, []).append({"key": digest, **item})
        # Each file is a mount: the session cannot replace it, and fgpu-verify checks that.
        mounts.append(_mount(READ, target, inside))
    for path in [*sorted(written), *map(place_of, shared)]:
        # A volume has no empty folder, and a read-only one gets none to mount on.
        texts.append({"path": f"{_below(path)}/.folder", "fieldRef": {"fieldPath": "metadata.name"}})
    for path in sorted(written):
        mounts.append(_mount(WRITTEN, path, path.strip("/").replace("/", "-"), read_only=False))
    config_maps = _config_maps(large)
    sources = list[dict[str, Any]]()
    for one in config_maps:
        items = [item for key in one["binaryData"] for item in places[key]]
        sources.append({"configMap": {"name": name_of(one), "items": items}})
    sources.append({"downwardAPI": {"items": texts}})
    volumes = (
        {"name": READ, "projected": {"sources": sources}},
        {"name": WRITTEN, "emptyDir": {"medium": "Memory", "sizeLimit": f"{WRITTEN_MIB}Mi"}},
    )
    return PodFiles(annotations, config_maps, volumes, tuple(mounts))


def _mount(volume: str, target: str, below: str, *, read_only: bool = True) -> dict[str, Any]:
    return {"name": volume, "mountPath": target, "subPath": below, "readOnly": read_only}


def _below(target: str) -> str:
    """Return a path in the volume."""
    if target.startswith(f"{IN_CONTAINER}/"):
        return f"run/{target.removeprefix(IN_CONTAINER + '/')}"
    return f"{OUTSIDE}/{target.lstrip('/')}"


def _config_maps(contents: Mapping[str, bytes]) -> tuple[dict[str, Any], ...]:
    """Return ConfigMaps with these contents, by their digests: few, as a node asks for each."""
    parts: list[list[str]] = []
    left = 0
    for digest, content in sorted(contents.items()):
        if len(content) > left:
            parts.append([])
            left = MOST_BYTES
        parts[-1].append(digest)
        left -= len(content)
    return tuple(_config_map({digest: contents[digest] for digest in part}) for part in parts)


def _config_map(contents: Mapping[str, bytes]) -> dict[str, Any]:
    digest = hashlib.sha256("".join(contents).encode()).hexdigest()
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": f"fgpu-files-{digest[:20]}", "labels": {LABEL: "shared"}},
        "immutable": True,
        "binaryData": {key: base64.b64encode(value).decode() for key, value in contents.items()},
    }
