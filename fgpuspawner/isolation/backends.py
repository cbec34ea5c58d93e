"""The backends of `base.Backend` that enforce limits: libfgpu (`Interposer`), alone or beside the driver, MIG or MPS."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from fgpu_scheduler import MIB, Device, Session
from fgpuspawner.isolation import facts, lending
from fgpuspawner.isolation.base import IN_CONTAINER, Backend, CannotPrepare, Mount, Prepared, in_folder
from fgpuspawner.isolation.files import (
    UnsafeFolder,
    link,
    make_empty,
    make_folder,
    make_zeros,
    remove_folder,
    write_whole,
)
from fgpuspawner.isolation.limits import DeviceLimit, Limits
from fgpuspawner.isolation.native import MOST_DEVICES, NOT_BUILT, mapped_as
from fgpuspawner.isolation.nvml_reader import NVML, NvmlReader, NvmlUnknown
from fgpuspawner.isolation.report import ProbeReport, missing_library, problems, wrong_preload

MIG_PREFIX = "MIG-"
PRELOAD = "/etc/ld.so.preload"
PRELOADED = f"{IN_CONTAINER}/libfgpu.so\n"
OPENCL = "opencl"
"""File in a session's folder that makes libfgpu allow NVIDIA's OpenCL."""
NO_LIMIT = 2**64 - 1
"""NVML_DEVICE_MEMORY_LIMIT_MAX."""
REGION_BYTES = 2 << 20
"""Size of the accounting file, in which libfgpu counts what a session's processes hold: isolation/libfgpu/region.h."""


class Interposer(Backend):
    """Loads libfgpu, a library in every process of a session that counts allocations and schedules kernels.

    Containers get it through a read-only /etc/ld.so.preload, local processes through LD_PRELOAD.
    """

    name = "interposer"
    words = "libfgpu holds memory and compute"
    auto = True
    verified = True
    watched = True
    lends_compute = True
    resizes = True
    parks = True

    def available(self, devices: Sequence[Device]) -> str | None:
        if self.host.native is None:
            return NOT_BUILT
        if not self.host.own_root and any(c in str(self.host.data) for c in " :"):
            return f"LD_PRELOAD cannot name {self.host.data}: set a c.FGPU.data_dir without spaces and colons"
        if sum(d.simulated for d in devices) > MOST_DEVICES:
            return f"a simulated machine has at most {MOST_DEVICES} GPUs; declare more nodes"
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
                # In memory, because every allocation writes it.
                make_folder(self.host.memory, mode=0o700)
                place = make_folder(self.host.memory / str(session.id), mode=0o700)
                account = make_zeros(place / "accounting", REGION_BYTES)
                link(own / "accounting", account)
                for source in (native.library, *native.probes.values()):
                    link(own / source.name, source)
                preload = {"LD_PRELOAD": str(own / native.library.name)}
                return prepared.plus(environment=preload, files=[account, *allowed])
            listed = write_whole(own / "ld.so.preload", PRELOADED.encode(), mode=0o444)
            mounts = [
                Mount(listed, PRELOAD),
                Mount(native.library, in_folder(own, native.library.name)),
                *(Mount(path, in_folder(own, name)) for name, path in native.probes.items()),
                *(Mount(path, f"{IN_CONTAINER}/{OPENCL}") for path in allowed),
            ]
        except (OSError, UnsafeFolder) as e:
            raise CannotPrepare(f"the session's account could not be made: {e}") from e
        return prepared.plus(mounts=[*mounts, *lent], files=[listed, *allowed])

    def _lending(self, session_id: int, devices: int, own: Path) -> list[Mount]:
        """Make the session's words and the folder for its neighbours' words: mounts of a container, or a link.

        Made even if the session lends nothing, so that a warm container can become any session's.
        """
        if not self.host.lends and not self.host.parks:
            return []
        count = devices if self.host.lends else 0
        folder = lending.make_words(self.host.memory, str(session_id), count, parks=self.host.parks)
        if not self.host.own_root:
            link(own / lending.FOLDER, folder)
            return []
        place = make_folder(own / lending.FOLDER, mode=0o755).name
        words = [lending.own_word(folder, index) for index in range(count)]
        words += [folder / lending.WANTED] if self.host.parks else []
        return [
            Mount(folder, f"{IN_CONTAINER}/{place}"),
            *(Mount(word, f"{IN_CONTAINER}/{place}/{word.name}", read_only=False) for word in words),
        ]

    def verify(self, limits: Limits, report: ProbeReport, static: ProbeReport | None) -> list[str]:
        """Return where the session sees more or other than its limits, or runs without libfgpu."""
        native = self.host.native
        assert native is not None, "not available"
        in_container = f"{IN_CONTAINER}/{native.library.name}"
        library = in_container if self.host.elsewhere else mapped_as(native.library)
        found = [*problems(limits, report), *missing_library(report, library)]
        return [*found, *wrong_preload(static, PRELOADED)] if self.host.own_root else found

    def teardown(self, session_id: int) -> None:
        super().teardown(session_id)
        remove_folder(self.host.memory / str(session_id))
        remove_folder(lending.folder_of(self.host.memory, str(session_id)))


class MigBackend(Interposer):
    """The hardware separates the administrator's MIG instances; libfgpu separates sessions that share one."""

    name = "mig"
    words = "its GPUs are MIG instances, held by the hardware; sessions that share one are held by libfgpu"
    resizes = False
    parks = False

    def available(self, devices: Sequence[Device]) -> str | None:
        others = [d.uuid for d in devices if not d.uuid.startswith(MIG_PREFIX)]
        if others or not devices:
            return f"{others[0] if others else 'no GPU'} is not a MIG instance"
        return super().available(devices)


class Mps(Interposer):
    """MPS, NVIDIA's daemon for sharing a GPU, limits compute; MPS and libfgpu limit memory.

    libfgpu too, because MPS does not show a session its limit. `auto` never chooses MPS: a process that dies inside a
    kernel can end its neighbours, and notebooks are killed often.
    """

    name = "mps"
    words = "MPS holds compute, libfgpu memory; a fault in one session can end its neighbours"
    auto = False
    resizes = False
    parks = False
    limits_compute = False

    def available(self, devices: Sequence[Device]) -> str | None:
        if any(d.simulated for d in devices):
            return "the GPUs are simulated"
        if any(d.uuid.startswith(MIG_PREFIX) for d in devices):
            return "MIG instances need a daemon each"
        if self.host.mps_pipe is None:
            return "c.FGPU.mps_pipe_directory is empty"
        # With a wrong folder every session would silently get the whole GPU.
        return self.host.mps_trouble or super().available(devices)

    def prepare(self, session: Session, devices: Sequence[Device], neighbours: Sequence[Limits]) -> Prepared:
        """Prepare for libfgpu, and set the MPS variables of the session's processes."""
        prepared = super().prepare(session, devices, neighbours)
        pipe, held = self.host.mps_pipe, prepared.limits.devices
        assert pipe is not None, "not available"
        # One limit for each visible ordinal: with one too many the driver ignores all limits.
        memory = ",".join(f"{ordinal}={limit.memory_mib}M" for ordinal, limit in enumerate(held))
        environment = {
            "CUDA_MPS_PIPE_DIRECTORY": str(pipe),
            "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(min(limit.compute_percent or 100 for limit in held)),
            "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": memory,
        }
        # Clients and daemon also share memory.
        mounts = [Mount(pipe, str(pipe), read_only=False)] if self.host.own_root else []
        return replace(prepared.plus(environment=environment, mounts=mounts), hosts_ipc=self.host.own_root)


class DriverCgroup(Interposer):
    """The driver limits memory by cgroup (r615 and newer); libfgpu limits managed memory and compute.

    The Hub sets the limit through NVML before a session is handed out, and at each change of its slice. It sets no soft
    limit: that is a reservation, and a cgroup that ends with one leaves it with its parents.
    """

    name = "driver-cgroup"
    words = "the driver holds memory by cgroup, libfgpu managed memory and compute"
    parks = False

    def available(self, devices: Sequence[Device]) -> str | None:
        if any(d.simulated for d in devices):
            return "the GPUs are simulated"
        if any(d.uuid.startswith(MIG_PREFIX) for d in devices):
            return "the driver limits no memory of MIG instances"
        if not self.host.own_root:
            return "sessions are local processes, which have no cgroup of their own"
        if not self.host.memory_limits:
            driver = f"driver {self.host.driver}" if self.host.driver else "the driver"
            return f"{driver} has no memory limits for cgroups; r615 or newer has"
        if not self.host.cgroup_v2:
            return "this machine does not use cgroup v2"
        if not self.host.as_root:
            return "the Hub does not run as root, and only root may set the driver's limits"
        return super().available(devices)

    async def driver_problems(self, limits: Limits, cgroup: str | None) -> list[str]:
        """Set the driver's limits of the session's cgroup, and read them back.

        The probe cannot tell, since libfgpu shows the session its limits in any case.
        """
        if cgroup is None:
            return ["the session's cgroup is not known, so the driver cannot limit its memory"]
        path = f"{facts.CGROUP_V2.parent}{cgroup}"
        reader = NvmlReader(NVML)
        try:
            return [p for limit in limits.devices if (p := await _set(reader, limit, path)) is not None]
        finally:
            reader.close()


BACKENDS: tuple[type[Backend], ...] = (MigBackend, DriverCgroup, Interposer, Mps, Backend)
"""All of them, the strongest first."""


async def _set(reader: NvmlReader, limit: DeviceLimit, path: str) -> str | None:
    """Have the driver hold a cgroup to a limit; return what is wrong if it does not."""
    hard = NO_LIMIT if limit.whole else limit.memory_mib * MIB
    try:
        found = await reader.ask({"do": "limit", "uuid": limit.uuid, "cgroup": path, "hard_limit": hard})
        wrong = None if found == {"soft_limit": 0, "hard_limit": hard} else f"its limits are {found}"
    except NvmlUnknown as e:
        wrong = str(e)
    if wrong is None:
        return None
    return (
        f"the driver does not hold the session to {limit.memory_mib} MiB of GPU {limit.uuid} ({wrong}); with "
        f'c.FGPU.isolation = "interposer" libfgpu alone would'
    )
