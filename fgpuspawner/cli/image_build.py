"""The command ``fgpu images build``: the recipes that come with the package, run by their own script."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any, NoReturn

from fgpuspawner import __version__
from fgpuspawner.cli.command import add_command
from fgpuspawner.settings.images import recipes


def add_to(own: Any) -> None:
    """Add the command to those of ``fgpu images``."""
    parser = add_command(
        own, run_build, "build", "build a session image, for the engine of this machine", speaks_json=False
    )
    parser.add_argument("name", metavar="NAME", help="a recipe, such as base or pytorch, or a folder: ./ours")
    parser.add_argument(
        "arguments",
        nargs=argparse.REMAINDER,
        metavar="...",
        help="what images/README.md lists; NAME --help shows it",
    )


def run_build(given: argparse.Namespace) -> NoReturn:
    """Become the script that builds.

    Raises:
        OSError: there is no bash.
    """
    # Its tools are those of this environment: uv, and a Python with pip, which fetches the extension of this version.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    sys.stdout.flush()
    os.execvpe(
        "bash",
        ["bash", str(recipes() / "build.sh"), given.name, *given.arguments],
        {**os.environ, "PATH": path, "FGPU_VERSION": __version__},
    )
