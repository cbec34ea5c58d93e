"""A private image as a Dockerfile: which packages its session has installed beyond what it was started from.

The engine says which files changed, and Python packages are read from the names of their folders. The session wrote
these names, and they end up in commands that a user runs to build the image. So names and versions must keep to
grammars that have no syntax of a shell or a Dockerfile, and are quoted as well. Those that do not are counted, and not
shown. Pure.
"""

from __future__ import annotations

import io
import itertools
import posixpath
import re
import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

ADDED, DELETED = 1, 2
"""Kinds of change, as Docker counts them; 0 is modified."""

DPKG = "/var/lib/dpkg/status"
MOST_BYTES = 16 * 2**20
MOST_ENVIRONMENTS = 50
MOST_CHARACTERS = 2**18
MOST_PACKAGES = 2000
MOST_SHOWN = 20

_NAME = r"[A-Za-z0-9](?:[A-Za-z0-9._]{0,126}[A-Za-z0-9])?"
# PEP 440, as folders' names have it.
_VERSION = r"[0-9A-Za-z][0-9A-Za-z.!+_]{0,63}"
PACKAGE = re.compile(
    r"(?P<prefix>(?:/[A-Za-z0-9][A-Za-z0-9._-]{0,63}){1,8})/lib(?:64)?/python(?P<python>[0-9]{1,2}(?:\.[0-9]{1,3})?)/"
    rf"(?P<kind>site|dist)-packages/(?P<name>{_NAME})-(?P<version>{_VERSION})"
    r"(?:-py[0-9.]{1,6}(?:-[a-z0-9_-]{1,40})?)?\.(?:dist|egg)-info"
)
DEEPEST = 10
"""Parts of the path of a folder in an environment, the empty one before the first / too: see PACKAGE."""
A_PACKAGE = re.compile(r"/(?:site|dist)-packages/[^/]*\.(?:dist|egg)-info$")
IN_PACKAGES = re.compile(r"/lib(?:64)?/python[0-9.]+/(?:site|dist)-packages(?:/|$)")
APT_NAME = re.compile(r"[a-z0-9][a-z0-9+.-]{1,127}")
APT_VERSION = re.compile(r"[0-9A-Za-z][0-9A-Za-z.+:~-]{0,127}")
APT_FILES = (
    "/var/lib/dpkg",
    "/var/lib/apt",
    "/var/cache/apt",
    "/var/log",
    "/etc/ld.so.cache",
    "/var/cache/ldconfig",
)
NOT_TOLD = ("/tmp", "/var/tmp", "/run", "/proc", "/sys", "/dev", "/root/.cache", "/etc/ld.so.preload")
"""What sessions leave behind, and what is mounted over."""
REFERENCE = re.compile(r"[a-z0-9][a-zA-Z0-9._:/@-]{0,400}")
USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:-]{0,64}")


@dataclass(frozen=True, slots=True, order=True)
class Environment:
    """A Python in the image, by where its packages are."""

    prefix: str
    python: str

    @property
    def program(self) -> str:
        """Its interpreter."""
        return f"{self.prefix}/bin/python{self.python.partition('.')[0]}"


@dataclass(frozen=True, slots=True)
class PackageChanges:
    """What a session has installed and removed."""

    installed: Mapping[Environment, Mapping[str, str]] = field(default_factory=dict)
    uninstalled: Mapping[Environment, Sequence[str]] = field(default_factory=dict)
    apt: Mapping[str, str] = field(default_factory=dict)
    apt_removed: Sequence[str] = ()
    elsewhere: Sequence[str] = ()
    """Folders in which other files have changed."""
    unreadable: int = 0
    """Number of Python packages without a valid name and version."""
    made: Sequence[str] = ()
    """Folders of environments that the session has made: what the image is made from has no interpreter there."""


@dataclass(frozen=True, slots=True)
class Base:
    """What the image was started from: how to name it, and as which user it runs. ``pinned``: by a digest."""

    reference: str
    engines_id: str
    user: str
    pinned: bool


def packages_of(status: bytes) -> dict[str, str]:
    """Return the installed packages of dpkg's status file, with versions. Invalid names and versions are left out."""
    found: dict[str, str] = {}
    fields: dict[bytes, str] = {}
    # Line by line: root in a session may write anything there, and all of it at once takes far more memory.
    for line in itertools.chain(io.BytesIO(status), (b"\n",)):
        key, _, value = line.rstrip(b"\n").partition(b": ")
        if key in (b"Package", b"Status", b"Version"):
            fields[key] = value.decode("utf-8", "replace")
        elif not key and fields:
            name, version = fields.get(b"Package", ""), fields.get(b"Version", "")
            is_in = fields.get(b"Status", "").endswith(" installed")
            if is_in and APT_NAME.fullmatch(name) and APT_VERSION.fullmatch(version):
                found[name] = version
            fields = {}
    return found


def packages_changed(before: bytes, after: bytes) -> tuple[dict[str, str], list[str]]:
    """Return which packages are new or of another version in the later of dpkg's status files, and which are gone."""
    old, new = packages_of(before), packages_of(after)
    return {n: v for n, v in new.items() if old.get(n) != v}, [n for n in old if n not in new]


def read_changes(
    changed: Mapping[str, int], apt: Mapping[str, str] | None = None, apt_removed: Sequence[str] = ()
) -> PackageChanges:
    """Return what changed files say of packages; 0 is modified, 1 added, 2 deleted. Pure."""
    installed: dict[Environment, dict[str, str]] = {}
    gone: dict[Environment, set[str]] = {}
    elsewhere: set[str] = set()
    unreadable = 0
    # A folder is listed for what is in it, which is listed too.
    folders = {posixpath.dirname(path) for path in changed}
    told_by_apt = APT_FILES if apt or apt_removed else ()
    for path, kind in changed.items():
        if _is_below(path, NOT_TOLD):
            continue
        package = PACKAGE.fullmatch(path)
        if package is not None and kind in (ADDED, DELETED):
            own, name = _environment(package), package["name"].replace("_", "-").lower()
            if kind == DELETED:
                gone.setdefault(own, set()).add(name)
            else:
                installed.setdefault(own, {})[name] = package["version"].replace("_", "-")
        elif A_PACKAGE.search(path):
            unreadable += kind == ADDED and package is None
        elif not (path in folders or IN_PACKAGES.search(path) or _is_below(path, told_by_apt)):
            elsewhere.add(path)
    roots = {own.prefix for own in (*installed, *gone)}
    made = {own.prefix for own in (*installed, *gone) if _is_made(own, changed)}
    installed = {own: names for own, names in installed.items() if own.prefix not in made}
    gone = {own: names for own, names in gone.items() if own.prefix not in made}
    scripts = {f"{root}/{folder}" for root in roots for folder in ("bin", "share", "etc", "include")}
    uninstalled = {own: sorted(names - set(installed.get(own, {}))) for own, names in gone.items()}
    return PackageChanges(
        installed,
        {own: names for own, names in uninstalled.items() if names},
        apt or {},
        sorted(apt_removed),
        sorted({_folder(path) for path in elsewhere if not _is_below_any(path, scripts)}),
        unreadable,
        sorted(made),
    )


def _environment(package: re.Match[str]) -> Environment:
    prefix = package["prefix"]
    # Debian's own Python puts there what is installed with pip.
    return Environment(
        "/usr" if prefix == "/usr/local" and package["kind"] == "dist" else prefix, package["python"]
    )


def _is_below(path: str, folders: Sequence[str]) -> bool:
    return (
        any(path == folder or path.startswith(folder + "/") for folder in folders) or "/__pycache__" in path
    )


def _is_below_any(path: str, folders: Collection[str]) -> bool:
    # There can be as many folders as paths. None is deeper than an environment's own: see PACKAGE.
    parts = path.split("/", DEEPEST + 1)
    return any("/".join(parts[:n]) in folders for n in range(2, len(parts)))


def _is_made(own: Environment, changed: Mapping[str, int]) -> bool:
    programs = (f"{own.prefix}/bin/python", own.program, f"{own.prefix}/bin/python{own.python}")
    return any(changed.get(path) == ADDED for path in (f"{own.prefix}/pyvenv.cfg", *programs))


def _folder(path: str) -> str:
    return "/".join(path.split("/")[:4]) or "/"


def dockerfile(changes: PackageChanges, base: Base, *, name: str, before: str | None = None) -> str:
    """Return the Dockerfile. ``before`` is that of the private image that the session ran, which it goes on.

    Raises:
        ValueError: it is too long to be kept.
    """
    lines = [before.rstrip("\n"), ""] if before else _from(base)
    lines.append(f"# {_plain(name)}")
    # An image of an image may have environments that none of these lines makes.
    known = set(lines[0].split("\n"))
    there = [
        own for own in sorted({*changes.installed, *changes.uninstalled}) if _made(own.prefix) not in known
    ]
    if changes.apt or changes.apt_removed:
        lines += ["USER root", *_apt_lines(changes), f"USER {_user(base)}"]
    for own in there[:MOST_ENVIRONMENTS]:
        lines += _pip_lines(own, changes.installed.get(own, {}), changes.uninstalled.get(own, ()))
    if len(there) > MOST_ENVIRONMENTS:
        more = len(there) - MOST_ENVIRONMENTS
        lines.append(f"# Not in here: what was installed in {more} more Python environments.")
    lines += _notes(changes)
    if len(lines) == 1 or not (
        changes.apt or changes.apt_removed or changes.installed or changes.uninstalled
    ):
        lines.append("# No package was installed or removed.")
    text = "\n".join(lines) + "\n"
    if len(text) > MOST_CHARACTERS:
        raise ValueError(f"it is {len(text)} characters; at most {MOST_CHARACTERS} are kept")
    return text


def _from(base: Base) -> list[str]:
    if REFERENCE.fullmatch(base.reference) is None:
        return ["# The name of the image that this is made from cannot be written here.", "FROM scratch"]
    lines = [] if base.pinned else [f"# Not of a registry: on its engine it was {_plain(base.engines_id)}."]
    arguments = [f"ARG {name}" for name in ("PIP_INDEX_URL", "PIP_FIND_LINKS", "PIP_NO_INDEX")]
    return [
        *lines,
        f"FROM {base.reference}",
        "# Where pip finds packages, if not on its usual index: docker build --build-arg PIP_INDEX_URL=...",
        *arguments,
    ]


def _user(base: Base) -> str:
    return base.user if USER.fullmatch(base.user) else "1000:1000"


def _apt_lines(changes: PackageChanges) -> list[str]:
    lines = []
    if changes.apt:
        wanted = [f"{name}={version}" for name, version in sorted(changes.apt.items())][:MOST_PACKAGES]
        lines.append(
            "RUN apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \\\n    "
            + " \\\n    ".join(map(shlex.quote, wanted))
        )
    if changes.apt_removed:
        names = " ".join(map(shlex.quote, list(changes.apt_removed)[:MOST_PACKAGES]))
        lines.append(f"RUN apt-get remove -y {names}")
    return lines


def _pip_lines(own: Environment, installed: Mapping[str, str], uninstalled: Sequence[str]) -> list[str]:
    pip = f"RUN {shlex.quote(own.program)} -m pip"
    lines = []
    if uninstalled:
        lines.append(f"{pip} uninstall -y {' '.join(map(shlex.quote, list(uninstalled)[:MOST_PACKAGES]))}")
    if installed:
        wanted = [f"{name}=={version}" for name, version in sorted(installed.items())][:MOST_PACKAGES]
        # All that it needs is in the list. Nothing in there can be a quote: see the grammars.
        lines.append(f"{pip} install --no-deps \\\n    " + " \\\n    ".join(f"'{one}'" for one in wanted))
    return lines


def _notes(changes: PackageChanges) -> list[str]:
    notes = []
    notes += [_made(prefix) for prefix in changes.made[:MOST_SHOWN]]
    if len(changes.made) > MOST_SHOWN:
        notes.append(f"#   and {len(changes.made) - MOST_SHOWN} more that it made")
    if changes.unreadable:
        notes.append(f"# Not in here: {changes.unreadable} Python packages without a name and version.")
    if changes.elsewhere:
        shown = [_plain(path) for path in list(changes.elsewhere)[:MOST_SHOWN]]
        more = len(changes.elsewhere) - len(shown)
        notes.append("# Not in here: other files that the session changed, in")
        notes += [f"#   {path}" for path in shown]
        if more:
            notes.append(f"#   and {more} more folders")
    return notes


def _made(prefix: str) -> str:
    return f"# Not in here: the Python environment {_plain(prefix)}, which the session made."


def _plain(text: str) -> str:
    """Return a text as a comment may have it: one line, and nothing but what names usually have."""
    return re.sub(r"[^A-Za-z0-9._/:@+ -]", "?", text)[:200]


def not_written(why: object, base: Base, *, name: str, before: str | None = None) -> str:
    """Return a Dockerfile that says why there is none."""
    head = [before.rstrip("\n")] if before else _from(base)
    said = f"# It could not be recorded what was installed: {_plain(str(why))}"
    return "\n".join([*head, f"# {_plain(name)}", said]) + "\n"
