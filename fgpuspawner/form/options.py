"""Form, link and API input -> one validated `LaunchRequest`. Pure; every refusal names the field and the limit.

The form and the link give lists of strings, the API gives JSON; all three have the same names and rules, `FIELDS`.
The GPU is asked for as ``fgpu``, or as ``gpu_memory_mib`` with ``compute_percent`` (without: memory only).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import islice, takewhile

from fgpu_scheduler import Refusal, Request, admit
from fgpuspawner.form.offer import AT_START, GPU_WHEN, ON_DEMAND, LaunchRequest, Offer, RequestRefused
from fgpuspawner.form.own_setup import GIVEN, read_setup
from fgpuspawner.images.availability import NOTHING_KNOWN
from fgpuspawner.images.model import Image
from fgpuspawner.images.needs import models_for
from fgpuspawner.text.fields import FIELDS, Given, in_gib, joined, short
from fgpuspawner.text.times import hours_minutes

GPU_BY = "gpu_by"
"""A field of the form only: which of its two ways to ask for a GPU is used, "fgpu" or "memory"."""
IMAGE_NAME = "image_name"
"""A field of the form only: the name of an image, used instead of the listed ones."""

ACCEPT_IMAGE = "accept_image"
"""The digest of another user's image that is accepted with the start: what was seen is what is started."""

NOT_ACCEPTED = "not_accepted"

MOST_UNKNOWN = 5
"""Most unknown options that a refusal names: a request may have a hundred thousand, and refusals are logged."""

ANY_GROUP = {"count", "time_limit", "time_limit_s", "priority"}
"""Fields with the same limits in every resource group."""
OF_SEVERAL = {"above_quota", "compute_alone", "never_fits_together", "two_ways"}
"""Codes of refusals that concern several fields together."""

MEMORY_BOUNDS = {
    "too_small": "too small; choose at least {}",
    "above_cap": "above the limit of {} GiB per session",
    "never_fits": "more than any machine has; choose at most {}",
    "below_image": "below the least of {} GiB that the image needs",
}
"""The messages for memory that is given in GiB, by the code of the refusal."""


def read_fields(fields: Mapping[str, Sequence[str]]) -> dict[str, object]:
    """Return form or link fields as raw options; empty ones are left out, so that defaults apply.

    Two empty fields of the form mean something: no time limit, and no image.

    Raises:
        RequestRefused: a field is given twice, or as a file.
    """
    raw: dict[str, object] = {}
    for name, values in fields.items():
        if name == "folders" and all(isinstance(value, str) for value in values):
            values = [joined(values)]
        elif name == "gpu_models" and all(isinstance(value, str) for value in values):
            # The form has one field for each model, and the first empty one ends the list.
            values = [joined(takewhile(str.strip, values))]
        field = name if name in FIELDS else "options"
        if len(values) > 1:
            message = f"{short(name)}: given {len(values)} times; give it once"
            raise RequestRefused([Refusal(field, "given_twice", message)])
        if values and not isinstance(values[0], str):
            raise RequestRefused([Refusal(field, "no_text", f"{short(name)}: a file was sent; send a text")])
        if values and (values[0].strip() or name in GIVEN):
            # Emptied ones replace what is saved.
            raw[name] = values[0].strip()
    by, named = raw.pop(GPU_BY, None), raw.pop(IMAGE_NAME, None)
    if by is not None and "time_limit" in fields and raw.keys().isdisjoint(("time_limit", "time_limit_s")):
        # The form's field holds the default: a user who empties it wants no limit.
        raw["time_limit_s"] = "0"
    if named is not None:
        raw["image"] = named
    elif IMAGE_NAME in fields:
        # A form without a chosen or named image must not start the default image.
        raw.setdefault("image", "")
    unmeant = {"fgpu": ("gpu_memory_mib", "compute_percent"), "memory": ("fgpu",)}.get(str(by), ())
    return {name: value for name, value in raw.items() if name not in unmeant}


def parse(raw: Mapping[str, object], offer: Offer) -> LaunchRequest:
    """Return the launch request for raw options that may queue. Missing options take the offer's defaults.

    Raises:
        RequestRefused: with every reason at once.
    """
    given = Given(raw)
    refusals = given.refusals
    unknown = (name for name in raw if name not in FIELDS and name != ACCEPT_IMAGE)
    for name in islice(unknown, MOST_UNKNOWN):
        message = f"{short(name)}: no such option; the options are {', '.join(FIELDS)}"
        refusals.append(Refusal("options", "unknown_option", message))
    group = given.choice("group", offer.groups, offer.default.resource_group)
    accounts = offer.account_paths
    account = given.choice("account", tuple(accounts), next(iter(accounts))) if accounts else ""
    if not accounts and raw.get("account"):
        given.refuse("account", "unknown_choice", "there are no accounts here; leave it out")
    when = GPU_WHEN if offer.may_wait_for_gpu(group) else (AT_START,)
    image = _image(given, offer)
    default = offer.amounts_with(image, group) if "image" in raw or "group" in raw else offer.default
    gpu_memory_mib, models = given.maybe_whole("gpu_memory_mib"), offer.models(group)
    fgpu_milli = given.amount("fgpu", default.fgpu_milli if gpu_memory_mib is None else 0)
    usual = fgpu_milli if gpu_memory_mib is None else offer.worth_milli(gpu_memory_mib, group)
    cpu_milli, memory_mib = offer.beside(usual, group, image)
    wanted = replace(
        offer.default,
        image=image.slug,
        resource_group=group,
        account=accounts.get(account, ""),
        on_demand=given.choice("gpu", when, AT_START) == ON_DEMAND,
        fgpu_milli=fgpu_milli,
        cpu_milli=given.amount("cpu", cpu_milli),
        memory_mib=given.memory_mib(memory_mib),
        count=given.whole("count", default.count),
        gpu_memory_mib=gpu_memory_mib,
        compute_percent=given.maybe_whole("compute_percent"),
        gpu_models=given.models(models),
        time_limit_s=given.time_limit(default.time_limit_s, offer.max_time_limit_s),
        priority=given.whole("priority", 0),
        folders=_folders(given, offer),
        name=given.name(),
        setup=given.whole("setup", 0),
        own=read_setup(given),
    )
    usable = models_for(image, models)
    if not wanted.gpu_models and len(usable) == 1 != len(models):
        # The image runs on this model only.
        wanted = replace(wanted, gpu_models=usable)
    found = admit(wanted, wanted.count, offer.nodes, offer.caps, offer.quotas)
    told = [_in_its_notation(raw, wanted, refusal) for refusal in found]
    refusals.extend(_beside(refusals, raw, told) if refusals else told)
    if refusals := refusals or [_in_its_notation(raw, wanted, unmet) for unmet in offer.unmet(wanted)]:
        raise RequestRefused(refusals)
    return wanted


def _folders(given: Given, offer: Offer) -> tuple[str, ...]:
    """Return the names of the chosen folders, without those that each of the user's sessions has."""
    chosen = given.folders([folder.name for folder in offer.folders])
    always = {folder.name for folder in offer.folders if folder.always}
    return tuple(name for name in chosen if name not in always)


def parse_to_start(
    raw: Mapping[str, object], offer: Offer, waiting: Request | None = None
) -> tuple[LaunchRequest, str]:
    """Return the launch request, and the digest of another user's image that it accepts, or "".

    ``waiting`` is the server's waiting request: it keeps its place, even if its image can't start now.

    Raises:
        RequestRefused: with every reason at once; also where the image is another user's and not accepted.
    """
    if waiting is not None and raw.get("account") not in offer.account_paths:
        # The accounts have changed since it was submitted.
        raw = {name: value for name, value in raw.items() if name != "account"}
    if waiting is not None and raw.get("image", waiting.image) == waiting.image:
        raw, offer = {**raw, "image": waiting.image}, replace(offer, available=NOTHING_KNOWN)
    wanted = parse(raw, offer)
    image = offer.image(wanted.image)
    assert image is not None
    if image.is_accepted_by(offer.user):
        return wanted, ""
    if not image.digest or raw.get(ACCEPT_IMAGE) != image.digest:
        message = (
            f"image: {image.slug} is {image.owner}'s, and its programs run as you, with your files; if you trust"
            f" {image.owner}, accept it with {ACCEPT_IMAGE}={image.digest}"
        )
        raise RequestRefused([Refusal("image", NOT_ACCEPTED, message, nearest=image.digest)])
    return wanted, image.digest


def _image(given: Given, offer: Offer) -> Image:
    """Return the chosen image; a hidden one only if it was named. If it is refused, return any image."""
    slug, slugs = given.raw.get("image"), [image.slug for image in offer.shown_images]
    found = offer.image(slug)
    if found is None and not slugs:
        named = slug not in (None, "")
        asked = f"there is no {short(slug)}" if named else "you are shown none"
        problem = f"{asked}; name one that you may use, or ask an administrator"
        given.refuse("image", "unknown_choice" if named else "no_image", problem)
        return offer.images[0]
    if found is None and slug == "":
        problem = f"none is chosen; choose one of {', '.join(slugs)}"
        given.refuse("image", "no_image", problem, nearest=offer.default.image)
    elif found is None:
        given.choice("image", slugs, offer.default.image)
    return found or offer.image(offer.default.image) or offer.images[0]


def _beside(before: Sequence[Refusal], raw: Mapping[str, object], found: Iterable[Refusal]) -> list[Refusal]:
    """Return the refusals that concern only readable given fields, in addition to ``before``, of unreadable ones.

    Unreadable fields were replaced by defaults, so refusals that may follow from those are left out.
    """
    wrong = {refusal.field for refusal in before}
    told = raw.keys() - wrong
    if "group" in wrong:
        told &= ANY_GROUP
    return [refusal for refusal in found if refusal.field in told and refusal.code not in OF_SEVERAL]


def _in_its_notation(raw: Mapping[str, object], wanted: LaunchRequest, refusal: Refusal) -> Refusal:
    """Return the refusal in the unit of the given field: hours and minutes for a time limit, GiB for memory."""
    if refusal.field == "time_limit_s" and raw.get("time_limit") is not None:
        field, limit = "time_limit", hours_minutes(int(refusal.limit or 0))
        which = "too short; choose at least" if refusal.code == "too_small" else "too long; choose at most"
        message = f"{hours_minutes(wanted.time_limit_s or 0)} is {which} {limit}"
    elif refusal.field == "memory_mib" and raw.get("memory_gib") is not None:
        field, limit = "memory_gib", in_gib(int(refusal.limit or 0))
        message = f"{raw['memory_gib']} is {MEMORY_BOUNDS[refusal.code].format(limit)}"
    else:
        return refusal
    return replace(refusal, field=field, message=f"{field}: {message}", limit=limit, nearest=limit)
