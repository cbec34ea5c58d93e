"""The command ``fgpu``, used wrongly."""

from __future__ import annotations

from pathlib import Path

from fgpu_scheduler import FGPUError

CONFIG, CONFIG_OF_SETUP = "jupyterhub_config.py", "/etc/jupyterhub/jupyterhub_config.py"
"""The Hub's configuration where no other file is named: in the working folder, or else as `fgpu setup` writes it."""


def default_config() -> str:
    """Return which of both is there, the first where none is."""
    return CONFIG_OF_SETUP if not Path(CONFIG).is_file() and Path(CONFIG_OF_SETUP).is_file() else CONFIG


class UsageError(FGPUError):
    """The command was used wrongly."""

    code = "usage"
