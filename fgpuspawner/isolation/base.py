"""What holds sessions to their slices: what every backend is made of, and the values that it speaks of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from fgpu_scheduler import Device, FGPUError, Request, Session
from fgpuspawner.isolation import limits as limits_file
from fgpuspawner.isolation import machine
from fgpuspawner.isolation.code_memory import CodeMemory
from fgpuspawner.isolation.files import link, make_empty, make_folder, remove_folder
from fgpuspawner.isolation.limits import BadLimits, Limits
from fgpuspawner.isolation.native import SIMULATED_COMMAND, Native
from fgpuspawner.isolation.report import Report

IN_CONTAINER = "/run/fgpu"
"""The session's folder, in a container."""

WRITTEN = "written"
"""In it, in a container, where libfgpu makes the files that the session's processes write: its log and its account."""
WRITTEN_OPTIONS = "rw,noexec,nosuid,nodev,mode=777,size=4m,nr_inodes=64"

MIG_PREFIX = "MIG-"
MOST_OF_SHARE = 4
"""The code of a process is charged a quarter of the slice at most."""


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

    ``search_paths`` go before what the session has in these variables otherwise. ``files`` are what was written for this
    session alone. ``in_memory`` are folders of a container that are file systems in memory of its own, with their mount
    options. ``hosts_ipc``: it needs the host's shared memory.
    """

    backend: str
    limits: Limits
    environment: Mapping[str, str] = field(default_factory=dict)
    search_paths: Mapping[str, str] = field(default_factory=dict)
    mounts: tuple[Mount, ...] = ()
    files: tuple[Path, ...] = ()
    in_memory: Mapping[str, str] = field(default_factory=dict)
    hosts_ipc: bool = False


@dataclass(frozen=True, slots=True)
class Host:
    """What there is on this machine, found once when the Hub starts.

    ``own_root``: sessions have a root file system of their own, as containers do. ``memory_limits`` is whether the driver
    can limit the memory of a cgroup. ``context_mib`` is what a CUDA context takes, by UUID, and ``code`` what is known of
    the code of kernels that is charged with it. ``elsewhere`` is another machine, of which only that is known what its
    engine says. ``opencl``: sessions may use NVIDIA's. ``lends``: sessions that are idle lend others their compute, of
    which each has ``most_percent`` at most.
    """

    data: Path
    own_root: bool
    native: Native | None = None
    accounting: Path | None = None
    commands: Path | None = None
    driver: str = ""
    memory_limits: bool = False
    cgroup_v2: bool = False
    mps_pipe: Path | None = None
    mps_trouble: str | None = None
    managed: str = "charge"
    opencl: bool = False
    lends: bool = False
    most_percent: int = 100
    context_mib: Mapping[str, int] = field(default_factory=dict)
    code: CodeMemory | None = None
    elsewhere: bool = False

    def gpu_name(self, model: str) -> str:
        """Return what tells GPUs apart that take differently much for contexts and code."""
        return f"{model}, driver {self.driver}"

    def charged_mib(self, device: Device, request: Request, share_mib: int) -> int:
        """Return what a context of a session is charged, with its code; 0 if contexts are charged nothing."""
        context = self.context_mib.get(device.uuid, 0)
        if not context or self.code is None:
            return context
        code = self.code.charged_mib(self.gpu_name(device.model), request.image, request.user)
        # Whatever was learnt, most of the slice is the program's.
        return context + min(code, share_mib // MOST_OF_SHARE)


class Backend:
    """One way of holding sessions to their slices.

    This one holds nobody: it writes the session's folder, for information, and gives it its simulated GPUs. All others
    are made of it.
    """

    name = "none"
    verified = False
    """Whether a session is verified after its start."""
    watched = False
    """Whether the watchdog looks at its sessions: wherever a session could get around it."""
    limits_compute = True
    """Whether the limits file is what holds compute."""
    lends_compute = False
    """Whether sessions can lend each other compute."""
    resizes = False
    """Whether the slice of a session can change while it runs."""

    def __init__(self, host: Host) -> None:
        self.host = host

    def available(self, devices: Sequence[Device]) -> str | None:
        """Return why it cannot be used for these devices, or None if it can."""
        return None

    @property
    def fixed(self) -> str:
        """Why a slice cannot change while a session runs, in words for its owner; empty where it can."""
        if self.host.elsewhere:
            return "on this machine a session keeps the slice that it started with, as its files are copies"
        if not self.resizes:
            return f"on this machine a session keeps the slice that it started with (isolation {self.name!r})"
        return ""

    def verify(self, limits: Limits, report: Report, static: Report | None) -> list[str]:
        """Return what a probe's report from inside the session says against these limits; empty if nothing.

        ``static`` is of the probe that has no code of the image in it; None where there is no image.
        """
        return []

    async def driver_problems(self, limits: Limits, cgroup: str | None) -> list[str]:
        """Return where the driver itself does not hold the session's cgroup, a path below the file system's root."""
        return []

    @property
    def lends(self) -> bool:
        """Whether sessions have their share of compute at least: what others leave idle is lent."""
        return self.lends_compute and self.host.lends and self.host.accounting is not None

    def prepare(self, session: Session, devices: Sequence[Device], neighbours: Sequence[Limits]) -> Prepared:
        """Write what the session needs, beside its ``neighbours`` on the same devices. Before every launch.

        Raises:
            CannotPrepare: with words for the owner.
        """
        try:
            found = limits_file.limits_of(
                session,
                devices,
                neighbours,
                managed=self.host.managed,
                context_mib=self._charged(session, devices),
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
            if not self.host.own_root:
                files.append(make_empty(own / "log", mode=0o666))
        except (BadLimits, OSError) as e:
            raise CannotPrepare(f"the session's limits could not be written: {e}") from e
        prepared = Prepared(self.name, found, files=tuple(files))
        prepared = self._with_folder(prepared, own)
        assert session.placement is not None
        if self.host.native is not None and any(d.simulated for d in devices):
            prepared = self._with_machine(prepared, own, session.placement.node_id)
        return prepared

    def _charged(self, session: Session, devices: Sequence[Device]) -> dict[str, int]:
        assert session.placement is not None
        shares = {share.device_uuid: share.memory_mib for share in session.placement.shares}
        own = [device for device in devices if device.uuid in shares]
        return {d.uuid: self.host.charged_mib(d, session.request, shares[d.uuid]) for d in own}

    def teardown(self, session_id: int) -> None:
        """Remove what `prepare` wrote. Doing so twice is fine."""
        remove_folder(self.folder(session_id))

    def folder(self, session_id: int) -> Path:
        """Return where a session's folder is."""
        return self.host.data / "limits" / str(session_id)

    def _with_folder(self, prepared: Prepared, own: Path) -> Prepared:
        """Return ``prepared`` with the limits, the place of the log, and the commands."""
        if not self.host.own_root:
            for name, source in self._commands().items():
                link(own / name, source)
            paths = {"PATH": str(self.host.commands)} if self.host.commands else {}
            return with_more(prepared, search_paths=paths)
        # The folder is a mount as well: in an image where /run is the user's it could be moved away otherwise.
        mounts = [Mount(own, IN_CONTAINER)]
        if not (own / limits_file.REVISION).exists():
            mounts.append(Mount(own / limits_file.NAME, f"{IN_CONTAINER}/{limits_file.NAME}"))
        for name, source in self._commands().items():
            mounts += [
                Mount(source, in_folder(own, name)),
                Mount(source, f"/usr/local/bin/{name}"),
            ]
        # Nothing that a session writes is a file of the host's: who fills it harms themselves only.
        # The mode is the mount's, too: engines take it from what they mount over.
        make_folder(own / WRITTEN, mode=0o777)
        prepared = replace(prepared, in_memory={f"{IN_CONTAINER}/{WRITTEN}": WRITTEN_OPTIONS})
        return with_more(prepared, mounts=mounts)

    def _commands(self) -> dict[str, Path]:
        if self.host.commands is None:
            return {}
        return {path.name: path for path in sorted(self.host.commands.iterdir()) if path.is_file()}

    def _with_machine(self, prepared: Prepared, own: Path, node_id: str) -> Prepared:
        """Return ``prepared`` with the simulated driver, and nvidia-smi for it."""
        machine_folder = machine.folder_of(self.host.data, node_id)
        smi = self.host.commands / "simulated" / SIMULATED_COMMAND if self.host.commands else None
        has_smi = smi is not None and smi.is_file()
        if not self.host.own_root:
            link(own / "simulated", machine_folder)
            paths = {"LD_LIBRARY_PATH": str(own / "simulated")}
            if has_smi:
                assert smi is not None
                paths["PATH"] = str(smi.parent)
            return with_more(prepared, search_paths=paths)
        make_folder(own / "simulated", mode=0o755)
        # One by one: nothing can be mounted over the link that the ledger is in the machine's folder.
        mounts = [
            Mount(
                (machine_folder / name).resolve(), in_folder(own, f"simulated/{name}"), name != machine.LEDGER
            )
            for name in machine.IN_CONTAINERS
        ]
        if has_smi:
            assert smi is not None
            mounts.append(Mount(smi, f"/usr/local/bin/{SIMULATED_COMMAND}"))
        return with_more(
            prepared, mounts=mounts, search_paths={"LD_LIBRARY_PATH": f"{IN_CONTAINER}/simulated"}
        )


def in_folder(own: Path, name: str) -> str:
    """Return the path in a container of a file in the session's folder, where there now is a place to mount it on."""
    make_empty(own / name, mode=0o444)
    return f"{IN_CONTAINER}/{name}"


def with_more(
    prepared: Prepared,
    *,
    environment: Mapping[str, str] | None = None,
    search_paths: Mapping[str, str] | None = None,
    mounts: Sequence[Mount] = (),
    files: Sequence[Path] = (),
) -> Prepared:
    """Return ``prepared`` with these too; a search path comes before those that are there."""
    paths = dict(prepared.search_paths)
    for name, path in (search_paths or {}).items():
        paths[name] = f"{path}:{paths[name]}" if name in paths else path
    return replace(
        prepared,
        environment={**prepared.environment, **(environment or {})},
        search_paths=paths,
        mounts=(*prepared.mounts, *mounts),
        files=(*prepared.files, *files),
    )
