"""The images of the launch form: a card for each framework with its versions, and the amounts that go with each. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fgpu_scheduler import Node, format_milli
from fgpu_scheduler.core.units import MEMORY_GRAIN_MIB
from fgpuspawner.advice import Advice
from fgpuspawner.images.icons import icon_name, icon_svg
from fgpuspawner.images.model import Image
from fgpuspawner.images.needs import least_fgpu_milli, least_words
from fgpuspawner.options import Offer

TITLES = {
    "jax": "JAX",
    "julia": "Julia",
    "mxnet": "MXNet",
    "python": "Python",
    "pytorch": "PyTorch",
    "r": "R",
    "rapids": "RAPIDS",
    "tensorflow": "TensorFlow",
}
"""How frameworks write their names; others are shown as the catalogue has them."""
PRIVATE = "Private images"
PRIVATE_ABOUT = "Saved from sessions: your own, and those that were shared with you."
SEARCH_FROM = 6
"""So many images can be searched."""


def cards(offer: Offer, advice: Mapping[str, Advice]) -> list[dict[str, Any]]:
    """Return the cards, in the order in which their first images are in the catalogue; private images come last.

    ``advice`` is what the user's last runs of an image would have needed, by the image's slug.
    """
    found: dict[tuple[bool, str], list[Image]] = {}
    for image in offer.shown_images:
        key = (True, "") if image.owner else (False, image.framework.casefold())
        found.setdefault(key, []).append(image)
    return [_card(found[key], advice, private=key[0]) for key in sorted(found, key=lambda key: key[0])]


def _card(images: Sequence[Image], advice: Mapping[str, Advice], *, private: bool) -> dict[str, Any]:
    framework = images[0].framework
    title = PRIVATE if private else TITLES.get(framework.casefold(), framework)
    short = _short(images, title)
    return {
        "title": title,
        "about": PRIVATE_ABOUT if private else "",
        "icon": icon_svg("cube" if private else icon_name(images[0])),
        "images": [
            {
                "slug": image.slug,
                "name": image.name,
                "prefix": image.name[: len(image.name) - len(short[image.slug])],
                "short": short[image.slug],
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


def _short(images: Sequence[Image], title: str) -> dict[str, str]:
    """Return what tells the images of a card apart: without the title, where that is in front of all their names."""
    lead = f"{title} ".casefold()
    rest = [image.name[len(lead) :] for image in images]
    if all(image.name.casefold().startswith(lead) for image in images) and all(rest):
        return {image.slug: text for image, text in zip(images, rest, strict=True)}
    return {image.slug: image.name for image in images}


def amounts(offer: Offer, advice: Mapping[str, Advice]) -> dict[str, Any]:
    """Return what the form's script knows of each image: what it is started with, and its least, in each group."""
    steps = {name: offer.amounts(name) for name in offer.groups}
    return {
        image.slug: _amounts(offer, image, steps) | {"enough": _enough(advice.get(image.slug))}
        for image in offer.shown_images
    }


def _amounts(offer: Offer, image: Image, steps: Mapping[str, Sequence[int]]) -> dict[str, Any]:
    return {
        "amounts": {group: _with(offer, image, group, steps[group]) for group in offer.groups},
        "least": {group: _least(offer, image, group) for group in offer.groups},
        "recommended": {
            "fgpu": bool(image.recommended_fgpu_milli or image.recommended_gpu_memory_mib),
            "cpu": bool(image.recommended_cpu_milli),
            "memory_mib": bool(image.recommended_memory_mib),
        },
        "gpu_memory_mib": {group: _gpu_memory_mib(offer, image, group) for group in offer.groups},
    }


def _gpu_memory_mib(offer: Offer, image: Image, group: str) -> int | None:
    """Return what is filled in for who asks for exact memory: what can be asked for, and one GPU there has."""
    wanted_mib = image.recommended_gpu_memory_mib or image.min_gpu_memory_mib
    if not wanted_mib:
        return None
    return min(-(-wanted_mib // MEMORY_GRAIN_MIB) * MEMORY_GRAIN_MIB, most_gpu_memory_mib(offer.nodes, group))


def most_gpu_memory_mib(nodes: Sequence[Node], group: str) -> int:
    """Return the memory of the largest GPU of a resource group, 0 where it has none."""
    own = (d.memory_mib for n in nodes if n.resource_group == group for d in n.devices)
    return max(own, default=0)


def _enough(advice: Advice | None) -> str | None:
    return None if advice is None else format_milli(advice.enough_milli)


def _with(offer: Offer, image: Image, group: str, steps: Sequence[int]) -> dict[str, str]:
    usual = offer.amounts_with(image, group, steps)
    return {
        "fgpu": format_milli(usual.fgpu_milli),
        "cpu": format_milli(usual.cpu_milli),
        "memory_mib": str(usual.memory_mib),
    }


def _least(offer: Offer, image: Image, group: str) -> dict[str, str | None]:
    devices = [d for n in offer.nodes if n.resource_group == group for d in n.devices]
    fgpu = least_fgpu_milli(image, devices, step_milli=offer.caps.fgpu_step_milli)
    return {
        "fgpu": format_milli(fgpu) if fgpu else None,
        "cpu": format_milli(image.min_cpu_milli) if image.min_cpu_milli else None,
        "memory_mib": str(image.min_memory_mib) if image.min_memory_mib else None,
    }
