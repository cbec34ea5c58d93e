"""The command ``fgpu images build``: the recipes that come with the package, run by their own script."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import NoReturn

import click

from fgpuspawner import __version__
from fgpuspawner.cli.command import command
from fgpuspawner.settings.images import recipes


@command(
    "build",
    speaks_json=False,
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)
@click.argument("name")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def build(name: str, arguments: tuple[str, ...]) -> NoReturn:
    """Build a session image, for the engine of this machine.

    NAME is a recipe, such as base or pytorch, or a folder: ./ours. The arguments are those that images/README.md lists;
    fgpu images build NAME --help shows them.
    """
    # The script finds this environment's uv and its Python with pip, which fetches the extension of this version.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    sys.stdout.flush()
    os.execvpe(
        "bash",
        ["bash", str(recipes() / "build.sh"), name, *arguments],
        {**os.environ, "PATH": path, "FGPU_VERSION": __version__},
    )
