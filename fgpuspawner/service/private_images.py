"""Private images: who may see and change them, and the changes, for the API and the pages."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence

from fgpu_scheduler import (
    Audit,
    EndCause,
    FGPUError,
    ImageInUse,
    ImageState,
    PrivateImage,
    PrivateImages,
    StoreUnavailable,
    in_use_words,
)
from fgpuspawner.service.handler import Handler
from fgpuspawner.service.hub import HubUnreachable
from fgpuspawner.service.model import Savers, Viewer
from fgpuspawner.service.problems import Problem, forbidden
from fgpuspawner.service.session_actions import end_session, keep_session

SAVED_LOOK_S = 2.0
SAVED_TRIES = 150
"""Tries while database or Hub are away: five minutes in all."""
Wish = Callable[[PrivateImages, int], PrivateImage | None]


def is_mine(image: PrivateImage, viewer: Viewer) -> bool:
    return viewer.user is not None and image.owner == viewer.user


def is_shared_with(image: PrivateImage, viewer: Viewer) -> bool:
    """Return whether the viewer may start it, once it is made."""
    return viewer.user is not None and image.is_visible_to(viewer.user, viewer.hub_groups)


def may_manage(image: PrivateImage, viewer: Viewer) -> bool:
    """Return whether the viewer may rename, share and delete it."""
    return viewer.admin or is_mine(image, viewer)


def answer_of(image: PrivateImage, viewer: Viewer) -> str | None:
    """Return "offered", "accepted" or "declined" for an image shared with the viewer; else None."""
    if image.state is not ImageState.READY or is_mine(image, viewer) or not is_shared_with(image, viewer):
        return None
    known = {"accepted": image.accepted_by, "declined": image.declined_by}
    return next((answer for answer, users in known.items() if viewer.user in users), "offered")


def is_visible(image: PrivateImage, viewer: Viewer) -> bool:
    """Return whether the viewer may know of it: their own, those they could start, and all for administrators."""
    ready = image.state is ImageState.READY
    return may_manage(image, viewer) or (ready and is_shared_with(image, viewer))


async def image_of(handler: Handler, image_id: str, *, to_manage: bool = True) -> PrivateImage:
    """Return an image that the caller may manage, or else may start; raises `Problem` 404."""
    images = await handler.service.reader.private_images()
    found = next((image for image in images if image.id == int(image_id)), None)
    if found is None or not is_visible(found, handler.viewer):
        raise Problem(404, "no_such_image", f"there is no private image {image_id}")
    if to_manage and not may_manage(found, handler.viewer):
        raise forbidden(f"{found.name} is shared with you; only its owner may do that")
    return found


async def save_session(
    handler: Handler, session_id: str, name: str, tag: str | None, *, end: bool = False
) -> PrivateImage | None:
    """Request that a session be saved as an image of its owner's; ``end`` ends the session after that."""
    service, viewer = handler.service, handler.viewer
    session = await handler.visible_session(session_id)
    if service.reader.savers is Savers.NOBODY:
        raise Problem(409, "image_refused", service.reader.engine.why_not_saved)
    if not viewer.admin:
        # A group's administrator sees its sessions, but their files belong to their owners.
        if service.reader.savers is not Savers.OWNERS:
            raise forbidden("only administrators save sessions as images here")
        if session.request.user != viewer.user:
            raise forbidden("only administrators save others' sessions as images")
    name, tag = split(name, tag)
    if end and session.ends_cause is EndCause.IDLE:
        # Else the session could be ended while it is being saved.
        with contextlib.suppress(Problem):
            await keep_session(handler, session_id)
    quota = service.settings.image_quota()
    asked_by = viewer.user or str(handler.current_user["name"])
    owner = session.request.user
    image = await _change(
        handler,
        lambda images, now_s: images.request(
            session.id, name=name, tag=tag, asked_by=asked_by, quota=quota, now_s=now_s
        ),
        owner=owner,
        action="save",
        target=f"session {session.id} of {owner} as {name}",
    )
    if end and image is not None:
        service.background.run(
            end_when_saved(handler, session_id, image.id),
            failed=f"Session {session_id} is not ended after it was saved",
            foreseen=(FGPUError, Problem, HubUnreachable),
        )
    return image


async def end_when_saved(handler: Handler, session_id: str, image_id: int) -> None:
    """End a session with the caller's own rights once its image is made; one that is not saved goes on.

    A restart of the service forgets it, and the session goes on.
    """
    tries = SAVED_TRIES
    while True:
        try:
            images = await handler.service.reader.private_images()
            found = next((image for image in images if image.id == image_id), None)
            if found is None or found.state not in (ImageState.WISHED, ImageState.COMMITTING):
                if found is not None and found.state is ImageState.READY:
                    await end_session(handler, session_id)
                return
        except (StoreUnavailable, HubUnreachable):
            tries -= 1
            if not tries:
                raise
        await asyncio.sleep(SAVED_LOOK_S)


async def rename(handler: Handler, image_id: str, name: str, tag: str | None) -> PrivateImage | None:
    name, tag = split(name, tag)
    return await _manage(
        handler, image_id, "rename", lambda i, now_s: i.rename(int(image_id), name=name, tag=tag, now_s=now_s)
    )


async def share(
    handler: Handler, image_id: str, users: Sequence[str], groups: Sequence[str]
) -> PrivateImage | None:
    """Set who may start an image beside its owner."""
    return await _manage(
        handler,
        image_id,
        "share",
        lambda i, now_s: i.share(int(image_id), users=users, groups=groups, now_s=now_s),
    )


async def answer(handler: Handler, image_id: str, *, accepted: bool) -> PrivateImage:
    """Accept or decline an image that is offered to the caller."""
    found = await image_of(handler, image_id, to_manage=False)
    user = handler.viewer.user
    if user is None or not is_shared_with(found, handler.viewer) or is_mine(found, handler.viewer):
        raise forbidden(f"{found.name} is not offered to you")
    engines_id = found.image_id or ""
    await handler.service.reader.change_private_images(
        lambda images, now_s: images.answer(engines_id, user=user, accepted=accepted, now_s=now_s)
    )
    return await image_of(handler, image_id, to_manage=False)


async def delete(handler: Handler, image_id: str) -> PrivateImage | None:
    """Delete an image; return it as it is until its removal, or None."""
    return await _manage(handler, image_id, "delete", lambda i, now_s: i.delete(int(image_id), now_s=now_s))


async def _manage(handler: Handler, image_id: str, action: str, wish: Wish) -> PrivateImage | None:
    found = await image_of(handler, image_id)
    return await _change(handler, wish, owner=found.owner, action=action, target=found.name)


async def _change(
    handler: Handler, wish: Wish, *, owner: str, action: str, target: str
) -> PrivateImage | None:
    """Write a change. A refusal names the users of the image that the caller may know.

    An administrator's change of another user's image is written into the audit log.
    """
    viewer = handler.viewer
    try:
        found = await handler.service.reader.change_private_images(wish)
    except ImageInUse as e:
        words = in_use_words(e.name, e.sessions, user=viewer.user, admin=viewer.admin)
        raise Problem(409, e.code, words) from None
    if viewer.admin and viewer.user != owner:
        await handler.change(
            lambda store, by, now_s: Audit(store).add(
                actor=by, action=f"private-image.{action}", target=target, now_s=now_s
            )
        )
    return found


def split(name: str, tag: str | None) -> tuple[str, str | None]:
    """Return name and tag; the name may contain the tag: ``torch:2``."""
    if tag is None and ":" in name:
        name, _, tag = name.partition(":")
    return name.strip(), tag or None
