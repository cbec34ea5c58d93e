"""What a session's container takes of its machine's disk: its own files, its anonymous volumes, and its home.

On the Hub's machine coreutils' ``du`` counts blocks and files in the engine's folders, for which the Hub must be root.
On other machines the engine reports the size of the container's files, and nothing of homes.
Functions with a client raise `DockerException` if the engine does not answer.
"""

from __future__ import annotations

import contextlib
import fnmatch
import glob
import os
import posixpath
import re
import stat
import subprocess
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import docker
from docker.errors import APIError

from fgpuspawner.engines.base import FOLDERS
from fgpuspawner.engines.docker.client import written_bytes
from fgpuspawner.engines.docker.containers import numbers_are_the_hosts
from fgpuspawner.engines.docker.create import UNNAMED
from fgpuspawner.engines.docker.homes import PLACE
from fgpuspawner.isolation.base import IN_CONTAINER
from fgpuspawner.meter.disk import TENTH_GIB, DiskUse, FolderUse
from fgpuspawner.meter.file_system import DU, is_counted, mount_of
from fgpuspawner.text.logs import as_text

WITHIN_S = 300
DEEP = 2
MOST_LARGEST = 5
TRIES = 3
MOST_OPEN = 100_000
"""Files kept open by a session's processes; counting stops there."""
MOVED = "folders in it are moved while they are counted"
HIDDEN = f"its programs keep more than {MOST_OPEN} files open"


def limits_disk(client: docker.APIClient, image: str) -> bool:
    """Return whether the engine can limit a container's disk, by creating one that is never started. Blocks."""
    host = client.create_host_config(network_mode="none", storage_opt={"size": "1g"})
    try:
        made = client.create_container(image, command=["true"], host_config=host)
    except APIError:
        return False
    client.remove_container(made["Id"], v=True, force=True)
    return True


def own_targets(settings: Mapping[str, Any]) -> tuple[str, ...]:
    """Return where in containers each user's own folder or volume is mounted, as patterns. Pure.

    These are the ``volumes`` and ``mounts`` with a user name in their source; others are shared and no home.
    """
    pairs = [
        (source, target["bind"] if isinstance(target, Mapping) else target)
        for source, target in (settings.get("volumes") or {}).items()
    ]
    mounts = (m for m in settings.get("mounts") or () if isinstance(m, Mapping))
    pairs += [(str(m.get("source", "")), m.get("target", "")) for m in mounts]
    own = (str(target) for source, target in pairs if "username}" in source)
    return tuple(posixpath.normpath(re.sub(r"\{[^{}]*\}", "*", target)) for target in own)


def _mount_below(written: str) -> tuple[str, ...]:
    """Return the file system of a folder that only root can read, by its first readable parent."""
    for parent in Path(written).parents:
        try:
            parent.stat()
        except PermissionError:
            continue
        return tuple(top for top, _ in [mount_of(str(parent)) or ("", "")] if top)
    return ()


def use_of(
    client: docker.APIClient, container: str, user: str, *, here: bool, own: Collection[str] = ()
) -> DiskUse:
    """Return what a container takes; ``own`` are `own_targets`. Blocks as long as ``du`` takes."""
    found = client.inspect_container(container)
    written = ((found.get("GraphDriver") or {}).get("Data") or {}).get("UpperDir")
    if not here or not written or not os.access(written, os.R_OK | os.X_OK):
        mounted = _mount_below(written) if here and written and is_counted() else ()
        size = written_bytes(client, found["Id"])
        return DiskUse(None if size is None else FolderUse(size), mounts=mounted)
    mounts = [m for m in found.get("Mounts") or () if m.get("RW") and not _is_shared(m)]
    volumes = {m["Name"]: client.inspect_volume(m["Name"]) for m in mounts if m.get("Type") == "volume"}
    unnamed = [m for m in mounts if UNNAMED in (volumes.get(m.get("Name"), {}).get("Labels") or {})]
    homes = {
        source: str(m["Destination"])
        for m in mounts
        if m not in unnamed and (source := _home_of(m, user, container, own)) is not None
    }
    folders = {written: "", **{str(m["Source"]): str(m["Destination"]) for m in unnamed}}
    if found.get("HostsPath"):
        # The engine's files for it, such as /etc/hosts, which root in it can write.
        folders[str(Path(found["HostsPath"]).parent)] = "/etc"
    in_homes = _places(homes)
    elsewhere = _places(str(m["Source"]) for m in unnamed) - in_homes
    nameless = _nameless(client, found)
    session = _measured(folders, nameless, {*elsewhere, nameless.root})
    home = _measured(homes, nameless, in_homes) if homes else None
    on = {top[0] for folder in (*folders, *homes) if (top := mount_of(folder)) is not None}
    return DiskUse(session, home, tuple(on))


def _is_shared(mount: Mapping[str, Any]) -> bool:
    """Return whether a mount is of a shared folder, which counts for no user, whatever its name."""
    return str(mount.get("Destination", "")).startswith(f"{IN_CONTAINER}/{FOLDERS}/")


def _home_of(mount: Mapping[str, Any], user: str, container: str, own: Collection[str]) -> str | None:
    """Return the source of a mount if it is the user's own, by `own_targets` or by its name."""
    source, target = Path(str(mount.get("Source", ""))), posixpath.normpath(str(mount.get("Destination", "")))
    words = source.parts if mount.get("Type") != "volume" else re.split(r"[^\w.]+", str(mount["Name"]))
    if user not in words and not any(fnmatch.fnmatchcase(target, pattern) for pattern in own):
        return None
    places, *rest = source.relative_to(PLACE).parts if source.is_relative_to(PLACE) else ("",)
    if places.startswith("fgpu-homes-"):
        # Mounted into a warm container; its folder has the new name by now.
        return str(PLACE.joinpath(places, container, *rest[1:]))
    return str(source)


@dataclass(frozen=True, slots=True)
class _Nameless:
    """Bytes in open files without a name, by file system number; ``root`` is the container's."""

    bytes: Mapping[int, int]
    root: int = -1
    too_many: bool = False


def _nameless(client: docker.APIClient, container: Mapping[str, Any]) -> _Nameless:
    """Count what a container's processes keep open, if visible: ``du`` only finds files with names."""
    found: dict[tuple[int, int], int] = {}
    looked_at = 0
    try:
        root = os.stat(f"/proc/{container['State']['Pid']}/root/").st_dev
        processes = client.top(container["Id"], ps_args="-eo pid")["Processes"] or ()
    except (OSError, APIError):
        return _Nameless({})
    if not numbers_are_the_hosts():
        return _Nameless({})
    for process in processes:
        for path in _opened(process[0]):
            looked_at += 1
            if looked_at > MOST_OPEN:
                return _Nameless({}, root, too_many=True)
            try:
                seen = os.stat(path)
            except OSError:
                continue
            if seen.st_nlink == 0 and stat.S_ISREG(seen.st_mode):
                found[seen.st_dev, seen.st_ino] = seen.st_blocks * 512
    by_place: dict[int, int] = {}
    for (place, _), size in found.items():
        by_place[place] = by_place.get(place, 0) + size
    return _Nameless(by_place, root)


def _places(folders: Iterable[str]) -> frozenset[int]:
    found = set()
    for folder in folders:
        with contextlib.suppress(OSError):
            found.add(os.stat(folder).st_dev)
    return frozenset(found)


def _opened(pid: str) -> Iterator[str]:
    """Yield paths to a process's open and mapped files; its other threads' if the first has ended."""
    by_first = glob.iglob(f"/proc/{pid}/fd/*")
    own = next(by_first, None)
    yield from (own, *by_first) if own else glob.iglob(f"/proc/{pid}/task/*/fd/*")
    yield from glob.iglob(f"/proc/{pid}/map_files/*")


def _measured(folders: Mapping[str, str], nameless: _Nameless, places: Collection[int]) -> FolderUse | None:
    """Return what these folders take together; ``folders`` maps each to the prefix that the owner sees.

    ``places`` are the file systems with nameless files that count too.
    """
    total, files = sum(nameless.bytes.get(place, 0) for place in places), 0
    uncounted = HIDDEN if nameless.too_many else ""
    largest: list[tuple[str, int]] = []
    for folder, shown in folders.items():
        sizes = _du(["-B1", f"--max-depth={DEEP}"], folder)
        counted = _du(["--inodes", "-s"], folder)
        if sizes is None or counted is None:
            return None
        if not (sizes.whole and counted.whole):
            uncounted = MOVED
        total += sizes.total
        files += counted.total
        largest += _deepest(folder, shown, sizes.large)
    ordered = sorted(largest, key=lambda entry: -entry[1])
    return FolderUse(total, files, tuple(ordered[:MOST_LARGEST]), uncounted)


def _deepest(folder: str, shown: str, sizes: Mapping[str, int]) -> Iterable[tuple[str, int]]:
    """Yield folders with their sizes, except where most of the size is in a listed subfolder."""
    within: dict[str, int] = {}
    for path, size in sizes.items():
        above = os.path.dirname(path)
        within[above] = max(size, within.get(above, 0))
    for path, size in sizes.items():
        if within.get(path, 0) < size / 2:
            yield as_text(f"{shown}{path.removeprefix(folder)}"), size


@dataclass(frozen=True, slots=True)
class _Counted:
    """The output of ``du``: the total, and the large folders.

    ``du`` gives up when the folder it is in is moved; then the count is not ``whole``.
    """

    total: int
    large: Mapping[str, int]
    whole: bool


def _du(options: Sequence[str], folder: str) -> _Counted | None:
    """Return what ``du`` counts, with retries if folders are moved; None if it fails or takes too long."""
    found = None
    for _ in range(TRIES):
        found = _du_once(options, folder)
        if found is None or found.whole:
            break
    return found


def _du_once(options: Sequence[str], folder: str) -> _Counted | None:
    command = [*DU, "-0", "-c", *options, "--", folder]
    environment = {"LC_ALL": "C", "PATH": os.defpath}
    large: dict[str, int] = {}
    total = whole = None
    try:
        # Files vanish during the count, so status 1 and error output mean nothing.
        du = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment)
    except OSError:
        return None
    with du:
        assert du.stdout is not None
        late = threading.Timer(WITHIN_S, du.kill)
        late.start()
        try:
            # Line by line: a home can have millions of folders.
            for line in _records(du.stdout):
                size, tab, path = line.partition(b"\t")
                if not (tab and size.isdigit()):
                    continue
                if path == b"total":
                    total = int(size)
                elif path == os.fsencode(folder):
                    whole = True
                elif int(size) >= TENTH_GIB:
                    large[os.fsdecode(path)] = int(size)
        finally:
            late.cancel()
    if total is None or not os.path.isdir(folder):
        return None
    return _Counted(total, large, whole is not None)


def _records(output: IO[bytes]) -> Iterator[bytes]:
    rest = b""
    while piece := output.read(65536):
        *records, rest = (rest + piece).split(b"\0")
        yield from records
