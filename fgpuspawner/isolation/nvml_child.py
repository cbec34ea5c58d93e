"""NVML in a process of its own: whatever a driver does, the Hub goes on. Standard library only.

    nvml_child.py LIBRARY    reads one JSON object a line, answers each with one JSON object on a line

``{"do": "facts"}``                              -> ``{"driver": "580.1", "memory_limits": false}``
``{"do": "devices"}``                            -> ``{"devices": [{"uuid": ..., "model": ..., "memory_mib": 40960}]}``
``{"do": "look", "uuids": [...], "since_us": {uuid: ...}}`` -> ``{"devices": {uuid: {"processes": [[pid, bytes or
null, mean percent or null, most percent or null, pid in its session, name or null], ...], "seen_us": ...,
"energy_mj": ... or null}}}``
``{"do": "health", "uuids": [...]}`` -> ``{"devices": {uuid: {"use_percent": 12, "memory_used_bytes": ...,
"temperature_c": 45, "power_mw": ..., "power_limit_mw": ..., "ecc_errors": 0, "xid": ...}}}``, each null where NVML does
not tell; ``xid`` is the newest error since the question before, 0 for none
``{"do": "cgroup", "uuid": ..., "cgroup": ...}`` -> ``{"hard_limit": bytes}``

What fails is ``{"error": "..."}``, of the whole answer or of one device: never a 0, and never nothing.
"""

from __future__ import annotations

import ctypes
import json
import sys
import time
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
"""Errors that a program on the GPU causes: an illegal address, say. The GPU is well."""
AGAIN_S = 600.0
MOST_EVENTS = 1000


class NvmlFailed(Exception):
    """A call failed; the text is for the log."""


class Process(ctypes.Structure):
    """nvmlProcessInfo_t of versions 2 and 3."""

    _fields_ = [
        ("pid", ctypes.c_uint),
        ("used", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    ]


class OldProcess(ctypes.Structure):
    """nvmlProcessInfo_v1_t."""

    _fields_ = [("pid", ctypes.c_uint), ("used", ctypes.c_ulonglong)]


ENTRIES: dict[str, type[ctypes.Structure]] = {"_v3": Process, "_v2": Process, "": OldProcess}
"""What each version of the lists' functions fills in, newest first."""


class Utilization(ctypes.Structure):
    """nvmlProcessUtilizationSample_t."""

    _fields_ = [
        ("pid", ctypes.c_uint),
        ("at_us", ctypes.c_ulonglong),
        ("sm", ctypes.c_uint),
        ("memory", ctypes.c_uint),
        ("encoder", ctypes.c_uint),
        ("decoder", ctypes.c_uint),
    ]


class Memory(ctypes.Structure):
    """nvmlMemory_t."""

    _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]


class MemoryLimits(ctypes.Structure):
    """nvmlGetMemoryLimits_v1_t."""

    _fields_ = [
        ("namespace", ctypes.c_char_p),
        ("soft_limit", ctypes.c_ulonglong),
        ("hard_limit", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    ]


class Rates(ctypes.Structure):
    """nvmlUtilization_t."""

    _fields_ = [("gpu", ctypes.c_uint), ("memory", ctypes.c_uint)]


class Event(ctypes.Structure):
    """nvmlEventData_t."""

    _fields_ = [
        ("device", ctypes.c_void_p),
        ("kind", ctypes.c_ulonglong),
        ("data", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    ]


def worse_xid(new: int, old: int) -> int:
    """Return the error that counts of two: what the driver cleans up after hides no error of the GPU."""
    return old if old and old not in PROGRAMS_XIDS and new in PROGRAMS_XIDS else new


class Nvml:
    """The few calls that are needed, of one library."""

    def __init__(self, path: str) -> None:
        try:
            self.library = ctypes.CDLL(path)
        except OSError as e:
            raise NvmlFailed(f"{path} cannot be loaded: {e}") from None
        self.begun = False
        self.watched: dict[str, ctypes.c_void_p] = {}
        """Of each device whose errors are listened for, what they come to."""
        self.failing: set[str] = set()
        self.named: dict[int, tuple[int, str | None]] = {}
        """What `process_named` found of the processes of the last look: they may have ended by the next one."""
        self.begun_s = 0.0

    def call(self, name: str, *arguments: Any, accept: tuple[int, ...] = (0,)) -> int:
        """Call a function and return its status; raise for one that is not to be accepted."""
        function = getattr(self.library, name, None)
        if function is None:
            raise NvmlFailed(f"NVML has no {name}")
        status = int(function(*arguments))
        if status not in accept:
            raise NvmlFailed(f"{name}: {self.words(status)}")
        return status

    def words(self, status: int) -> str:
        """Return NVML's text for a status."""
        self.library.nvmlErrorString.restype = ctypes.c_char_p
        text: bytes = self.library.nvmlErrorString(status) or b"?"
        return text.decode("ascii", "replace")

    def begin(self) -> None:
        """Initialise, once; again after a failure."""
        if not self.begun:
            self.call("nvmlInit_v2")
            self.begun, self.begun_s = True, time.monotonic()

    def end(self) -> None:
        """Forget everything, so that the next question begins anew."""
        if self.begun:
            self.begun = False
            self.watched = {}
            self.library.nvmlShutdown()

    def handle(self, uuid: str) -> ctypes.c_void_p:
        """Return a device's handle."""
        found = ctypes.c_void_p()
        self.call("nvmlDeviceGetHandleByUUID", uuid.encode("ascii"), ctypes.byref(found))
        return found

    def facts(self, question: dict[str, Any]) -> dict[str, Any]:
        """Return the driver's version, and whether it has memory limits for cgroups."""
        text = ctypes.create_string_buffer(96)
        self.call("nvmlSystemGetDriverVersion", text, ctypes.c_uint(len(text)))
        has_limits = hasattr(self.library, "nvmlDeviceSetMemoryLimits_v1")
        return {"driver": text.value.decode("ascii", "replace"), "memory_limits": has_limits}

    def devices(self, question: dict[str, Any]) -> dict[str, Any]:
        """Return the GPUs in order of their index."""
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

    def look(self, question: dict[str, Any]) -> dict[str, Any]:
        """Return what each process holds and has used since an instant, and each device's energy counter."""
        found: dict[str, Any] = {}
        for uuid in question["uuids"]:
            try:
                found[uuid] = self.looked_at(self.handle(uuid), int(question["since_us"].get(uuid, 0)))
            except NvmlFailed as e:
                found[uuid] = {"error": str(e)}
        seen = {process[0] for device in found.values() for process in device.get("processes", ())}
        self.named = {pid: named for pid, named in self.named.items() if pid in seen}
        failing = {uuid for uuid, device in found.items() if "error" in device}
        if failing and (failing != self.failing or time.monotonic() > self.begun_s + AGAIN_S):
            # Not each time: one GPU that is lost would keep the errors of all others from being heard.
            self.end()
        self.failing = failing
        return {"devices": found}

    def health(self, question: dict[str, Any]) -> dict[str, Any]:
        """Return how each device is."""
        found: dict[str, Any] = {}
        for uuid in question["uuids"]:
            try:
                found[uuid] = self.health_of(uuid)
            except NvmlFailed as e:
                found[uuid] = {"error": str(e)}
        return {"devices": found}

    def health_of(self, uuid: str) -> dict[str, Any]:
        """Return one device's answer to `health`."""
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
            "xid": self.heard(uuid, handle),
        }

    def tells(self, name: str, *arguments: Any) -> bool:
        """Return whether a function is there and succeeds; raise where it fails though the device has it."""
        if not hasattr(self.library, name):
            return False
        return self.call(name, *arguments, accept=(0, NOT_SUPPORTED, NO_FUNCTION)) == 0

    def number(self, name: str, *arguments: Any, kind: Any = ctypes.c_uint) -> int | None:
        """Return the number that a function puts into its last argument; None where it does not."""
        found = kind()
        return int(found.value) if self.tells(name, *arguments, ctypes.byref(found)) else None

    def heard(self, uuid: str, handle: ctypes.c_void_p) -> int | None:
        """Return what `xid` does; None also where the driver does not let errors be listened for."""
        try:
            return self.xid(uuid, handle)
        except NvmlFailed:
            self.watched.pop(uuid, None)
            return None

    def xid(self, uuid: str, handle: ctypes.c_void_p) -> int | None:
        """Return the worst error of a device since the last call, 0 for none; None where it was not listened for."""
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
        """Return what each process holds, in bytes; None where NVML does not know."""
        found: dict[int, int | None] = {}
        for kind in LISTS:
            for entry in self.listed(kind, handle):
                used = None if entry.used == NOT_AVAILABLE else entry.used
                # One that does both is in both lists, with the same amount.
                before = found.get(entry.pid, 0)
                found[entry.pid] = None if used is None or before is None else max(used, before)
        return found

    def samples(self, handle: ctypes.c_void_p, since_us: int) -> list[Any] | None:
        """Return the samples of what each process used of a device that are newer than an instant; None if unknown."""
        name, size = "nvmlDeviceGetProcessUtilization", 256
        if not hasattr(self.library, name):
            return None
        while True:
            count, samples = ctypes.c_uint(size), (Utilization * size)()
            since = ctypes.c_ulonglong(since_us)
            status = int(getattr(self.library, name)(handle, samples, ctypes.byref(count), since))
            if status == NOT_FOUND:
                return []  # Nobody has used it.
            if status == INSUFFICIENT_SIZE and size < 1 << 16:
                size = max(2 * size, count.value + 16)
                continue
            return list(samples[: count.value]) if status == 0 else None

    def looked_at(self, handle: ctypes.c_void_p, since_us: int) -> dict[str, Any]:
        """Return one device's answer to `look`."""
        if since_us > time.time() * 1e6:
            # The clock was set back since; by it nothing would be new for as long.
            since_us = 0
        samples, there = self.samples(handle, since_us), self.processes(handle)
        computed: dict[int, list[int]] = {}
        most: dict[int, int] = {}
        for sample in samples or ():
            # Some drivers tell of rests of samples that are no percentage.
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
            # One that has ended in between holds nothing any more.
            processes.append([pid, there.get(pid, 0), mean, busiest, *self.process_named(pid)])
        return {"processes": processes, "seen_us": since_us, "energy_mj": self.energy(handle)}

    def energy(self, handle: ctypes.c_void_p) -> int | None:
        """Return what a device has used since its driver was loaded, in mJ; None where it does not count."""
        name, counted = "nvmlDeviceGetTotalEnergyConsumption", ctypes.c_ulonglong()
        if not hasattr(self.library, name):
            return None
        status = int(getattr(self.library, name)(handle, ctypes.byref(counted)))
        return counted.value if status == 0 else None

    def process_named(self, pid: int) -> tuple[int, str | None]:
        """Return a process's number in its own namespace, as its session sees it, and its name."""
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
        """Return one of NVML's lists of processes."""
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

    def cgroup(self, question: dict[str, Any]) -> dict[str, Any]:
        """Return the driver's hard limit of a cgroup, in bytes; 0 is none."""
        limits = MemoryLimits(question["cgroup"].encode(), 0, 0, 0)
        self.call("nvmlDeviceGetMemoryLimits_v1", self.handle(question["uuid"]), ctypes.byref(limits))
        return {"hard_limit": limits.hard_limit}


def main() -> None:
    """Answer until the input ends."""
    nvml: Nvml | None = None
    for line in sys.stdin:
        try:
            nvml = nvml or Nvml(sys.argv[1])
            nvml.begin()
            question = json.loads(line)
            tasks = {
                "facts": nvml.facts,
                "devices": nvml.devices,
                "look": nvml.look,
                "health": nvml.health,
                "cgroup": nvml.cgroup,
            }
            answer = tasks[question["do"]](question)
        except NvmlFailed as e:
            answer = {"error": str(e)}
            if nvml is not None:
                nvml.end()
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
