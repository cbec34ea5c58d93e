"""How much of this session's GPU memory is in use, as NVML tells it.

Only two readings count as the slice's own: the device itself reports the slice as its total (the
session's isolation does that, and a whole device is one), or the driver's processes can be told
apart by session. Anything else is unknown, with the reason, and never zero.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import ctypes
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from . import smi

# The inode number of the first PID namespace (PROC_PID_INIT_INO in Linux).
HOST_PID_NAMESPACE = 0xEFFFFFFC


class Device(NamedTuple):
    """One device of the slice; `memory_mib` is the slice's limit on it, None if not known."""

    uuid: str
    memory_mib: int | None


class Process(NamedTuple):
    """A process of this session on a device; `mib` is None where the driver does not say."""

    pid: int
    mib: int | None


class Used(NamedTuple):
    """Memory in use in MiB, or None with the reason; and the processes that use it, if known."""

    mib: int | None
    reason: str | None
    processes: tuple[Process, ...] = ()


class GpuMemory:
    """Samples NVML in its own thread, one sample at a time.

    A driver that hangs costs a thread and an "unknown", never the server's event loop.
    """

    def __init__(
        self,
        *,
        session_id: int | None,
        timeout_s: float,
        proc: Path = Path("/proc"),
    ) -> None:
        self._session_id = session_id
        self._timeout_s = timeout_s
        self._proc = proc
        self._running: concurrent.futures.Future[list[Used]] | None = None

    async def sample(self, devices: Sequence[Device]) -> list[Used]:
        """Return one reading per device, within `timeout_s`."""
        if not devices:
            return []
        if self._running is not None and not self._running.done():
            return [Used(None, "the GPU driver has not answered yet") for _ in devices]
        result: concurrent.futures.Future[list[Used]] = concurrent.futures.Future()
        self._running = result

        def run() -> None:
            try:
                result.set_result(self._read(devices))
            except Exception as error:  # handed to the waiter below
                result.set_exception(error)

        # A daemon thread: an executor would keep the server from exiting while the driver hangs.
        threading.Thread(target=run, name="fgpu-nvml", daemon=True).start()
        answered = asyncio.wrap_future(result)
        # Not `wait_for`: before Python 3.12 it loses a cancel that comes as the reading ends.
        await asyncio.wait([answered], timeout=self._timeout_s)
        # If the server itself stood still, the thread may have its answer already.
        if not result.done():
            return [Used(None, "the GPU driver did not answer in time") for _ in devices]
        return result.result()

    def _read(self, devices: Sequence[Device]) -> list[Used]:
        try:
            nvml = smi.Nvml()
        except smi.NvmlError as error:
            return [Used(None, f"no NVIDIA driver answers here ({error.text})") for _ in devices]
        try:
            return [self._read_device(nvml, device) for device in devices]
        finally:
            # NVML counts initialisations; staying initialised would keep a lost GPU's handle.
            nvml.close()

    def _read_device(self, nvml: smi.Nvml, device: Device) -> Used:
        try:
            uuid = device.uuid.encode()
            handle = nvml.fill(ctypes.c_void_p, "nvmlDeviceGetHandleByUUID", uuid)
            if device.memory_mib is not None and smi.memory_of("total")(nvml, handle) == device.memory_mib:
                used_mib = smi.memory_of("used")(nvml, handle)
                return Used(used_mib, None, self._listed(nvml, handle))
            processes = _processes(nvml, handle)
        except smi.NvmlError as error:
            return Used(None, f"the GPU driver says: {error.text}")
        return self._of_this_session(processes)

    def _listed(self, nvml: smi.Nvml, handle: ctypes.c_void_p) -> tuple[Process, ...]:
        try:
            return tuple(p for p in _processes(nvml, handle) if self._is_mine(p.pid))
        except smi.NvmlError:
            # The amount in use is known without them.
            return ()

    def _of_this_session(self, processes: Sequence[Process]) -> Used:
        if self._session_id is None:
            return Used(None, "this session's processes cannot be told from others'")
        if not self._sees_host_processes():
            # NVML numbers processes as the host does; here the same number is another process.
            return Used(None, "the GPU driver's process list cannot be read from a container")
        mine = tuple(p for p in processes if self._is_mine(p.pid))
        if any(p.mib is None for p in mine):
            return Used(None, "the GPU driver does not report memory per process", mine)
        return Used(sum(p.mib for p in mine if p.mib is not None), None, mine)

    def _sees_host_processes(self) -> bool:
        try:
            return os.stat(self._proc / "self/ns/pid").st_ino == HOST_PID_NAMESPACE
        except OSError:
            return False

    def _is_mine(self, pid: int) -> bool:
        try:
            environ = (self._proc / str(pid) / "environ").read_bytes()
        except OSError:
            # It has ended, or is another user's: a session's processes are its owner's.
            return False
        return f"FGPU_SESSION_ID={self._session_id}".encode() in environ.split(b"\0")


def _processes(nvml: smi.Nvml, handle: ctypes.c_void_p) -> list[Process]:
    listed = smi.list_processes(nvml, "nvmlDeviceGetComputeRunningProcesses", handle)
    return [Process(p.pid, smi.mib_of(p.used)) for p in listed]
