"""The launch form's choices of one click: presets and last launches, as far as their user may start them now. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fgpu_scheduler import Session
from fgpuspawner.options import Offer, Refused, Wanted, parse
from fgpuspawner.presets import (
    LAUNCHES_SHOWN,
    fields_of,
    launch_words,
    launches,
    link,
    options_of,
    preset_words,
)

AMOUNTS = ("fgpu", "cpu", "memory_mib")
"""What goes with an image where it is not said."""


def quick(
    offer: Offer, presets: Iterable[Mapping[str, object]], sessions: Sequence[Session]
) -> dict[str, list[dict[str, Any]]]:
    """Return what is offered, by kind: each with its words, the fields that it fills in, and a link that starts it."""
    return {
        "presets": [
            _preset(preset, wanted, offer)
            for preset in presets
            if (wanted := _parsed(options_of(preset), offer)) is not None
        ],
        "launches": [_launch(s, offer) for s in _startable(sessions, offer)][:LAUNCHES_SHOWN],
    }


def _startable(sessions: Sequence[Session], offer: Offer) -> list[Session]:
    return [s for s in launches(sessions) if _parsed(Wanted.of(s.request).as_options(), offer)]


def _parsed(options: Mapping[str, object], offer: Offer) -> Wanted | None:
    try:
        return parse(options, offer)
    except Refused:
        return None


def _preset(preset: Mapping[str, object], wanted: Wanted, offer: Offer) -> dict[str, Any]:
    options = options_of(preset)
    fields = {name: str(value) for name, value in options.items()}
    if "image" in options and all(image.slug != options["image"] for image in offer.shown_images):
        # The form does not know what goes with an image that it does not show.
        usual = wanted.as_options()
        fields |= {name: str(usual[name]) for name in AMOUNTS if name in usual and name not in fields}
    if not options.keys().isdisjoint(("image", "group", "fgpu", "gpu_memory_mib")):
        fields["gpu_by"] = "memory" if "gpu_memory_mib" in options else "fgpu"
    image = _name(str(options["image"]), offer) if "image" in options else ""
    if "gpu_memory_mib" in options:
        # Without it only memory is limited.
        fields.setdefault("compute_percent", "")
    return {
        "title": preset["name"],
        "words": ", ".join(words for words in (image, preset_words(options)) if words),
        "fields": json.dumps(fields),
        "link": link(options),
    }


def _launch(session: Session, offer: Offer) -> dict[str, Any]:
    options = Wanted.of(session.request).as_options()
    return {
        "title": _name(session.request.image, offer),
        "words": launch_words(session),
        "fields": json.dumps(fields_of(options)),
        "link": link(options),
    }


def _name(slug: str, offer: Offer) -> str:
    return next((image.name for image in offer.images if image.slug == slug), slug)
