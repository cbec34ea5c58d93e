"""The command ``fgpu``, used wrongly."""

from __future__ import annotations

from fgpu_scheduler import FGPUError

CONFIG = "jupyterhub_config.py"
"""The Hub's configuration, where no other file is named."""


class UsageError(FGPUError):
    """The command was used wrongly."""

    code = "usage"
