"""The commands of ``fgpu images`` for private images: for administrators, who may do all of it for everybody."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import click

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
from fgpuspawner.cli.command import Report, UsageError, command, config_option, who
from fgpuspawner.cli.image_catalogue import Opened, opened
from fgpuspawner.text.tables import printable

LOOK_EVERY_S = 0.3
WAIT_S = 3600
MAKING = (ImageState.WISHED, ImageState.COMMITTING)


class NotSaved(FGPUError):
    """The Hub could not save a session, and says why."""

    code = "not_saved"


image_argument = click.argument("image")


@command("private")
@config_option
def private(config: str) -> list[str]:
    """List the private images of all users."""
    with opened(config) as own:
        found = PrivateImages(own.store).all()
    images = [{**asdict(image), "state": image.state.value} for image in found]
    for image in images:
        del image["facts"]
    lines = [printable(line) for image in found for line in _lines(image)] or ["there is no private image"]
    return Report(lines, {"version": 1, "images": images})


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


@command("recipe")
@image_argument
@config_option
def recipe(image: str, config: str) -> list[str]:
    """Print a private image's Dockerfile."""
    with opened(config) as own:
        found = PrivateImages(own.store).by_name(image)
        text = PrivateImages(own.store).recipe(found.id)
    if text is None:
        raise BadSettings(f"there is no recipe of {found.name}, which is {found.state}")
    return text.rstrip("\n").split("\n")


@command("commit")
@click.argument("session")
@click.option("--name", required=True, help="what the image is called, such as torch-more")
@click.option("--tag", help="its tag; default: the next number")
@click.option("--later", is_flag=True, help="do not wait until the Hub has made it")
@config_option
def commit(session: str, name: str, tag: str | None, later: bool, config: str) -> list[str]:
    """Save a running session as a private image of its owner.

    SESSION is its number, or USER/SERVER; USER/ is the unnamed one.
    """
    with opened(config) as own:
        images = PrivateImages(own.store)
        wished = images.request(
            _session(own, session).id,
            name=name,
            tag=tag,
            asked_by=who(),
            quota=own.settings.image_quota(),
            now_s=int(time.time()),
        )
        _noted(own, "commit", f"session {wished.session_id} as {wished.name}")
        if later:
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
    Audit(own.store).add(
        actor=f"{who()} (fgpu)", action=f"private-image.{action}", target=target, now_s=int(time.time())
    )


def _changed(config: str, image: str, action: str, change: Callable[..., Any], **to: Any) -> Any:
    with opened(config) as own:
        images = PrivateImages(own.store)
        try:
            found = change(images, images.by_name(image).id, **to, now_s=int(time.time()))
        except ImageInUse as e:
            raise BadSettings(in_use_words(e.name, e.sessions, user=None, admin=True)) from None
        _noted(own, action, image)
        return found


@command("rename")
@image_argument
@click.option("--name", required=True, help="its new name, without its owner")
@click.option("--tag", help="its new tag; default: the next number")
@config_option
def rename(config: str, image: str, name: str, tag: str | None) -> list[str]:
    """Give a private image another name."""
    found = _changed(config, image, "rename", PrivateImages.rename, name=name, tag=tag)
    return [f"{image} is now {found.name}"]


@command("share")
@image_argument
@click.option("--users", default="", help="users, with commas between them; default: nobody")
@click.option("--groups", default="", help="Hub groups, with commas between them; default: none")
@config_option
def share(config: str, image: str, **texts: str) -> list[str]:
    """Say who may see and start a private image beside its owner."""
    to = {name: [part.strip() for part in text.split(",") if part.strip()] for name, text in texts.items()}
    found = _changed(config, image, "share", PrivateImages.share, **to)
    return [f"{image} is shared with {_shared_with(found) or 'nobody'}"]


@command("delete")
@image_argument
@config_option
def delete(config: str, image: str) -> list[str]:
    """Remove a private image."""
    left = _changed(config, image, "delete", PrivateImages.delete)
    follows = "is gone" if left is None else "the Hub removes it from the engines within seconds"
    return [f"{image}: {follows}"]


COMMANDS = (private, commit, rename, share, delete, recipe)
