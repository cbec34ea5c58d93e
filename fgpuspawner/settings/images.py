"""Which images there are, how they are got ready, and what users may make of them."""

from __future__ import annotations

from pathlib import Path

from traitlets import Bool, Dict, Integer, List, Unicode

from fgpu_scheduler import BadSettings, ImageQuota
from fgpuspawner.settings.traits import Settings, is_whole

LARGEST_QUOTA = 10**9


def recipes() -> Path:
    """Return the folder of the recipes that session images are built from, with the catalogue of what they make."""
    packaged = Path(__file__).parents[1] / "data" / "images"
    # In a checkout they are where an administrator looks for them; the wheel carries a copy.
    return packaged if packaged.exists() else Path(__file__).parents[2] / "images"


def recipe_of(reference: str) -> str | None:
    """Return the recipe that makes an image of this name, None where there is none."""
    name = reference.removeprefix("fgpuspawner/").removesuffix(":0.1")
    known = reference == f"fgpuspawner/{name}:0.1" and (recipes() / name / "image.toml").is_file()
    return name if known else None


class ImageSettings(Settings):
    """The catalogue, fetching beforehand, warm containers, private images, and becoming root in sessions."""

    catalogue = Unicode().tag(example='"/etc/fgpu/catalogue.toml"')
    """Path of the image catalogue (TOML); empty: the package's own."""
    prefetch = Integer(2, min=0).tag(example="5")
    """Pre-pull images for this many requests at the head of each queue; 0: none.

    They are pulled on every machine of the group that could hold the session.
    """
    pulls_at_a_time = Integer(3, min=1).tag(example="1")
    """Images that one Docker engine pulls at a time; others wait, those of a launch first.

    With 2 or more, one place is kept for launches.
    """
    warm_pool = Dict().tag(example='{"python": 2, "pytorch": "auto"}')
    """Containers of each image that wait, with the server imported, for the next sessions: on each node, and for
    each real GPU. Empty: none.

    By the image's slug in the catalogue: a number, or "auto" for as many as were started within five minutes at
    most in the last hour, and never more than 8. Only on this machine's own engine; docs/fast-start.md has the other
    limits, and what a pool costs.
    """
    owners_may_commit = Bool(False).tag(example="True")
    """Let users save their own running sessions as private images. Administrators always may.

    Sessions must be containers, and homes must be volumes or folders of the host (docs/user-images.md). They can share
    them, so set ``c.JupyterHub.subdomain_host`` too (docs/network.md).
    """
    max_private_images = Integer(5, min=0, max=LARGEST_QUOTA).tag(example="10")
    """Most private images of one user; 0: no limit."""
    max_private_images_mib = Integer(20480, min=0, max=LARGEST_QUOTA).tag(example="102400")
    """Most MiB of one user's private images together, without the catalogue's layers; 0: no limit."""
    sudo_groups = List(Unicode()).tag(example='["staff"]')
    """Hub groups with members who may become root in their containers, where the image has ``sudo``.

    For all users of one image: ``sudo = true`` in the catalogue. docs/isolation.md says what that weakens.
    """

    def catalogue_path(self) -> Path:
        """Return the catalogue's path."""
        if self.catalogue:
            return Path(self.catalogue).absolute()
        return recipes() / "catalogue.toml"

    def image_quota(self) -> ImageQuota:
        """Return what private images each user may have."""
        return ImageQuota(self.max_private_images or None, self.max_private_images_mib or None)

    def danger_of_sharing(self, *, saves_images: bool, subdomain_host: str) -> str | None:
        """Return the warning to administrators where users may share images, or None."""
        if not (saves_images and self.owners_may_commit) or subdomain_host:
            return None
        return (
            "Users may share images (c.FGPU.owners_may_commit), and their sessions are on the Hub's own domain: programs"
            " of an image can act on the Hub as the person who opens a session of it, an administrator too. Set"
            " c.JupyterHub.subdomain_host, such as 'https://hub.example'"
        )

    def _check_images(self) -> None:
        for slug, size in self.warm_pool.items():
            if size != "auto" and not is_whole(size, 0, 100):
                raise BadSettings(
                    f'c.FGPU.warm_pool: {slug!r} has {size!r}; use a number from 0 to 100, or "auto"'
                )
