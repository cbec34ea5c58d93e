"""The Python environment of an image's sessions, and whether it matches the image's catalogue entry. Blocks."""

from __future__ import annotations

import shutil
import sys
from importlib.metadata import distributions
from pathlib import Path

from fgpuspawner.images.availability import Availability, Where
from fgpuspawner.images.labels import is_version
from fgpuspawner.images.model import Image

PACKAGES = {"pytorch": "torch"}
"""Package names of frameworks that differ from their names."""


def folder_of(image: Image) -> Path:
    return Path(image.environment or sys.prefix).expanduser()


def availability(image: Image, server: str) -> Availability:
    """Return whether an image's environment has the server and the versions in its entry.

    An environment that the entry names may lack the framework's package: the administrator has chosen it.
    """
    folder, own = folder_of(image), not image.environment
    pythons = [path.name.removeprefix("python") for path in (folder / "lib").glob("python3.*")]
    if own:
        pythons = [f"{sys.version_info.major}.{sys.version_info.minor}"]
    lacks = []
    if shutil.which(server, path=str(folder / "bin")) is None:
        lacks.append(f"no {server}")
    if pythons and not any(is_version(version, image.python) for version in pythons):
        lacks.append(f"Python {' and '.join(pythons)}, not {image.python}")
    if (framework := image.framework.casefold()) != "python":
        path = sys.path if own else [str(site) for site in folder.glob("lib/python3.*/site-packages")]
        name = PACKAGES.get(framework, framework)
        versions = [found.version for found in distributions(name=name, path=path)]
        if versions and not any(is_version(version, image.version) for version in versions):
            lacks.append(f"{image.framework} {versions[0]}, not {image.version}")
        elif own and not versions:
            lacks.append(f"no {image.framework}")
    if lacks:
        where = "the Hub's own Python environment" if own else f"the Python environment {folder}"
        return Availability(
            Where.CANNOT, f"its sessions would run in {where}, which has {', and '.join(lacks)}"
        )
    return Availability(Where.HERE)
