"""The API's images: what the caller may start."""

from __future__ import annotations

from collections.abc import Iterable

from fgpu_scheduler import format_milli
from fgpuspawner.images.icons import icon_name
from fgpuspawner.images.model import Image
from fgpuspawner.service.api.base import Api
from fgpuspawner.service.model import Json


class Images(Api):
    needs_scope = None

    async def get(self) -> None:
        reader, viewer = self.service.reader, self.viewer
        world = await reader.world()
        shown = reader.shown_images(world, viewer.user or "", viewer.hub_groups, viewer.groups)
        default = next((image for image in shown if image.default), next(iter(shown), None))
        self.answer(images_object(shown, default=default, simulated=world.simulated(viewer.groups)))


def images_object(images: Iterable[Image], *, default: Image | None, simulated: bool) -> Json:
    """Return the images that a caller is shown, in the catalogue's order."""
    return {
        "images": [_image_object(image, default=image == default) for image in images],
        "simulated": simulated,
    }


def _image_object(image: Image, *, default: bool) -> Json:
    return {
        "slug": image.slug,
        "name": image.name,
        "framework": image.framework,
        "version": image.version,
        "python": image.python,
        "description": image.description,
        "icon": icon_name(image),
        "kernels": list(image.kernels),
        "gpu_architectures": list(image.gpu_architectures),
        "cuda": image.cuda or None,
        "minimum": _amounts_object(image, "min"),
        "recommended": _amounts_object(image, "recommended"),
        "sudo": image.sudo,
        "deprecated": image.deprecated or None,
        "private": bool(image.owner),
        "default": default,
    }


def _amounts_object(image: Image, which: str) -> Json:
    amounts = ("fgpu_milli", "gpu_memory_mib", "cpu_milli", "memory_mib")
    fgpu, gpu_memory, cpu, memory = (getattr(image, f"{which}_{amount}") for amount in amounts)
    return {
        "fgpu": format_milli(fgpu) if fgpu else None,
        "gpu_memory_mib": gpu_memory or None,
        "cpu": format_milli(cpu) if cpu else None,
        "memory_mib": memory or None,
    }
