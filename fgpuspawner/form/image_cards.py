"""The images of the launch form: a card for each framework, the amounts that go with each, and their meaning. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from fractions import Fraction
from typing import Any

from fgpu_scheduler import (
    MEMORY_GRAIN_MIB,
    Device,
    format_milli,
    memory_words,
    share_compute_percent,
    share_memory_mib,
)
from fgpuspawner.form.advice import Advice
from fgpuspawner.form.offer import Offer
from fgpuspawner.images.icons import icon_name, icon_svg
from fgpuspawner.images.model import Image
from fgpuspawner.images.needs import least_fgpu_milli, least_words
from fgpuspawner.text.fields import in_gib
from fgpuspawner.text.sessions import TITLES

FINEST = 20
"""Parts of a GPU with a larger denominator are written in percent."""


def amount_meaning(
    fgpu_milli: int, devices: Sequence[Device], lending: Collection[str] = ()
) -> dict[str, str]:
    """Return an amount's description for each possible GPU model: "1/4 GPU: 2 GiB GPU memory, 25 % compute".

    ``devices`` are those of one resource group. On the nodes of ``lending`` the text is "at least 25 % compute".
    """
    found: dict[str, list[str]] = {}
    kinds = {(d.model, d.capacity_milli, d.memory_mib, d.node_id in lending): d for d in devices}
    for device in kinds.values():
        if words := _of(fgpu_milli, device, lends=device.node_id in lending):
            if words in found.get(device.model, ()):
                continue
            found.setdefault(device.model, []).append(words)
    return {model: " or ".join(words) for model, words in found.items()}


def _of(fgpu_milli: int, device: Device, *, lends: bool) -> str:
    whole, rest = divmod(fgpu_milli, device.capacity_milli)
    if whole and rest:
        return ""
    if whole > 1:
        return f"{whole} GPUs: {memory_words(device.memory_mib)} GPU memory each"
    if whole == 1:
        return f"1 GPU: {memory_words(device.memory_mib)} GPU memory"
    part = Fraction(fgpu_milli, device.capacity_milli)
    percent = share_compute_percent(fgpu_milli, capacity_milli=device.capacity_milli)
    share_mib = share_memory_mib(
        fgpu_milli, capacity_milli=device.capacity_milli, device_memory_mib=device.memory_mib
    )
    name = f"{part} GPU" if part.denominator <= FINEST else f"{percent} % of a GPU"
    return f"{name}: {memory_words(share_mib)} GPU memory, {'at least ' if lends else ''}{percent} % compute"


PRIVATE = "Private images"
PRIVATE_ABOUT = "Saved from sessions: your own, and those that were shared with you."
SEARCH_FROM = 6
"""From this many images on, the form has a search field."""


def cards(offer: Offer, advice: Mapping[str, Advice]) -> list[dict[str, Any]]:
    """Return the cards, in the order in which their first images are in the catalogue; private images come last.

    ``advice`` is what the user's last runs of an image would have needed, by the image's slug.
    """
    found: dict[str, list[Image]] = {}
    for image in sorted(offer.shown_images, key=lambda image: bool(image.owner)):
        found.setdefault("" if image.owner else image.framework.casefold(), []).append(image)
    return [_card(images, advice) for images in found.values()]


def _card(images: Sequence[Image], advice: Mapping[str, Advice]) -> dict[str, Any]:
    private, framework = bool(images[0].owner), images[0].framework
    title = PRIVATE if private else TITLES.get(framework.casefold(), framework)
    # Names are shown without the title if all begin with it and have more.
    lead = f"{title} ".casefold()
    led = all(image.name.casefold().startswith(lead) and image.name[len(lead) :] for image in images)
    cut = len(lead) if led else 0
    return {
        "title": title,
        "about": PRIVATE_ABOUT if private else "",
        "icon": icon_svg("cube" if private else icon_name(images[0])),
        "images": [
            {
                "slug": image.slug,
                "name": image.name,
                "prefix": image.name[:cut],
                "short": image.name[cut:],
                "description": image.description,
                "least": least_words(image),
                "deprecated": image.deprecated,
                "advice": advice[image.slug].text if image.slug in advice else "",
                "search": " ".join(
                    (image.name, image.framework, image.version, f"python {image.python}", image.description)
                ).casefold(),
            }
            for image in images
        ],
    }


def amounts(offer: Offer, advice: Mapping[str, Advice]) -> dict[str, Any]:
    """Return each image's preselected and minimum amounts by resource group, for the form's script."""
    steps = {group: offer.amounts(group) for group in offer.groups}
    return {
        image.slug: {
            "amounts": {group: _with(offer, image, group, steps[group]) for group in offer.groups},
            "least": {group: _least(offer, image, group) for group in offer.groups},
            "recommended": {
                "fgpu": bool(image.recommended_fgpu_milli or image.recommended_gpu_memory_mib),
                "cpu": bool(image.recommended_cpu_milli),
                "memory_gib": bool(image.recommended_memory_mib),
            },
            "gpu_memory_mib": {group: _gpu_memory_mib(offer, image, group) for group in offer.groups},
            "enough": format_milli(advice[image.slug].enough_milli) if image.slug in advice else None,
        }
        for image in offer.shown_images
    }


def most_gpu_memory_mib(offer: Offer, group: str) -> int:
    return max((device.memory_mib for device in offer.devices_of(group)), default=0)


def _gpu_memory_mib(offer: Offer, image: Image, group: str) -> int | None:
    """Return the exact GPU memory that the form fills in: the image's, at most the largest GPU's; None without."""
    wanted_mib = image.recommended_gpu_memory_mib or image.min_gpu_memory_mib
    asked_mib = -(-wanted_mib // MEMORY_GRAIN_MIB) * MEMORY_GRAIN_MIB
    return min(asked_mib, most_gpu_memory_mib(offer, group)) if wanted_mib else None


def _with(offer: Offer, image: Image, group: str, steps: Sequence[int]) -> dict[str, str | None]:
    usual = offer.amounts_with(image, group, steps)
    return written(usual.fgpu_milli, usual.cpu_milli, usual.memory_mib)


def _least(offer: Offer, image: Image, group: str) -> dict[str, str | None]:
    fgpu = least_fgpu_milli(image, offer.devices_of(group), step_milli=offer.caps.fgpu_step_milli)
    return written(fgpu, image.min_cpu_milli, image.min_memory_mib)


def written(fgpu_milli: int, cpu_milli: int, memory_mib: int) -> dict[str, str | None]:
    """Return three amounts in the units of the form's fields, by the fields' names; None for 0."""
    found = {
        "fgpu": format_milli(fgpu_milli),
        "cpu": format_milli(cpu_milli),
        "memory_gib": in_gib(memory_mib),
    }
    return {name: None if text == "0" else text for name, text in found.items()}
