"""One image's entry, as a table of TOML or JSON, and the `Image` that it means: the same facts, both ways."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from fgpu_scheduler import format_milli
from fgpuspawner.images.icons import ICONS
from fgpuspawner.images.model import Image
from fgpuspawner.images.values import Refuse, Values

Entry = Mapping[str, object]

KEYS = (
    "slug",
    "name",
    "framework",
    "version",
    "python",
    "description",
    "icon",
    "kernels",
    "reference",
    "digest",
    "environment",
    "gpu_architectures",
    "cuda",
    "minimum",
    "recommended",
    "sudo",
    "default",
    "enabled",
    "hidden",
    "deprecated",
    "groups",
    "users",
)
"""Every key of an entry, in the order in which they are written and shown."""

AMOUNTS = ("fgpu", "gpu_memory_mib", "cpu", "memory_mib")
"""The keys of the tables ``minimum`` and ``recommended``."""

SLUG = re.compile(r"[a-z0-9-]{1,40}")
PYTHON_VERSION = re.compile(r"[0-9]+\.[0-9]+(\.[0-9]+)?")
CUDA_VERSION = re.compile(r"[0-9]{1,2}\.[0-9]{1,2}")
KERNEL = re.compile(r"[A-Za-z0-9._-]{1,100}")
DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
DESCRIPTION_MAX_LENGTH = 1000
REFERENCE_MAX_LENGTH = 400

# Docker's own grammar of a reference: [host[:port]/]path[:tag][@digest].
_HOST_LABEL = r"[a-zA-Z0-9](?:[a-zA-Z0-9-]*[a-zA-Z0-9])?"
# Only a dot, a port or this one name tell a host from the first part of a path.
_HOST = rf"(?=localhost[:/]|[^/]*[.:]){_HOST_LABEL}(?:\.{_HOST_LABEL})*(?::[0-9]{{1,5}})?"
_PART = r"[a-z0-9]+(?:(?:\.|__?|-+)[a-z0-9]+)*"
_TAG = r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}"
REFERENCE = re.compile(rf"(?:{_HOST}/)?{_PART}(?:/{_PART})*(?::{_TAG})?(?:@sha256:[0-9a-f]{{64}})?")


def read_entry(entry: Entry, refuse: Refuse) -> Image:
    """Return the image that an entry means; ``refuse`` is called with the first thing that is wrong."""
    values = Values(entry, refuse)
    values.check_keys(KEYS)
    minimum, recommended = (values.table(key, AMOUNTS) for key in ("minimum", "recommended"))
    image = Image(
        slug=values.text("slug", SLUG, "1 to 40 of a-z, 0-9 and -"),
        name=values.text("name"),
        framework=values.text("framework"),
        version=values.text("version"),
        python=values.text("python", PYTHON_VERSION, 'a version such as "3.11"'),
        reference=values.text(
            "reference",
            REFERENCE,
            'a Docker image reference such as "fgpuspawner/base:0.1"',
            max_length=REFERENCE_MAX_LENGTH,
        ),
        description=values.text("description", fallback="", max_length=DESCRIPTION_MAX_LENGTH),
        environment=values.text(
            "environment",
            re.compile(r"(/.*)?"),
            'an absolute path such as "/opt/torch", or "" for the Hub\'s own environment',
            fallback="",
            max_length=REFERENCE_MAX_LENGTH,
        ),
        icon=_icon(values),
        kernels=values.words(
            "kernels",
            KERNEL,
            "a kernel's name such as python3, at most 100 of A-Z, a-z, 0-9, ., _ and -",
            '["python3"]',
        ),
        digest=values.text("digest", DIGEST, '"sha256:" and 64 of 0-9 and a-f', fallback=""),
        gpu_architectures=values.words(
            "gpu_architectures", CUDA_VERSION, 'compute capabilities such as "7.0"', '["7.0", "8.6"]'
        ),
        cuda=values.text("cuda", CUDA_VERSION, 'a version such as "12.4"', fallback=""),
        min_fgpu_milli=minimum.milli("fgpu"),
        min_gpu_memory_mib=minimum.mib("gpu_memory_mib"),
        min_cpu_milli=minimum.milli("cpu"),
        min_memory_mib=minimum.mib("memory_mib"),
        recommended_fgpu_milli=recommended.milli("fgpu"),
        recommended_gpu_memory_mib=recommended.mib("gpu_memory_mib"),
        recommended_cpu_milli=recommended.milli("cpu"),
        recommended_memory_mib=recommended.mib("memory_mib"),
        sudo=values.flag("sudo"),
        default=values.flag("default"),
        enabled=values.flag("enabled", fallback=True),
        hidden=values.flag("hidden"),
        deprecated=values.text("deprecated", fallback="", max_length=DESCRIPTION_MAX_LENGTH),
        groups=values.names("groups"),
        users=values.names("users"),
    )
    _check_amounts(image, recommended)
    return image


def _icon(values: Values) -> str:
    icon = values.text("icon", fallback="")
    if icon and icon not in ICONS:
        hint = "pictures from elsewhere are not shown; " if ":" in icon or "/" in icon else ""
        values.refuse("icon", f"there is no icon of this name; {hint}choose one of {', '.join(ICONS)}")
    return icon


def _check_amounts(image: Image, recommended: Values) -> None:
    for key, least, usual, shown in (
        ("fgpu", image.min_fgpu_milli, image.recommended_fgpu_milli, format_milli),
        ("gpu_memory_mib", image.min_gpu_memory_mib, image.recommended_gpu_memory_mib, str),
        ("cpu", image.min_cpu_milli, image.recommended_cpu_milli, format_milli),
        ("memory_mib", image.min_memory_mib, image.recommended_memory_mib, str),
    ):
        if usual and usual < least:
            recommended.refuse(
                key, f"{shown(usual)} is below the minimum of {shown(least)}; write at least that"
            )


def entry_of(image: Image) -> dict[str, Any]:
    """Return the entry that `read_entry` reads as this very image, without what goes without saying."""
    found: dict[str, Any] = {
        "slug": image.slug,
        "name": image.name,
        "framework": image.framework,
        "version": image.version,
        "python": image.python,
        "description": image.description,
        "icon": image.icon,
        "kernels": list(image.kernels),
        "reference": image.reference,
        "digest": image.digest,
        "environment": image.environment,
        "gpu_architectures": list(image.gpu_architectures),
        "cuda": image.cuda,
        "minimum": _amounts(
            image.min_fgpu_milli, image.min_gpu_memory_mib, image.min_cpu_milli, image.min_memory_mib
        ),
        "recommended": _amounts(
            image.recommended_fgpu_milli,
            image.recommended_gpu_memory_mib,
            image.recommended_cpu_milli,
            image.recommended_memory_mib,
        ),
        "sudo": image.sudo,
        "default": image.default,
        "hidden": image.hidden,
        "deprecated": image.deprecated,
        "groups": list(image.groups),
        "users": list(image.users),
    }
    said = {key: value for key, value in found.items() if value}
    if not image.enabled:
        said["enabled"] = False
    return {key: said[key] for key in KEYS if key in said}


def _amounts(fgpu_milli: int, gpu_memory_mib: int, cpu_milli: int, memory_mib: int) -> dict[str, object]:
    found: dict[str, object] = {
        "fgpu": format_milli(fgpu_milli) if fgpu_milli else "",
        "gpu_memory_mib": gpu_memory_mib,
        "cpu": format_milli(cpu_milli) if cpu_milli else "",
        "memory_mib": memory_mib,
    }
    return {key: value for key, value in found.items() if value}
