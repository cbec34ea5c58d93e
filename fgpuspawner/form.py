"""What the Hub's own pages show: the launch form, and refusals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from fgpu_scheduler import Refusal, format_milli
from fgpuspawner.images.icons import icon_name, icon_svg
from fgpuspawner.images.model import Image
from fgpuspawner.images.needs import least_words
from fgpuspawner.options import FIELDS, GPU_BY, IMAGE_NAME, Offer, Refused
from fgpuspawner.words import hours_minutes

TEMPLATES = Path(__file__).parent / "templates"
FIELD_MAX_LENGTH = 400
"""What a field of the form can hold: the longest name of a private image, and more."""

_jinja = Environment(
    loader=FileSystemLoader(TEMPLATES), autoescape=True, undefined=StrictUndefined, trim_blocks=True
)


def render(
    offer: Offer,
    *,
    hub_prefix: str,
    ticket: str,
    given: Mapping[str, str],
    refusals: Sequence[Refusal] = (),
) -> str:
    """Return the inside of the launch form. It works without JavaScript; with it, it shows a forecast.

    ``ticket`` lets the page ask the service for forecasts. ``given`` is what was sent and refused, to be
    shown again, with why it was (``refusals``) at its fields; it is only ever shown as text.
    """
    groups = [_group(offer, name) for name in offer.groups]
    amounts = {name: offer.amounts(name) for name in offer.groups}
    images = [_image(offer, image, amounts) for image in offer.shown_images]
    template = _jinja.get_template("fgpu_options_form.html")
    return template.render(
        images=images,
        presets={
            image["slug"]: {name: image[name] for name in ("amounts", "gpu_memory_mib")} for image in images
        },
        groups=groups,
        models=list(dict.fromkeys(model for group in groups for model in group["models"])),
        values=_values(offer, given),
        refused=_at_fields(refusals),
        step=format_milli(offer.caps.fgpu_step_milli),
        most_fgpu=max((g["amounts"][-1] for g in groups if g["amounts"]), key=float, default="0"),
        most_cpu=max((g["max_cpu"] for g in groups), key=float, default="0"),
        most_memory_mib=max((g["max_memory_mib"] for g in groups), default=0),
        most_gpu_memory_mib=max((g["max_gpu_memory_mib"] for g in groups), default=0),
        longest=None if offer.max_time_limit_s is None else hours_minutes(offer.max_time_limit_s),
        highest=offer.max_priority,
        max_count=offer.caps.max_count,
        simulated=offer.simulated,
        ticket=ticket,
        field_max_length=FIELD_MAX_LENGTH,
        service_url=hub_prefix.removesuffix("hub/") + "services/fgpu/",
    )


def _image(offer: Offer, image: Image, amounts: Mapping[str, Sequence[int]]) -> dict[str, Any]:
    """Return what the form says of an image, and its script preselects with it in each resource group."""
    return {
        "slug": image.slug,
        "name": image.name,
        "description": image.description,
        "icon": icon_svg(icon_name(image)),
        "deprecated": image.deprecated,
        "least": least_words(image),
        "amounts": {
            group: {
                "fgpu": format_milli(usual.fgpu_milli),
                "cpu": format_milli(usual.cpu_milli),
                "memory_mib": str(usual.memory_mib),
            }
            for group in offer.groups
            for usual in [offer.amounts_with(image, group, amounts[group])]
        },
        "gpu_memory_mib": image.recommended_gpu_memory_mib or image.min_gpu_memory_mib or None,
    }


def _group(offer: Offer, name: str) -> dict[str, Any]:
    """Return what the form says of a resource group, and its script knows of it."""
    own = [n for n in offer.nodes if n.resource_group == name]
    counts: dict[str, int] = {}
    for device in (d for n in own for d in n.devices):
        label = f"{device.model} = {format_milli(device.capacity_milli)} fGPU"
        counts[label] = counts.get(label, 0) + 1
    caps = offer.caps
    return {
        "name": name,
        "amounts": [format_milli(a) for a in offer.amounts(name)],
        "max_cpu": format_milli(min(max((n.cpu_milli for n in own), default=0), caps.max_cpu_milli or 10**9)),
        "max_memory_mib": min(max((n.memory_mib for n in own), default=0), caps.max_memory_mib or 10**9),
        "max_gpu_memory_mib": max((d.memory_mib for n in own for d in n.devices), default=0),
        "gpus": [f"{count} x {label}" for label, count in counts.items()],
        "models": offer.models(name),
    }


def _values(offer: Offer, given: Mapping[str, str]) -> dict[str, str]:
    """Return the text of every field: what was given, else what is preselected."""
    preselected = {name: str(value) for name, value in offer.default.as_options().items()}
    values: dict[str, str] = {**dict.fromkeys((*FIELDS, GPU_BY, IMAGE_NAME), ""), **preselected, **given}
    # The form asks for the time in hours and minutes; a link may have given it in seconds.
    seconds = values["time_limit_s"]
    if not values["time_limit"] and seconds.isascii() and seconds.isdigit() and len(seconds) < 10:
        values["time_limit"] = hours_minutes(int(seconds)) if int(seconds) else ""
    if values[GPU_BY] not in ("fgpu", "memory"):
        values[GPU_BY] = "memory" if given.get("gpu_memory_mib") and not given.get("fgpu") else "fgpu"
    return values


def _at_fields(refusals: Sequence[Refusal]) -> dict[str, str]:
    """Return what to say at each of the form's fields; of several things at one, all."""
    found: dict[str, list[str]] = {}
    for refusal in refusals:
        field = "time_limit" if refusal.field == "time_limit_s" else refusal.field
        found.setdefault(field, []).append(refusal.message)
    return {field: "; ".join(messages) for field, messages in found.items()}


def render_refusal(refused: Refused) -> str:
    """Return what stands in place of the form for a user who may start nothing."""
    return str(refusal_html(refused))


def refusal_html(refused: Refused) -> str:
    """Return the reasons as escaped HTML, one below the other."""
    items = Markup("").join(Markup("<li>{}</li>").format(r.message) for r in refused.refusals)
    return str(Markup("<ul class='fgpu-refusals mb-0 ps-3'>{}</ul>").format(items))


def given(handler: Any) -> dict[str, str]:
    """Return the options that a link to the form carries, for showing the form filled in with them."""
    arguments = getattr(getattr(handler, "request", None), "query_arguments", {})
    texts = {name: [v.decode("utf-8", "replace") for v in values] for name, values in arguments.items()}
    return first_of({name.removeprefix("opt-"): v for name, v in texts.items() if name.startswith("opt-")})


def first_of(fields: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Return the first value of each field that the form has, cut to what a field can hold."""
    return {
        name: str(fields[name][0])[:FIELD_MAX_LENGTH]
        for name in (*FIELDS, GPU_BY, IMAGE_NAME)
        if fields.get(name)
    }
