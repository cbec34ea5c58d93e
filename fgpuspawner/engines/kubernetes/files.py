"""The files that a session is given, carried into its pod: by an init container of our own image. It only reads.

What is large (libfgpu, the probes, the simulated driver) is in that image, each under its digest; what is the session's
own is small, and goes with the pod. All of it lies in a volume of the pod that the session can only read.
"""

from __future__ import annotations

import base64
import posixpath
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fgpuspawner.engines.kubernetes.files_image import digest_of
from fgpuspawner.isolation.base import IN_CONTAINER, Mount, Prepared

INIT = "fgpu-files"
READ, WRITTEN = "fgpu-files", "fgpu-written"
READ_AT, WRITTEN_AT = "/to/read", "/to/written"
BELOW = "outside"
"""The folder of files that go elsewhere than into the session's folder."""
SMALL_BYTES = 4096
"""Smaller content goes with the pod. A variable may hold 128 KiB."""
WRITTEN_MIB = 32
NOBODY = 65534
"""The files' owner, so that the session's user cannot change them."""


@dataclass(frozen=True, slots=True)
class Carried:
    """What a pod is made with for its files: lines for the init container, volumes, and mounts of the session."""

    lines: tuple[str, ...]
    volumes: tuple[Mapping[str, Any], ...]
    mounts: tuple[Mapping[str, Any], ...]

    @property
    def targets(self) -> frozenset[str]:
        """The paths in the session at which something of ours is."""
        return frozenset(str(mount["mountPath"]) for mount in self.mounts)


def carry(prepared: Prepared) -> Carried:
    """Return how a session's files get into its pod.

    Raises:
        OSError: one cannot be read.
    """
    lines: list[str] = []
    mounts = [_mount(READ, IN_CONTAINER, "run")]
    for mount in _by_depth(prepared.mounts):
        target = posixpath.normpath(mount.target)
        if mount.source.is_dir():
            if target != IN_CONTAINER:
                raise OSError(f"{mount.source} is a folder, which is not carried into pods")
            continue
        inside = _below(target)
        if not mount.read_only:
            # A file that the session writes: its own, empty at first.
            name = f"file{len(lines)}"
            lines.append(f"666 written/{name} base64:")
            lines.append(f"444 read/{inside} base64:")
            mounts.append(_mount(WRITTEN, target, name, read_only=False))
            continue
        lines.append(f"{_mode(mount.source)} read/{inside} {_content(mount.source)}")
        # Each a mount of its own, as everywhere: nothing can be put in the place of one, and fgpu-verify looks for that.
        mounts.append(_mount(READ, target, inside))
    for path in sorted(prepared.in_memory):
        lines.append(f"755 read/{_below(path)}/ -")
        lines.append(f"777 written/memory{_flat(path)}/ -")
        mounts.append(_mount(WRITTEN, path, f"memory{_flat(path)}", read_only=False))
    volumes = (
        {"name": READ, "emptyDir": {}},
        {"name": WRITTEN, "emptyDir": {"medium": "Memory", "sizeLimit": f"{WRITTEN_MIB}Mi"}},
    )
    return Carried(tuple(lines), volumes, tuple(mounts))


def _mount(volume: str, target: str, below: str, *, read_only: bool = True) -> dict[str, Any]:
    return {"name": volume, "mountPath": target, "subPath": below, "readOnly": read_only}


def _by_depth(mounts: Sequence[Mount]) -> list[Mount]:
    # One that comes later lies over an earlier one at the same place.
    last = {posixpath.normpath(mount.target): mount for mount in mounts}
    return [last[target] for target in sorted(last)]


def _below(target: str) -> str:
    """Return where a file of the session's lies in the volume."""
    if target.startswith(f"{IN_CONTAINER}/"):
        return f"run/{target.removeprefix(IN_CONTAINER + '/')}"
    return f"{BELOW}/{target.lstrip('/')}"


def _flat(path: str) -> str:
    return path.replace("/", "-")


def _mode(source: Path) -> str:
    return "555" if source.stat().st_mode & 0o100 else "444"


def _content(source: Path) -> str:
    if source.stat().st_size <= SMALL_BYTES:
        return f"base64:{base64.b64encode(source.read_bytes()).decode()}"
    return f"sha256:{digest_of(source)}"


def init_container(image: str, carried: Carried, *, pull_policy: str) -> dict[str, Any]:
    """Return the init container that puts a session's files where they belong."""
    return {
        "name": INIT,
        "image": image,
        "imagePullPolicy": pull_policy,
        "args": ["/to"],
        "env": [{"name": "FGPU_FILES", "value": "\n".join(carried.lines)}],
        "volumeMounts": [{"name": READ, "mountPath": READ_AT}, {"name": WRITTEN, "mountPath": WRITTEN_AT}],
        "resources": {
            "limits": {"cpu": "200m", "memory": "64Mi"},
            "requests": {"cpu": "10m", "memory": "64Mi"},
        },
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": True,
            "runAsNonRoot": True,
            "runAsUser": NOBODY,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }
