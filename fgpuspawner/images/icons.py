"""The pictures of images: a few of our own, each one path in a box of 24 by 24, drawn in the text's colour."""

from __future__ import annotations

from markupsafe import Markup

from fgpuspawner.images.model import Image

ICONS = {
    "snake": "M18 6a3 3 0 0 0-3-2h-5a4 4 0 0 0 0 8h4a4 4 0 0 1 0 8H8a3 3 0 0 1-3-2M18 6h-3M18 6l2-2",
    "flame": "M12 3c1 4 6 6 6 11a6 6 0 0 1-12 0c0-3 2-4 2-7 2 1 3 2 3 4 1-2 2-4 1-8z",
    "flow": "M4 6h10a4 4 0 0 1 0 8H9M9 14l3-3M9 14l3 3M4 18h16M4 6l3-3M4 6l3 3",
    "chart": "M4 4v16h16M8 16v-5M12 16V7M16 16v-7",
    "chip": "M7 7h10v10H7zM10 3v4M14 3v4M10 17v4M14 17v4M3 10h4M3 14h4M17 10h4M17 14h4",
    "book": "M12 6c-3-2-6-2-8-1v13c2-1 5-1 8 1 3-2 6-2 8-1V5c-2-1-5-1-8 1zM12 6v13",
    "flask": "M9 3h6M10 3v6l-5 9a2 2 0 0 0 2 3h10a2 2 0 0 0 2-3l-5-9V3M8 15h8",
    "cube": "M12 3l8 4.5v9L12 21l-8-4.5v-9zM4 7.5l8 4.5 8-4.5M12 12v9",
}
"""By name. The last is for whatever says nothing else."""

OF_FRAMEWORK = {"python": "snake", "pytorch": "flame", "tensorflow": "flow"}


def icon_name(image: Image) -> str:
    """Return the image's icon: its own, else that of its framework."""
    return image.icon or OF_FRAMEWORK.get(image.framework.lower(), "cube")


def icon_svg(name: str) -> Markup:
    """Return an icon as inline SVG, without a style of its own."""
    return Markup(
        '<svg class="fgpu-icon" viewBox="0 0 24 24" width="24" height="24" fill="none" stroke="currentColor" '
        'stroke-width="1.6" stroke-linecap="round" stroke-linejoin="round" aria-hidden="true"><path d="{}"/></svg>'
    ).format(ICONS.get(name, ICONS["cube"]))
