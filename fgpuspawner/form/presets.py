"""The launch form's choices of one click: presets and last launches that the user may start now. Pure."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any
from urllib.parse import urlencode

from fgpu_scheduler import Request, SavedSetup, Session, format_milli, memory_words
from fgpuspawner.form.offer import LaunchRequest, Offer, RequestRefused
from fgpuspawner.form.options import GPU_BY, parse
from fgpuspawner.form.own_setup import names_text
from fgpuspawner.text.fields import FIELDS, PRESET_FIELDS, in_gib, joined
from fgpuspawner.text.sessions import amount_words
from fgpuspawner.text.times import hours_minutes

LAUNCHES_SHOWN = 5


def with_unknown_image(
    presets: Sequence[Mapping[str, object]], pooled: Iterable[str], slugs: Collection[str]
) -> list[str]:
    """Return a line for each warm pool or preset image that the catalogue lacks; none for private images."""
    return [
        f"c.FGPU.warm_pool: image {image!r} is not in the catalogue; none of it is kept ready"
        for image in pooled
        if image not in slugs
    ] + [
        f"c.FGPU.presets: {preset['name']!r} has the image {image!r}, which is not in the catalogue; nobody is offered it"
        for preset in presets
        if isinstance(image := preset.get("image"), str) and "/" not in image and image not in slugs
    ]


def one_click(
    offer: Offer,
    presets: Iterable[Mapping[str, object]],
    sessions: Iterable[Session],
    own_presets: Mapping[str, Mapping[str, object]] = {},
    setups: Mapping[int, SavedSetup] = {},
) -> dict[str, list[dict[str, Any]]]:
    """Return presets and last launches: each with its text, the fields that it fills in, and a link."""
    # The newest launch of each set of options, newest first.
    asked: dict[Request, Request] = {}
    for session in sorted(sessions, key=lambda s: s.id, reverse=True):
        own = session.request
        plain = replace(own, user="", server_name="", priority=0, groups=(), account="", name="")
        asked.setdefault(plain, own)
    launches = (
        _launch(own, offer, setups)
        for own in asked.values()
        if _parsed(LaunchRequest.of(own).as_options(), offer)
    )
    named = ((name, wanted) for name, own in own_presets.items() if (wanted := _parsed(own, offer)))
    return {
        "own": [_launch(wanted, offer, setups, name) for name, wanted in named],
        "presets": [_preset(p, wanted, offer) for p in presets if (wanted := _parsed(_options(p), offer))],
        "launches": list(islice(launches, LAUNCHES_SHOWN)),
    }


def _parsed(options: Mapping[str, object], offer: Offer) -> LaunchRequest | None:
    try:
        return parse(options, offer)
    except RequestRefused:
        return None


def _options(preset: Mapping[str, object]) -> dict[str, object]:
    return {name: preset[name] for name in PRESET_FIELDS if name in preset}


def _preset(preset: Mapping[str, object], wanted: LaunchRequest, offer: Offer) -> dict[str, Any]:
    options = _options(preset)
    said = in_form(options)
    fields = dict(said)
    if "image" in options and not offer.shows(options["image"]):
        # The form has no defaults for an image that it does not show.
        usual = in_form(wanted.as_options())
        for name in ("fgpu", "cpu", "memory_gib"):
            if name in usual:
                fields.setdefault(name, usual[name])
    if not options.keys().isdisjoint(("image", "group", "fgpu", "gpu_memory_mib")):
        fields[GPU_BY] = "memory" if "gpu_memory_mib" in options else "fgpu"
    if "gpu_memory_mib" in options:
        # Without it only memory is limited.
        fields.setdefault("compute_percent", "")
    words = [
        field.words.format(said[name]) for name, field in FIELDS.items() if field.words and said.get(name)
    ]
    if "image" in options:
        words.insert(0, _name(str(options["image"]), offer))
    return _choice(str(preset["name"]), words, fields, options)


def _launch(
    asked: Request, offer: Offer, setups: Mapping[int, SavedSetup], title: str = ""
) -> dict[str, Any]:
    # Not its name: the next session gets one of its own.
    options = LaunchRequest.of(replace(asked, name="")).as_options()
    words = [amount_words(asked), f"{format_milli(asked.cpu_milli)} CPU", memory_words(asked.memory_mib)]
    if asked.time_limit_s:
        words.append(hours_minutes(asked.time_limit_s))
    if asked.folders:
        words.append(f"folders {joined(asked.folders)}")
    if asked.setup:
        words.append("own variables or script")
    fields = fields_of(options)
    image = _name(asked.image, offer)
    return _choice(
        title or image,
        [image, *words] if title else words,
        fields | setup_fields(fields["setup"], setups),
        options,
    )


def setup_fields(setup: str, setups: Mapping[int, SavedSetup]) -> dict[str, str]:
    """Return the form's fields of a saved setup: variables by their names alone, which keep their values."""
    found = setups.get(int(setup)) if setup.isascii() and setup.isdigit() else None
    if found is None:
        return {"variables": "", "script": ""}
    return {"variables": names_text(found.variables), "script": found.script}


def _name(slug: str, offer: Offer) -> str:
    image = offer.image(slug)
    return slug if image is None else image.name


def _choice(
    title: str, words: Sequence[str], fields: Mapping[str, str], options: Mapping[str, object]
) -> dict[str, Any]:
    link = "?" + urlencode({f"opt-{name}": _text(value) for name, value in options.items()})
    return {"title": title, "words": ", ".join(words), "fields": json.dumps(fields), "link": link}


def _text(value: object) -> str:
    return joined(map(str, value)) if isinstance(value, list | tuple) else str(value)


def fields_of(options: Mapping[str, Any]) -> dict[str, str]:
    """Return the values of the form's fields for these options. An option that is not given leaves its field empty."""
    said = in_form({name: value for name, value in options.items() if value is not None})
    empty = {name: "" for name, field in FIELDS.items() if field.is_optional}
    return {**empty, **said, GPU_BY: "memory" if "gpu_memory_mib" in said else "fgpu"}


def in_form(options: Mapping[str, object]) -> dict[str, str]:
    """Return options as text, by the form's own fields: it asks for memory in GiB, and for time in hours and minutes."""
    said = {name: _text(value) for name, value in options.items()}
    if "gpu_model" in said:
        said["gpu_models"] = said.pop("gpu_model")
    for name, own, words in (
        ("memory_mib", "memory_gib", in_gib),
        ("time_limit_s", "time_limit", hours_minutes),
    ):
        text = said.pop(name, "")
        if text.isascii() and text.isdigit() and len(text) < 10:
            # No limit of time is an empty field.
            said[own] = words(int(text)) if int(text) else ""
    return said
