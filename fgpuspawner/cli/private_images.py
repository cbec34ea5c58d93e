"""The commands of ``fgpu images`` for private images: for administrators, who may do all of it for everybody."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from fgpu_scheduler import (
    Audit,
    BadSettings,
    FGPUError,
    ImageInUse,
    ImageState,
    PrivateImage,
    PrivateImages,
    Session,
    UnknownSession,
    in_use_words,
    shown_mib,
)
from fgpuspawner.cli.command import JsonReport, who
from fgpuspawner.cli.image_catalogue import Opened, command, opened
from fgpuspawner.cli.usage import UsageError
from fgpuspawner.text.tables import printable

LOOK_EVERY_S = 0.3
WAIT_S = 3600
MAKING = (ImageState.WISHED, ImageState.COMMITTING)


class NotSaved(FGPUError):
    """The Hub could not save a session, and says why."""

    code = "not_saved"


def add_to(own: Any) -> None:
    """Add the commands to those of ``fgpu images``."""
    command(own, run_private, "private", "everybody's private images")
    commit = command(own, run_commit, "commit", "save a running session as a private image of its owner")
    commit.add_argument(
        "session", metavar="SESSION", help="its number, or USER/SERVER; USER/ is the default server"
    )
    commit.add_argument("--name", required=True, help="what the image is called, such as torch-more")
    commit.add_argument("--tag", help="its tag; default: the next number")
    commit.add_argument("--later", action="store_true", help="do not wait until the Hub has made it")
    rename = command(own, run_rename, "rename", "give a private image another name")
    share = command(own, run_share, "share", "say who may see and start a private image beside its owner")
    delete = command(own, run_delete, "delete", "remove a private image")
    recipe = command(own, run_recipe, "recipe", "print a private image's Dockerfile")
    for one in (rename, share, delete, recipe):
        one.add_argument("image", metavar="IMAGE", help="its full name, such as alice/torch-more:2")
    rename.add_argument("--name", required=True, help="its new name, without its owner")
    rename.add_argument("--tag", help="its new tag; default: the next number")
    share.add_argument("--users", default="", help="users, with commas between them; default: nobody")
    share.add_argument("--groups", default="", help="Hub groups, with commas between them; default: none")


# --- Looking ---


def run_private(given: argparse.Namespace) -> list[str]:
    """Return every private image, as lines or as JSON."""
    with opened(given.config) as own:
        found = PrivateImages(own.store).all()
    if given.json:
        images = [{**asdict(image), "state": image.state.value} for image in found]
        for image in images:
            del image["facts"]
        return JsonReport({"version": 1, "images": images})
    return [printable(line) for image in found for line in _lines(image)] or ["there is no private image"]


def _lines(image: PrivateImage) -> list[str]:
    size = "" if image.size_bytes is None else f", {shown_mib(image.size_bytes)} MiB"
    lines = [
        f"{image.name}: {image.state}{size}, from session {image.session_id} ({image.made_from}), on {image.node_id}"
    ]
    if image.message:
        lines.append(f"  {image.message}")
    if shared := _shared_with(image):
        lines.append(f"  shared with {shared}")
    return lines


def _shared_with(image: PrivateImage) -> str:
    return ", ".join([*image.shared_users, *(f"group {name}" for name in image.shared_groups)])


def run_recipe(given: argparse.Namespace) -> list[str]:
    """Return an image's Dockerfile."""
    with opened(given.config) as own:
        found = PrivateImages(own.store).by_name(given.image)
        text = PrivateImages(own.store).recipe(found.id)
    if text is None:
        raise BadSettings(f"there is no recipe of {found.name}, which is {found.state}")
    return text.rstrip("\n").split("\n")


# --- Changing ---


def run_commit(given: argparse.Namespace) -> list[str]:
    """Ask that a session be saved, and wait until the Hub has done so."""
    with opened(given.config) as own:
        images = PrivateImages(own.store)
        wished = images.request(
            _session(own, given.session).id,
            name=given.name,
            tag=given.tag,
            asked_by=who(),
            quota=own.settings.image_quota(),
            now_s=int(time.time()),
        )
        _noted(own, "commit", f"session {wished.session_id} as {wished.name}")
        if given.later:
            return [f"the Hub is going to save it as {wished.name}"]
        found = _made(images, wished)
    if found.state is ImageState.FAILED:
        raise NotSaved(f"{found.name}: {found.message}")
    return [f"saved as {found.name}, {shown_mib(found.size_bytes or 0)} MiB"]


def _session(own: Opened, text: str) -> Session:
    if text.isascii() and text.isdigit() and len(text) < 16:
        found = own.store.session(int(text))
    elif "/" in text:
        user, _, server = text.partition("/")
        found = own.store.serving(user, server)
    else:
        raise UsageError(f"SESSION is {text!r}; give its number, or USER/SERVER")
    if found is None:
        raise UnknownSession(f"there is no session {text}")
    return found


def _made(images: PrivateImages, wished: PrivateImage) -> PrivateImage:
    """Wait until it is made, or not; say how far it is on standard error."""
    said, deadline = "", time.monotonic() + WAIT_S
    while (found := images.get(wished.id)).state in MAKING:
        message = found.message or "waiting for the Hub"
        if message != said:
            print(f"{found.name}: {message}", file=sys.stderr, flush=True)
            said = message
        if time.monotonic() > deadline:
            raise NotSaved(f"{found.name} is not made yet; is the Hub running? It does it when it is")
        time.sleep(LOOK_EVERY_S)
    return found


def _noted(own: Opened, action: str, target: str) -> None:
    """Add a line to the audit log, as the service does for administrators."""
    Audit(own.store).add(
        actor=f"{who()} (fgpu)", action=f"private-image.{action}", target=target, now_s=int(time.time())
    )


def _changed(given: argparse.Namespace, action: str, change: Callable[..., Any], **to: Any) -> Any:
    """Change an image with a function of `PrivateImages`; who uses it is named: administrators may know."""
    with opened(given.config) as own:
        images = PrivateImages(own.store)
        try:
            found = change(images, images.by_name(given.image).id, **to, now_s=int(time.time()))
        except ImageInUse as e:
            raise BadSettings(in_use_words(e.name, e.sessions, user=None, admin=True)) from None
        _noted(own, action, given.image)
        return found


def run_rename(given: argparse.Namespace) -> list[str]:
    """Give an image another name."""
    found = _changed(given, "rename", PrivateImages.rename, name=given.name, tag=given.tag)
    return [f"{given.image} is now {found.name}"]


def run_share(given: argparse.Namespace) -> list[str]:
    """Set with whom an image is shared."""
    users, groups = (
        [name for part in text.split(",") if (name := part.strip())] for text in (given.users, given.groups)
    )
    found = _changed(given, "share", PrivateImages.share, users=users, groups=groups)
    return [f"{given.image} is shared with {_shared_with(found) or 'nobody'}"]


def run_delete(given: argparse.Namespace) -> list[str]:
    """Remove an image."""
    left = _changed(given, "delete", PrivateImages.delete)
    follows = "is gone" if left is None else "the Hub removes it from the engines within seconds"
    return [f"{given.image}: {follows}"]
