"""The API's images: what the caller may start."""

from __future__ import annotations

from collections.abc import Iterable

from fgpuspawner.images.entry import amount_text, amounts_of
from fgpuspawner.images.icons import icon_name
from fgpuspawner.images.model import Image
from fgpuspawner.service import objects
from fgpuspawner.service.api.base import Api


class Images(Api):
    needs_scope = None

    async def get(self) -> None:
        reader, viewer = self.service.reader, self.viewer
        world = await reader.world()
        shown = reader.shown_images(world, viewer.user or "", viewer.hub_groups, viewer.groups)
        default = next((image for image in shown if image.default), next(iter(shown), None))
        self.answer(images_object(shown, default=default, simulated=world.simulated(viewer.groups)))


def images_object(images: Iterable[Image], *, default: Image | None, simulated: bool) -> objects.Images:
    """Return the images that a caller is shown, in the catalogue's order."""
    shown = [_image_object(image, default=image == default) for image in images]
    return objects.Images(images=shown, simulated=simulated)


def _image_object(image: Image, *, default: bool) -> objects.Image:
    return objects.Image.of(
        image,
        icon=icon_name(image),
        cuda=image.cuda or None,
        minimum=_needs(image, "minimum"),
        recommended=_needs(image, "recommended"),
        deprecated=image.deprecated or None,
        private=bool(image.owner),
        default=default,
    )


def _needs(image: Image, table: str) -> objects.Needs:
    said = amounts_of(image, table).items()
    amounts = {amount: amount_text(amount, value) if value else None for amount, value in said}
    return objects.Needs.model_validate(amounts)
