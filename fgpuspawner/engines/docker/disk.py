"""What a session's container takes of its machine's disk: what it has written, its unnamed volumes, and its home.

On the Hub's own machine coreutils' ``du`` counts blocks and files where the engine keeps them, for which the Hub has to
be root. Elsewhere the engine tells the size of what was written, and nothing of homes.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import docker
from docker.errors import APIError

from fgpuspawner.engines.docker.endings import as_text
from fgpuspawner.engines.docker.homes import PLACE
from fgpuspawner.engines.docker.volumes import LABEL
from fgpuspawner.meter.disk import DiskUse, Taken
from fgpuspawner.settings import FGPU

LIMITING_DRIVERS = ("btrfs", "zfs", "devicemapper")
WITHIN_S = 300
DEEP = 2
MOST_LARGEST = 5


def limits_disk(client: docker.APIClient, image: str) -> bool:
    """Return whether the engine itself can limit what a container writes: asked with one that is never started. Blocks.

    Raises:
        DockerException: the engine does not answer.
    """
    host = client.create_host_config(network_mode="none", storage_opt={"size": "1g"})
    try:
        made = client.create_container(image, command=["true"], host_config=host)
    except APIError:
        return False
    client.remove_container(made["Id"], v=True, force=True)
    return True


def what_is_held(client: docker.APIClient, settings: FGPU) -> list[str]:
    """Return, for ``fgpu check``, how this machine holds containers to their limits of the disk. Blocks.

    Raises:
        DockerException: the engine does not answer.
    """
    info = client.info()
    root, driver = Path(str(info.get("DockerRootDir") or "/")), info.get("Driver")
    session, home = settings.session_disk_mib, settings.home_disk_mib
    every = f"looked at every {settings.disk_every_s} s, then {'ended' if settings.disk_over == 'end' else 'warned'}"
    lines = []
    if session:
        held = driver in LIMITING_DRIVERS or (driver == "overlay2" and _has_project_quotas(root))
        how = (
            "held by the engine"
            if held
            else f"{every} ({driver} here has no quotas: use XFS mounted with pquota)"
        )
        lines.append(f"sessions: {session} MiB, {how}")
    can_look = os.geteuid() == 0 and os.access(root, os.R_OK | os.X_OK)
    if home:
        how = every if can_look else "NOT held: the Hub is not root, so it cannot look into homes"
        lines.append(f"homes: {home} MiB, {how}")
    if session and not can_look:
        lines.append(
            "files are not counted, and blocks behind a file's end are not seen: the Hub is not root"
        )
    if _same_disk(root, settings.data_path()):
        lines.append(
            f"WARNING: what sessions write ({root}) is on the disk of the Hub's data ({settings.data_path()}): together "
            "they can fill it; give one of them a disk of its own"
        )
    return lines


def _same_disk(one: Path, other: Path) -> bool:
    there = next((folder for folder in (other, *other.parents) if folder.is_dir()), other)
    try:
        return one.stat().st_dev == there.stat().st_dev
    except OSError:
        return False


def _has_project_quotas(folder: Path) -> bool:
    """Return whether a folder is on XFS with project quotas, as far as this process sees its mount."""
    try:
        own = os.stat(folder).st_dev
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return False
    device = f"{os.major(own)}:{os.minor(own)}"
    of_it = [line.split(" - ", 1)[1] for line in lines if line.split()[2] == device and " - xfs " in line]
    return any({"prjquota", "pquota"} & set(said.split()[-1].split(",")) for said in of_it)


def take(client: docker.APIClient, container: str, user: str, *, here: bool) -> DiskUse:
    """Return what a container takes. Blocks, for as long as folders take to be read.

    Raises:
        DockerException: the engine does not answer, or there is no such container.
    """
    found = client.inspect_container(container)
    written = ((found.get("GraphDriver") or {}).get("Data") or {}).get("UpperDir")
    if not here or not written or not os.access(written, os.R_OK | os.X_OK):
        return DiskUse(_told_by_engine(client, found["Id"]))
    mounts = [m for m in found.get("Mounts") or () if m.get("RW")]
    unnamed = [m for m in mounts if m.get("Type") == "volume" and _is_unnamed(client, str(m["Name"]))]
    homes = {
        source: str(m["Destination"])
        for m in mounts
        if m not in unnamed and (source := _home_of(m, user, container)) is not None
    }
    session = _measured({written: "", **{str(m["Source"]): str(m["Destination"]) for m in unnamed}})
    home = _measured(homes) if homes else None
    return DiskUse(session, home)


def _told_by_engine(client: docker.APIClient, container: str) -> Taken | None:
    for entry in client.containers(all=True, size=True, filters={"id": container}):
        size = entry.get("SizeRw")
        return Taken(int(size)) if size is not None else None
    return None


def _is_unnamed(client: docker.APIClient, name: str) -> bool:
    return LABEL in (client.inspect_volume(name).get("Labels") or {})


def _home_of(mount: Mapping[str, Any], user: str, container: str) -> str | None:
    """Return the folder of what is mounted if it is the user's own: a volume, or a folder that is called after them."""
    source = Path(str(mount.get("Source", "")))
    places, *rest = source.relative_to(PLACE).parts if source.is_relative_to(PLACE) else ("",)
    if places.startswith("fgpu-homes-"):
        # Brought to a warm container, whose places go by its new name.
        return str(PLACE.joinpath(places, container, *rest[1:]))
    return str(source) if mount.get("Type") == "volume" or user in source.parts else None


def _measured(folders: Mapping[str, str]) -> Taken | None:
    """Return what these folders take together; ``folders`` has how their paths begin for the owner."""
    total, files = 0, 0
    largest: list[tuple[str, int]] = []
    for folder, shown in folders.items():
        sizes = _du(["-B1", f"--max-depth={DEEP}"], folder)
        counted = _du(["--inodes", "-s"], folder)
        if folder not in sizes or folder not in counted:
            return None
        total += sizes.pop(folder)
        files += counted[folder]
        largest += _deepest(folder, shown, sizes)
    return Taken(total, files, tuple(sorted(largest, key=lambda entry: -entry[1])[:MOST_LARGEST]))


def _deepest(folder: str, shown: str, sizes: Mapping[str, int]) -> Iterable[tuple[str, int]]:
    """Return folders with their sizes: not one whose size is mostly that of a folder in it that is named, too."""
    for path, size in sizes.items():
        within = max((s for p, s in sizes.items() if p.startswith(f"{path}/")), default=0)
        if within < size / 2:
            yield as_text(f"{shown}{path.removeprefix(folder)}"), size


def _du(options: Sequence[str], folder: str) -> dict[str, int]:
    """Return what ``du`` says, by path; what it could not read in time is missing."""
    command = ["nice", "-n", "19", "du", "-x", "-0", *options, "--", folder]
    environment = {"LC_ALL": "C", "PATH": os.defpath}
    try:
        # Files go while they are counted: that it then ends with 1 says nothing.
        done = subprocess.run(command, capture_output=True, timeout=WITHIN_S, check=False, env=environment)
    except (OSError, subprocess.TimeoutExpired):
        return {}
    found: dict[str, int] = {}
    for line in done.stdout.split(b"\0"):
        size, tab, path = line.partition(b"\t")
        if tab and size.isdigit():
            found[os.fsdecode(path)] = int(size)
    return found
