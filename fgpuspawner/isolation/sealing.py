"""A session's environment, laid over whatever else was asked for its container or process. Pure."""

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
"""What switches isolation, or what a container gets of the GPUs, on or off: ours to set, or nobody's."""

Environment = dict[str, str | None]
"""As the engine takes it: None takes away what the image sets."""


def is_knob(name: str) -> bool:
    """Return whether this variable is not a user's, an image's or an administrator's to set."""
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in KNOBS)


def without_knobs(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without the variables that are not its to set."""
    return {name: value for name, value in environment.items() if not is_knob(name)}


def as_text(name: str, value: object) -> str | None:
    """Return a variable's value as text; None takes it away.

    Raises:
        BadSettings: it is neither text, nor a number, truth value or path. What it is may be secret, and is not said.
    """
    if value is None or isinstance(value, str | Number | PathLike):
        return None if value is None else str(value)
    raise BadSettings(f"{name} is a {type(value).__name__}; a variable is text, a number or a path")


def sealed_environment(
    given: Mapping[str, object],
    told: Mapping[str, str],
    prepared: Prepared,
    *,
    image: Mapping[str, str] | None = None,
) -> Environment:
    """Return ``given`` without knobs, and with what the session is ``told`` and needs over it.

    ``image`` is what the container would have beside it: its knobs are taken away, its search paths kept behind ours.
    """
    image = image or {}
    found = {name: as_text(name, value) for name, value in given.items() if not is_knob(name)}
    found.update({name: None for name in image if is_knob(name)})
    found.update(told)
    found.update(prepared.environment)
    for name, first in prepared.search_paths.items():
        rest = found.get(name) if name in given else image.get(name)
        found[name] = f"{first}:{rest}" if rest else first
    return found
