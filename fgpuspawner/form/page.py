"""What the Hub's own pages show: the launch form, and refusals."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from fgpu_scheduler import Notice, Refusal, SavedSetup, Session, format_milli
from fgpuspawner.form.advice import Advice
from fgpuspawner.form.image_cards import (
    SEARCH_FROM,
    amount_meaning,
    amounts,
    cards,
    most_gpu_memory_mib,
    written,
)
from fgpuspawner.form.offer import LaunchRequest, Offer, RequestRefused
from fgpuspawner.form.options import ACCEPT_IMAGE, GPU_BY, IMAGE_NAME, NOT_ACCEPTED, parse, read_fields
from fgpuspawner.form.own_setup import GIVEN
from fgpuspawner.form.presets import fields_of, in_form, one_click, setup_fields
from fgpuspawner.images.model import Image
from fgpuspawner.text.fields import FIELDS, MOST_NAME, joined
from fgpuspawner.text.times import hours_minutes

TEMPLATES = Path(__file__).parents[1] / "templates"
LONGEST_TEXT = 16_000
FIELD_MAX_LENGTH = 400
"""What a field of the form can hold: the longest name of a private image, and more."""
LABELS = {name: field.label for name, field in FIELDS.items()}
"""The labels of the form's fields. Refusals name options as links and the API do."""
AT = {"time_limit_s": "time_limit", "memory_mib": "memory_gib", "gpu_model": "gpu_models"}
"""The field of the form at which the refusal of an option without a field is shown."""
MORE = (
    "cpu",
    "memory_gib",
    "count",
    "time_limit",
    "priority",
    "name",
    "variables",
    "script",
    "account",
    "gpu",
    "gpu_models",
    "gpu_memory_mib",
    "compute_percent",
)
"""The fields that are shown on demand."""
FORM_FIELDS = (*FIELDS, GPU_BY, IMAGE_NAME)

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
    by_link: bool = False,
    fewer_sessions: bool = False,
    presets: Sequence[Mapping[str, object]] = (),
    sessions: Sequence[Session] = (),
    advice: Mapping[str, Advice] | None = None,
    again: Session | None = None,
    next_step: str = "",
    notice: Notice | None = None,
    own_presets: Mapping[str, Mapping[str, object]] | None = None,
    setups: Mapping[int, SavedSetup] | None = None,
    installing: Mapping[str, str] | None = None,
) -> str:
    """Return the inside of the launch form. It works without JavaScript; with it, it shows a forecast.

    Args:
        ticket: Lets the page request forecasts from the service.
        given: Field values to show again as text: refused ones, with ``refusals`` at their fields, or a link's.
        by_link: Whether ``given`` comes from a link.
        fewer_sessions: Whether the limit of named servers lowers the number of sessions below the cap.
        presets: The administrators' presets.
        sessions: The user's recent sessions.
        advice: Smaller sufficient amounts by image, from the user's last runs.
        again: The last session of this server; its request fills in the form.
        next_step: What to do now if ``again`` failed.
        notice: The administrators' banner.
        own_presets: The user's presets by name.
        setups: The user's saved variables and scripts; None for a viewer who is not the user.
        installing: How far each framework is that is being installed, by its name.
    """
    if again is not None:
        # An image that is not shown is requested by its name.
        given = {IMAGE_NAME: "", **fields_of(LaunchRequest.of(again.request).as_options())}
    groups = [_group(offer, name) for name in offer.groups]
    refused = _at_fields(refusals)
    template = _jinja.get_template("fgpu_options_form.html")
    return template.render(
        cards=cards(offer, advice or {}),
        images_shown=len(offer.shown_images),
        search_from=SEARCH_FROM,
        known={
            "groups": groups,
            "images": amounts(offer, advice or {}),
            "labels": LABELS,
            "at": AT,
            # What the user has chosen does not follow the amount of the GPU.
            "given": [AT.get(name, name) for name in given if name in FIELDS],
        },
        by_link=by_link,
        accept_image=ACCEPT_IMAGE,
        again=again,
        next_step=next_step,
        notice=notice,
        quick=one_click(offer, presets, sessions, own_presets or {}, setups or {}),
        owner=setups is not None,
        installing=installing or {},
        groups=groups,
        models=list(dict.fromkeys(model for group in groups for model in group["models"])),
        values=_values(offer, given, setups or {}),
        refused=refused,
        to_accept=_to_accept(offer, given),
        offered=len(offer.offered_images),
        step=format_milli(offer.caps.fgpu_step_milli),
        most_fgpu=max((g["amounts"][-1]["fgpu"] for g in groups if g["amounts"]), key=float, default="0"),
        most_cpu=max((g["max_cpu"] for g in groups), key=float, default="0"),
        most_memory_gib=max((g["max_memory_gib"] for g in groups), key=float, default="0"),
        more_refused=not refused.keys().isdisjoint(MORE),
        most_gpu_memory_mib=max((g["max_gpu_memory_mib"] for g in groups), default=0),
        longest=None if offer.max_time_limit_s is None else hours_minutes(offer.max_time_limit_s),
        highest=offer.max_priority,
        accounts=list(offer.account_paths),
        folders=offer.folders,
        on_demand=any(offer.may_wait_for_gpu(group) for group in offer.groups),
        max_count=offer.caps.max_count,
        fewer_sessions=fewer_sessions,
        simulated=offer.simulated,
        ticket=ticket,
        field_max_length=FIELD_MAX_LENGTH,
        most_name=MOST_NAME,
        service_url=hub_prefix.removesuffix("hub/") + "services/fgpu/",
    )


def _group(offer: Offer, name: str) -> dict[str, Any]:
    own, caps, devices = offer.nodes_of(name), offer.caps, offer.devices_of(name)
    counts = Counter(f"{d.model} of {format_milli(d.capacity_milli)} fGPU" for d in devices)
    most_memory_mib = min(max((n.memory_mib for n in own), default=0), caps.max_memory_mib or 10**9)
    return {
        "name": name,
        "amounts": [
            written(a, *offer.beside(a, name)) | {"means": amount_meaning(a, devices, offer.lending)}
            for a in offer.amounts(name)
        ],
        "max_cpu": format_milli(min(max((n.cpu_milli for n in own), default=0), caps.max_cpu_milli or 10**9)),
        # Rounded down: what is not there is refused.
        "max_memory_gib": format_milli(most_memory_mib * 100 // 1024 * 10),
        "max_gpu_memory_mib": most_gpu_memory_mib(offer, name),
        "fgpu_of_one": format_milli(offer.worth_milli(most_gpu_memory_mib(offer, name), name)),
        "gpus": [f"{count} x {label}" + (" each" if count > 1 else "") for label, count in counts.items()],
        "models": offer.models(name),
        "lends": bool(own) and all(node.id in offer.lending for node in own),
    }


def _values(offer: Offer, given: Mapping[str, str], setups: Mapping[int, SavedSetup]) -> dict[str, str]:
    values: dict[str, str] = {
        **dict.fromkeys(FORM_FIELDS, ""),
        **_preselected(offer, given),
        **in_form(given),
        **given,
    }
    if not values[IMAGE_NAME] and not offer.shows(given.get("image")):
        # The form has no button for a hidden image: the field of names has it.
        values[IMAGE_NAME] = given.get("image", "")
    if not given.keys() & set(GIVEN):
        values |= setup_fields(values["setup"], setups)
    if values[GPU_BY] not in ("fgpu", "memory"):
        values[GPU_BY] = "memory" if given.get("gpu_memory_mib") and not given.get("fgpu") else "fgpu"
    return values


def _preselected(offer: Offer, given: Mapping[str, str]) -> dict[str, str]:
    try:
        found = parse(read_fields({name: [value] for name, value in given.items()}), offer)
    except RequestRefused:
        found = offer.default
    return {name: value for name, value in fields_of(found.as_options()).items() if name != GPU_BY}


def _to_accept(offer: Offer, given: Mapping[str, str]) -> Image | None:
    image = offer.image(given.get(IMAGE_NAME) or given.get("image"))
    return None if image is None or image.is_accepted_by(offer.user) else image


def _at_fields(refusals: Sequence[Refusal]) -> dict[str, str]:
    found: dict[str, list[str]] = {}
    for refusal in refusals:
        field = AT.get(refusal.field, refusal.field)
        found.setdefault(field, []).append(_words(refusal).removeprefix(f"{refusal.field}: "))
    return {field: "; ".join(messages) for field, messages in found.items()}


def refusal_words(refused: RequestRefused) -> list[str]:
    """Return the reasons with the form's words for its fields."""
    return [
        f"{LABELS[r.field]}: {_words(r).removeprefix(f'{r.field}: ')}" if r.field in LABELS else r.message
        for r in refused.refusals
    ]


def _words(refusal: Refusal) -> str:
    # The form has a box to tick, where the API has an option.
    return (
        "another user's image: tick the box below it to accept it"
        if refusal.code == NOT_ACCEPTED
        else refusal.message
    )


def refusal_html(refused: RequestRefused) -> str:
    """Return the reasons as escaped HTML, one below the other."""
    items = Markup("").join(Markup("<li>{}</li>").format(words) for words in refusal_words(refused))
    return str(Markup("<ul class='fgpu-refusals mb-0 ps-3'>{}</ul>").format(items))


def first_of(fields: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Return the first value of each field that the form has, of models and folders all, cut to what a field can hold."""
    first = {name: fields[name][0] for name in FORM_FIELDS if fields.get(name)}
    if "gpu_models" in first:
        first["gpu_models"] = joined(takewhile(str.strip, map(str, fields["gpu_models"])))
    if "folders" in first:
        first["folders"] = joined(map(str, fields["folders"]))
    return {
        n: str(value)[: LONGEST_TEXT if n in (*GIVEN, "folders") else FIELD_MAX_LENGTH]
        for n, value in first.items()
    }
