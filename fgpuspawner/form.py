"""What the Hub's own pages show: the launch form, and refusals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from fgpu_scheduler import Refusal, Session, format_milli
from fgpu_scheduler.banner import Notice
from fgpuspawner.advice import Advice
from fgpuspawner.failed import next_step
from fgpuspawner.form_images import SEARCH_FROM, amounts, cards, most_gpu_memory_mib
from fgpuspawner.form_quick import quick
from fgpuspawner.options import FIELDS, GPU_BY, IMAGE_NAME, Offer, Refused, Wanted
from fgpuspawner.presets import fields_of
from fgpuspawner.words import hours_minutes

TEMPLATES = Path(__file__).parent / "templates"
FIELD_MAX_LENGTH = 400
"""What a field of the form can hold: the longest name of a private image, and more."""
LABELS = {
    "image": "Image",
    "group": "Resource group",
    "fgpu": "GPU (fGPU)",
    "gpu_memory_mib": "GPU memory (MiB)",
    "compute_percent": "Compute (%)",
    "gpu_model": "GPU model",
    "cpu": "CPU (cores)",
    "memory_mib": "Memory (MiB)",
    "count": "Sessions",
    "time_limit": "Time limit",
    "time_limit_s": "Time limit",
    "priority": "Priority",
}
"""How the form calls its fields: refusals name options as links and the API have them."""

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
    fewer_sessions: bool = False,
    presets: Sequence[Mapping[str, object]] = (),
    sessions: Sequence[Session] = (),
    advice: Mapping[str, Advice] | None = None,
    failed: Session | None = None,
    notice: Notice | None = None,
) -> str:
    """Return the inside of the launch form. It works without JavaScript; with it, it shows a forecast.

    ``ticket`` lets the page ask the service for forecasts. ``given`` is what was sent and refused, to be
    shown again, with why it was (``refusals``) at its fields; it is only ever shown as text. ``fewer_sessions``: the
    offer's ``max_count`` is below the cap, as more would be named servers too many. ``presets`` are the
    administrator's, ``sessions`` the user's own of late. ``advice`` is what their last runs of an image would have
    needed. ``failed`` is the last session of this server where that came to nothing: the form is filled in with what
    it asked for. ``notice`` is what the administrators announce.
    """
    if failed is not None:
        given = _again(offer, failed)
    groups = [_group(offer, name) for name in offer.groups]
    template = _jinja.get_template("fgpu_options_form.html")
    return template.render(
        cards=cards(offer, advice or {}),
        images_shown=len(offer.shown_images),
        search_from=SEARCH_FROM,
        known={"groups": groups, "images": amounts(offer, advice or {}), "labels": LABELS},
        failed=failed,
        next_step="" if failed is None or failed.end_cause is None else next_step(failed.end_cause),
        notice=notice,
        quick=quick(offer, presets, sessions),
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
        fewer_sessions=fewer_sessions,
        simulated=offer.simulated,
        ticket=ticket,
        field_max_length=FIELD_MAX_LENGTH,
        service_url=hub_prefix.removesuffix("hub/") + "services/fgpu/",
    )


def _again(offer: Offer, failed: Session) -> dict[str, str]:
    """Return the fields as they were for a session; an image that is not shown is asked for by its name."""
    fields = fields_of(Wanted.of(failed.request).as_options())
    return fields | {IMAGE_NAME: _unshown_image(offer, fields)}


def _unshown_image(offer: Offer, fields: Mapping[str, str]) -> str:
    """Return the image that these fields choose where the form does not show it, so that it is asked for by name."""
    slug = fields.get("image", "")
    return "" if any(image.slug == slug for image in offer.shown_images) else slug


def _group(offer: Offer, name: str) -> dict[str, Any]:
    """Return what the form says of a resource group, and its script knows of it."""
    own = [n for n in offer.nodes if n.resource_group == name]
    counts: dict[str, int] = {}
    for device in (d for n in own for d in n.devices):
        label = f"{device.model} of {format_milli(device.capacity_milli)} fGPU"
        counts[label] = counts.get(label, 0) + 1
    caps = offer.caps
    return {
        "name": name,
        "amounts": [format_milli(a) for a in offer.amounts(name)],
        "max_cpu": format_milli(min(max((n.cpu_milli for n in own), default=0), caps.max_cpu_milli or 10**9)),
        "max_memory_mib": min(max((n.memory_mib for n in own), default=0), caps.max_memory_mib or 10**9),
        "max_gpu_memory_mib": most_gpu_memory_mib(own, name),
        "gpus": [f"{count} x {label}" + (" each" if count > 1 else "") for label, count in counts.items()],
        "models": offer.models(name),
    }


def _values(offer: Offer, given: Mapping[str, str]) -> dict[str, str]:
    """Return the text of every field: what was given, else what is preselected."""
    preselected = {name: str(value) for name, value in offer.default.as_options().items()}
    values: dict[str, str] = {**dict.fromkeys((*FIELDS, GPU_BY, IMAGE_NAME), ""), **preselected, **given}
    values[IMAGE_NAME] = values[IMAGE_NAME] or _unshown_image(offer, given)
    # The form asks for the time in hours and minutes; a link may have given it in seconds.
    seconds = (given if "time_limit" in given else values).get("time_limit_s", "")
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
        found.setdefault(field, []).append(_reason(refusal))
    return {field: "; ".join(messages) for field, messages in found.items()}


def _reason(refusal: Refusal) -> str:
    """Return a refusal without the name of its option."""
    return refusal.message.removeprefix(f"{refusal.field}: ")


def _words(refusal: Refusal) -> str:
    """Return a refusal with the form's word for its field."""
    reason = _reason(refusal)
    return f"{LABELS[refusal.field]}: {reason}" if refusal.field in LABELS else refusal.message


def refusal_words(refused: Refused) -> str:
    """Return the reasons as one text, with the form's words for its fields."""
    return "; ".join(_words(r) for r in refused.refusals)


def render_refusal(refused: Refused) -> str:
    """Return what stands in place of the form for a user who may start nothing."""
    return str(refusal_html(refused))


def refusal_html(refused: Refused) -> str:
    """Return the reasons as escaped HTML, one below the other."""
    items = Markup("").join(Markup("<li>{}</li>").format(_words(r)) for r in refused.refusals)
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
