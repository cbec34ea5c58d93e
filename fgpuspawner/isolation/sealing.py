"""The environment of a session: its own variables override those of users, images and administrators. Pure."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from numbers import Number
from os import PathLike

from fgpu_scheduler import BadSettings
from fgpuspawner.isolation.base import Prepared

KNOBS = (
    "LD_PRELOAD",
    "LD_AUDIT",
    "CUDA_MPS_*",
    "CUDA_DEVICE_MEMORY_LIMIT*",
    "CUDA_DEVICE_SM_LIMIT*",
    "CUDA_DEVICE_MEMORY_SHARED_CACHE",
    "CUDA_TASK_PRIORITY",
    "CUDA_DISABLE_CONTROL",
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
"""Variables that switch isolation or GPU access on or off. Only the Hub sets them."""

Environment = dict[str, str | None]
"""For the engine; None unsets a variable of the image."""


def is_knob(name: str) -> bool:
    """Return whether users, images and administrators may not set this variable."""
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in KNOBS)


def without_knobs(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if not is_knob(name)}


def as_text(name: str, value: object) -> str | None:
    """Return a variable's value as text; None unsets it.

    Raises:
        BadSettings: it is not text, a number, a truth value or a path. The message omits the value, which may be
            secret.
    """
    if value is None or isinstance(value, str | Number | PathLike):
        return None if value is None else str(value)
    raise BadSettings(f"{name} is a {type(value).__name__}; a variable is text, a number or a path")


def sealed_environment(
    given: Mapping[str, object],
    slice_environment: Mapping[str, str],
    prepared: Prepared,
    *,
    image: Mapping[str, str] | None = None,
) -> Environment:
    """Return ``given`` without knobs, overridden by the session's variables.

    ``image`` has the image's variables: its knobs are unset, its search paths kept behind the session's.
    """
    image = image or {}
    found = {name: as_text(name, value) for name, value in given.items() if not is_knob(name)}
    found.update({name: None for name in image if is_knob(name)})
    found.update(slice_environment)
    found.update(prepared.environment)
    for name, first in prepared.search_paths.items():
        rest = found.get(name) if name in given else image.get(name)
        found[name] = f"{first}:{rest}" if rest else first
    return found
