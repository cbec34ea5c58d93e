"""Frameworks for sessions as local processes: Python environments made of the package index, when asked for.

Each is a virtual environment below ``data_dir`` that has the framework, and sees the Hub's own packages for the server.
What is fetched is fixed first, with its size and hashes (uv writes a lock file); then every wheel is fetched and checked.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import ssl
import subprocess
import sys
import sysconfig
import tempfile
import tomllib
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

import truststore
from packaging.tags import sys_tags
from packaging.utils import parse_wheel_filename

from fgpu_scheduler import FGPUError
from fgpuspawner.isolation.files import HubFile, remove_folder

TIMEOUT_S = 120
CHUNK = 1 << 20
SERVER = "jupyterhub-singleuser"
INSTALLING: HubFile[dict[str, str]] = HubFile("installing.json", dict)
"""Written by the service for the launch form: how far each framework is that is being installed, in words by name."""


class CannotInstall(FGPUError):
    """A framework cannot be installed here; the message says why in one line."""

    code = "cannot_install"


@dataclass(frozen=True, slots=True)
class LocalFramework:
    """A version of a framework that can be installed: the image that it becomes, and what is asked of the index."""

    slug: str
    name: str
    framework: str
    version: str
    packages: tuple[str, ...]

    def entry(self, folder: Path) -> dict[str, object]:
        """Return the entry of the catalogue for it in this environment."""
        python = f"{sys.version_info.major}.{sys.version_info.minor}"
        names = {"slug": self.slug, "name": self.name, "framework": self.framework, "version": self.version}
        return {**names, "python": python, "reference": f"local/{self.slug}", "environment": str(folder)}


FRAMEWORKS = (
    LocalFramework("torch-2-13", "PyTorch 2.13", "pytorch", "2.13", ("torch==2.13.*", "numpy")),
    LocalFramework("torch-2-6", "PyTorch 2.6", "pytorch", "2.6", ("torch==2.6.*", "numpy<2.3")),
    LocalFramework("tf-2-21", "TensorFlow 2.21", "tensorflow", "2.21", ("tensorflow-cpu==2.21.*",)),
    LocalFramework("tf-2-16", "TensorFlow 2.16", "tensorflow", "2.16", ("tensorflow-cpu==2.16.*",)),
)


@dataclass(frozen=True, slots=True)
class WheelFile:
    """A wheel to fetch: where it is, its size in bytes and its SHA-256."""

    name: str
    url: str
    size: int
    sha256: str


def find_wheels(wanted: LocalFramework) -> tuple[WheelFile, ...]:
    """Return the wheels that make the environment. Nothing is fetched but the index's own answers. Blocks.

    Raises:
        CannotInstall: the index is not reached, or has none for this Python and machine.
    """
    with tempfile.TemporaryDirectory(prefix="fgpu-lock.") as folder:
        asked, lock = Path(folder, "asked.txt"), Path(folder, "pylock.toml")
        asked.write_text("\n".join(wanted.packages) + "\n")
        command = ["pip", "compile", str(asked), "--python", sys.executable, "--only-binary", ":all:"]
        _uv([*command, "--format", "pylock.toml", "--output-file", str(lock)])
        packages = tomllib.loads(lock.read_text())["packages"]
    return tuple(_wheel(package) for package in packages)


def _wheel(package: Mapping[str, Any]) -> WheelFile:
    tags = {tag: rank for rank, tag in enumerate(sys_tags())}
    best: tuple[int, WheelFile] | None = None
    for one in package.get("wheels", ()):
        url = one.get("url") or Path(one["path"]).as_uri()
        name = one.get("name") or url.rpartition("/")[2].replace("%2B", "+")
        fits = [tags[tag] for tag in parse_wheel_filename(name)[3] if tag in tags]
        if fits and (best is None or min(fits) < best[0]):
            best = min(fits), WheelFile(name, url, one.get("size") or _size(url), one["hashes"]["sha256"])
    if best is None:
        raise CannotInstall(f"{package['name']} {package.get('version', '')} has no wheel for this machine")
    return best[1]


def _size(url: str) -> int:
    """Ask for the size of a wheel whose index does not say it, such as PyTorch's own."""
    if url.startswith("file:"):
        return Path(url2pathname(urlsplit(url).path)).stat().st_size
    try:
        with urllib.request.urlopen(
            urllib.request.Request(url, method="HEAD"), timeout=TIMEOUT_S, context=_trusted()
        ) as answer:
            return int(answer.headers["Content-Length"])
    except (OSError, TypeError, ValueError) as error:
        raise CannotInstall(f"the size of {url.rpartition('/')[2]} is not known: {error}") from None


def _trusted() -> ssl.SSLContext:
    return truststore.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


def install(wheels: Sequence[WheelFile], folder: Path, *, tell: Callable[[int], None]) -> None:
    """Make the environment in this folder, whole or not at all; ``tell`` gets percents. Blocks.

    Raises:
        CannotInstall: something cannot be fetched or written.
    """
    draft = folder.with_name(f".{folder.name}.new")
    remove_folder(draft)
    draft.mkdir(parents=True, mode=0o755)
    total, done = sum(wheel.size for wheel in wheels) or 1, 0
    try:
        with tempfile.TemporaryDirectory(prefix="wheels.", dir=draft) as place:
            for wheel in wheels:
                for piece in _fetch(wheel, Path(place)):
                    done += piece
                    tell(90 * done // total)
            files = [str(Path(place, wheel.name)) for wheel in wheels]
            _uv(["venv", "--allow-existing", "--relocatable", "--python", sys.executable, str(draft)])
            target = ["--python", str(draft / "bin/python"), "--no-deps", "--no-index", "--no-cache"]
            _uv(["pip", "install", *target, *files])
        tell(99)
        _see_the_server(draft, folder)
        remove_folder(folder)
        draft.rename(folder)
    except OSError as error:
        raise CannotInstall(f"{error.strerror or error}") from None
    finally:
        remove_folder(draft)


def _fetch(wheel: WheelFile, place: Path) -> Iterator[int]:
    """Fetch and check a wheel; yield the sizes of its pieces as they come."""
    seen = hashlib.sha256()
    with (
        urllib.request.urlopen(wheel.url, timeout=TIMEOUT_S, context=_trusted()) as answer,
        (place / wheel.name).open("wb") as file,
    ):
        while piece := answer.read(CHUNK):
            file.write(piece)
            seen.update(piece)
            yield len(piece)
    if seen.hexdigest() != wheel.sha256:
        raise CannotInstall(f"{wheel.name} is not what the package index has promised; try again")


def _see_the_server(draft: Path, folder: Path) -> None:
    """Let an environment run the Hub's own server: its packages after those of the framework."""
    (site,) = draft.glob("lib/python3*/site-packages")
    own = sysconfig.get_path("purelib")
    (site / "fgpu_hub.pth").write_text(f"import site; site.addsitedir({own!r})\n")
    # Kernels and front ends.
    for name in ("share", "etc"):
        remove_folder(draft / name)
        (draft / name).symlink_to(Path(sys.prefix, name))
    server = draft / "bin" / SERVER
    words = "from jupyterhub.singleuser import main\nmain()\n"
    server.write_text(f"#!{folder}/bin/python\n{words}")
    server.chmod(0o755)


def find_uv() -> str | None:
    """Return the program uv: of the Hub's own environment, or on the PATH."""
    return shutil.which("uv", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")


def _uv(arguments: Sequence[str]) -> None:
    program = find_uv()
    if program is None:
        raise CannotInstall("uv is not here: pip install uv")
    # As pip, which trusts the certificates that its machine trusts.
    environment = {**os.environ, "UV_SYSTEM_CERTS": "1"}
    if "PIP_FIND_LINKS" in environment:
        environment.setdefault("UV_FIND_LINKS", environment["PIP_FIND_LINKS"])
    try:
        done = subprocess.run(
            [program, "--no-config", "--quiet", *arguments],
            check=False,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            env=environment,
            timeout=10 * TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        raise CannotInstall("the package index does not answer; try again later") from None
    if done.returncode != 0:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        raise CannotInstall(" ".join(lines)[:400] or "uv failed")
