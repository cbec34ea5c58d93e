"""What the administrator sets: ``c.FGPU``, one module for each subject."""

from fgpuspawner.settings.fgpu import FGPU, configured

__all__ = ["FGPU", "configured"]
