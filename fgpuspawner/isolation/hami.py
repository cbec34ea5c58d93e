"""HAMi-core: an existing libvgpu.so of the administrator's in place of libfgpu."""

from __future__ import annotations

from collections.abc import Sequence

from fgpu_scheduler import Device, Session
from fgpuspawner.isolation.base import Backend, CannotPrepare, Mount, Prepared, in_folder, with_more
from fgpuspawner.isolation.files import write_whole
from fgpuspawner.isolation.interposer import PRELOAD
from fgpuspawner.isolation.limits import Limits
from fgpuspawner.isolation.native import NOT_BUILT
from fgpuspawner.isolation.report import Report, problems, wrong_preload

LIBRARY = "/usr/local/vgpu/libvgpu.so"
"""Where HAMi's own images expect it."""
PRELOADED = f"{LIBRARY}\n"


class Hami(Backend):
    """Limits are in the session's environment, where it can change them: hence the watchdog."""

    name = "hami"
    verified = True
    watched = True

    def available(self, devices: Sequence[Device]) -> str | None:
        """Return why the library cannot be used, or None if it can."""
        if any(d.simulated for d in devices):
            return "the GPUs are simulated"
        if self.host.hami_library is None:
            return "c.FGPU.hami_library is empty; set it to the path of HAMi's libvgpu.so"
        if not self.host.hami_library.is_file():
            return f"c.FGPU.hami_library: there is no file {self.host.hami_library}"
        # The probe comes with libfgpu, and no session starts that was not verified.
        return None if self.host.native is not None else NOT_BUILT

    def prepare(self, session: Session, devices: Sequence[Device], neighbours: Sequence[Limits]) -> Prepared:
        """Have HAMi's library loaded, with its limits."""
        library, native = self.host.hami_library, self.host.native
        assert library is not None, "not available"
        assert native is not None, "not available"
        prepared = super().prepare(session, devices, neighbours)
        held = prepared.limits.devices
        environment = {
            f"CUDA_DEVICE_MEMORY_LIMIT_{ordinal}": f"{limit.memory_mib}m"
            for ordinal, limit in enumerate(held)
        }
        environment["CUDA_DEVICE_SM_LIMIT"] = str(min(limit.compute_percent for limit in held))
        # It reports to standard error otherwise.
        environment["LIBCUDA_LOG_LEVEL"] = "0"
        if not self.host.own_root:
            return with_more(prepared, environment={**environment, "LD_PRELOAD": str(library)})
        own = self.folder(session.id)
        try:
            listed = write_whole(own / "ld.so.preload", PRELOADED.encode(), mode=0o444)
            probes = [Mount(path, in_folder(own, name)) for name, path in native.probes.items()]
        except OSError as e:
            raise CannotPrepare(f"the session's limits could not be written: {e}") from e
        mounts = [Mount(listed, PRELOAD), Mount(library, LIBRARY), *probes]
        return with_more(prepared, environment=environment, mounts=mounts, files=[listed])

    def verify(self, limits: Limits, report: Report, static: Report | None) -> list[str]:
        """Return where the session sees more, or other, than its limits."""
        # Some versions of it refuse with an error of their own.
        found = problems(limits, report, any_refusal=True)
        if self.host.own_root:
            found.extend(wrong_preload(static, PRELOADED))
        return found
