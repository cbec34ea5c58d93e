"""The administrator's settings of what users may make of images."""

from __future__ import annotations

from traitlets import Bool, Integer, List, Unicode
from traitlets.config import Configurable

from fgpu_scheduler import BadSettings
from fgpu_scheduler.private_image import ImageQuota

LARGEST_MIB = 10**9


class ImageSettings(Configurable):
    """What the administrator sets of private images, and of becoming root in sessions."""

    owners_may_commit = Bool(
        False,
        help="""Whether users may save their own running sessions as private images. Administrators always may.

        Sessions must be containers, and homes must be volumes or folders of the host (docs/user-images.md).

        Example: ``c.FGPU.owners_may_commit = True``
        """,
    ).tag(config=True)
    max_private_images = Integer(
        5,
        help="""Most private images of one user, whoever saves them; 0: no limit.

        Example: ``c.FGPU.max_private_images = 10``
        """,
    ).tag(config=True)
    max_private_images_mib = Integer(
        20480,
        help="""Most MiB that all private images of one user have beyond the catalogue's images; 0: no limit.

        Example: ``c.FGPU.max_private_images_mib = 102400``
        """,
    ).tag(config=True)

    sudo_groups = List(
        Unicode(),
        help="""Hub groups whose members may become root in all their sessions in containers, where the image has `sudo`.

        For everybody in one image: ``sudo = true`` in the catalogue. docs/isolation.md says what it weakens.

        Example: ``c.FGPU.sudo_groups = ["staff"]``
        """,
    ).tag(config=True)

    def image_quota(self) -> ImageQuota:
        """Return what each user may have."""
        return ImageQuota(self.max_private_images or None, self.max_private_images_mib or None)

    def _check_images(self) -> None:
        for name in ("max_private_images", "max_private_images_mib"):
            value = getattr(self, name)
            if not 0 <= value <= LARGEST_MIB:
                raise BadSettings(
                    f"c.FGPU.{name} is {value}; it must be between 0 (no limit) and {LARGEST_MIB}"
                )
