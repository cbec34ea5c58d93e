"""A session's mounts and environment, laid over whatever else was asked for its container or process. Pure."""

from __future__ import annotations

import fnmatch
import posixpath
from collections.abc import Mapping, Sequence
from typing import Any

from fgpuspawner.isolation.base import Mount, Prepared

KNOBS = (
    "LD_PRELOAD",
    "LD_AUDIT",
    "CUDA_MPS_*",
    "CUDA_DEVICE_MEMORY_LIMIT*",
    "CUDA_DEVICE_SM_LIMIT*",
    "CUDA_DEVICE_MEMORY_SHARED_CACHE",
    "CUDA_TASK_PRIORITY",
    "GPU_CORE_UTILIZATION_POLICY",
    "LIBCUDA_LOG_LEVEL",
    "NVIDIA_VISIBLE_DEVICES",
    "NVIDIA_DRIVER_CAPABILITIES",
    "NVIDIA_GPU_MEMORY_*",
    "NVIDIA_MIG_*",
    "NVIDIA_IMEX_CHANNELS",
    "CUDA_VISIBLE_DEVICES",
    "FGPU_SIMULATED_MACHINE",
)
"""What switches isolation, or what a container gets of the GPUs, on or off: ours to set, or nobody's."""

Environment = dict[str, str | None]
"""As the engine takes it: None takes away what the image sets."""


def is_knob(name: str) -> bool:
    """Return whether this variable is not a user's, an image's or an administrator's to set."""
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in KNOBS)


def without_knobs(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without the variables that are not its to set."""
    return {name: value for name, value in environment.items() if not is_knob(name)}


def sealed_environment(
    given: Mapping[str, str | None],
    told: Mapping[str, str],
    prepared: Prepared,
    *,
    image: Mapping[str, str] | None = None,
) -> Environment:
    """Return ``given`` without knobs, and with what the session is ``told`` and needs over it.

    ``image`` is what the container would have beside it: its knobs are taken away, its search paths kept behind ours.
    """
    image = image or {}
    found: Environment = {name: value for name, value in given.items() if not is_knob(name)}
    found.update({name: None for name in image if is_knob(name)})
    found.update(told)
    found.update(prepared.environment)
    for name, first in prepared.search_paths.items():
        rest = given[name] if name in given else image.get(name)
        found[name] = f"{first}:{rest}" if rest else first
    return found


def parse_environment(entries: Sequence[str] | Mapping[str, str | None] | None) -> dict[str, str | None]:
    """Return an environment that may be a list of ``NAME=value``, as the engine's API has it."""
    if entries is None:
        return {}
    if isinstance(entries, Mapping):
        return dict(entries)
    pairs = (entry.partition("=") for entry in entries)
    return {name: value if equals else None for name, equals, value in pairs}


def sealed_mounts(
    host_config: Mapping[str, Any], mounts: Sequence[Mount]
) -> tuple[dict[str, Any], list[str]]:
    """Return a container's HostConfig (of the engine's API) with our mounts, and what had to make way for them.

    What is mounted where one of ours goes, or below it, is left out; what is mounted above stays, as the engine mounts
    by depth.
    """
    ours = {posixpath.normpath(mount.target) for mount in mounts}
    displaced: list[str] = []

    def stays(target: str) -> bool:
        path = posixpath.normpath("/" + target.lstrip("/"))
        hit = any(path == own or path.startswith(f"{own}/") for own in ours)
        if hit:
            displaced.append(path)
        return not hit

    found = dict(host_config)
    found["Binds"] = [bind for bind in found.get("Binds") or [] if stays(_bind_target(bind))]
    given = [mount for mount in found.get("Mounts") or [] if stays(str(mount.get("Target", "")))]
    if found.get("Tmpfs"):
        found["Tmpfs"] = {path: options for path, options in found["Tmpfs"].items() if stays(path)}
    found["Mounts"] = [*given, *(_as_api(mount) for mount in mounts)]
    return found, displaced


def _bind_target(bind: str) -> str:
    """Return the path in the container of ``source:target[:options]``, or of ``target`` alone."""
    parts = bind.split(":")
    return parts[1] if len(parts) > 1 else parts[0]


def _as_api(mount: Mount) -> dict[str, Any]:
    return {
        "Type": "bind",
        "Source": str(mount.source),
        "Target": mount.target,
        "ReadOnly": mount.read_only,
    }
