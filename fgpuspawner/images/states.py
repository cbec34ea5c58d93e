"""The state of an image in words, the same on the command line and on the page. Pure."""

from __future__ import annotations

from fgpuspawner.images.model import Image


def state_words(image: Image) -> list[str]:
    """Return what is to be said of an image's state, beginning with whether it may be started."""
    words = ["disabled" if not image.enabled else "hidden" if image.hidden else "enabled"]
    if image.default:
        words.append("default")
    if image.deprecated:
        words.append("deprecated")
    if image.groups or image.users:
        named = [*(f"group {group}" for group in image.groups), *(f"user {user}" for user in image.users)]
        words.append(f"for {', '.join(named)}")
    if image.sudo:
        words.append("with sudo")
    return words
