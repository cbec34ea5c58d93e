#!/usr/bin/env python3
"""fgpu-verify: prove, from inside a session, that its limits hold.

Each check runs in a process of its own: one that crashes or hangs is a verdict, not the end. One
file without imports beyond Python's own, for Python 3.6 and later: it is also put into images that
have nothing of fGPU. Nothing is changed: what a check allocates it gives back, and it tries to
remove a file only where that is a mount, which the kernel refuses.
"""

import argparse
import ctypes
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Tuple

VERSION = "0.1.0"
IN_CONTAINER = "/run/fgpu"
PRELOAD = "/etc/ld.so.preload"
MIB = 1024 * 1024
OUT_OF_MEMORY = 2
NOT_SUPPORTED = 801
PROVED, FAILED = "PROVED", "FAILED"
BYPASSED, NOT_TRIED = "BYPASSED (expected)", "NOT TRIED"
# Compute is held on average and kernels are never interrupted, so what 3 s show is near the share.
COMPUTE_SECONDS = 3.0
COMPUTE_TOLERANCE = 10.0
# A kernel of about 1 ms; a simulated device takes how long it is from its name.
SPIN = b"spin_1ms"
PTX = b"""
.version 6.0
.target sm_50
.address_size 64
.visible .entry spin_1ms()
{
    .reg .pred %p<2>;
    .reg .b64 %t<4>;
    mov.u64 %t1, %globaltimer;
again:
    mov.u64 %t2, %globaltimer;
    sub.s64 %t3, %t2, %t1;
    setp.lt.u64 %p1, %t3, 1000000;
    @%p1 bra again;
    ret;
}
\0"""


class Share(NamedTuple):
    """One device of the limits file."""

    uuid: str
    memory_mib: int
    device_mib: int
    compute_percent: int
    mode: str
    most_percent: int  # with borrowed compute

    @property
    def whole(self) -> bool:
        return self.memory_mib == self.device_mib


class Limits(NamedTuple):
    """The content of the limits file, and its path."""

    path: str
    session: int
    managed: str
    shares: List[Share]

    @property
    def folder(self) -> str:
        return os.path.dirname(self.path)

    @property
    def container(self) -> bool:
        return self.folder == IN_CONTAINER


def read_limits(path: str) -> Limits:
    with open(path, encoding="ascii") as file:
        lines = file.read(16385).split("\n")
    if lines[0] != "fgpu-limits 1" or lines[-2:] != ["end", ""] or len(lines) < 6:
        raise ValueError("it is not a whole limits file of version 1")
    shares = []
    for line in lines[3:-2]:
        entry = dict(word.split("=", 1) for word in line.split(" "))
        numbers = [int(entry[k]) for k in ("memory_mib", "device_mib", "compute_percent")]
        most = int(entry.get("most_percent", numbers[2]))
        shares.append(Share(entry["device"], *numbers, entry["mode"], most))
    return Limits(path, int(lines[1].split("=")[1]), lines[2].split("=")[1], shares)


def uuid_bytes(uuid: str) -> str:
    """Return how the driver knows a UUID: its digits; of any other name the 128-bit FNV-1a hash."""
    name = uuid[4:]
    digits = name.replace("-", "").lower()
    if len(digits) == 32 and set(digits) <= set("0123456789abcdef"):
        return digits
    value = 0x6C62272E07BB014262B821756295C58D
    for byte in name.encode():
        value = (value ^ byte) * (2**88 + 0x13B) % 2**128
    return f"{value:032x}"


# ---- in a child: questions to the driver ---------------------------------------------------------


class CheckError(Exception):
    """A check could not run; the message says why."""


class NotThere(CheckError):
    """The driver has no such function."""


class DriverError(CheckError):
    """A call failed; `code` is the driver's."""

    def __init__(self, call: str, name: str, code: int) -> None:
        super().__init__(f"{call}: {name} ({code})")
        self.code = code


def open_library(path: str, way: str) -> ctypes.CDLL:
    """Load a library in the `way` of a program that wants to bypass a preloaded library."""
    try:
        if way == "deepbind":
            return ctypes.CDLL(path, mode=os.RTLD_NOW | os.RTLD_DEEPBIND)
        if way != "dlmopen":
            return ctypes.CDLL(path)
    except OSError as error:
        raise NotThere(str(error)) from None
    own = ctypes.CDLL(None)
    own.dlmopen.restype = ctypes.c_void_p
    own.dlerror.restype = ctypes.c_char_p
    new_namespace = ctypes.c_long(-1)
    handle = own.dlmopen(new_namespace, path.encode(), ctypes.c_int(os.RTLD_NOW))
    if not handle:
        raise NotThere("dlmopen: {}".format((own.dlerror() or b"refused").decode()))
    return ctypes.CDLL(path, handle=handle)


class Cuda:
    """The CUDA driver, initialised. `way` is how its functions are found."""

    def __init__(self, library: str = "libcuda.so.1", way: str = "dlsym") -> None:
        self.library = open_library(library, way)
        self._flags = {"legacy": 1, "per_thread": 2}.get(way)
        self._version = 12000
        self("cuInit", 0)
        version = ctypes.c_int()
        self("cuDriverGetVersion", ctypes.byref(version))
        self._version = version.value

    def function(self, name: str) -> Any:
        """Return a function by its exported name; raises NotThere."""
        if self._flags is None:
            function = getattr(self.library, name, None)
            if function is None:
                raise NotThere(f"the driver has no {name}")
            return function
        pointer, found = ctypes.c_void_p(), ctypes.c_int()
        names = ("cuGetProcAddress_v2", "cuGetProcAddress")
        get = next((getattr(self.library, n) for n in names if hasattr(self.library, n)), None)
        if get is None:
            raise NotThere("the driver has no cuGetProcAddress")
        flags = ctypes.c_ulonglong(self._flags)
        plain = re.sub("_v[0-9]+$", "", name).encode()
        code = get(plain, ctypes.byref(pointer), self._version, flags, ctypes.byref(found))
        if code != 0 or not pointer.value:
            raise NotThere(f"cuGetProcAddress gives no {name}")
        return ctypes.CFUNCTYPE(ctypes.c_int)(pointer.value)

    def __call__(self, name: str, *arguments: Any) -> None:
        """Call a function; raises DriverError."""
        code = self.function(name)(*arguments)
        if code != 0:
            words = ctypes.c_char_p()
            describe = getattr(self.library, "cuGetErrorName", None)
            known = describe is not None and describe(code, ctypes.byref(words)) == 0
            text = (words.value or b"").decode() if known else "an unnamed error"
            raise DriverError(name, text, code)

    def devices(self) -> Dict[str, ctypes.c_int]:
        count = ctypes.c_int()
        self("cuDeviceGetCount", ctypes.byref(count))
        found = {}
        for index in range(count.value):
            device, uuid = ctypes.c_int(), ctypes.create_string_buffer(16)
            self("cuDeviceGet", ctypes.byref(device), index)
            has_v2 = hasattr(self.library, "cuDeviceGetUuid_v2")
            self("cuDeviceGetUuid_v2" if has_v2 else "cuDeviceGetUuid", uuid, device)
            found[uuid.raw.hex()] = device
        return found

    def enter(self, device: ctypes.c_int) -> None:
        context = ctypes.c_void_p()
        self("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self("cuCtxSetCurrent", context)

    def leave(self, device: ctypes.c_int) -> None:
        self("cuDevicePrimaryCtxRelease_v2", device)

    def memory(self) -> Tuple[int, int]:
        """Return free and total bytes of the current context's device."""
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return free.value, total.value


def child_locate(_ask: Dict[str, Any]) -> Dict[str, Any]:
    """Return the path under which the loader opens the driver."""

    class Found(ctypes.Structure):
        _fields_ = [("name", ctypes.c_char_p), ("base", ctypes.c_void_p)]
        _fields_ += [("symbol", ctypes.c_char_p), ("address", ctypes.c_void_p)]

    function, found = open_library("libcuda.so.1", "dlsym").cuDriverGetVersion, Found()
    address = ctypes.cast(function, ctypes.c_void_p)
    if ctypes.CDLL(None).dladdr(address, ctypes.byref(found)) == 0 or not found.name:
        raise CheckError("libcuda.so.1 is loaded, but from where cannot be told")
    return {"path": os.path.abspath(found.name.decode())}


def child_totals(ask: Dict[str, Any]) -> Dict[str, Any]:
    """Return the total memory of each of the session's devices in CUDA, by UUID and call."""
    cuda = Cuda(ask.get("library", "libcuda.so.1"), ask["way"])
    seen = {}
    for uuid, device in cuda.devices().items():
        if uuid not in ask["uuids"]:
            continue
        total = ctypes.c_size_t()
        cuda("cuDeviceTotalMem_v2", ctypes.byref(total), device)
        cuda.enter(device)
        seen[uuid] = {"cuDeviceTotalMem": total.value, "cuMemGetInfo": cuda.memory()[1]}
        cuda.leave(device)
    return seen


def open_nvml(way: str = "dlsym") -> Callable[..., None]:
    """Return a function that calls an NVML function by name; it raises as Cuda does."""
    library = open_library("libnvidia-ml.so.1", way)
    library.nvmlErrorString.restype = ctypes.c_char_p

    def call(name: str, *arguments: Any) -> None:
        function = getattr(library, name, None)
        if function is None:
            raise NotThere(f"NVML has no {name}")
        code = function(*arguments)
        if code != 0:
            raise DriverError(name, library.nvmlErrorString(code).decode(), code)

    call("nvmlInit_v2")
    return call


def nvml_device(call: Callable[..., None], uuid: str) -> ctypes.c_void_p:
    handle = ctypes.c_void_p()
    call("nvmlDeviceGetHandleByUUID", uuid.encode(), ctypes.byref(handle))
    return handle


def child_nvml(ask: Dict[str, Any]) -> Dict[str, Any]:
    """Return the total memory of each of the session's devices in NVML, by UUID."""
    call = open_nvml()
    second = ask["version"] == 2
    seen = {}
    for uuid in ask["names"]:
        memory = (ctypes.c_ulonglong * 5)()
        memory[0] = 40 | 2 << 24  # the structure's version: its size and a 2
        name = "nvmlDeviceGetMemoryInfo" + ("_v2" if second else "")
        call(name, nvml_device(call, uuid), ctypes.byref(memory))
        seen[uuid_bytes(uuid)] = {f"nvmlMemory_v{ask['version']}": memory[1 if second else 0]}
    return seen


class AllocationProperties(ctypes.Structure):
    """CUmemAllocationProp: pinned memory of one device."""

    _fields_ = [("type", ctypes.c_int), ("handles", ctypes.c_int), ("location", ctypes.c_int)]
    _fields_ += [("device", ctypes.c_int), ("data", ctypes.c_void_p), ("flags", ctypes.c_byte * 8)]


def attempts(cuda: Cuda, device: ctypes.c_int, bytes_: int) -> Dict[str, int]:
    """Allocate this amount by each function, and free it; return the status of each call."""
    pointer, pitch = ctypes.c_ulonglong(), ctypes.c_size_t()
    size = ctypes.c_size_t(-(-bytes_ // (2 * MIB)) * 2 * MIB)
    properties = ctypes.byref(AllocationProperties(1, 0, 1, device.value))
    rows = ctypes.c_size_t(size.value // MIB)
    # The arguments after the pointer.
    ways = {
        "cuMemAlloc_v2": (size,),
        "cuMemAllocPitch_v2": (ctypes.byref(pitch), ctypes.c_size_t(MIB), rows, 4),
        "cuMemAllocManaged": (size, 1),
        "cuMemAllocAsync": (size, ctypes.c_void_p()),
        "cuMemCreate": (size, properties, ctypes.c_ulonglong(0)),
    }  # type: Dict[str, Tuple[Any, ...]]
    codes = {}
    for name, arguments in ways.items():
        try:
            cuda(name, ctypes.byref(pointer), *arguments)
            codes[name] = 0
            cuda("cuMemRelease" if name == "cuMemCreate" else "cuMemFree_v2", pointer)
        except NotThere:
            codes[name] = NOT_SUPPORTED
        except DriverError as error:
            codes[name] = error.code
    return codes


def child_allocate(ask: Dict[str, Any]) -> Dict[str, Any]:
    """Allocate 2 MiB past the limit by each function, then use a part of the free memory."""
    cuda = Cuda()
    devices = cuda.devices()
    found = {}
    for name, memory_mib in ask["limits"].items():
        device = devices.get(uuid_bytes(name))
        if device is None:
            raise CheckError(f"{name} is not among the devices that CUDA shows")
        cuda.enter(device)
        codes = attempts(cuda, device, (memory_mib + 2) * MIB)
        free = cuda.memory()[0]
        size = min(memory_mib * MIB // 4, free // 2)
        used = _use(cuda, size) if ask["recover"] and size >= MIB else None
        found[name] = {"past": codes, "free": free, "used": used}
        cuda.leave(device)
    return found


def _use(cuda: Cuda, size: int) -> Dict[str, Any]:
    pointer, written = ctypes.c_ulonglong(), bytes(bytearray(i * 7 % 251 for i in range(MIB)))
    read, length = ctypes.create_string_buffer(MIB), ctypes.c_size_t(MIB)
    try:
        cuda("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(size))
    except DriverError as error:
        return {"bytes": size, "code": error.code, "same": False}
    end = ctypes.c_ulonglong(pointer.value + size - MIB)
    cuda("cuMemcpyHtoD_v2", end, written, length)
    cuda("cuMemcpyDtoH_v2", read, end, length)
    cuda("cuMemFree_v2", pointer)
    return {"bytes": size, "code": 0, "same": read.raw == written}


def child_others(ask: Dict[str, Any]) -> Dict[str, Any]:
    cuda = Cuda()
    codes = {}
    for uuid, device in cuda.devices().items():
        if uuid in ask["uuids"]:
            continue
        try:
            cuda.enter(device)
            pointer = ctypes.c_ulonglong()
            cuda("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(2 * MIB))
            codes[uuid] = 0
        except DriverError as error:
            codes[uuid] = error.code
    return codes


def listed_pids(call: Callable[..., None], handle: ctypes.c_void_p) -> List[int]:
    # The entries of the first version have two words, those of the others three.
    for suffix, width in (("_v3", 3), ("_v2", 3), ("", 2)):
        count, listed = ctypes.c_uint(4096), (ctypes.c_ulonglong * (width * 4096))()
        name = "nvmlDeviceGetComputeRunningProcesses" + suffix
        try:
            call(name, handle, ctypes.byref(count), listed)
        except NotThere:
            continue
        return [listed[width * i] & 0xFFFFFFFF for i in range(count.value)]
    raise NotThere("NVML lists no processes")


def child_processes(ask: Dict[str, Any]) -> Dict[str, Any]:
    """Return for each process that NVML lists whether it is of this session."""
    cuda = Cuda()
    devices = cuda.devices()
    call = open_nvml()
    found = {"self": os.getpid()}  # type: Dict[str, Any]
    for name in ask["names"]:
        cuda.enter(devices[uuid_bytes(name)])
        # A process without memory need not be listed. With no memory left, the context has to do.
        cuda.function("cuMemAlloc_v2")(ctypes.byref(ctypes.c_ulonglong()), ctypes.c_size_t(MIB))
        pids = listed_pids(call, nvml_device(call, name))
        found[name] = {str(pid): _is_ours(pid, ask["accounting"]) for pid in pids}
    return found


def _is_ours(pid: int, accounting: str) -> bool:
    try:
        wanted = os.stat(accounting).st_ino
        with open(f"/proc/{pid}/maps", "rb") as maps:
            return any(line.split(None, 5)[4] == str(wanted).encode() for line in maps)
    except PermissionError:
        # Another user's process. In a container only the session's are visible.
        return accounting.startswith(IN_CONTAINER)
    except OSError:
        return False


def child_compute(ask: Dict[str, Any]) -> Dict[str, Any]:
    """Keep each device busy with kernels of one length; return their percentage of the time."""
    cuda = Cuda()
    devices = cuda.devices()
    shares = {}
    for name in ask["names"]:
        device = devices[uuid_bytes(name)]
        cuda.enter(device)
        shares[name] = _busy_percent(cuda, ask["seconds"])
        cuda.leave(device)
    return shares


def _busy_percent(cuda: Cuda, seconds: float) -> float:
    module, function, stream = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
    cuda("cuModuleLoadData", ctypes.byref(module), PTX)
    cuda("cuModuleGetFunction", ctypes.byref(function), module, SPIN)
    cuda("cuStreamCreate", ctypes.byref(stream), 1)
    events = [ctypes.c_void_p() for _ in range(4)]
    for event in events:
        cuda("cuEventCreate", ctypes.byref(event), 0)
    launch, record = cuda.function("cuLaunchKernel"), cuda.function("cuEventRecord")
    wait = cuda.function("cuEventSynchronize")

    def run(kernels: int, done: ctypes.c_void_p) -> None:
        for _ in range(kernels):
            code = launch(function, 1, 1, 1, 1, 1, 1, 0, stream, None, None)
            if code != 0:
                raise DriverError("cuLaunchKernel", "failed", code)
        record(done, stream)

    # Measure the kernel, not its wait for a slot: most have none, so the median.
    lengths = []  # type: List[float]
    until = time.monotonic() + 1.0  # also lets a burst at the start pass
    while time.monotonic() < until or len(lengths) < 20:
        took = ctypes.c_float()
        record(events[0], stream)
        run(1, events[1])
        wait(events[1])
        cuda("cuEventElapsedTime", ctypes.byref(took), events[0], events[1])
        lengths.append(took.value)
    length_ms = sorted(lengths)[len(lengths) // 2]
    kernels, turn = 0, 0
    run(8, events[3])
    wait(events[3])
    start = time.monotonic()
    run(8, events[0])
    while time.monotonic() - start < seconds:
        # Two batches at a time, so that the device has no reason to idle.
        run(8, events[1 - turn])
        wait(events[turn])
        kernels += 8
        turn = 1 - turn
    busy = 100.0 * kernels * length_ms / (1000.0 * (time.monotonic() - start))
    wait(events[turn])
    return busy


def child_tamper(ask: Dict[str, Any]) -> Dict[str, Any]:
    """Try to open for writing, remove and replace files that are mounts, or in one."""
    refused, possible = [], []

    def attempt(what: str, path: str, action: Callable[[str], Any]) -> None:
        try:
            action(path)
            possible.append(f"{what} {path}")
        except OSError as error:
            refused.append(f"{what} {path}: {error.strerror}")

    for path in ask["paths"]:
        # Limits may change while the session runs, so what is mounted is their folder.
        folder = path if os.path.dirname(path) != IN_CONTAINER else IN_CONTAINER
        if not is_mount(path) and not is_mount(folder):
            raise CheckError(f"{path} is not a mount of its own")
        attempt("write", path, lambda path: os.close(os.open(path, os.O_WRONLY)))
        attempt("remove", path, os.unlink)
        attempt("replace", path, _replace)
    with open("/proc/self/status") as status:
        effective = re.search("CapEff:\\s*([0-9a-f]+)", status.read())
    if effective is not None and int(effective.group(1), 16) >> 21 & 1:
        possible.append("unmount (CAP_SYS_ADMIN)")
    return {"refused": refused, "possible": possible}


def _replace(path: str) -> None:
    handle, other = tempfile.mkstemp(dir=os.path.dirname(path))
    os.close(handle)
    try:
        os.rename(other, path)
    except OSError:
        os.unlink(other)
        raise


def child_namespace(ask: Dict[str, Any]) -> Dict[str, Any]:
    """In a new user namespace, mount an empty file over the preload file; return the totals."""
    libc = ctypes.CDLL(None, use_errno=True)
    uid = os.geteuid()
    if libc.unshare(0x10000000 | 0x00020000) != 0:
        return {"refused": f"unshare: {os.strerror(ctypes.get_errno())}"}
    try:
        with open("/proc/self/uid_map", "w") as ids:
            ids.write(f"{uid} {uid} 1\n")
    except OSError:
        pass  # as user 65534
    if libc.mount(b"/dev/null", PRELOAD.encode(), None, 4096, None) != 0:
        return {"refused": f"mount: {os.strerror(ctypes.get_errno())}"}
    command = [sys.executable, os.path.abspath(__file__), "--child", "totals", json.dumps(ask)]
    out = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=False)
    answer = json.loads(out.stdout.decode().strip().split("\n")[-1])
    if "error" in answer:
        raise CheckError(answer["error"])
    return {"seen": answer["result"]}


def is_mount(path: str) -> bool:
    with open("/proc/self/mountinfo") as mounts:
        return any(line.split(" ")[4] == path for line in mounts)


CHILDREN = {
    function.__name__.replace("child_", ""): function
    for function in (
        *(child_locate, child_totals, child_nvml, child_allocate, child_others, child_processes),
        *(child_compute, child_tamper, child_namespace),
    )
}


def run_child(name: str, ask: str) -> int:
    """Run the function child_NAME and print its result as the last line of standard output."""
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # a driver that prints must not get into the answer
    try:
        found = {"result": CHILDREN[name](json.loads(ask))}  # type: Dict[str, Any]
    except (CheckError, OSError) as error:
        found = {"error": str(error), "not_there": isinstance(error, NotThere)}
    answer.write("\n" + json.dumps(found) + "\n")
    answer.flush()
    os._exit(0)  # a driver's exit handlers may hang


# ---- the checks ----------------------------------------------------------------------------------


class Result(NamedTuple):
    """The verdict of a check, and what it saw."""

    verdict: str
    text: str


class NoAnswer(Exception):
    """A child or probe gave no result; the message says why. `not_there`: a function or file is missing."""

    def __init__(self, text: str, not_there: bool = False) -> None:
        super().__init__(text)
        self.not_there = not_there


Totals = Dict[str, Dict[str, int]]  # bytes by UUID and call


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


UNTRIED_WHOLE = Result(NOT_TRIED, "the share is the whole GPU: nothing could be told apart")
UNTRIED_LOCAL = Result(NOT_TRIED, "this session is a local process: LD_PRELOAD loads libfgpu")


class Session:
    """The session under test: it runs children and probes, and judges what they report."""

    def __init__(self, limits: Limits, timeout_s: float) -> None:
        self.limits = limits
        self.timeout_s = timeout_s
        self.uuids = {uuid_bytes(share.uuid): share for share in limits.shares}
        self.names = [share.uuid for share in limits.shares]
        self.all_whole = all(share.whole for share in limits.shares)
        self._in_force = None  # type: Optional[Result]

    def run(
        self, command: List[str], environment: Optional[Dict[str, str]] = None, extra_s: float = 0
    ) -> str:
        """Run a program for a limited time and return its last line; raises NoAnswer."""
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        try:
            process = subprocess.Popen(command, env=environment, start_new_session=True, **pipes)  # type: subprocess.Popen[bytes]
        except OSError as error:
            raise NoAnswer(f"{command[0]}: {error.strerror}") from None
        try:
            out, err = process.communicate(timeout=self.timeout_s + extra_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            # One that hangs in the driver outlives even this; it is not waited for.
            raise NoAnswer(f"no answer in {self.timeout_s + extra_s:g} s") from None
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
        words = err.decode("utf-8", "replace").strip().split("\n")[-1][:200]
        if process.returncode < 0:
            raise NoAnswer(f"crashed by {_signal_name(-process.returncode)} {words}")
        last = out.decode("utf-8", "replace").strip().split("\n")[-1]
        if process.returncode != 0 or not last:
            raise NoAnswer(f"ended with status {process.returncode} {words}")
        return last

    def child(
        self,
        name: str,
        ask: Optional[Dict[str, Any]] = None,
        environment: Optional[Dict[str, str]] = None,
        extra_s: float = 0,
    ) -> Dict[str, Any]:
        """Return the result of the function child_NAME in a process of its own; raises NoAnswer."""
        whole = dict({"uuids": list(self.uuids), "names": self.names}, **(ask or {}))
        command = [sys.executable, os.path.abspath(__file__), "--child", name, json.dumps(whole)]
        answer = json.loads(self.run(command, environment, extra_s))
        if "error" in answer:
            raise NoAnswer(answer["error"], answer["not_there"])
        return dict(answer["result"])

    def in_force(self) -> Result:
        """Return whether a plain program sees the limits: other results mean nothing without it."""
        if self._in_force is None:
            self._in_force = self.result_of(lambda _: self.judge(self.child("totals", {"way": "dlsym"})))
        return self._in_force

    def result_of(self, check: "Check") -> Result:
        """Run a check: it fails if a child gives no answer, unless it says otherwise itself."""
        try:
            return check(self)
        except NoAnswer as error:
            return Result(FAILED, str(error))

    def judge(self, seen: Totals, bypass_expected: bool = False) -> Result:
        """Compare the totals that a child saw with the limits."""
        words, whole, wrong = [], False, False
        for uuid, share in self.uuids.items():
            totals = seen.get(uuid)
            if not totals:
                return Result(FAILED, f"{share.uuid} is not shown")
            limit = share.memory_mib * MIB
            for total in sorted(set(totals.values())):
                # Of a whole device the driver keeps some to itself.
                wrong = wrong or not (total == limit or (share.whole and 0 < total <= limit))
                whole = whole or total > limit
                calls = sorted(call for call, shown in totals.items() if shown == total)
                words.append("{} by {}".format(in_mib(total), ", ".join(calls)))
        text = "; ".join(words)
        if not wrong:
            return Result(PROVED, text)
        return self.expected(text) if whole and bypass_expected else Result(FAILED, text)

    def judge_or_skip(self, missing: str, ask: Callable[[], Totals]) -> Result:
        """Judge the totals that `ask` returns; NOT TRIED if it lacks what `missing` names."""
        try:
            return self.judge(ask())
        except NoAnswer as error:
            if not error.not_there or missing not in str(error):
                raise
            return Result(NOT_TRIED, str(error))

    def expected(self, text: str) -> Result:
        """Return the verdict for a known bypass; FAILED if the limit is not in force at all."""
        if self.in_force().verdict != PROVED:
            return Result(FAILED, "the limit is not in force at all; " + text)
        return Result(BYPASSED, text)

    def holding(self, result: Result) -> Result:
        return result if self.in_force().verdict == PROVED else self.expected(result.text)

    def environment(self, **change: Optional[str]) -> Dict[str, str]:
        """Return this process's environment with these variables set, or removed if None."""
        changed = dict(os.environ, **change)
        return {name: value for name, value in changed.items() if value is not None}

    def probe(self, name: str, *before: str, **change: Optional[str]) -> Totals:
        """Run a probe, a program in C, and return the totals in its report; raises NoAnswer."""
        path = os.path.join(self.limits.folder, name)
        if not os.path.exists(path):
            raise NoAnswer(f"{path} is not there", True)
        timeout = f"{max(1, int(self.timeout_s) - 3):d}"
        command = [*before, path, "--timeout", timeout]
        environment = self.environment(**change)
        simulated = os.path.join(self.limits.folder, "simulated")
        if name == "probe-static" and os.path.isdir(simulated):
            # In a static program the simulated driver cannot tell where it was loaded from.
            environment["FGPU_SIMULATED_MACHINE"] = simulated
        cuda = json.loads(self.run(command, environment))["cuda"]
        if cuda["status"] != "ok":
            raise NoAnswer(cuda["error"], cuda["status"] == "not_tried")
        seen = {d.get("uuid_bytes"): d.get("total_bytes") for d in cuda["devices"]}
        return {u: {k: v for k, v in (t or {}).items() if v} for u, t in seen.items()}


Check = Callable[[Session], Result]


def in_mib(count: int) -> str:
    return f"{count // MIB} MiB" if count % MIB == 0 else f"{count} bytes"


def visible(way: str) -> Check:
    """Return the check of CUDA's totals, its functions found in this way."""
    return lambda session: session.judge_or_skip(
        "cuGetProcAddress", lambda: session.child("totals", {"way": way})
    )


def visible_nvml(version: int) -> Check:
    return lambda session: session.judge_or_skip(
        "has no nvmlDeviceGetMemoryInfo_v2", lambda: session.child("nvml", {"version": version})
    )


def visible_program(session: Session) -> Result:
    return session.judge_or_skip("", lambda: session.probe("probe"))


def allocation(recover: bool) -> Check:
    """Return the check of an allocation past the limit, or of the next one that fits."""

    def check(session: Session) -> Result:
        limits = {share.uuid: share.memory_mib for share in session.limits.shares}
        found = session.child("allocate", {"limits": limits, "recover": recover})
        verdicts = [
            (_recovered if recover else _refused)(session, share, found[share.uuid])
            for share in session.limits.shares
        ]
        worst = min(verdicts, key=lambda r: (FAILED, NOT_TRIED, PROVED).index(r.verdict))
        return Result(worst.verdict, "; ".join(r.text for r in verdicts))

    return check


def _refused(session: Session, share: Share, found: Dict[str, Any]) -> Result:
    past = dict(found["past"])
    limit = f"{share.memory_mib + 2} MiB"
    missing = [name for name, code in past.items() if code == NOT_SUPPORTED]
    if session.limits.managed == "refuse" and "cuMemAllocManaged" in missing:
        past["cuMemAllocManaged"] = OUT_OF_MEMORY
    got = [name for name, code in past.items() if code == 0]
    other = [n for n, code in past.items() if code not in (0, OUT_OF_MEMORY, NOT_SUPPORTED)]
    if got or other or past["cuMemAlloc_v2"] != OUT_OF_MEMORY:
        words = ["{} {}".format(n, "granted" if c == 0 else f"error {c}") for n, c in past.items()]
        return Result(FAILED, "{}: {}".format(limit, ", ".join(words)))
    text = "{} refused with error 2 by {}".format(limit, ", ".join(n for n, c in past.items() if c == 2))
    return Result(PROVED, text + (" (not there: {})".format(", ".join(missing)) if missing else ""))


def _recovered(session: Session, share: Share, found: Dict[str, Any]) -> Result:
    if found["past"]["cuMemAlloc_v2"] != OUT_OF_MEMORY:
        return Result(FAILED, "nothing was refused that could be recovered from")
    used = found["used"]
    if used is None:
        return Result(NOT_TRIED, "too little is free: {}".format(in_mib(found["free"])))
    amount, code = in_mib(used["bytes"]), used["code"]
    if code != 0 or not used["same"]:
        words = f"error {code}" if code else "read back other than written"
        return Result(FAILED, f"then {amount}: {words}")
    return Result(PROVED, f"then {amount} allocated, written and read back")


def bypass(way: str, change: Optional[Dict[str, Optional[str]]] = None, known: bool = False) -> Check:
    """Return the check of CUDA's totals by another way of loading, or with another environment.

    `change` sets variables, or removes those that are None; an empty one stands for no variables
    at all. `known`: this gets around libfgpu in local sessions.
    """

    def check(session: Session) -> Result:
        if session.all_whole:
            return UNTRIED_WHOLE
        # A child without an environment would not find the driver by its name.
        ask = {"way": way, "library": session.child("locate")["path"]}
        environment = {} if change == {} else session.environment(**(change or {}))
        try:
            seen = session.child("totals", ask, environment)
        except NoAnswer as error:
            if not str(error).startswith("dlmopen:"):
                raise
            return Result(PROVED, f"refused: {error}")
        return session.judge(seen, bypass_expected=known and not session.limits.container)

    return check


# Limits that other libraries of this kind would believe.
FORGED = {
    "FGPU_LIMITS_FILE": "/dev/null",
    "FGPU_MEMORY_MIB": "1048576",
    "FGPU_SESSION_ID": "1",
    "FGPU_COMPUTE_PERCENT": None,
    "CUDA_DEVICE_MEMORY_LIMIT": "1048576m",
    "NVIDIA_GPU_MEMORY_LIMIT": "1048576",
}  # type: Dict[str, Optional[str]]


def other_gpus(session: Session) -> Result:
    """Check that no memory can be allocated on GPUs of other sessions."""
    codes = session.child("others", None, session.environment(CUDA_VISIBLE_DEVICES=None))
    granted = [uuid for uuid, code in codes.items() if code == 0]
    if granted:
        return Result(FAILED, f"memory granted on GPUs that are not this session's: {len(granted)}")
    words = f"memory refused on GPUs that are not this session's: {len(codes)}"
    return session.holding(Result(PROVED, words if codes else "no other GPU is visible"))


def tampering(*names: str) -> Check:
    """Return the check that these files of libfgpu's folder, or with a path, cannot be changed."""

    def check(session: Session) -> Result:
        paths = [os.path.join(session.limits.folder, name) for name in names]
        if not session.limits.container:
            if PRELOAD in paths:
                return UNTRIED_LOCAL
            writable = [p for p in [session.limits.folder, *paths] if os.access(p, os.W_OK)]
            if writable:
                return session.expected("the session's user may write " + ", ".join(writable))
            return session.holding(Result(PROVED, "the session's user may write none of it"))
        found = session.child("tamper", {"paths": paths})
        if found["possible"]:
            return Result(FAILED, "possible: {}".format(", ".join(found["possible"])))
        after = session.judge(session.child("totals", {"way": "dlsym"}))
        tried = "{} attempts refused on {}".format(len(found["refused"]), ", ".join(paths))
        return Result(after.verdict, f"{tried}; then {after.text}")

    return check


def namespace(session: Session) -> Result:
    """Check that a user namespace cannot replace the preload file."""
    if not session.limits.container:
        return UNTRIED_LOCAL
    if session.all_whole:
        return UNTRIED_WHOLE
    found = session.child("namespace", {"way": "dlsym"})
    if "refused" in found:
        return session.holding(Result(PROVED, "refused: {}".format(found["refused"])))
    return session.judge(found["seen"])


def static_program(session: Session) -> Result:
    """Run a static program: without a loader there is no preload, a known bypass of libfgpu."""
    return _known_bypass(session, "probe-static")


def _known_bypass(session: Session, name: str, *before: str, **change: Optional[str]) -> Result:
    try:
        return session.judge(session.probe(name, *before, **change), bypass_expected=True)
    except NoAnswer as error:
        return Result(NOT_TRIED, str(error))


def loader_copy(session: Session) -> Result:
    """Run a copy of the loader that reads another preload file, a known bypass of libfgpu."""
    loader = _loader()
    if loader is None:
        return Result(NOT_TRIED, "this Python's loader is not glibc's")
    with open(loader, "rb") as file:
        code = file.read()
    other = b"/" + b"-" * (len(PRELOAD) - 1)
    if PRELOAD.encode() not in code:
        return Result(NOT_TRIED, f"{loader} names no {PRELOAD}")
    folder = tempfile.mkdtemp(prefix="fgpu-verify-")
    try:
        copy = os.path.join(folder, "loader")
        with open(copy, "wb") as file:
            file.write(code.replace(PRELOAD.encode(), other))
        os.chmod(copy, 0o700)
        return _known_bypass(session, "probe", copy, LD_PRELOAD=None)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _loader() -> Optional[str]:
    with open(os.path.realpath(sys.executable), "rb") as file:
        head = file.read(4096)
    found = re.search(b"(/[-./0-9A-Za-z_]*/ld-linux[-.0-9A-Za-z_]*)\0", head)
    return found.group(1).decode() if found else None


def raw_ioctl(session: Session) -> Result:
    """Name the bypass by system calls to the driver's devices, which is not tried."""
    words = "system calls to /dev/nvidia* get around every library; the host's watchdog sees them"
    return Result(NOT_TRIED, words)


def processes(session: Session) -> Result:
    """Check that NVML lists only this session's processes, and this one among them."""
    # In a container libfgpu makes the accounting file, in a folder that the session can write.
    names = ("written/accounting", "accounting")
    places = [os.path.join(session.limits.folder, name) for name in names]
    accounting = next(filter(os.path.exists, places), places[-1])
    found = session.child("processes", {"accounting": accounting})
    own = str(found.pop("self"))
    listed = {pid: ours for device in found.values() for pid, ours in device.items()}
    foreign = sorted(pid for pid, ours in listed.items() if not ours)
    if foreign:
        return Result(FAILED, "not this session's: {}".format(", ".join(foreign)))
    if own not in listed:
        return Result(FAILED, f"the check's own process is not listed: {found}")
    return Result(PROVED, f"{len(listed)} listed, all of this session")


def compute(session: Session) -> Result:
    """Check the kernels' part of the time, within COMPUTE_TOLERANCE of the share."""
    limited = [
        s for s in session.limits.shares if s.mode == "memory+compute" and s.compute_percent < 100
    ]  # Borrowed compute is above the share: that is no fault, up to the most that may be lent.
    if not limited:
        return Result(NOT_TRIED, "compute is not limited in this session")
    ask = {"names": [share.uuid for share in limited], "seconds": COMPUTE_SECONDS}
    percents = session.child("compute", ask, extra_s=len(limited) * (COMPUTE_SECONDS + 3))
    words, verdict = [], PROVED
    for share in limited:
        had, entitled = percents[share.uuid], share.compute_percent
        # Of a large share less: all of the time must never count as near it.
        tolerance = min(COMPUTE_TOLERANCE, (100 - entitled) / 2)
        # The batches overlap at both ends of the measurement: a little above 100 % is all of the time.
        words.append(
            f"{min(had, 100):.1f} % of the GPU's time; {entitled} % is yours, +/- {tolerance:g} points"
        )
        if share.most_percent > entitled:
            words[-1] += f", and up to {share.most_percent} % while others do not use theirs"
        if had > share.most_percent + tolerance:
            verdict = FAILED
        elif had < entitled - tolerance:
            words[-1] += " (less than the share: this session or the machine is busy)"
    return Result(verdict, "; ".join(words))


CHECKS = [
    ("visible-dlsym", "total by CUDA's exported functions", Session.in_force),
    ("visible-legacy", "total by cuGetProcAddress, legacy stream", visible("legacy")),
    ("visible-per-thread", "total by cuGetProcAddress, per-thread stream", visible("per_thread")),
    ("visible-nvml-v1", "total by NVML, version 1", visible_nvml(1)),
    ("visible-nvml-v2", "total by NVML, version 2", visible_nvml(2)),
    ("visible-program", "total in a program in C", visible_program),
    ("allocate", "2 MiB past the limit is refused, in every way", allocation(False)),
    ("recover", "a smaller allocation works after that", allocation(True)),
    ("other-gpus", "no memory on GPUs of others", other_gpus),
    ("env-cleared", "env -i", bypass("dlsym", {}, known=True)),
    ("preload-unset", "LD_PRELOAD removed", bypass("dlsym", {"LD_PRELOAD": None}, known=True)),
    (
        "preload-changed",
        "LD_PRELOAD changed",
        bypass("dlsym", {"LD_PRELOAD": "libm.so.6"}, known=True),
    ),
    # Puts the C library before libfgpu, which then does not get the calls of dlsym.
    (
        "preload-libc",
        "LD_PRELOAD=libc.so.6",
        bypass("dlsym", {"LD_PRELOAD": "libc.so.6"}, known=True),
    ),
    ("env-forged", "limits named in the environment", bypass("dlsym", FORGED)),
    ("deepbind", "RTLD_DEEPBIND", bypass("deepbind")),
    ("dlmopen", "dlmopen into a new namespace", bypass("dlmopen")),
    ("preload-file", "/etc/ld.so.preload written, removed", tampering(PRELOAD)),
    ("limits-file", "limits and library written, removed", tampering("limits", "libfgpu.so")),
    ("namespace", "/etc/ld.so.preload covered in a user namespace", namespace),
    ("static", "a static program", static_program),
    ("loader-copy", "a loader that reads another preload file", loader_copy),
    ("raw-ioctl", "system calls past every library", raw_ioctl),
    ("processes", "other sessions' processes are hidden", processes),
    ("compute", "kernels get their share of time", compute),
]  # type: List[Tuple[str, str, Check]]


def table(
    limits: Limits, results: List[Tuple[str, str, Result]], columns: int, details: bool = False
) -> List[str]:
    """Return the report: what holds in full; known bypasses and untried checks by name unless `details`."""
    kind = "a container" if limits.container else "a local process, which can leave its limits"
    lines = [f"fgpu-verify: session {limits.session}, {kind}; limits in {limits.path}"]
    for share in limits.shares:
        limited = share.mode == "memory+compute"
        words = f"{share.compute_percent} % of compute" if limited else "compute not limited"
        lines += [f"  {share.uuid}: {share.memory_mib} of {share.device_mib} MiB, {words}"]
    width = max(columns, 80)

    def rows(chosen: List[Tuple[str, str, Result]]) -> List[str]:
        found = []  # type: List[str]
        for name, what, result in chosen:
            text = result.text.encode("ascii", "backslashreplace").decode()
            first = f"  {name:<20}"
            found += textwrap.wrap(f"{what}: {text}", width, initial_indent=first, subsequent_indent=" " * 22)
        return found

    for verdict, title in ((FAILED, "DOES NOT HOLD"), (PROVED, "Holds")):
        chosen = [r for r in results if r[2].verdict == verdict]
        if chosen:
            lines += ["", f"{title} ({len(chosen)})", *rows(chosen)]
    known = [r for r in results if r[2].verdict == BYPASSED]
    untried = [r for r in results if r[2].verdict == NOT_TRIED]
    if (known or untried) and not details:
        lines.append("")
    closed = "MIG closes them" if limits.container else "containers close some, MIG all"
    for chosen, words in (
        (known, "{} known way{} around libfgpu; " + closed),
        (untried, "{} check{} not tried here"),
    ):
        if not chosen:
            continue
        title = words.format(len(chosen), "" if len(chosen) == 1 else "s")
        if details:
            lines += ["", title, *rows(chosen)]
        else:
            names = f"{title} (--details): " + ", ".join(name for name, _, _ in chosen)
            lines += textwrap.wrap(names, width, subsequent_indent="  ", break_on_hyphens=False)
    return lines


def main() -> int:
    """Run the checks; return the exit status: 0 if everything holds that must hold."""
    if len(sys.argv) == 4 and sys.argv[1] == "--child":
        return run_child(sys.argv[2], sys.argv[3])
    parser = argparse.ArgumentParser(
        prog="fgpu-verify", description="Prove, from inside a session, that its limits hold."
    )
    names = [name for name, _, _ in CHECKS]
    add = parser.add_argument
    add("--only", metavar="NAME", action="append", choices=names, help="only this check")
    add("--list", action="store_true", help="list the checks")
    add("--details", action="store_true", help="also show what known ways around libfgpu saw")
    add("--json", action="store_true", help="print the result as JSON")
    add("--limits", metavar="FILE", help="the limits file, if it cannot be found")
    add("--timeout", metavar="SECONDS", type=float, default=30.0, help="for each check (30)")
    add("--version", action="version", version="fgpu-verify " + VERSION)
    options = parser.parse_args()
    if options.list:
        print("\n".join(f"{name:<20}{what}" for name, what, _ in CHECKS))
        return 0
    if not 1 <= options.timeout <= 600:
        parser.error("--timeout takes 1 to 600 seconds")
    in_container = os.path.join(IN_CONTAINER, "limits")
    here = in_container if os.path.exists(in_container) else os.environ.get("FGPU_LIMITS_FILE", "")
    path = options.limits or here
    if not path:
        sys.stderr.write(f"fgpu-verify: this is no session: there is no {IN_CONTAINER}/limits\n")
        return 1
    try:
        limits = read_limits(os.path.abspath(path))
    except (OSError, ValueError, KeyError, IndexError) as error:
        sys.stderr.write(f"fgpu-verify: {path} cannot be read: {error}\n")
        return 1
    # A SIGTERM ends the current check, too, which is in a session of its own.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    session = Session(limits, options.timeout)
    chosen = [c for c in CHECKS if options.only is None or c[0] in options.only]
    results = [(name, what, session.result_of(check)) for name, what, check in chosen]
    holds = all(result.verdict != FAILED for _, _, result in results)
    if options.json:
        checks = [{"name": n, "what": what, "verdict": r.verdict, "text": r.text} for n, what, r in results]
        about = {"session": limits.session, "container": limits.container, "holds": holds}
        print(json.dumps(dict(about, checks=checks)))
    else:
        columns = shutil.get_terminal_size((100, 24)).columns
        print("\n".join(table(limits, results, columns, options.details)))
        print(
            "\nYour limits are in force."
            if holds
            else "\nYour limits are NOT fully in force: tell your administrator what does not hold."
        )
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
