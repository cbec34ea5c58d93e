"""The one protocol of everything that holds sessions to their slices, and the values that it speaks of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from fgpu_scheduler import Device, FGPUError, Session
from fgpuspawner.isolation.limits import Limits
from fgpuspawner.isolation.native import Native
from fgpuspawner.isolation.report import Report

IN_CONTAINER = "/run/fgpu"
"""The session's folder, in a container."""

MIG_PREFIX = "MIG-"


class CannotPrepare(FGPUError):
    """A session's isolation cannot be set up; the message is for its owner."""

    code = "cannot_isolate"


@dataclass(frozen=True, slots=True)
class Mount:
    """One file or folder of the host in a container."""

    source: Path
    target: str
    read_only: bool = True


@dataclass(frozen=True, slots=True)
class Prepared:
    """What a session needs so that its limits are in force, however it is launched.

    ``search_paths`` go before what the session has in these variables otherwise. ``host_config`` is of Docker's API,
    as docker-py's ``create_host_config`` names it. ``files`` are what was written for this session alone.
    """

    backend: str
    limits: Limits
    environment: Mapping[str, str] = field(default_factory=dict)
    search_paths: Mapping[str, str] = field(default_factory=dict)
    mounts: tuple[Mount, ...] = ()
    host_config: Mapping[str, Any] = field(default_factory=dict)
    files: tuple[Path, ...] = ()


@dataclass(frozen=True, slots=True)
class Host:
    """What there is on this machine, found once when the Hub starts.

    ``containers`` says whether sessions are containers or local processes. ``memory_limits`` is whether the driver
    can limit the memory of a cgroup. ``context_mib`` is what a CUDA context takes, by UUID. ``elsewhere`` is another
    machine, of which only that is known what its engine says.
    """

    data: Path
    containers: bool
    native: Native | None = None
    accounting: Path | None = None
    commands: Path | None = None
    driver: str = ""
    memory_limits: bool = False
    cgroup_v2: bool = False
    mps_pipe: Path | None = None
    mps_trouble: str | None = None
    hami_library: Path | None = None
    managed: str = "charge"
    context_mib: Mapping[str, int] = field(default_factory=dict)
    elsewhere: bool = False


class Backend(Protocol):
    """One way of holding sessions to their slices."""

    name: str
    verified: bool
    """Whether a session is verified after its start."""
    watched: bool
    """Whether the watchdog looks at its sessions: wherever a session could get around it."""

    def available(self, devices: Sequence[Device]) -> str | None:
        """Return why it cannot be used for these devices, or None if it can."""
        ...

    def prepare(self, session: Session, devices: Sequence[Device], neighbours: Sequence[Limits]) -> Prepared:
        """Write what the session needs, beside its ``neighbours`` on the same devices. Before every launch.

        Raises:
            CannotPrepare: with words for the owner.
        """
        ...

    def verify(self, limits: Limits, report: Report, static: Report | None) -> list[str]:
        """Return what a probe's report from inside the session says against these limits; empty if nothing.

        ``static`` is of the probe that has no code of the image in it; None where there is no image.
        """
        ...

    def teardown(self, session_id: int) -> None:
        """Remove what `prepare` wrote. Doing so twice is fine."""
        ...
