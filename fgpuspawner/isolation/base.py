"""The base class of the isolation backends, and the values that they exchange."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType

from fgpu_scheduler import Device, FGPUError, Session
from fgpuspawner.isolation import limits as limits_file
from fgpuspawner.isolation import native as native_parts
from fgpuspawner.isolation.files import link, make_empty, make_folder, remove_folder
from fgpuspawner.isolation.limits import BadLimits, Limits
from fgpuspawner.isolation.native import SIMULATED_COMMAND, Native
from fgpuspawner.isolation.report import ProbeReport

IN_CONTAINER = "/run/fgpu"
"""The session's folder in a container."""

WRITTEN = "written"
"""Folder below `IN_CONTAINER` for the files that the session's processes write: libfgpu's log and accounting file."""
WRITTEN_OPTIONS = "rw,noexec,nosuid,nodev,mode=777,size=4m,nr_inodes=64"

PARKING_DRIVER = 570
"""The first driver that moves the GPU memory of a process to the host: cuCheckpointProcess* of CUDA 12.8."""


class CannotPrepare(FGPUError):
    """The isolation of a session cannot be set up. The message is for the session's owner."""

    code = "cannot_isolate"


@dataclass(frozen=True, slots=True)
class Mount:
    """One file or folder of the host in a container."""

    source: Path
    target: str
    read_only: bool = True


@dataclass(frozen=True, slots=True)
class Prepared:
    """What a launch must give a session so that its limits are in force.

    Each of ``search_paths`` goes before the session's own value of that variable. ``files`` were written for this
    session alone. ``in_memory`` has the mount options of a container's tmpfs folders. ``hosts_ipc``: the session needs
    the host's shared memory.
    """

    backend: str
    limits: Limits
    environment: Mapping[str, str] = field(default_factory=dict)
    search_paths: Mapping[str, str] = field(default_factory=dict)
    mounts: tuple[Mount, ...] = ()
    files: tuple[Path, ...] = ()
    in_memory: Mapping[str, str] = field(default_factory=dict)
    hosts_ipc: bool = False

    def plus(
        self,
        *,
        environment: Mapping[str, str] = MappingProxyType({}),
        search_paths: Mapping[str, str] = MappingProxyType({}),
        mounts: Sequence[Mount] = (),
        files: Sequence[Path] = (),
    ) -> Prepared:
        """Return this with more; a new search path goes before the ones already there."""
        paths = dict(self.search_paths)
        for name, path in search_paths.items():
            paths[name] = f"{path}:{paths[name]}" if name in paths else path
        return replace(
            self,
            environment={**self.environment, **environment},
            search_paths=paths,
            mounts=(*self.mounts, *mounts),
            files=(*self.files, *files),
        )


@dataclass(frozen=True, slots=True)
class Host:
    """What this machine offers for isolation, found once when the Hub starts.

    ``own_root``: sessions have their own root file system, as containers do. ``memory_limits``: the driver can limit
    the memory of a cgroup. ``as_root``: the Hub runs as root. ``context_mib`` is the size of a CUDA context by UUID.
    ``elsewhere``: this is another machine, known only from its engine. ``opencl``: sessions may use NVIDIA's OpenCL.
    ``lends``: idle sessions lend their compute; with it a session gets at most ``most_percent``. ``parks``: idle
    sessions may be parked, so each gets the word by which it asks for its GPU again.
    """

    data: Path
    own_root: bool
    native: Native | None = None
    accounting: Path | None = None
    commands: Path | None = None
    driver: str = ""
    memory_limits: bool = False
    as_root: bool = False
    cgroup_v2: bool = False
    mps_pipe: Path | None = None
    mps_trouble: str | None = None
    managed: str = "charge"
    opencl: bool = False
    lends: bool = False
    parks: bool = False
    most_percent: int = 100
    context_mib: Mapping[str, int] = field(default_factory=dict)
    elsewhere: bool = False

    @property
    def memory(self) -> Path:
        """The folder for files that sessions write all the time: in memory if this machine has such a place."""
        return self.accounting or self.data / "memory"


class Backend:
    """One way to hold sessions to their slices; the base of all others.

    This one enforces nothing. It writes the session's folder, for information, and gives the session its simulated
    GPUs.
    """

    name = "none"
    words = "NOTHING holds a session to its slice"
    """What holds a session, for administrators."""
    auto = False
    """Whether ``auto`` chooses it, if no stronger one is available."""
    verified = False
    """Whether the probe verifies each session after its start."""
    watched = False
    """Whether the watchdog checks its sessions: true wherever a session could get around the backend."""
    limits_compute = True
    """Whether libfgpu limits compute by the limits file."""
    lends_compute = False
    """Whether sessions can lend each other compute."""
    resizes = False
    """Whether a session's slice can change while it runs."""
    parks = False
    """Whether a session's GPU memory can go to the host's memory while it is idle."""

    def __init__(self, host: Host) -> None:
        self.host = host

    def available(self, devices: Sequence[Device]) -> str | None:
        """Return why this backend cannot be used for these devices, or None if it can."""
        return None

    @property
    def fixed(self) -> str:
        """The reason why a running session's slice cannot change, in words for its owner; empty if it can."""
        if self.host.elsewhere:
            return "on this machine a session keeps the slice that it started with, as its files are copies"
        if not self.resizes:
            return f"on this machine a session keeps the slice that it started with (isolation {self.name!r})"
        return ""

    @property
    def unparkable(self) -> str:
        """The reason why sessions cannot be parked, in words for an owner; empty if they can."""
        if not self.host.parks:
            return (
                "no host memory is set aside for parked sessions"
                if not self.host.elsewhere
                else ("sessions on other machines keep their GPU")
            )
        if not self.parks:
            return f"sessions with isolation {self.name!r} keep their GPU"
        number = self.host.driver.partition(".")[0]
        if number.isdecimal() and int(number) < PARKING_DRIVER:
            return f"driver {self.host.driver} cannot move GPU memory to the host; {PARKING_DRIVER} and newer can"
        return ""

    def verify(self, limits: Limits, report: ProbeReport, static: ProbeReport | None) -> list[str]:
        """Return how a probe's report from inside the session contradicts these limits; empty if it does not.

        ``static`` is the report of the probe that runs no code of the image; None for sessions without an image.
        """
        return []

    async def driver_problems(self, limits: Limits, cgroup: str | None) -> list[str]:
        """Put the limits of the session's cgroup, a path below the cgroup root, in force in the driver.

        Returns where it does not enforce them.
        """
        return []

    @property
    def lends(self) -> bool:
        """Whether a session's share of compute is a minimum: what other sessions leave idle is lent to it."""
        return self.lends_compute and self.host.lends

    def prepare(self, session: Session, devices: Sequence[Device], neighbours: Sequence[Limits]) -> Prepared:
        """Write the session's files, with slots beside those of its ``neighbours`` on the same devices.

        Runs before every launch.

        Raises:
            CannotPrepare: with words for the owner.
        """
        assert session.placement is not None
        if session.request.on_demand and self.unparkable:
            raise CannotPrepare(f"no GPU on demand: {self.unparkable}; ask for the GPU at the start")
        try:
            found = limits_file.limits_of(
                session,
                devices,
                neighbours,
                managed=self.host.managed,
                context_mib=self.host.context_mib,
                compute=self.limits_compute,
                lends=self.lends,
                most_percent=self.host.most_percent,
            )
            own = self.folder(session.id)
            make_folder(own.parent, mode=0o755)
            make_folder(own, mode=0o755)
            files = [limits_file.write(own, found)]
            if not self.fixed:
                files.append(limits_file.begin_revisions(own))
                if session.request.on_demand:
                    limits_file.close_gate(own)
            if not self.host.own_root:
                files.append(make_empty(own / "log", mode=0o666))
        except (BadLimits, OSError) as e:
            raise CannotPrepare(f"the session's limits could not be written: {e}") from e
        prepared = self._with_folder(Prepared(self.name, found, files=tuple(files)), own)
        if self.host.native is not None and any(d.simulated for d in devices):
            prepared = self._with_machine(prepared, own, session.placement.node_id)
        return prepared

    def teardown(self, session_id: int) -> None:
        """Remove what `prepare` wrote; idempotent."""
        remove_folder(self.folder(session_id))

    def folder(self, session_id: int) -> Path:
        return self.host.data / "limits" / str(session_id)

    def _with_folder(self, prepared: Prepared, own: Path) -> Prepared:
        if not self.host.own_root:
            for name, source in self._commands().items():
                link(own / name, source)
            paths = {"PATH": str(self.host.commands)} if self.host.commands else {}
            return prepared.plus(search_paths=paths)
        # Mount the folder too: where the image's user owns /run, the user could otherwise rename it.
        mounts = [Mount(own, IN_CONTAINER)]
        if not (own / limits_file.REVISION).exists():
            mounts.append(Mount(own / limits_file.NAME, f"{IN_CONTAINER}/{limits_file.NAME}"))
        for name, source in self._commands().items():
            mounts += [
                Mount(source, in_folder(own, name)),
                Mount(source, f"/usr/local/bin/{name}"),
            ]
        # Sessions write into a tmpfs, not into a file of the host: a session that fills it harms only itself. Engines
        # take the mode from the folder that they mount over.
        make_folder(own / WRITTEN, mode=0o777)
        prepared = replace(prepared, in_memory={f"{IN_CONTAINER}/{WRITTEN}": WRITTEN_OPTIONS})
        return prepared.plus(mounts=mounts)

    def _commands(self) -> dict[str, Path]:
        if self.host.commands is None:
            return {}
        return {path.name: path for path in sorted(self.host.commands.iterdir()) if path.is_file()}

    def _with_machine(self, prepared: Prepared, own: Path, node_id: str) -> Prepared:
        machine = native_parts.machine_folder(self.host.data, node_id)
        smi = self.host.commands / "simulated" / SIMULATED_COMMAND if self.host.commands else None
        smi = smi if smi is not None and smi.is_file() else None
        if not self.host.own_root:
            link(own / "simulated", machine)
            paths = {"PATH": str(smi.parent)} if smi else {}
            return prepared.plus(search_paths={"LD_LIBRARY_PATH": str(own / "simulated"), **paths})
        make_folder(own / "simulated", mode=0o755)
        # Mount each file: the ledger in the machine's folder is a link, and nothing can be mounted over a link.
        mounts = [
            Mount(
                (machine / name).resolve(), in_folder(own, f"simulated/{name}"), name != native_parts.LEDGER
            )
            for name in native_parts.IN_CONTAINERS
        ]
        if smi:
            mounts.append(Mount(smi, f"/usr/local/bin/{SIMULATED_COMMAND}"))
        return prepared.plus(mounts=mounts, search_paths={"LD_LIBRARY_PATH": f"{IN_CONTAINER}/simulated"})


def in_folder(own: Path, name: str) -> str:
    """Make an empty file in the session's folder to mount over, and return its path in the container."""
    make_empty(own / name, mode=0o444)
    return f"{IN_CONTAINER}/{name}"
