#!/usr/bin/env python3
"""fgpu-smi: this session's GPUs as NVML shows them, in the format of nvidia-smi.

For real and simulated GPUs. One file with imports of Python's own library only, for Python 3.6
and later: it is also put into images that have nothing of fGPU.
"""

import argparse
import ctypes
import json
import os
import re
import sys
import time
from typing import (
    Any,
    Callable,
    Dict,
    Iterable,
    List,
    NamedTuple,
    NoReturn,
    Optional,
    Sequence,
    Tuple,
    Union,
)
from xml.etree import ElementTree

VERSION = "0.1.0"
MIB = 1024 * 1024
SIMULATED = "Simulated GPU"  # prefix of the names of simulated devices
NO_REAL_GPU = "simulated: no real GPU is behind these figures"
INVALID_ARGUMENT, NOT_SUPPORTED, NO_PERMISSION, NOT_FOUND = 2, 3, 4, 6
INSUFFICIENT_SIZE, LIBRARY_NOT_FOUND, FUNCTION_NOT_FOUND, DEPRECATED = 7, 12, 13, 26
# Status of a value that a device or driver does not have: newer drivers lack some old values.
WITHOUT = {NOT_SUPPORTED, FUNCTION_NOT_FOUND, DEPRECATED}
NOT_AVAILABLE = 2**64 - 1  # an unknown number of bytes in NVML
WIDTH = 79


class NvmlError(Exception):
    """A call of NVML that failed, in NVML's own words."""

    def __init__(self, call: str, code: int, text: str) -> None:
        super().__init__(f"{call}: {text}")
        self.code = code
        self.text = text


class Failed(NamedTuple):
    """Stands for a value that NVML failed to give; the text is the reason."""

    text: str


Value = Union[int, float, str, None, Failed]  # None: the device or driver has no such value


class Nvml:
    """NVML through ctypes, initialised."""

    def __init__(self) -> None:
        try:
            self._library = ctypes.CDLL("libnvidia-ml.so.1")
        except OSError as error:
            raise NvmlError("NVML", LIBRARY_NOT_FOUND, str(error)) from None
        self.call("nvmlInit_v2")

    def close(self) -> None:
        self._library.nvmlShutdown()

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function; raises NvmlError."""
        function = getattr(self._library, name, None)
        code = NOT_SUPPORTED if function is None else function(*arguments)
        if code != 0:
            words = getattr(self._library, "nvmlErrorString", lambda code: b"")  # type: Any
            words.restype = ctypes.c_char_p
            text = (words(code) or b"").decode("utf-8", "replace")
            raise NvmlError(name, code, text or f"error {code}")

    def has(self, name: str) -> bool:
        return hasattr(self._library, name)

    def fill(self, kind: Any, name: str, *before: Any) -> Any:
        """Return what a function writes through its last argument."""
        found = kind()
        self.call(name, *before, ctypes.byref(found))
        return found

    def text(self, name: str, *before: Any) -> str:
        """Return what a function writes into a buffer, given it and its size last."""
        buffer = ctypes.create_string_buffer(128)
        self.call(name, *before, buffer, 96)
        return buffer.value.decode("utf-8", "replace")


def optional(read: Callable[[], Any], more: Iterable[int] = ()) -> Any:
    """Return the value of `read`; None for a code of WITHOUT or `more`, Failed for another."""
    try:
        return read()
    except NvmlError as error:
        return None if error.code in WITHOUT or error.code in more else Failed(error.text)


# ---- the values of a device ----------------------------------------------------------------------


def structure(*fields: Tuple[str, Any]) -> Any:
    return type("Structure", (ctypes.Structure,), {"_fields_": list(fields)})


def numbers(kind: Any, *names: str) -> List[Tuple[str, Any]]:
    """Return fields of one type."""
    return [(name, kind) for name in names]


U32, U64 = ctypes.c_uint, ctypes.c_ulonglong
# nvmlMemory_t, nvmlMemory_v2_t, nvmlPciInfo_t, nvmlProcessInfo_t of versions 1 and 2,
# nvmlProcessUtilizationSample_t
Memory = structure(*numbers(U64, "total", "free", "used"))
MemoryV2 = structure(("version", U32), *numbers(U64, "total", "reserved", "free", "used"))
Pci = structure(("legacy", ctypes.c_char * 16), ("numbers", U32 * 5), ("bus_id", ctypes.c_char * 32))
ProcessInfoV1 = structure(("pid", U32), ("used", U64))
ProcessInfo = structure(("pid", U32), ("used", U64), ("mig", U32 * 2))
Sample = structure(("pid", U32), ("at_us", U64), *numbers(U32, "sm", "memory", "encoder", "decoder"))


Reader = Callable[[Nvml, ctypes.c_void_p], Value]


def text_of(name: str) -> Reader:
    return lambda nvml, gpu: nvml.text("nvmlDeviceGet" + name, gpu)


def number_of(name: str, *more: int, factor: float = 1, words: str = "{}") -> Reader:
    """Read a number; `words` is how it is shown, or the words for 0, 1 and so on."""

    def read(nvml: Nvml, gpu: ctypes.c_void_p) -> Value:
        number = nvml.fill(ctypes.c_uint, "nvmlDeviceGet" + name, gpu, *more).value
        known = words.split(" ")
        if len(known) > 1:
            return known[number] if number < len(known) else str(number)
        return number * factor if words == "{}" else words.format(number)

    return read


def memory_of(field: str) -> Reader:
    """Read total, free or used memory in MiB."""

    def read(nvml: Nvml, gpu: ctypes.c_void_p) -> Value:
        memory = MemoryV2(ctypes.sizeof(MemoryV2) | 2 << 24)
        try:
            nvml.call("nvmlDeviceGetMemoryInfo_v2", gpu, ctypes.byref(memory))
        except NvmlError as error:
            if error.code != NOT_SUPPORTED:
                raise
            memory = nvml.fill(Memory, "nvmlDeviceGetMemoryInfo", gpu)
        count = getattr(memory, field)  # type: int
        # A used amount is never shown as 0.
        return -(-count // MIB) if field == "used" else count // MIB

    return read


def utilization_of(index: int) -> Reader:
    """Read the utilisation of the processors (0) or of the memory (1)."""
    name = "nvmlDeviceGetUtilizationRates"
    return lambda nvml, gpu: nvml.fill(ctypes.c_uint * 2, name, gpu)[index]


def pair(nvml: Nvml, name: str, gpu: ctypes.c_void_p) -> Tuple[int, int]:
    first, second = ctypes.c_uint(), ctypes.c_uint()
    nvml.call("nvmlDeviceGet" + name, gpu, ctypes.byref(first), ctypes.byref(second))
    return first.value, second.value


SWITCH = "Disabled Enabled"
READERS = {
    "name": text_of("Name"),
    "uuid": text_of("UUID"),
    "serial": text_of("Serial"),
    "pci.bus_id": lambda nvml, gpu: nvml.fill(Pci, "nvmlDeviceGetPciInfo_v3", gpu).bus_id.decode(),
    "memory.total": memory_of("total"),
    "memory.used": memory_of("used"),
    "memory.free": memory_of("free"),
    "utilization.gpu": utilization_of(0),
    "utilization.memory": utilization_of(1),
    "temperature.gpu": number_of("Temperature", 0),
    "fan.speed": number_of("FanSpeed"),
    "power.draw": number_of("PowerUsage", factor=0.001),
    "power.limit": number_of("EnforcedPowerLimit", factor=0.001),
    "pstate": number_of("PerformanceState", words="P{}"),
    "compute_mode": number_of("ComputeMode", words="Default Exclusive_Thread Prohibited Exclusive_Process"),
    "persistence_mode": number_of("PersistenceMode", words=SWITCH),
    "display_active": number_of("DisplayActive", words=SWITCH),
    "display_mode": number_of("DisplayMode", words=SWITCH),
    "mig.mode.current": lambda nvml, gpu: SWITCH.split()[pair(nvml, "MigMode", gpu)[0]],
    "compute_cap": lambda nvml, gpu: "{}.{}".format(*pair(nvml, "CudaComputeCapability", gpu)),
}  # type: Dict[str, Reader]
# The values that identify a slice. A driver may refuse the others for a device or user.
ESSENTIAL = {"name", "uuid", "memory.total", "memory.used", "memory.free", "utilization.gpu"}
UNITS = {"memory": "MiB", "used_gpu_memory": "MiB", "utilization": "%", "fan": "%", "power": "W"}
ALIASES = {
    "gpu_name": "name",
    "gpu_uuid": "uuid",
    "gpu_serial": "serial",
    "gpu_bus_id": "pci.bus_id",
    "used_memory": "used_gpu_memory",
}
GPU_FIELDS = ["timestamp", "driver_version", "count", "index", *READERS]
GPU_FIELDS += ["gpu_name", "gpu_uuid", "gpu_serial", "gpu_bus_id"]
APP_FIELDS = ["timestamp", "gpu_name", "gpu_uuid", "gpu_bus_id", "pid", "process_name"]
APP_FIELDS += ["used_gpu_memory", "used_memory"]


def unit_of(field: str) -> str:
    return UNITS.get(field.split(".", maxsplit=1)[0], "")


# ---- one reading of everything -------------------------------------------------------------------


class Share(NamedTuple):
    """One device's line of the limits file."""

    uuid: str
    memory_mib: int
    device_mib: int
    compute_percent: int
    mode: str
    lent: bool  # it gets more while other sessions have no work


class Limits(NamedTuple):
    """The limits file, or why it cannot be read. libfgpu enforces it; here it is only shown."""

    session: Optional[int]
    shares: List[Share]
    problem: Optional[str]


def read_limits() -> Optional[Limits]:
    """Return this session's limits, or None outside of a session."""
    path = "/run/fgpu/limits"
    if not os.path.exists(path):
        path = os.environ.get("FGPU_LIMITS_FILE", "")
    if not path:
        return None
    try:
        with open(path, encoding="ascii") as file:
            lines = file.read(16385).split("\n")
        if lines[0] != "fgpu-limits 1" or lines[-2:] != ["end", ""]:
            raise ValueError("it is not a whole limits file of version 1")
        shares = []
        for line in lines[3:-2]:
            entry = dict(word.split("=", 1) for word in line.split(" "))
            memory, device, compute = (int(entry[k]) for k in ("memory_mib", "device_mib", "compute_percent"))
            lent = "lending" in entry
            shares.append(Share(entry["device"], memory, device, compute, entry["mode"], lent))
        return Limits(int(lines[1].split("=")[1]), shares, None)
    except (OSError, ValueError, KeyError, IndexError) as error:
        return Limits(None, [], f"{path} cannot be read: {error}")


class Process(NamedTuple):
    """A process that uses a device. `kind` is C (compute), G (graphics) or C+G."""

    pid: int
    kind: str
    name: str
    memory_mib: Value
    sm_percent: Optional[int]


class Gpu(NamedTuple):
    """One device; `values` by the names of --query-gpu."""

    values: Dict[str, Value]
    processes: Union[List[Process], Failed, None]
    share: Optional[Share]


class Reading(NamedTuple):
    """Everything that is shown. `problems` make the exit status 1."""

    driver: Value
    cuda: Value
    gpus: List[Gpu]
    session: Optional[int]
    problems: List[str]

    @property
    def simulated(self) -> bool:
        return any(str(gpu.values["name"]).startswith(SIMULATED) for gpu in self.gpus)


def read_all(nvml: Nvml, wanted: Optional[List[str]]) -> Reading:
    """Return NVML's values of this session's devices, or of the `wanted` ones (index or UUID)."""
    limits = read_limits()
    problems = [limits.problem] if limits is not None and limits.problem else []
    handles = []  # type: List[Tuple[ctypes.c_void_p, Optional[Share]]]
    for share in limits.shares if limits is not None else []:
        by_uuid = "nvmlDeviceGetHandleByUUID"
        try:
            handles.append((nvml.fill(ctypes.c_void_p, by_uuid, share.uuid.encode()), share))
        except NvmlError as error:
            problems.append(f"{share.uuid}, of this session's limits: {error.text}")
    if limits is None:
        by_index = "nvmlDeviceGetHandleByIndex_v2"
        for index in range(nvml.fill(ctypes.c_uint, "nvmlDeviceGetCount_v2").value):
            handles.append((nvml.fill(ctypes.c_void_p, by_index, index), None))
    driver = optional(lambda: nvml.text("nvmlSystemGetDriverVersion"))
    cuda = optional(lambda: nvml.fill(ctypes.c_int, "nvmlSystemGetCudaDriverVersion_v2").value)
    if isinstance(cuda, int):
        cuda = f"{cuda // 1000}.{cuda % 1000 // 10}"
    moment = time.strftime("%Y/%m/%d %H:%M:%S.000")
    gpus = []
    for index, (handle, own) in enumerate(handles):
        values = {"timestamp": moment, "driver_version": driver, "count": len(handles)}
        values["index"] = index
        for name, reader in READERS.items():
            more = () if name in ESSENTIAL else (INVALID_ARGUMENT, NO_PERMISSION)
            values[name] = optional(lambda: reader(nvml, handle), more)  # noqa: B023 - called at once
        processes = optional(lambda: read_processes(nvml, handle))  # noqa: B023
        gpus.append(Gpu(values, processes, own))
    if wanted is not None:
        for name in wanted:
            if not any(name in (str(g.values["index"]), g.values["uuid"]) for g in gpus):
                raise NvmlError(f"GPU {name}", NOT_FOUND, "not among this session's GPUs")
        gpus = [g for g in gpus if {str(g.values["index"]), g.values["uuid"]} & set(wanted)]
    for gpu in gpus:
        problems += problems_of(gpu)
    return Reading(driver, cuda, gpus, None if limits is None else limits.session, problems)


def read_once(wanted: Optional[List[str]]) -> Reading:
    """Initialise NVML, read everything, and end NVML; raises NvmlError."""
    nvml = Nvml()
    try:
        return read_all(nvml, wanted)
    finally:
        nvml.close()


def problems_of(gpu: Gpu) -> List[str]:
    """Return a line for each unreadable value, and one for a total that is not the share's."""
    parts = [*gpu.values.items(), ("processes", gpu.processes)]  # type: List[Tuple[str, Any]]
    found = [f"{name}: {value.text}" for name, value in parts if isinstance(value, Failed)]
    if gpu.share is not None and not is_own(gpu):
        total, limit = gpu.values["memory.total"], gpu.share.memory_mib
        found.append(f"NVML shows {total} MiB, the limit is {limit} MiB: see fgpu-verify")
    return ["GPU {}: {}".format(gpu.values["index"], text) for text in found]


def is_own(gpu: Gpu) -> bool:
    """Return whether NVML's total is the share's memory; True if either is unknown."""
    total = gpu.values["memory.total"]
    if gpu.share is None or not isinstance(total, int):
        return True
    limit = gpu.share.memory_mib
    # The driver keeps some memory of a whole device to itself.
    return total == limit or (total < limit and limit == gpu.share.device_mib)


def read_processes(nvml: Nvml, gpu: ctypes.c_void_p) -> List[Process]:
    """Return the processes that NVML lists for a device; raises NvmlError, also without a list."""
    found = {}  # type: Dict[int, Tuple[str, int]]
    for kind, name in (("C", "Compute"), ("G", "Graphics")):
        try:
            listed = list_processes(nvml, f"nvmlDeviceGet{name}RunningProcesses", gpu)
        except NvmlError as error:
            if error.code not in WITHOUT or kind == "C":
                raise
            continue
        for process in listed:
            kinds = found[process.pid][0] + "+" + kind if process.pid in found else kind
            found[process.pid] = (kinds, process.used)
    sm = read_percents(nvml, gpu) if found else {}
    processes = []
    for pid, (kinds, used) in sorted(found.items()):
        processes.append(Process(pid, kinds, process_name(pid), mib_of(used), sm.get(pid)))
    return processes


def mib_of(used: int) -> Optional[int]:
    """Return a process's memory in MiB, rounded up, or None if the driver does not say."""
    return None if used == NOT_AVAILABLE else -(-used // MIB)


def read_percents(nvml: Nvml, gpu: ctypes.c_void_p) -> Dict[int, int]:
    samples, count = (Sample * 1024)(), ctypes.c_uint(1024)
    name, since = "nvmlDeviceGetProcessUtilization", ctypes.c_ulonglong(0)
    try:
        nvml.call(name, gpu, samples, ctypes.byref(count), since)
    except NvmlError:
        return {}
    # The newest sample of each process is the last one.
    return {s.pid: s.sm for s in sorted(samples[: count.value], key=lambda s: s.at_us)}


def list_processes(nvml: Nvml, name: str, gpu: ctypes.c_void_p) -> List[Any]:
    """Return one of NVML's lists of processes, from the newest function that the driver has."""
    versions = (("_v3", ProcessInfo), ("_v2", ProcessInfo), ("", ProcessInfoV1))
    suffix, entry = next((v for v in versions if nvml.has(name + v[0])), versions[0])
    name, room = name + suffix, 16
    while True:
        listed, count = (entry * room)(), ctypes.c_uint(room)
        try:
            nvml.call(name, gpu, ctypes.byref(count), listed)
            return list(listed)[: count.value]
        except NvmlError as error:
            # Processes may start in between: allocate more entries than were reported.
            if error.code != INSUFFICIENT_SIZE or room > 65536:
                raise
            room = max(count.value, room) * 2


def process_name(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            words = file.read(4096).rstrip(b"\0").replace(b"\0", b" ")
    except OSError:
        words = b""
    return words.decode("utf-8", "replace") or "[Not Found]"


# ---- output --------------------------------------------------------------------------------------


def shown(text: str) -> str:
    """Return text as printable ASCII: nothing that an image puts into a name acts on a terminal."""
    return "".join(c if " " <= c <= "~" else "?" for c in text)


def short(value: Value, unit: str = "") -> str:
    if value is None:
        return "N/A"
    if isinstance(value, Failed):
        return "ERR!"
    return f"{value:.0f}{unit}" if isinstance(value, float) else f"{value}{unit}"


def fit(text: str, width: int) -> str:
    text = shown(text)
    return text[: width - 3] + "..." if len(text) > width else text.ljust(width)


def listed(gpu: Gpu) -> List[Process]:
    return gpu.processes if isinstance(gpu.processes, list) else []


def memory_words(gpu: Gpu) -> str:
    return " / ".join(short(gpu.values["memory." + k], "MiB") for k in ("used", "total"))


def share_words(share: Share) -> Tuple[str, str]:
    percent = ("at least " if share.lent else "") + f"{share.compute_percent}%"
    compute = f"{percent} of time" if "compute" in share.mode else "not limited"
    return f"slice of {share.device_mib}MiB", compute


def heading(reading: Reading) -> List[str]:
    driver, cuda = short(reading.driver), short(reading.cuda)
    lines = [f"FGPU-SMI {VERSION:<10} Driver Version: {driver:<14} CUDA Version: {cuda}"]
    lines += [NO_REAL_GPU] if reading.simulated else []
    return lines + ([f"session {reading.session}"] if reading.session is not None else [])


def table(reading: Reading) -> List[str]:
    line = "+" + "-" * 31 + "+" + "-" * 22 + "+" + "-" * 22 + "+"
    plain = "+" + "-" * (WIDTH - 2) + "+"

    def row(first: str, second: str, third: str) -> str:
        return f"| {fit(first, 29)} | {fit(second.rjust(20), 20)} | {fit(third.rjust(20), 20)} |"

    lines = [plain] + [f"| {fit(text, WIDTH - 4)} |" for text in heading(reading)]
    lines += [line, row("GPU  Name", "Bus-Id", "GPU-Util  Compute M.")]
    lines += [row("Fan  Temp  Perf Pwr:Usage/Cap", "Memory-Usage", "Share")]
    lines += [line.replace("-", "=")]
    for gpu in reading.gpus:
        of = gpu.values
        power = "{} / {}".format(short(of["power.draw"], "W"), short(of["power.limit"], "W"))
        busy, mode = short(of["utilization.gpu"], "%"), short(of["compute_mode"])
        fan, heat = short(of["fan.speed"], "%"), short(of["temperature.gpu"], "C")
        first = "{:>3}  {}".format(short(of["index"]), short(of["name"]))
        lines += [row(first, short(of["pci.bus_id"]), f"{busy:>8} {mode:>11}")]
        second = f"{fan:>3}  {heat:>4}  {short(of['pstate']):>4} {power:>13}"
        lines += [row(second, memory_words(gpu), "")]
        lines += [row("", *share_words(gpu.share))] if gpu.share is not None else []
        lines += [line]
    title = " GPU       PID  Type  Process name".ljust(65) + "GPU Memory"
    lines += ["", plain, f"| {fit('Processes:', WIDTH - 4)} |", f"| {title} |"]
    lines += [plain.replace("-", "=")]
    for gpu in reading.gpus:
        for p in listed(gpu):
            index, memory = short(gpu.values["index"]), short(p.memory_mib, "MiB")
            lines += [f"| {index:>4} {p.pid:>9}  {p.kind:>4}  {fit(p.name, 42)} {memory:>10} |"]
    if not any(listed(gpu) for gpu in reading.gpus):
        unknown = [gpu.processes for gpu in reading.gpus if not isinstance(gpu.processes, list)]
        failed = any(isinstance(processes, Failed) for processes in unknown)
        words = "ERR!" if failed else "N/A" if unknown else "No running processes found"
        lines += [f"|  {fit(words, WIDTH - 5)} |"]
    return [*lines, plain]


def csv_lines(reading: Reading, options: argparse.Namespace, header: bool) -> List[str]:
    apps = options.query_compute_apps is not None
    fields = options.query_compute_apps if apps else options.query_gpu
    rows = [gpu.values for gpu in reading.gpus]
    if apps:
        rows = [
            dict(gpu.values, pid=p.pid, process_name=p.name, used_gpu_memory=p.memory_mib)
            for gpu in reading.gpus
            for p in listed(gpu)
        ]

    def cell(row: Dict[str, Value], name: str) -> str:
        value, unit = row[name], unit_of(name)
        if value is None or isinstance(value, Failed):
            return "[N/A]" if value is None else f"[{shown(value.text)}]"
        text = f"{value:.2f}" if isinstance(value, float) else shown(str(value))
        return f"{text} {unit}" if unit and "nounits" not in options.format else text

    def title(field: str) -> str:
        # A process's row uses the device's fields by the requested names: gpu_name.
        name = field if field.startswith("gpu_") and apps else ALIASES.get(field, field)
        return f"{name} [{unit_of(name)}]" if unit_of(name) else name

    lines = [", ".join(title(f) for f in fields)] if header else []
    return lines + [", ".join(cell(row, ALIASES.get(f, f)) for f in fields) for row in rows]


def as_json(reading: Reading) -> str:
    """Return everything; an unknown value is null, a failed one {"error": text}."""

    def plain(value: Value) -> Any:
        return {"error": value.text} if isinstance(value, Failed) else value

    suffixes = {"MiB": "_mib", "%": "_percent", "W": "_w", "": ""}
    gpus = []
    for gpu in reading.gpus:
        entry = {
            name.replace(".", "_") + suffixes[unit_of(name)]: plain(value)
            for name, value in gpu.values.items()
        }
        entry["share"] = dict(gpu.share._asdict()) if gpu.share is not None else None
        entry["processes"] = plain(gpu.processes)
        if isinstance(gpu.processes, list):
            entry["processes"] = [
                {"pid": p.pid, "type": p.kind, "name": p.name, "memory_mib": plain(p.memory_mib)}
                for p in gpu.processes
            ]
        gpus.append(entry)
    whole = {"simulated": reading.simulated, "session": reading.session, "gpus": gpus}
    whole.update(driver_version=plain(reading.driver), cuda_version=plain(reading.cuda))
    return json.dumps(dict(whole, problems=reading.problems))


# The parts of `-q` for each GPU: elements with their fields.
REPORT = """\
product_name=name mig_mode/current_mig=mig.mode.current uuid=uuid fan_speed=fan.speed
performance_state=pstate fb_memory_usage/total=memory.total fb_memory_usage/used=memory.used
fb_memory_usage/free=memory.free compute_mode=compute_mode utilization/gpu_util=utilization.gpu
utilization/memory_util=utilization.memory temperature/gpu_temp=temperature.gpu
gpu_power_readings/power_draw=power.draw gpu_power_readings/current_power_limit=power.limit"""
# What `-q -d` takes, and the elements that it shows.
DISPLAYS = {
    "MEMORY": "fb_memory_usage",
    "UTILIZATION": "utilization",
    "TEMPERATURE": "temperature",
    "POWER": "gpu_power_readings",
    "PERFORMANCE": "performance_state",
    "COMPUTE": "compute_mode",
    "PIDS": "processes",
}
MONITORS = {
    "dmon": "gpu:Idx pwr:W gtemp:C mtemp:C sm:% mem:% enc:% dec:% jpg:% ofa:% mclk:MHz pclk:MHz",
    "pmon": "gpu:Idx pid:# type:C/G sm:% mem:% enc:% dec:% jpg:% ofa:% command:name",
}


def report(reading: Reading, only: Sequence[str]) -> ElementTree.Element:
    """Return the values as `nvidia-smi -q -x` has them. ``only``: these parts of each GPU, or all."""

    def put(under: ElementTree.Element, values: Iterable[Tuple[str, object]]) -> None:
        for path, value in values:
            parent, _, tag = path.rpartition("/")
            if parent and under.find(parent) is None:
                ElementTree.SubElement(under, parent)
            above = under.find(parent) if parent else under
            ElementTree.SubElement(above, tag).text = shown(str(value))

    root = ElementTree.Element("nvidia_smi_log")
    put(root, [("timestamp", time.ctime()), ("driver_version", short(reading.driver))])
    put(root, [("cuda_version", short(reading.cuda)), ("attached_gpus", len(reading.gpus))])
    for gpu in reading.gpus:
        entry = ElementTree.SubElement(root, "gpu", id=shown(short(gpu.values["pci.bus_id"])))
        fields = [pair.split("=") for pair in REPORT.split()]
        put(entry, ((p, short(gpu.values[f], f" {unit_of(f)}".rstrip())) for p, f in fields))
        processes = ElementTree.SubElement(entry, "processes")
        if not isinstance(gpu.processes, list):
            processes.text = "N/A" if gpu.processes is None else "ERR!"
        for p in listed(gpu):
            values = (p.pid, p.kind, p.name, short(p.memory_mib, " MiB"))
            tags = ("pid", "type", "process_name", "used_memory")
            put(ElementTree.SubElement(processes, "process_info"), zip(tags, values))
        for element in list(entry) if only else ():
            if element.tag not in only:
                entry.remove(element)
    return root


def report_lines(element: ElementTree.Element, depth: int = 0) -> List[str]:
    title = re.sub(
        r"\b(Cuda|Fb|Gpu|Mig|Uuid)",
        lambda found: found[1].upper(),
        element.tag.replace("_", " ").title(),
    )
    label = "    " * depth + " ".join([title, *element.attrib.values()])
    lines = [f"{label:<42}: {element.text}" if element.text else label]
    return lines + [line for child in element for line in report_lines(child, depth + 1)]


def monitor(reading: Reading, kind: str, header: bool) -> List[str]:
    titles = list(zip(*(title.split(":") for title in MONITORS[kind].split())))
    rows = [["# " + line[0], *line[1:]] for line in titles] if header else []
    for gpu in reading.gpus:
        of = {name: short(value).replace("N/A", "-") for name, value in gpu.values.items()}
        if kind == "dmon":
            known = ("index", "power.draw", "temperature.gpu", "-")
            busy = (of["utilization.gpu"], of["utilization.memory"])
            rows.append([*(of.get(name, "-") for name in known), *busy, *"------"])
            continue
        for p in listed(gpu):
            sm = "-" if p.sm_percent is None else str(p.sm_percent)
            rows.append([of["index"], str(p.pid), p.kind, sm, *"-----", p.name.split(" ")[0]])
        rows += [] if listed(gpu) else [[of["index"], *"---------"]]
    return [shown(f"{row[0]:>5}" + "".join(f" {text:>8}" for text in row[1:])) for row in rows]


# ---- the command ---------------------------------------------------------------------------------

SUPPORTED = """\
options that are supported here:
  (none)                        the table
  -L, --list-gpus               one line for each GPU
  -i ID, --id=ID                only these: indices or UUIDs, separated by commas
  --query-gpu=FIELD,...         values of each GPU; needs --format
  --query-compute-apps=FIELD,.. values of each process of this session; needs --format
  --format=csv[,noheader][,nounits]
  -q, --query [-x] [-d KIND,..] all of it, a value a line; with -x as XML; with -d only
                                {}
  dmon, pmon [-c N] [-d SEC]    a line for each GPU, or process, every second; N times
  --json                        all of it as JSON
  -l SEC, --loop=SEC            again every SEC seconds
  -h, --help; --version
fields of --query-gpu: {}
fields of --query-compute-apps: {}
"""


class Parser(argparse.ArgumentParser):
    """Lists what is supported when it gets something else."""

    def error(self, message: str) -> NoReturn:
        sys.stderr.write(f"{self.prog}: {message}\n{self.format_help()}")
        sys.exit(2)

    def format_help(self) -> str:
        return SUPPORTED.format(*map(", ".join, (DISPLAYS, GPU_FIELDS, APP_FIELDS)))


def fields_of(known: List[str]) -> Callable[[str], List[str]]:
    def parse(text: str) -> List[str]:
        names = [name.strip() for name in text.split(",")]
        for name in names:
            if name not in known:
                raise argparse.ArgumentTypeError(f'field "{name}" is not supported')
        return names

    return parse


def parse_options(arguments: List[str]) -> argparse.Namespace:
    """Return the options; ends the program when they are not understood."""
    parser = Parser(prog=os.path.basename(sys.argv[0]), allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"fgpu-smi {VERSION}")
    parser.add_argument("-i", "--id", type=lambda text: text.split(","))
    parser.add_argument("-l", "--loop", type=float)
    parser.add_argument("--format", type=lambda text: [w.strip() for w in text.split(",")])
    what = parser.add_mutually_exclusive_group()
    what.add_argument("-L", "--list-gpus", action="store_true")
    what.add_argument("--json", action="store_true")
    what.add_argument("-q", "--query", action="store_true")
    what.add_argument("monitor", nargs="?", choices=sorted(MONITORS))
    parser.add_argument("-x", "--xml-format", action="store_true")
    parser.add_argument("-c", "--count", type=int)
    parser.add_argument("-d", "--delay", "--display")
    what.add_argument("--query-gpu", type=fields_of(GPU_FIELDS))
    what.add_argument("--query-compute-apps", type=fields_of(APP_FIELDS))
    options = parser.parse_args(arguments)
    queried = options.query_gpu is not None or options.query_compute_apps is not None
    if queried != (options.format is not None):
        parser.error("--query-gpu and --query-compute-apps need --format=csv, and it needs them")
    if queried and (options.format[0] != "csv" or set(options.format[1:]) - {"noheader", "nounits"}):
        parser.error("--format is csv[,noheader][,nounits]")
    if options.xml_format and not options.query:
        parser.error("-x needs -q")
    asked = options.delay.upper().split(",") if options.query and options.delay else []
    if not DISPLAYS.keys() >= set(asked):
        parser.error("-q -d takes {}".format(", ".join(DISPLAYS)))
    options.display = [DISPLAYS[name] for name in asked]
    if options.monitor is not None:
        try:
            options.loop = float(options.delay or 1)
        except ValueError:
            parser.error("{} -d takes seconds".format(options.monitor))
    if options.loop is not None and not 0.1 <= options.loop <= 86400:
        parser.error("--loop takes 0.1 to 86400 seconds")
    return options


def show(reading: Reading, options: argparse.Namespace, first: bool) -> List[str]:
    if options.query:
        found = report(reading, options.display)
        xml = ['<?xml version="1.0" ?>', ElementTree.tostring(found, "unicode")]
        return xml if options.xml_format else report_lines(found)
    if options.json or options.monitor is not None:
        return [as_json(reading)] if options.json else monitor(reading, options.monitor, first)
    if options.format is not None:
        return csv_lines(reading, options, first and "noheader" not in options.format)
    if options.list_gpus:
        of = [[short(gpu.values[k]) for k in ("index", "name", "uuid")] for gpu in reading.gpus]
        return [shown("GPU {}: {} (UUID: {})".format(*words)) for words in of]
    return table(reading)


def show_once(options: argparse.Namespace, first: bool) -> int:
    """Print the output once; a failure exits with NVML's code, as nvidia-smi does."""
    try:
        reading = read_once(options.id)
    except NvmlError as error:
        sys.stderr.write(f"fgpu-smi: {shown(str(error))}\n")
        return error.code if 0 < error.code < 255 else 255
    print("\n".join(show(reading, options, first)), flush=True)
    for problem in reading.problems:
        sys.stderr.write(f"fgpu-smi: {shown(problem)}\n")
    return 1 if reading.problems else 0


def main() -> int:
    options = parse_options(sys.argv[1:])
    try:
        status, shows = show_once(options, True), 1
        while options.loop is not None and status in (0, 1) and shows != options.count:
            time.sleep(options.loop)
            status, shows = max(status, show_once(options, False)), shows + 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        return 0  # the reader has gone: `| head`
    return status


if __name__ == "__main__":
    sys.exit(main())
