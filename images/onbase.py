"""An image on a registry's image, or on one that was made here: images/NAME/image.toml says which, and what it is.

    images/onbase.py describe FOLDER                   what build.sh has to know of it, as lines of NAME=VALUE
    images/onbase.py build FOLDER --base REF --server REF --tag TAG [--uv FILE] [--label NAME=VALUE]...

The base is asked for its Python and its framework's version. Everything else is put together here and only copied:
nothing is installed inside the base: its own package sources are often gone. Standard library of Python 3.11; needs
Docker and uv.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from debianfiles import CannotBuild, run, write
from serverenv import ENVIRONMENT
from serverext import (
    ServerTable,
    add_to_server,
    check_built,
    prefixes_of,
    read_table,
    warnings_of,
    without_server_half,
)
from userenv import Framework, make_kernel, make_user_environment, search_path

HERE = Path(__file__).resolve().parent
# The keys of image.toml: what is done, and facts, which become labels (docs/images.md).
ABOUT_BUILDING = ("base", "program", "module", "host", "server")
FACTS = (
    *("slug", "name", "framework", "version", "description", "icon", "kernels", "cuda", "gpu_architectures"),
    *("minimum", "recommended", "deprecated", "groups", "users"),
)
OF_ITS_OWN_BASE = ("cuda", "gpu_architectures", "minimum", "recommended")
NEEDED = ("name", "framework", "version", "base")
OLDEST_PYTHON = (3, 6)
ASK = """
import json, os, sys
def version_of(module):
    if not module:
        return "%d.%d" % sys.version_info[:2]
    return str(__import__(module).__version__)
try:
    libc = os.confstr("CS_GNU_LIBC_VERSION").split()[-1]
except (AttributeError, OSError, ValueError):
    libc = ""
in_venv = sys.prefix != sys.base_prefix
def extensions():
    try:
        from importlib.metadata import distributions
    except ImportError:
        return {}
    found = {}
    for one in distributions():
        if any("jupyter_server_config.d" in str(path) for path in one.files or ()):
            found[one.metadata["Name"]] = one.version
    return found
found = {
    "prefixes": [sys.prefix, sys.base_prefix], "extensions": extensions(),
    "program": os.path.realpath(getattr(sys, "_base_executable", sys.executable)),
    "packages": [path for path in sys.path if in_venv and path.startswith(sys.prefix + os.sep)],
    "python": "%d.%d.%d" % sys.version_info[:3], "libc": libc,
    "machine": os.uname().machine, "path": os.environ.get("PATH", ""), "version": version_of(sys.argv[1]),
}
print("fgpu: " + json.dumps(found))
"""


@dataclass(frozen=True, slots=True)
class Recipe:
    """What images/NAME/image.toml says."""

    name: str
    base: str
    program: str
    module: str
    python: str
    packages: Sequence[str]
    facts: Mapping[str, Any]
    server: ServerTable


def read_recipe(folder: Path) -> Recipe:
    """Return what an image's folder says.

    Raises:
        CannotBuild: it says it wrongly; the message names the key.
    """
    path = folder / "image.toml"
    try:
        said = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CannotBuild(f"there is no {path}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise CannotBuild(f"{path}: {error}") from None
    unknown = [key for key in said if key not in (*ABOUT_BUILDING, *FACTS)]
    if unknown:
        raise CannotBuild(
            f"{path}: unknown key {unknown[0]}; known are {', '.join((*ABOUT_BUILDING, *FACTS))}"
        )
    missing = [key for key in NEEDED if not said.get(key)]
    if missing:
        raise CannotBuild(f"{path}: {missing[0]} is missing")
    host = said.get("host", {})
    kernels = said.get("kernels", [])
    if not isinstance(kernels, list) or not all(isinstance(name, str) for name in kernels):
        raise CannotBuild(f'{path}: kernels: write a list of names, such as ["python3", "ir"]')
    return Recipe(
        name=folder.resolve().name,
        base=said["base"],
        program=said.get("program", "python3"),
        module=said.get("module", ""),
        python=host.get("python", ""),
        packages=host.get("packages", []),
        facts={key: value for key, value in said.items() if key not in ABOUT_BUILDING},
        server=read_table(said.get("server", {}), str(path)),
    )


def ask(recipe: Recipe, base: str) -> dict[str, Any]:
    """Return what the base itself says of its Python: no label may claim what is not there.

    Raises:
        CannotBuild: it has no such Python or framework, or another version of it.
    """
    command = ["docker", "run", "--rm", "--network", "none", "--entrypoint", recipe.program, base]
    done = subprocess.run(
        [*command, "-c", ASK, recipe.module],
        check=False,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("fgpu: ")]
    if done.returncode != 0 or not lines:
        # Where docker itself fails, its last line only names its help.
        errors = [
            line for line in done.stderr.splitlines() if line.strip() and "docker run --help" not in line
        ]
        said = errors[-1][:500] if errors else "it said nothing"
        what = f"{recipe.program} with {recipe.module}" if recipe.module else recipe.program
        raise CannotBuild(f"{base} cannot run {what}: {said}")
    found: dict[str, Any] = json.loads(lines[-1].removeprefix("fgpu: "))
    wanted, has = str(recipe.facts["version"]), found["version"]
    if recipe.module and not re.match(rf"{re.escape(wanted)}([.+]|$)", has):
        raise CannotBuild(
            f"{base} has {recipe.module} {has}, and {recipe.name}/image.toml says version {wanted}; "
            "change either"
        )
    return found


def facts_of(recipe: Recipe, found: Mapping[str, Any], *, made_here: bool) -> dict[str, Any]:
    """Return what is known of the image: what its folder says, and over it what the base was asked for."""
    minor = ".".join(found["python"].split(".")[:2])
    facts = {
        "slug": recipe.name.replace(".", "-"),
        "kernels": ["python3"],
        **recipe.facts,
        "version": found["version"].split("+")[0],
        "python": minor,
    }
    if recipe.facts["framework"] == "python":
        facts["name"] = f"Python {minor}"
    return {key: value for key, value in facts.items() if not made_here or key not in OF_ITS_OWN_BASE}


def labels_of(facts: Mapping[str, Any]) -> dict[str, str]:
    """Return facts as labels: tables become longer names, lists are separated by commas."""
    found: dict[str, str] = {}
    for key, value in facts.items():
        if isinstance(value, Mapping):
            found |= {f"fgpu.{key}.{name}": str(amount) for name, amount in value.items()}
        elif isinstance(value, list):
            found[f"fgpu.{key}"] = ",".join(map(str, value))
        else:
            found[f"fgpu.{key}"] = str(value)
    return found


def build(
    recipe: Recipe, *, base: str, server: str, tag: str, uv: str, labels: Sequence[str], made_here: bool
) -> None:
    """Build and tag the image; ``made_here``: the base is not the framework's own, so not what it has of GPUs either.

    Raises:
        CannotBuild: the base does not fit, or Docker refuses.
    """
    found = ask(recipe, base)
    if tuple(map(int, found["python"].split("."))) < OLDEST_PYTHON:
        raise CannotBuild(
            f"{base} has Python {found['python']}, which is too old for notebooks: give --base an image with "
            f"{recipe.facts['framework']} {recipe.facts['version']} on Python 3.6 or newer"
        )
    minor = ".".join(found["python"].split(".")[:2])
    facts = facts_of(recipe, found, made_here=made_here)
    plain = recipe.facts["framework"] == "python"
    framework = Framework(
        program=found["program"],
        version=found["python"],
        libc=found["libc"] or "2.17",
        name=facts["name"] if plain else f"{facts['name']} (Python {minor})",
        machine=found["machine"],
    )
    with tempfile.TemporaryDirectory(prefix="fgpu-image.") as folder:
        context = Path(folder)
        roots, users = context / "roots", context / "users"
        make_user_environment(users, framework, uv=uv)
        packages = [path for path in found["packages"] if not path.startswith(f"/{ENVIRONMENT}/")]
        if packages:
            # The base's Python is a virtual environment itself, and one does not see through another.
            write(
                users / f"lib/python{minor}/site-packages/fgpu_framework.pth",
                "".join(f"{path}\n" for path in packages),
            )
        make_kernel(roots, framework)
        prefixes = prefixes_of(found["prefixes"])
        have = add_to_server(roots, recipe.server, uv=uv, server=server, prefixes=prefixes)
        for warning in (*warnings_of(recipe.server), *without_server_half(found["extensions"], have)):
            print(f"images: warning: {warning}", file=sys.stderr)
        path = search_path(found["path"])
        write(roots / "etc/profile.d/fgpu.sh", f"PATH={shlex.quote(path)}\nexport PATH\n")
        shutil.copy2(HERE / "prepare.py", roots / "opt/fgpu/prepare.py")
        shutil.copy2(HERE / "Dockerfile", context)
        arguments = [
            "--build-arg",
            f"BASE={base}",
            "--build-arg",
            f"SERVER={server}",
            "--build-arg",
            f"SEARCH={path}",
        ]
        # The base's own, where it was made here, says what went into the base.
        for key, value in {**labels_of(facts), "fgpu.inputs": ""}.items():
            arguments += ["--label", f"{key}={value}"]
        for label in labels:
            arguments += ["--label", label]
        run(["docker", "build", "--quiet", "--tag", tag, *arguments, str(context)])
    kernels = recipe.facts.get("kernels", [])
    if kernels or recipe.server.extensions or recipe.server.trusted:
        check_built(tag, kernels=kernels, prefixes=prefixes)


def main() -> int:
    parser = argparse.ArgumentParser(prog="onbase.py", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("action", choices=("describe", "build"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--base")
    parser.add_argument("--server", default="")
    parser.add_argument("--tag", default="")
    parser.add_argument("--uv", default="uv")
    parser.add_argument(
        "--made-here", action="store_true", help="the base was made of this machine's packages"
    )
    parser.add_argument("--label", action="append", default=[], metavar="NAME=VALUE")
    given = parser.parse_args()
    os.umask(0o022)
    try:
        recipe = read_recipe(given.folder)
        if given.action == "describe":
            print(f"base={recipe.base}\npython={recipe.python}")
            if recipe.module:
                print(f"module={recipe.module}\nversion={recipe.facts['version']}")
            print("".join(f"package={package}\n" for package in recipe.packages), end="")
        else:
            build(
                recipe,
                base=given.base or recipe.base,
                server=given.server,
                tag=given.tag,
                uv=given.uv,
                labels=given.label,
                made_here=given.made_here,
            )
    except CannotBuild as error:
        print(f"images: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
