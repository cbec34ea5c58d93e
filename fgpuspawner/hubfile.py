"""A Hub's configuration file, loaded without its Hub by the command ``fgpu``."""

from __future__ import annotations

import traceback
from pathlib import Path

from traitlets import TraitError
from traitlets.config import Config
from traitlets.config.loader import ConfigError, PyFileConfigLoader

from fgpu_scheduler import BadSettings, FGPUError

CONFIG = "jupyterhub_config.py"


class UsageError(FGPUError):
    """The command was used wrongly."""

    code = "usage"


def load_config(path: str) -> Config:
    """Return what a Hub's configuration file sets.

    Raises:
        UsageError: there is no such file.
        BadSettings: it ends the process, or fails; one line that says where.
    """
    file = Path(path).absolute()
    if not file.is_file():
        raise UsageError(f"there is no file {path}; --config names the Hub's configuration")
    try:
        return PyFileConfigLoader(file.name, path=str(file.parent)).load_config()
    except SystemExit as e:
        # `configure` ends the Hub with its one line.
        said = e.code if isinstance(e.code, str) else f"{path} ends the process with status {e.code}"
        raise BadSettings(said.removeprefix("fgpuspawner: ")) from None
    except (FGPUError, TraitError, ConfigError) as e:
        raise BadSettings(f"{path}: {e}") from None
    except Exception as e:
        # The file is a program: it can raise anything.
        raise BadSettings(f"{_place(e, file)}: {type(e).__name__}: {e}") from None


def _place(error: Exception, file: Path) -> str:
    """Return ``file:line`` of what raised, as far as it is in the file."""
    if isinstance(error, SyntaxError):
        return f"{file.name}:{error.lineno}"
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == str(file)]
    return f"{file.name}:{lines[-1]}" if lines else file.name
