"""Homes for containers that already run.

The engine adds no mounts to a running container. But a container that was created with an empty host folder from which
mounts propagate (`rslave`) sees what the host mounts below that folder later. So a Hub that is root on the engine's
machine can mount a user's volume into a warm container.

1. The folders are in /run. They are only ever removed empty, as users' files are mounted there.
2. Nothing done to such a mount may reach the source: on most hosts all mounts are shared, a bind mount is a peer of its
   source, and an unmount below it would also unmount at the source. So each is made private first.
"""

from __future__ import annotations

import logging
import os
import subprocess
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import docker

log = logging.getLogger("fgpu.warm")

PLACE = Path("/run")
MOUNT_TIMEOUT_S = 10


class CannotMount(Exception):
    """A home cannot be mounted into a running container."""


class NotReached(CannotMount):
    """The Hub's mounts do not reach containers: the Hub or the engine is in another mount namespace."""


@dataclass(frozen=True, slots=True)
class Home:
    """A volume or host folder, and its path in the container."""

    source: str
    target: str


class Homes:
    """Mounts homes into one installation's warm containers. Everything blocks."""

    def __init__(self, installation: str) -> None:
        self._folder = PLACE / f"fgpu-homes-{installation}"

    def open(self) -> None:
        """Make the folder from which mounts propagate; raises CannotMount if this Hub may not mount here."""
        if os.geteuid() != 0:
            raise CannotMount("the Hub is not root")
        self._folder.mkdir(mode=0o700, exist_ok=True)
        if str(self._folder) not in _mounted():
            _run("mount", "--bind", str(self._folder), str(self._folder))
            # Its own peer group: as a peer of /run every mount here would appear twice.
            _run("mount", "--make-private", str(self._folder))
        _run("mount", "--make-shared", str(self._folder))

    def places(self, name: str, count: int) -> list[Path]:
        """Make empty folders for a container's homes."""
        found = [self._folder / name / str(number) for number in range(count)]
        for place in found:
            place.mkdir(parents=True, exist_ok=True)
        return found

    def bring(self, name: str, homes: Sequence[tuple[Path, str]], *, pid: int) -> None:
        """Mount host folders into a running container at these paths, and check that they arrived.

        ``pid`` is the container's first process.

        Raises:
            CannotMount: they did not arrive.
        """
        for number, (source, target) in enumerate(homes):
            place = str(self._folder / name / str(number))
            # Recursive, as the engine does it.
            _run("mount", "--rbind", str(source), place)
            _run("mount", "--make-rprivate", place)
            seen, meant = os.stat(f"/proc/{pid}/root{target}"), os.stat(source)
            if (seen.st_dev, seen.st_ino) != (meant.st_dev, meant.st_ino):
                raise NotReached("what this Hub mounts does not reach the engine's containers")

    def rename(self, before: str, after: str) -> None:
        (self._folder / before).rename(self._folder / after)

    def names(self) -> list[str]:
        """Return the containers with folders; none if there are none, or if a Hub that is root made them."""
        try:
            return sorted(path.name for path in self._folder.iterdir())
        except OSError:
            return []

    def remove(self, names: Collection[str]) -> None:
        mounted = _mounted() if names else ()
        for name in names:
            for place in sorted((self._folder / name).glob("*")):
                if str(place) in mounted:
                    try:
                        # A Hub that was killed may have left the mount shared.
                        _run("mount", "--make-rprivate", str(place))
                        _run("umount", "--lazy", str(place))
                    except CannotMount as e:
                        log.warning("%s", e)
            for place in [*sorted((self._folder / name).glob("*")), self._folder / name]:
                try:
                    # Only if empty: a home could still be mounted there.
                    place.rmdir()
                except OSError as e:
                    log.warning("%s is not removed: %s", place, e.strerror)

    def close(self) -> None:
        """Remove the common folder if it is unused."""
        if not self.names() and str(self._folder) in _mounted():
            try:
                _run("umount", str(self._folder))
                self._folder.rmdir()
            except (CannotMount, OSError) as e:
                log.debug("%s stays: %s", self._folder, e)


def source_of(client: docker.APIClient, home: Home) -> Path:
    """Return the host folder of a home.

    Raises:
        CannotMount: it is missing, or a new volume that only the engine fills from the image.
        DockerException: the engine does not answer.
    """
    if home.source.startswith("/"):
        path = Path(home.source)
    else:
        try:
            found = client.inspect_volume(home.source)
        except docker.errors.NotFound:
            raise CannotMount("the volume is new") from None
        if found.get("Driver") != "local" or found.get("Options"):
            raise CannotMount("the volume is of another kind than a local folder")
        path = Path(found["Mountpoint"])
    try:
        with os.scandir(path) as entries:
            if home.source.startswith("/") or any(entries):
                return path
    except OSError as e:
        raise CannotMount(f"the home cannot be read here: {e.strerror}") from None
    raise CannotMount("the volume is empty")


def _mounted() -> frozenset[str]:
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    return frozenset(line.split()[4].replace("\\040", " ") for line in lines)


def _run(*command: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=MOUNT_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as e:
        raise CannotMount(f"{' '.join(command)}: {e}") from None
    if done.returncode != 0:
        raise CannotMount(f"{' '.join(command)}: {done.stderr.strip()}")
