"""Images that tests build without a registry, on the CPythons of this machine."""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from dockerhub import Engine, build

from fgpuspawner.engines.docker.daemon import connect_here

PYTHONS = ("3.7", "3.8", "3.9", "3.10", "3.12", "3.13")
SLUGS = ("old", "new")
VERSIONS = ("0.8.10", "0.9.0")
RECIPE = """
name = "Tabulate {version}"
framework = "tabulate"
version = "{version}"
module = "tabulate"
base = "127.0.0.1:1/nowhere:1"
cuda = "10.0"

[host]
python = "{python}"
packages = ["tabulate=={version}"]
"""


def cpython(version: str) -> bool:
    """Return whether a CPython of this version is where images/build.sh looks."""
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    return bool(list(pyenv.glob(f"versions/{version}.*/bin/python{version}"))) or bool(
        shutil.which(f"python{version}")
    )


def built(engine: Engine, image: str, folder: str | Path, name: str) -> str:
    """Build an image without a registry, with the default image's server environment, and return its tag."""
    tag = f"{engine.prefix}/{name}:1"
    made = build(str(folder), "--base", "host", "--server", image, "--tag", tag)
    assert made.returncode == 0, made.stderr[-2000:]
    return engine.mine(tag)


def with_recipe(parent: Path, recipe: str) -> str:
    """Return a folder of an image with this image.toml."""
    folder = parent / "ours"
    folder.mkdir()
    (folder / "image.toml").write_text(recipe)
    return str(folder)


def missing_pythons() -> str | None:
    """Return why two images on two Pythons cannot be made here; None where they can."""
    found = _pythons()
    if len(found) < 2:
        return f"two CPythons of {', '.join(PYTHONS)} are needed (pyenv, or on the PATH); here: {found}"
    return None


@dataclass(frozen=True)
class TwoImages:
    """Two versions of one library on two Pythons: each by the image's slug, ``old`` and ``new``."""

    references: dict[str, str]
    pythons: dict[str, str]
    versions: dict[str, str]


@functools.cache
def two_images(image: str) -> TwoImages:
    """Build them once in this process; they are removed when it ends."""
    engine = Engine(connect_here({"timeout": 60}))
    atexit.register(engine.close)
    pythons = dict(zip(SLUGS, (_pythons()[0], _pythons()[-1]), strict=True))
    versions = dict(zip(SLUGS, VERSIONS, strict=True))
    references = {}
    with tempfile.TemporaryDirectory() as folder:
        for slug in SLUGS:
            recipe = RECIPE.format(version=versions[slug], python=pythons[slug])
            (own := Path(folder, slug)).mkdir()
            references[slug] = built(engine, image, with_recipe(own, recipe), slug)
    return TwoImages(references, pythons, versions)


def _pythons() -> list[str]:
    return [version for version in PYTHONS if cpython(version)]
