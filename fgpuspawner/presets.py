"""What the launch form offers for one click: the administrator's presets, and what somebody launched lately. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any
from urllib.parse import urlencode

from fgpu_scheduler import BadSettings, Refusal, Session, format_milli
from fgpuspawner import fields as read
from fgpuspawner.words import amount_words, hours_minutes

LAUNCHES_SHOWN = 5
NAME_MAX_LENGTH = 60
OPTIONS = (
    "image",
    "group",
    "fgpu",
    "gpu_memory_mib",
    "compute_percent",
    "gpu_model",
    "cpu",
    "memory_mib",
    "count",
    "time_limit",
)
"""What a preset may say: options of the form."""


def check_presets(presets: Sequence[Mapping[str, object]], groups: Sequence[str]) -> None:
    """Look at what the administrator has set, as far as it can be known before the images and the GPUs are.

    Raises:
        BadSettings: one line that names the preset, the key and what would work.
    """
    names: list[str] = []
    for at, preset in enumerate(presets):
        name = preset.get("name")
        if not isinstance(name, str) or not name.strip() or len(name) > NAME_MAX_LENGTH:
            raise BadSettings(
                f"c.FGPU.presets[{at}]: name is {read.short(name)}; it must be a text of 1 to {NAME_MAX_LENGTH} letters"
            )
        where = f"c.FGPU.presets: {name!r}"
        if name in names:
            raise BadSettings(f"{where} is there twice; give each another name")
        names.append(name)
        for key in preset:
            if key not in ("name", *OPTIONS):
                raise BadSettings(f"{where} has {key!r}; use name and {', '.join(OPTIONS)}")
        if len(preset) == 1:
            raise BadSettings(f"{where} chooses nothing; add some of {', '.join(OPTIONS)}")
        _check_values(preset, where, groups)


def with_unknown_image(presets: Sequence[Mapping[str, object]], slugs: Collection[str]) -> list[str]:
    """Return a line for each preset whose image is in no catalogue, so that nobody is offered it; not of private ones."""
    return [
        f"c.FGPU.presets: {preset['name']!r} has the image {image!r}, which is not in the catalogue; nobody is offered it"
        for preset in presets
        if isinstance(image := preset.get("image"), str) and "/" not in image and image not in slugs
    ]


def _check_values(preset: Mapping[str, object], where: str, groups: Sequence[str]) -> None:
    refusals: list[Refusal] = []
    for key in ("fgpu", "cpu"):
        if key in preset and read.amount(preset, key, 1, refusals) == 0:
            refusals.append(Refusal(key, "too_small", f"{key}: must be above 0"))
    for key, example in (
        ("gpu_memory_mib", 4096),
        ("compute_percent", 25),
        ("memory_mib", 4096),
        ("count", 1),
    ):
        if read.maybe_whole(preset, key, example, refusals) == 0:
            refusals.append(Refusal(key, "too_small", f"{key}: must be above 0"))
    read.time_limit(preset, None, None, refusals)
    if "group" in preset:
        read.choice(preset, "group", groups, groups[0], refusals)
    for key in ("image", "gpu_model"):
        if key in preset and (not isinstance(preset[key], str) or not preset[key]):
            refusals.append(Refusal(key, "not_a_text", f"{key}: {read.short(preset[key])} is not a text"))
    if "gpu_memory_mib" in preset and "fgpu" in preset:
        message = "gpu_memory_mib: given beside fgpu; ask for the GPU in one of these ways"
        refusals.append(Refusal("gpu_memory_mib", "two_ways", message))
    if "compute_percent" in preset and "gpu_memory_mib" not in preset:
        message = "compute_percent: needs gpu_memory_mib beside it; compute is not given alone"
        refusals.append(Refusal("compute_percent", "compute_alone", message))
    if refusals:
        raise BadSettings(f"{where}: {refusals[0].message}")


def options_of(preset: Mapping[str, object]) -> dict[str, object]:
    """Return the options that a preset chooses."""
    return {key: preset[key] for key in OPTIONS if key in preset}


def launches(sessions: Iterable[Session]) -> list[Session]:
    """Return of somebody's sessions the newest of each set of options, newest first."""
    found: dict[object, Session] = {}
    for session in sorted(sessions, key=lambda s: s.id, reverse=True):
        asked = session.request
        found.setdefault(
            (
                asked.image,
                asked.resource_group,
                asked.fgpu_milli,
                asked.gpu_memory_mib,
                asked.compute_percent,
                asked.gpu_model,
                asked.cpu_milli,
                asked.memory_mib,
                asked.time_limit_s,
            ),
            session,
        )
    return list(found.values())


def launch_words(session: Session) -> str:
    """Return the amounts that one launch asked for, in words."""
    asked = session.request
    parts = [amount_words(asked), f"{format_milli(asked.cpu_milli)} CPU", f"{asked.memory_mib} MiB"]
    if asked.time_limit_s:
        parts.append(hours_minutes(asked.time_limit_s))
    return ", ".join(parts)


def preset_words(options: Mapping[str, object]) -> str:
    """Return what a preset chooses, in words."""
    units = {
        "fgpu": "{} fGPU",
        "gpu_memory_mib": "{} MiB of GPU memory",
        "compute_percent": "{} %",
        "gpu_model": "{}",
        "cpu": "{} CPU",
        "memory_mib": "{} MiB",
        "count": "{} sessions",
        "time_limit": "{} hours",
    }
    return ", ".join(text.format(options[name]) for name, text in units.items() if name in options)


def link(options: Mapping[str, object]) -> str:
    """Return the query of a link that starts a server with these options."""
    return "?" + urlencode({f"opt-{name}": str(value) for name, value in options.items()})


def fields_of(options: Mapping[str, Any]) -> dict[str, str]:
    """Return the options as what the form's fields are to hold; one that is not said is to be empty."""
    said = {name: str(value) for name, value in options.items() if value is not None}
    seconds = said.pop("time_limit_s", "0")
    empty = {
        name: ""
        for name in ("fgpu", "gpu_memory_mib", "compute_percent", "gpu_model", "time_limit", "priority")
    }
    limit = {"time_limit": hours_minutes(int(seconds))} if int(seconds) else {}
    return {**empty, **said, **limit, "gpu_by": "memory" if "gpu_memory_mib" in said else "fgpu"}
