"""A folder as an image: the archive that `docker load` reads, the same bytes for the same files on any day."""

from __future__ import annotations

import hashlib
import io
import json
import os
import platform
import stat
import tarfile
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

# 2020-01-01: some programs refuse files from before 1980.
FIXED_TIME_S = 1_577_836_800
FIXED_TIME_TEXT = "2020-01-01T00:00:00Z"
# The machine types' names in the image format.
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


def write_image(
    root: Path, out: Path, *, config: Mapping[str, Any], owned: Collection[str], owner: int
) -> None:
    """Write an image of the folder ``root``, in one layer, without a tag.

    ``config`` is the container's configuration; the content of the folders ``owned`` gets user and group ``owner``, the
    rest root.
    """
    layer = out.parent / "layer.tar"
    diff_id = _write_layer(root, layer, owned, owner)
    written = json.dumps(
        {
            "architecture": ARCHITECTURES[platform.machine()],
            "os": "linux",
            "created": FIXED_TIME_TEXT,
            "config": dict(config),
            "rootfs": {"type": "layers", "diff_ids": [diff_id]},
            "history": [{"created": FIXED_TIME_TEXT, "created_by": "images/build.sh --base host"}],
        },
        sort_keys=True,
    ).encode()
    config_name = f"{hashlib.sha256(written).hexdigest()}.json"
    manifest = [{"Config": config_name, "RepoTags": None, "Layers": ["layer.tar"]}]
    with tarfile.open(out, "w", format=tarfile.GNU_FORMAT) as archive:
        for name, content in (("manifest.json", json.dumps(manifest).encode()), (config_name, written)):
            entry = tarfile.TarInfo(name)
            entry.mtime, entry.size = FIXED_TIME_S, len(content)
            archive.addfile(entry, io.BytesIO(content))
        entry = tarfile.TarInfo("layer.tar")
        entry.mtime, entry.size = FIXED_TIME_S, layer.stat().st_size
        with layer.open("rb") as layer_file:
            archive.addfile(entry, layer_file)
    layer.unlink()


def _write_layer(root: Path, layer: Path, owned: Collection[str], owner: int) -> str:
    """Write the file tree as one layer and return its digest."""
    paths = sorted(path.relative_to(root).as_posix() for path in root.rglob("*"))
    with tarfile.open(layer, "w", format=tarfile.GNU_FORMAT) as archive:
        for name in paths:
            path = root / name
            entry = _entry_of(path, name)
            if any(name == folder or name.startswith(f"{folder}/") for folder in owned):
                entry.uid = entry.gid = owner
            if entry.isreg():
                with path.open("rb") as content:
                    archive.addfile(entry, content)
            else:
                archive.addfile(entry)
    with layer.open("rb") as written:
        return f"sha256:{hashlib.file_digest(written, 'sha256').hexdigest()}"


def _entry_of(path: Path, name: str) -> tarfile.TarInfo:
    """Return the archive's entry for a path: mode and time are ours, not the machine's."""
    mode = path.lstat().st_mode
    entry = tarfile.TarInfo(name)
    entry.mtime = FIXED_TIME_S
    if stat.S_ISLNK(mode):
        entry.type, entry.linkname, entry.mode = tarfile.SYMTYPE, os.readlink(path), 0o777
    elif stat.S_ISDIR(mode):
        entry.type = tarfile.DIRTYPE
        entry.mode = 0o1777 if name in ("tmp", "var/tmp") else 0o755
    else:
        # No set-user-id bit of any package comes along.
        entry.mode = 0o755 if mode & 0o111 else 0o644
        entry.size = path.stat().st_size
    return entry
