"""Shared folders that users may have in their sessions."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path
from typing import Any

from traitlets import Dict

from fgpu_scheduler import BadSettings
from fgpuspawner.settings.cluster import FOUND_NAME, NAME, NAME_FORM, ClusterSettings, admits, are_names
from fgpuspawner.settings.traits import check_keys
from fgpuspawner.text.fields import short

READ_ONLY, READ_WRITE = MODES = ("read-only", "read-write")
KEYS = ("mode", "at", "text", "always", "users", "hub_groups")
PLACE = re.compile(r"\w[\w +-]*(\.[\w +-]+)*(/\w[\w +-]*(\.[\w +-]+)*)*")
"""A relative path without ``..`` and hidden names: nothing of a home's own settings is at such a place."""
MOST_PLACE, MOST_TEXT = 100, 200
SYSTEM = (
    "/proc",
    "/sys",
    "/dev",
    "/run",
    "/var/run",
    "/etc",
    "/boot",
    "/var/lib/docker",
    "/var/lib/containerd",
)
"""With these a session could command the machine."""


@dataclass(frozen=True, slots=True)
class SharedFolder:
    """A folder of a machine (``path``), or of a volume claim of the cluster, and its place in the home, ``at``.

    ``always``: each session of a user who may have it has it, and the form only names it.
    """

    name: str
    at: str
    path: str = ""
    claim: str = ""
    subpath: str = ""
    read_only: bool = True
    always: bool = False
    text: str = ""

    @property
    def source(self) -> str:
        """Where its files are: on the machine, or in the cluster's claims."""
        return self.path or "/".join(filter(None, (self.claim, self.subpath)))


class FolderSettings(ClusterSettings):
    """Folders that the launch form offers."""

    folders = Dict()
    """Folders that users may choose for their sessions, by name.

    Each is a dict with ``path``, a folder of the machine that runs the session; on Kubernetes ``claim``, a
    PersistentVolumeClaim in the sessions' namespace, and ``subpath``, a folder in it. ``at`` is its place in the
    home, its name by default; ``mode`` is "read-only" (default) or "read-write"; ``text`` is shown in the form.
    With ``users`` or ``hub_groups`` only those are offered it, else all users. With ``always`` each of their
    sessions has it.

    Example::

        c.FGPU.folders = {
            "datasets": {"path": "/srv/datasets", "at": "data/datasets", "text": "ImageNet, COCO", "always": True},
            "vision": {"path": "/srv/projects/vision", "mode": "read-write", "hub_groups": ["vision"]},
        }
    """

    def folders_for(self, user: str, hub_groups: Collection[str]) -> tuple[SharedFolder, ...]:
        """Return the folders that this user may have, in the administrator's order."""
        return tuple(
            _folder(name, given) for name, given in self.folders.items() if admits(given, user, hub_groups)
        )

    def folders_of(
        self, user: str, hub_groups: Collection[str], chosen: Collection[str]
    ) -> tuple[SharedFolder, ...]:
        """Return the folders of a session: those that the user has chosen and may have, and those they always have."""
        offered = self.folders_for(user, hub_groups)
        return tuple(folder for folder in offered if folder.always or folder.name in chosen)

    def _check_folders(self, data: Path) -> None:
        for name, given in self.folders.items():
            where = f"c.FGPU.folders[{short(name)}]"
            if not isinstance(name, str) or NAME.fullmatch(name) is None:
                raise BadSettings(f"{where} is not a name; {NAME_FORM}")
            if not isinstance(given, Mapping):
                raise BadSettings(f"{where} is {short(given)}; use a dict such as {{'path': '/srv/{name}'}}")
            check_keys(where, given, (*(("claim", "subpath") if self.finds_nodes else ("path",)), *KEYS))
            if (wrong := _wrong(name, given, data, in_cluster=self.finds_nodes)) is not None:
                raise BadSettings(f"{where}: {wrong}")
        found = [_folder(name, given) for name, given in self.folders.items()]
        for own, other in permutations(found, 2):
            words = ""
            if _holds(other.at, own.at):
                words = f"at {own.at!r} is at or in the place of {other.name!r}, {other.at!r}; use another"
            elif not other.read_only and own.source != other.source and _holds(other.source, own.source):
                # Users could put a link there, to any folder of the machine or the claim.
                where = f"path {own.path!r}" if own.path else f"subpath {own.subpath!r}"
                words = f"{where} is in that of {other.name!r}, where users may write; use another"
            if words:
                raise BadSettings(f"c.FGPU.folders[{own.name!r}]: {words}")

    def check_folders_here(self, *, one_user: bool) -> None:
        """Refuse folders that this machine lacks. ``one_user``: sessions are processes of the Hub's own user."""
        if all(map(self.is_elsewhere, self.node_ids())):
            return
        for name, given in self.folders.items():
            where, path = f"c.FGPU.folders[{name!r}]: path {given['path']!r}", Path(given["path"])
            if _is_missing(path):
                raise BadSettings(f"{where} is no folder on this machine; make it, or name one that is there")
            if one_user and _folder(name, given).read_only and os.access(path, os.W_OK):
                raise BadSettings(
                    f"{where} can be written by local sessions, which are this user's processes; "
                    f"take that right away, or use mode {READ_WRITE!r}"
                )


def _folder(name: str, given: Mapping[str, Any]) -> SharedFolder:
    own = {key: given[key] for key in ("path", "claim", "subpath", "always", "text") if key in given}
    at = str(given.get("at", name))
    return SharedFolder(name, at, read_only=given.get("mode", READ_ONLY) == READ_ONLY, **own)


def _wrong(name: str, given: Mapping[str, Any], data: Path, *, in_cluster: bool) -> str | None:
    path, claim, text = given.get("path", ""), given.get("claim", ""), given.get("text", "")
    place, names = "without '..' and hidden names", "a list of one name or more, or leave it out"
    rules = (
        (
            "path",
            in_cluster
            or (isinstance(path, str) and path[:1] == "/" != path[1:2] and os.path.normpath(path) == path),
            f"an absolute path without '..', such as '/srv/{name}'",
        ),
        (
            "claim",
            not in_cluster or (isinstance(claim, str) and FOUND_NAME.fullmatch(claim)),
            "the name of a PersistentVolumeClaim",
        ),
        ("subpath", "subpath" not in given or _is_place(given["subpath"]), f"a relative path {place}"),
        ("at", _is_place(given.get("at", name)), f"a path in the home, such as 'data/{name}', {place}"),
        ("mode", given.get("mode", READ_ONLY) in MODES, f"{READ_ONLY!r} or {READ_WRITE!r}"),
        ("always", isinstance(given.get("always", False), bool), "True or False"),
        (
            "text",
            isinstance(text, str) and len(text) <= MOST_TEXT and text.isprintable(),
            f"a line of at most {MOST_TEXT} characters",
        ),
        *((key, key not in given or are_names(given[key]), names) for key in ("users", "hub_groups")),
    )
    for key, met, remedy in rules:
        if not met:
            return f"{key} is {short(given.get(key))}; use {remedy}"
    for own in () if in_cluster else (*SYSTEM, str(data)):
        if _holds(path, own) or _holds(own, path):
            return f"path {path!r} has files of the machine or the Hub, {own}; use another, such as '/srv/{name}'"
    return None


def _is_place(path: object) -> bool:
    return isinstance(path, str) and len(path) <= MOST_PLACE and PLACE.fullmatch(path) is not None


def _holds(folder: str, path: str) -> bool:
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def _is_missing(path: Path) -> bool:
    """Return whether a folder is certainly missing here.

    A Hub's unit hides folders, such as /home, as empty ones or without rights: what is there is not known.
    """
    try:
        if path.is_dir():
            return False
        above = next(parent for parent in path.parents if parent.is_dir())
        return any(above.iterdir())
    except OSError:
        return False
