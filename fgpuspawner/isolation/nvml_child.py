"""NVML in its own process, so that a driver's crash or hang does not reach the Hub. Standard library only.

    nvml_child.py LIBRARY    reads one JSON object a line, answers each with one JSON object on a line

``{"do": "facts"}``                              -> ``{"driver": "580.1", "memory_limits": false}``
``{"do": "devices"}``                            -> ``{"devices": [{"uuid": ..., "model": ..., "memory_mib": 40960}]}``
``{"do": "uses", "uuids": [...], "since_us": {uuid: ...}}`` -> ``{"devices": {uuid: {"processes": [[pid, bytes or
null, mean percent or null, most percent or null, pid in its session, name or null], ...], "seen_us": ...,
"energy_mj": ... or null}}}``
``{"do": "health", "uuids": [...]}`` -> ``{"devices": {uuid: {"use_percent": 12, "memory_used_bytes": ...,
"temperature_c": 45, "power_mw": ..., "power_limit_mw": ..., "ecc_errors": 0, "xid": ...}}}``, each null where NVML does
not tell; ``xid`` is the newest error since the question before, 0 for none
``{"do": "limit", "uuid": ..., "cgroup": ..., "hard_limit": bytes}`` -> ``{"soft_limit": 0, "hard_limit": bytes}``: sets
a cgroup's limits, without a soft one, and reads them back
``{"do": "cgroups", "pids": [...]}`` -> ``{"cgroups": {pid: text of /proc/PID/cgroup}}``, of those that live
``{"do": "context", "uuid": ...}`` -> ``{"mib": 411}``, the size of a CUDA context, which this process then makes

A failure is ``{"error": "..."}``, for the whole answer or for one device; never 0 and never an empty answer.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

NOT_SUPPORTED = 3
NOT_FOUND = 6
INSUFFICIENT_SIZE = 7
NOT_AVAILABLE = 2**64 - 1
LISTS = ("Compute", "Graphics", "MPSCompute")
ON_THE_CHIP = 0
UNCORRECTED = 1
SINCE_LOADED = 0
TIMED_OUT = 10
NO_FUNCTION = 13
XID_ERRORS = 8
PROGRAMS_XIDS = frozenset((13, 31, 43, 45))
"""Xid errors that a program causes, for example by an illegal address; the GPU itself is healthy."""
AGAIN_S = 600.0
MOST_EVENTS = 1000


class NvmlFailed(Exception):
    """A call failed; the message is for the log."""


def structure(**fields: Any) -> Any:
    """Return a structure with these fields, in this order."""
    return type("Structure", (ctypes.Structure,), {"_fields_": list(fields.items())})


U32, U64 = ctypes.c_uint, ctypes.c_ulonglong
#: nvmlProcessInfo_t of versions 2 and 3, and of version 1.
Process = structure(pid=U32, used=U64, gpu_instance=U32, compute_instance=U32)
OldProcess = structure(pid=U32, used=U64)
ENTRIES = {"_v3": Process, "_v2": Process, "": OldProcess}
"""The structure of each version of the process lists, newest first."""
#: nvmlProcessUtilizationSample_t
Utilization = structure(pid=U32, at_us=U64, sm=U32, memory=U32, encoder=U32, decoder=U32)
#: nvmlMemory_t
Memory = structure(total=U64, free=U64, used=U64)
#: nvmlGetMemoryLimits_v1_t
MemoryLimits = structure(namespace=ctypes.c_char_p, soft_limit=U64, hard_limit=U64, used=U64)
#: nvmlUtilization_t
Rates = structure(gpu=U32, memory=U32)
#: nvmlEventData_t
Event = structure(device=ctypes.c_void_p, kind=U64, data=U64, gpu_instance=U32, compute_instance=U32)


def worse_xid(new: int, old: int) -> int:
    """Return the more important of two errors: a program's error never hides one of the GPU."""
    return old if old and old not in PROGRAMS_XIDS and new in PROGRAMS_XIDS else new


class Nvml:
    """The NVML calls that are needed, on one library."""

    def __init__(self, path: str) -> None:
        try:
            self.library = ctypes.CDLL(path)
        except OSError as e:
            raise NvmlFailed(f"{path} cannot be loaded: {e}") from None
        self.begun = False
        #: Event sets by UUID, of the devices that report their errors.
        self.watched: dict[str, ctypes.c_void_p] = {}
        self.failing: set[str] = set()
        #: Results of `process_named` at the last look, as a process may end before the next one.
        self.named: dict[int, tuple[int, str | None]] = {}
        self.begun_s = 0.0

    def call(self, name: str, *arguments: Any, accept: tuple[int, ...] = (0,)) -> int:
        """Call a function and return its status; raises NvmlFailed if the status is not one of ``accept``."""
        function = getattr(self.library, name, None)
        if function is None:
            raise NvmlFailed(f"NVML has no {name}")
        status = int(function(*arguments))
        if status not in accept:
            raise NvmlFailed(f"{name}: {self.words(status)}")
        return status

    def words(self, status: int) -> str:
        self.library.nvmlErrorString.restype = ctypes.c_char_p
        text: bytes = self.library.nvmlErrorString(status) or b"?"
        return text.decode("ascii", "replace")

    def begin(self) -> None:
        """Initialise NVML once; again after a failure."""
        if not self.begun:
            self.call("nvmlInit_v2")
            self.begun, self.begun_s = True, time.monotonic()

    def end(self) -> None:
        """Shut NVML down, so that the next question initialises it again."""
        if self.begun:
            self.begun = False
            self.watched = {}
            self.library.nvmlShutdown()

    def handle(self, uuid: str) -> ctypes.c_void_p:
        found = ctypes.c_void_p()
        self.call("nvmlDeviceGetHandleByUUID", uuid.encode("ascii"), ctypes.byref(found))
        return found

    def facts(self, question: dict[str, Any]) -> dict[str, Any]:
        """Answer "facts": the driver's version, and whether it has memory limits for cgroups."""
        text = ctypes.create_string_buffer(96)
        self.call("nvmlSystemGetDriverVersion", text, ctypes.c_uint(len(text)))
        has_limits = hasattr(self.library, "nvmlDeviceSetMemoryLimits_v1")
        return {"driver": text.value.decode("ascii", "replace"), "memory_limits": has_limits}

    def devices(self, question: dict[str, Any]) -> dict[str, Any]:
        """Answer "devices": the GPUs in the order of their index."""
        count = ctypes.c_uint()
        self.call("nvmlDeviceGetCount_v2", ctypes.byref(count))
        found = []
        for index in range(count.value):
            handle, memory = ctypes.c_void_p(), Memory()
            self.call("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index), ctypes.byref(handle))
            self.call("nvmlDeviceGetMemoryInfo", handle, ctypes.byref(memory))
            texts = []
            for name in ("nvmlDeviceGetUUID", "nvmlDeviceGetName"):
                text = ctypes.create_string_buffer(96)
                self.call(name, handle, text, ctypes.c_uint(len(text)))
                texts.append(text.value.decode("ascii", "replace"))
            found.append({"uuid": texts[0], "model": texts[1], "memory_mib": memory.total // 2**20})
        return {"devices": found}

    def for_each(self, uuids: Any, read: Callable[[str], dict[str, Any]]) -> dict[str, Any]:
        """Return what ``read`` returns for each device, or why it failed."""
        found: dict[str, Any] = {}
        for uuid in uuids:
            try:
                found[uuid] = read(uuid)
            except NvmlFailed as e:
                found[uuid] = {"error": str(e)}
        return found

    def uses(self, question: dict[str, Any]) -> dict[str, Any]:
        """Answer "uses": what each process holds and has used since then, and each device's energy counter."""
        since_us = question["since_us"]
        found = self.for_each(
            question["uuids"], lambda uuid: self.device_use(self.handle(uuid), int(since_us.get(uuid, 0)))
        )
        seen = {process[0] for device in found.values() for process in device.get("processes", ())}
        self.named = {pid: named for pid, named in self.named.items() if pid in seen}
        failing = {uuid for uuid, device in found.items() if "error" in device}
        if failing and (failing != self.failing or time.monotonic() > self.begun_s + AGAIN_S):
            # Not each time: with one lost GPU the errors of all others would never be collected.
            self.end()
        self.failing = failing
        return {"devices": found}

    def health(self, question: dict[str, Any]) -> dict[str, Any]:
        """Answer "health": the condition of each device."""
        return {"devices": self.for_each(question["uuids"], self.health_of)}

    def health_of(self, uuid: str) -> dict[str, Any]:
        handle, rates, memory = self.handle(uuid), Rates(), Memory()
        knows_rates = self.tells("nvmlDeviceGetUtilizationRates", handle, ctypes.byref(rates))
        knows_memory = self.tells("nvmlDeviceGetMemoryInfo", handle, ctypes.byref(memory))
        kinds = ctypes.c_uint(UNCORRECTED), ctypes.c_uint(SINCE_LOADED)
        return {
            "use_percent": rates.gpu if knows_rates else None,
            "memory_used_bytes": memory.used if knows_memory else None,
            "temperature_c": self.number("nvmlDeviceGetTemperature", handle, ctypes.c_uint(ON_THE_CHIP)),
            "power_mw": self.number("nvmlDeviceGetPowerUsage", handle),
            "power_limit_mw": self.number("nvmlDeviceGetEnforcedPowerLimit", handle),
            "ecc_errors": self.number("nvmlDeviceGetTotalEccErrors", handle, *kinds, kind=ctypes.c_ulonglong),
            "xid": self.xid(uuid, handle),
        }

    def tells(self, name: str, *arguments: Any) -> bool:
        """Return whether a function exists and succeeds; raise if it fails on a device that supports it."""
        if not hasattr(self.library, name):
            return False
        return self.call(name, *arguments, accept=(0, NOT_SUPPORTED, NO_FUNCTION)) == 0

    def number(self, name: str, *arguments: Any, kind: Any = ctypes.c_uint) -> int | None:
        """Return the number that a function writes to its last argument; None if it is not supported."""
        found = kind()
        return int(found.value) if self.tells(name, *arguments, ctypes.byref(found)) else None

    def xid(self, uuid: str, handle: ctypes.c_void_p) -> int | None:
        """Return the worst error of a device since the last call, 0 for none; None if nothing was listening."""
        try:
            return self.worst_error(uuid, handle)
        except NvmlFailed:
            # The driver does not allow listening for errors.
            self.watched.pop(uuid, None)
            return None

    def worst_error(self, uuid: str, handle: ctypes.c_void_p) -> int | None:
        events = self.watched.get(uuid)
        if events is None:
            events = ctypes.c_void_p()
            if self.tells("nvmlEventSetCreate", ctypes.byref(events)):
                if self.tells("nvmlDeviceRegisterEvents", handle, ctypes.c_ulonglong(XID_ERRORS), events):
                    self.watched[uuid] = events
                else:
                    self.tells("nvmlEventSetFree", events)
            return None
        newest, event = 0, Event()
        for _ in range(MOST_EVENTS):
            wait = ctypes.byref(event), ctypes.c_uint(0)
            if self.call("nvmlEventSetWait_v2", events, *wait, accept=(0, TIMED_OUT)) == TIMED_OUT:
                break
            if event.kind == XID_ERRORS:
                newest = worse_xid(int(event.data), newest)
        return newest

    def processes(self, handle: ctypes.c_void_p) -> dict[int, int | None]:
        """Return what each process holds, in bytes; None if NVML does not know."""
        found: dict[int, int | None] = {}
        for kind in LISTS:
            for entry in self.listed(kind, handle):
                used = None if entry.used == NOT_AVAILABLE else entry.used
                # A process that computes and draws is in both lists, with the same amount.
                before = found.get(entry.pid, 0)
                found[entry.pid] = None if used is None or before is None else max(used, before)
        return found

    def samples(self, handle: ctypes.c_void_p, since_us: int) -> list[Any] | None:
        """Return the utilization samples of a device's processes after ``since_us``; None if unknown."""
        name, size = "nvmlDeviceGetProcessUtilization", 256
        if not hasattr(self.library, name):
            return None
        while True:
            count, samples = ctypes.c_uint(size), (Utilization * size)()
            since = ctypes.c_ulonglong(since_us)
            status = int(getattr(self.library, name)(handle, samples, ctypes.byref(count), since))
            if status == NOT_FOUND:
                return []
            if status == INSUFFICIENT_SIZE and size < 1 << 16:
                size = max(2 * size, count.value + 16)
                continue
            return list(samples[: count.value]) if status == 0 else None

    def device_use(self, handle: ctypes.c_void_p, since_us: int) -> dict[str, Any]:
        if since_us > time.time() * 1e6:
            # The clock was set back: until then no sample would be newer.
            since_us = 0
        samples, there = self.samples(handle, since_us), self.processes(handle)
        computed: dict[int, list[int]] = {}
        most: dict[int, int] = {}
        for sample in samples or ():
            # Some drivers return incomplete samples with values that are no percentage.
            if sample.sm <= 100:
                computed.setdefault(sample.pid, []).append(sample.sm)
                since_us = max(since_us, sample.at_us)
            busiest = max(sample.sm, sample.memory, sample.encoder, sample.decoder)
            most[sample.pid] = max(busiest, most.get(sample.pid, 0))
        processes = []
        for pid in sorted({*there, *most}):
            own = computed.get(pid, [0])
            mean = None if samples is None else round(sum(own) / len(own), 1)
            busiest = None if samples is None else min(100, most.get(pid, 0))
            # A process that ended in between holds nothing.
            processes.append([pid, there.get(pid, 0), mean, busiest, *self.process_named(pid)])
        return {"processes": processes, "seen_us": since_us, "energy_mj": self.energy(handle)}

    def energy(self, handle: ctypes.c_void_p) -> int | None:
        """Return the energy that a device has used since its driver was loaded, in mJ; None if it does not count."""
        try:
            return self.number("nvmlDeviceGetTotalEnergyConsumption", handle, kind=ctypes.c_ulonglong)
        except NvmlFailed:
            return None

    def process_named(self, pid: int) -> tuple[int, str | None]:
        """Return a process's number in its own PID namespace, as its session sees it, and its name."""
        inner, name = self.named.get(pid, (pid, None))
        try:
            with open(f"/proc/{pid}/status", encoding="utf-8", errors="replace") as file:
                for line in file:
                    word, _, rest = line.partition(":")
                    if word == "Name":
                        name = rest.strip()
                    elif word == "NSpid":
                        inner = int(rest.split()[-1])
        except (OSError, ValueError, IndexError):
            pass
        self.named[pid] = inner, name
        return inner, name

    def listed(self, kind: str, handle: ctypes.c_void_p) -> list[Any]:
        known = ((f"nvmlDeviceGet{kind}RunningProcesses{v}", e) for v, e in ENTRIES.items())
        name, entry = next(((n, e) for n, e in known if hasattr(self.library, n)), (None, Process))
        if name is None:
            if kind == "Compute":
                raise NvmlFailed("NVML lists no processes")
            return []
        size = 64
        while True:
            count, entries = ctypes.c_uint(size), (entry * size)()
            status = self.call(name, handle, ctypes.byref(count), entries, accept=(0, INSUFFICIENT_SIZE))
            if status == 0:
                return list(entries[: count.value])
            size = max(2 * size, count.value + 16)
            if size > 1 << 20:
                raise NvmlFailed(f"{name}: more than a million processes")

    def limit(self, question: dict[str, Any]) -> dict[str, Any]:
        """Answer "limit": set a cgroup's hard limit, in bytes, and return its limits."""
        path, handle = question["cgroup"].encode(), self.handle(question["uuid"])
        # nvmlSetMemoryLimits_v1_t is the beginning of the other structure.
        limits = MemoryLimits(path, 0, question["hard_limit"], 0)
        self.call("nvmlDeviceSetMemoryLimits_v1", handle, ctypes.byref(limits))
        found = MemoryLimits(path, 0, 0, 0)
        self.call("nvmlDeviceGetMemoryLimits_v1", handle, ctypes.byref(found))
        return {"soft_limit": found.soft_limit, "hard_limit": found.hard_limit}

    def cgroups(self, question: dict[str, Any]) -> dict[str, Any]:
        """Answer "cgroups": the cgroup of each process that lives."""
        found = {}
        for pid in question["pids"]:
            try:
                with open(f"/proc/{int(pid)}/cgroup", encoding="utf-8", errors="replace") as file:
                    found[str(pid)] = file.read(4096)
            except OSError:
                continue
        return {"cgroups": found}

    def context(self, question: dict[str, Any]) -> dict[str, Any]:
        """Answer "context": make a CUDA context on a device, and return what this process holds then, in MiB."""
        # Before CUDA is loaded: this process must see only this device, as number 0.
        os.environ["CUDA_VISIBLE_DEVICES"] = question["uuid"]
        try:
            cuda = ctypes.CDLL("libcuda.so.1")
        except OSError as e:
            raise NvmlFailed(str(e)) from None
        device, context = ctypes.c_int(), ctypes.c_void_p()
        for name, *arguments in (
            ("cuInit", ctypes.c_uint(0)),
            ("cuDeviceGet", ctypes.byref(device), ctypes.c_int(0)),
            ("cuDevicePrimaryCtxRetain", ctypes.byref(context), device),
            ("cuCtxSetCurrent", context),
        ):
            status = getattr(cuda, name)(*arguments)
            if status != 0:
                raise NvmlFailed(f"{name} failed with {status}")
        used = self.processes(self.handle(question["uuid"])).get(os.getpid())
        if not used:
            raise NvmlFailed(
                "NVML does not say what this process holds; is the Hub in a PID namespace of its own?"
            )
        return {"mib": -(-used // 2**20)}


TASKS = {
    task.__name__: task
    for task in (Nvml.facts, Nvml.devices, Nvml.uses, Nvml.health, Nvml.limit, Nvml.cgroups, Nvml.context)
}


def main() -> None:
    nvml: Nvml | None = None
    for line in sys.stdin:
        try:
            nvml = nvml or Nvml(sys.argv[1])
            nvml.begin()
            question = json.loads(line)
            answer = TASKS[question["do"]](nvml, question)
        except NvmlFailed as e:
            answer = {"error": str(e)}
            if nvml is not None:
                nvml.end()
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
