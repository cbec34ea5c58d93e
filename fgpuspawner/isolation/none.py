"""No isolation: a session is told its limits, and nothing holds it to them. Also what all backends have in common."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fgpu_scheduler import Device, Session
from fgpuspawner.isolation import limits, machine
from fgpuspawner.isolation.backend import IN_CONTAINER, CannotPrepare, Host, Mount, Prepared
from fgpuspawner.isolation.files import link, make_empty, make_folder, remove_folder
from fgpuspawner.isolation.limits import BadLimits, Limits
from fgpuspawner.isolation.native import SIMULATED_COMMAND
from fgpuspawner.isolation.report import Report


class NoIsolation:
    """Writes the session's folder, for information, and gives it its simulated GPUs where they are simulated."""

    name = "none"
    verified = False
    watched = False
    limits_compute = True
    """Whether the limits file is what holds compute."""

    def __init__(self, host: Host) -> None:
        self.host = host

    def available(self, devices: Sequence[Device]) -> str | None:
        """Return None: nothing is needed to hold nobody."""
        return None

    def verify(self, limits: Limits, report: Report, static: Report | None) -> list[str]:
        """Return nothing: no limit is in force that could be missing."""
        return []

    def prepare(self, session: Session, devices: Sequence[Device], neighbours: Sequence[Limits]) -> Prepared:
        """Write the session's folder and return what it is given of it."""
        try:
            found = limits.limits_of(
                session,
                devices,
                neighbours,
                managed=self.host.managed,
                context_mib=dict(self.host.context_mib),
                compute=self.limits_compute,
            )
            own = self.folder(session.id)
            make_folder(own.parent, mode=0o755)
            make_folder(own, mode=0o755)
            files = (limits.write(own, found), make_empty(own / "log", mode=0o666))
        except (BadLimits, OSError) as e:
            raise CannotPrepare(f"the session's limits could not be written: {e}") from e
        prepared = Prepared(self.name, found, files=files)
        prepared = self._with_folder(prepared, own)
        assert session.placement is not None
        if self.host.native is not None and any(d.simulated for d in devices):
            prepared = self._with_machine(prepared, own, session.placement.node_id)
        return prepared

    def teardown(self, session_id: int) -> None:
        """Remove the session's folder."""
        remove_folder(self.folder(session_id))

    def folder(self, session_id: int) -> Path:
        """Return where a session's folder is."""
        return self.host.data / "limits" / str(session_id)

    def _with_folder(self, prepared: Prepared, own: Path) -> Prepared:
        """Return ``prepared`` with the limits, the log and the commands."""
        if not self.host.containers:
            for name, source in self._commands().items():
                link(own / name, source)
            paths = {"PATH": str(self.host.commands)} if self.host.commands else {}
            return with_more(prepared, search_paths=paths)
        # The folder is a mount as well: in an image where /run is the user's it could be moved away otherwise.
        mounts = [
            Mount(own, IN_CONTAINER),
            Mount(own / "limits", f"{IN_CONTAINER}/limits"),
            Mount(own / "log", f"{IN_CONTAINER}/log", read_only=False),
        ]
        for name, source in self._commands().items():
            mounts += [
                Mount(source, in_folder(own, name)),
                Mount(source, f"/usr/local/bin/{name}"),
            ]
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
        if not self.host.containers:
            link(own / "simulated", machine_folder)
            paths = {"LD_LIBRARY_PATH": str(own / "simulated")}
            if has_smi:
                assert smi is not None
                paths["PATH"] = str(smi.parent)
            return with_more(prepared, search_paths=paths)
        inside = f"{IN_CONTAINER}/simulated"
        make_folder(own / "simulated", mode=0o755)
        mounts = [Mount(machine_folder, inside)]
        mounts += [
            Mount(machine_folder / name, f"{inside}/{name}", read_only=False)
            for name in machine.WRITTEN_BY_SESSIONS
        ]
        if has_smi:
            assert smi is not None
            mounts.append(Mount(smi, f"/usr/local/bin/{SIMULATED_COMMAND}"))
        return with_more(prepared, mounts=mounts, search_paths={"LD_LIBRARY_PATH": inside})


def in_folder(own: Path, name: str) -> str:
    """Return the path in a container of a file in the session's folder, where there now is a place to mount it on."""
    make_empty(own / name, mode=0o444)
    return f"{IN_CONTAINER}/{name}"


def with_more(
    prepared: Prepared,
    *,
    environment: dict[str, str] | None = None,
    search_paths: dict[str, str] | None = None,
    mounts: Sequence[Mount] = (),
    host_config: dict[str, object] | None = None,
    files: Sequence[Path] = (),
) -> Prepared:
    """Return ``prepared`` with these too; a search path comes before those that are there."""
    paths = dict(prepared.search_paths)
    for name, path in (search_paths or {}).items():
        paths[name] = f"{path}:{paths[name]}" if name in paths else path
    return Prepared(
        backend=prepared.backend,
        limits=prepared.limits,
        environment={**prepared.environment, **(environment or {})},
        search_paths=paths,
        mounts=(*prepared.mounts, *mounts),
        host_config={**prepared.host_config, **(host_config or {})},
        files=(*prepared.files, *files),
    )
