"""Private images as the API's objects, and who may do what with them. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from fgpu_scheduler.store.private_image import HELD, ImageQuota, ImageState, PrivateImage, shown_mib
from fgpuspawner.service.view import Json, Viewer


def is_mine(image: PrivateImage, viewer: Viewer) -> bool:
    """Return whether it is the viewer's own."""
    return viewer.user is not None and image.owner == viewer.user


def may_manage(image: PrivateImage, viewer: Viewer) -> bool:
    """Return whether the viewer may rename, share and delete it."""
    return viewer.admin or is_mine(image, viewer)


def is_visible(image: PrivateImage, viewer: Viewer) -> bool:
    """Return whether the viewer may know of it: others only of what they could start."""
    if may_manage(image, viewer):
        return True
    ready = image.state is ImageState.READY
    return ready and viewer.user is not None and image.is_visible_to(viewer.user, viewer.hub_groups)


def image_object(image: PrivateImage, viewer: Viewer) -> Json:
    """Return one that the viewer may know of. With whom it is shared is for who may manage it."""
    managed = may_manage(image, viewer)
    return {
        "id": image.id,
        "name": image.name,
        "owner": image.owner,
        "mine": is_mine(image, viewer),
        "can_manage": managed,
        "state": image.state.value,
        "message": image.message,
        "session_id": image.session_id,
        "made_from": image.made_from,
        "base": image.base,
        "size_mib": None if image.size_bytes is None else shown_mib(image.size_bytes),
        "shared_users": list(image.shared_users) if managed else None,
        "shared_groups": list(image.shared_groups) if managed else None,
        "asked_by": image.asked_by if managed else None,
        "asked_at_s": image.asked_at_s,
        "made_at_s": image.made_at_s,
        "has_recipe": image.has_recipe,
    }


def images_object(
    images: Sequence[PrivateImage], viewer: Viewer, quota: ImageQuota, *, everybody: bool
) -> Json:
    """Return those that the viewer has, or that are shared with them; ``everybody``'s, for administrators."""
    shown = [
        image
        for image in images
        if is_visible(image, viewer)
        and (everybody or is_mine(image, viewer) or _is_shared_with(image, viewer))
    ]
    own = [image for image in images if is_mine(image, viewer)]
    return {
        "images": [image_object(image, viewer) for image in shown],
        "quota": {
            "images": quota.images,
            "mib": quota.mib,
            "images_used": sum(image.state in HELD for image in own),
            "mib_used": shown_mib(sum(image.size_bytes or 0 for image in own)),
        },
    }


def _is_shared_with(image: PrivateImage, viewer: Viewer) -> bool:
    return viewer.user is not None and image.is_visible_to(viewer.user, viewer.hub_groups)
