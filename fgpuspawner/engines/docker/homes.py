"""Homes in containers that run already.

The engine adds no mounts to a running container. But one that was made with an empty folder of the host, from which
mounts propagate (`rslave`), sees what the host mounts below that folder later. So a Hub that is root on the engine's own
machine can mount a user's volume into a container that waits. The folders are in /run, and never removed but empty: what
is mounted there are users' files.

Nothing that is done to such a mount may reach the host's own: on most hosts all mounts are shared, a bind mount is the
peer of what it shows, and what is unmounted below it is unmounted at its source as well.
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
    """A home cannot be brought into a container that runs already."""


class NotReached(CannotMount):
    """What this Hub mounts does not reach containers at all: it is in a mount namespace of its own, or the engine is."""


@dataclass(frozen=True, slots=True)
class Home:
    """A volume, or a folder of the host, and where in the container it is."""

    source: str
    target: str


class Homes:
    """The places for the homes of one installation's warm containers. Everything blocks."""

    def __init__(self, installation: str) -> None:
        self._folder = PLACE / f"fgpu-homes-{installation}"

    def open(self) -> None:
        """Make the place from which mounts propagate.

        Raises:
            CannotMount: this Hub may not mount here.
        """
        if os.geteuid() != 0:
            raise CannotMount("the Hub is not root")
        self._folder.mkdir(mode=0o700, exist_ok=True)
        if str(self._folder) not in _mounted():
            _run("mount", "--bind", str(self._folder), str(self._folder))
            # A group of its own: as the peer of /run, all that is mounted here would be there a second time.
            _run("mount", "--make-private", str(self._folder))
        _run("mount", "--make-shared", str(self._folder))

    def places(self, name: str, count: int) -> list[Path]:
        """Make empty places for a container's homes."""
        found = [self._folder / name / str(number) for number in range(count)]
        for place in found:
            place.mkdir(parents=True, exist_ok=True)
        return found

    def bring(self, name: str, homes: Sequence[tuple[Path, str]], *, pid: int) -> None:
        """Mount folders of the host into a running container, at these paths, and make sure that they are there.

        ``pid`` is of the container's first process.

        Raises:
            CannotMount: they are not there.
        """
        for number, (source, target) in enumerate(homes):
            place = str(self._folder / name / str(number))
            # With what is mounted below it, as the engine does.
            _run("mount", "--rbind", str(source), place)
            _run("mount", "--make-rprivate", place)
            seen, meant = os.stat(f"/proc/{pid}/root{target}"), os.stat(source)
            if (seen.st_dev, seen.st_ino) != (meant.st_dev, meant.st_ino):
                raise NotReached("what this Hub mounts does not reach the engine's containers")

    def rename(self, before: str, after: str) -> None:
        """Have a container's places go by another name. What is mounted there stays."""
        (self._folder / before).rename(self._folder / after)

    def names(self) -> list[str]:
        """Return whose places there are."""
        try:
            return sorted(path.name for path in self._folder.iterdir())
        except FileNotFoundError:
            return []

    def remove(self, names: Collection[str]) -> None:
        """Take away the places of containers that are gone."""
        mounted = _mounted() if names else ()
        for name in names:
            for place in sorted((self._folder / name).glob("*")):
                if str(place) in mounted:
                    try:
                        # Again: it may be from a Hub that was killed between the two.
                        _run("mount", "--make-rprivate", str(place))
                        _run("umount", "--lazy", str(place))
                    except CannotMount as e:
                        log.warning("%s", e)
            for place in [*sorted((self._folder / name).glob("*")), self._folder / name]:
                try:
                    # Of an empty folder, and of nothing else: a home could still be mounted there.
                    place.rmdir()
                except OSError as e:
                    log.warning("%s is not removed: %s", place, e.strerror)

    def close(self) -> None:
        """Take away the place of all, if it is not used any more."""
        if not self.names() and str(self._folder) in _mounted():
            try:
                _run("umount", str(self._folder))
                self._folder.rmdir()
            except (CannotMount, OSError) as e:
                log.debug("%s stays: %s", self._folder, e)


def source_of(client: docker.APIClient, home: Home) -> Path:
    """Return the folder of the host that a home is.

    Raises:
        CannotMount: it is not there, or empty: the engine fills a new volume from the image, and nobody else does.
        DockerException: the engine does not say.
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
