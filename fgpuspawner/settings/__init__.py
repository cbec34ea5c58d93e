"""What the administrator sets: ``c.FGPU``, one module for each subject."""

from fgpuspawner.settings.fgpu import FGPU, configured, engine_is_asked, without_engine

__all__ = ["FGPU", "configured", "engine_is_asked", "without_engine"]
