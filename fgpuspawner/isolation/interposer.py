"""libfgpu: a library in every process of a session that counts allocations and schedules kernels."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fgpu_scheduler import Device, Session
from fgpuspawner.isolation import accounting, lending, machine
from fgpuspawner.isolation.base import (
    IN_CONTAINER,
    Backend,
    CannotPrepare,
    Mount,
    Prepared,
    in_folder,
    with_more,
)
from fgpuspawner.isolation.files import (
    UnsafeFolder,
    link,
    make_empty,
    make_folder,
    remove_folder,
    write_whole,
)
from fgpuspawner.isolation.limits import Limits
from fgpuspawner.isolation.native import NOT_BUILT, mapped_as
from fgpuspawner.isolation.report import ProbeReport, missing_library, problems, wrong_preload

PRELOAD = "/etc/ld.so.preload"
PRELOADED = f"{IN_CONTAINER}/libfgpu.so\n"
OPENCL = "opencl"
"""File in a session's folder that makes libfgpu allow NVIDIA's OpenCL."""


class Interposer(Backend):
    """Loads libfgpu: through a read-only /etc/ld.so.preload in a container, else through LD_PRELOAD."""

    name = "interposer"
    verified = True
    watched = True
    lends_compute = True
    resizes = True

    def available(self, devices: Sequence[Device]) -> str | None:
        if self.host.native is None:
            return NOT_BUILT
        if not self.host.own_root and any(c in str(self.host.data) for c in " :"):
            return f"LD_PRELOAD cannot name {self.host.data}: set a c.FGPU.data_dir without spaces and colons"
        if sum(d.simulated for d in devices) > machine.MOST_DEVICES:
            return f"a simulated machine has at most {machine.MOST_DEVICES} GPUs; declare more nodes"
        return None

    def prepare(self, session: Session, devices: Sequence[Device], neighbours: Sequence[Limits]) -> Prepared:
        """Write the session's folder and load libfgpu.

        A local process also gets an accounting file; in a container libfgpu makes it.
        """
        native = self.host.native
        assert native is not None, "not available"
        prepared = super().prepare(session, devices, neighbours)
        own = self.folder(session.id)
        try:
            lent = self._lending(session.id, len(prepared.limits.devices), own)
            (own / OPENCL).unlink(missing_ok=True)  # What an earlier launch was allowed.
            allowed = [make_empty(own / OPENCL, mode=0o444)] if self.host.opencl else []
            if not self.host.own_root:
                account = self._account(session.id)
                if account.parent != own:
                    link(own / "accounting", account)
                for source in (native.library, *native.probes.values()):
                    link(own / source.name, source)
                preload = {"LD_PRELOAD": str(own / native.library.name)}
                return with_more(prepared, environment=preload, files=[account, *allowed])
            listed = write_whole(own / "ld.so.preload", PRELOADED.encode(), mode=0o444)
            mounts = [
                Mount(listed, PRELOAD),
                Mount(native.library, in_folder(own, native.library.name)),
                *(Mount(path, in_folder(own, name)) for name, path in native.probes.items()),
                *(Mount(path, f"{IN_CONTAINER}/{OPENCL}") for path in allowed),
            ]
        except (OSError, UnsafeFolder) as e:
            raise CannotPrepare(f"the session's account could not be made: {e}") from e
        return with_more(prepared, mounts=[*mounts, *lent], files=[listed, *allowed])

    def verify(self, limits: Limits, report: ProbeReport, static: ProbeReport | None) -> list[str]:
        """Return where the session sees more or other than its limits, or runs without libfgpu."""
        native = self.host.native
        assert native is not None, "not available"
        library = (
            f"{IN_CONTAINER}/{native.library.name}" if self.host.elsewhere else mapped_as(native.library)
        )
        found = [*problems(limits, report), *missing_library(report, library)]
        if self.host.own_root:
            found.extend(wrong_preload(static, PRELOADED))
        return found

    def teardown(self, session_id: int) -> None:
        super().teardown(session_id)
        if self.host.accounting is not None:
            remove_folder(self.host.accounting / str(session_id))
            lending.forget(self.host.accounting, str(session_id))

    def _lending(self, session_id: int, devices: int, own: Path) -> list[Mount]:
        """Make the session's words and the folder for its neighbours' words: mounts of a container, or a link.

        Made even if the session lends nothing, so that a warm container can become any session's.
        """
        memory = self.host.accounting
        if not self.host.lends or memory is None:
            return []
        folder = lending.make_words(memory, str(session_id), devices)
        if not self.host.own_root:
            link(own / lending.FOLDER, folder)
            return []
        place = make_folder(own / lending.FOLDER, mode=0o755).name
        words = [lending.own_word(memory, str(session_id), index) for index in range(devices)]
        return [
            Mount(folder, f"{IN_CONTAINER}/{place}"),
            *(Mount(word, f"{IN_CONTAINER}/{place}/{word.name}", read_only=False) for word in words),
        ]

    def _account(self, session_id: int) -> Path:
        """Make the session's accounting file, in memory if possible, as it is written all the time."""
        if self.host.accounting is None:
            place = self.folder(session_id)
        else:
            make_folder(self.host.accounting, mode=0o700)
            place = make_folder(self.host.accounting / str(session_id), mode=0o700)
        return accounting.create(place / "accounting")
