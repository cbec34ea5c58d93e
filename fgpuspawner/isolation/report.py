"""The probe's report from inside a session, and its check against the limits. Pure.

isolation/probe/README.md has the format. The session's image runs the probe, so the text is untrusted.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from signal import Signals
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, AliasChoices, AliasPath, BeforeValidator, Field, TypeAdapter

from fgpu_scheduler import MIB, FGPUError
from fgpuspawner.isolation.limits import DeviceLimit, Limits
from fgpuspawner.text.tables import printable

LARGEST_BYTES = 64 * 1024
MOST_DEVICES = 64
MOST_PROCESSES = 1024
LARGEST_NUMBER = 2**63
ACCOUNTING = "--accounting"
OUT_OF_MEMORY = 2
"""CUDA_ERROR_OUT_OF_MEMORY."""


class BadReport(FGPUError):
    """A probe printed no report, or another than the requested one."""

    code = "bad_report"


@dataclass(frozen=True, slots=True)
class Answer:
    """The probe's output, and its exit status if known."""

    output: bytes
    status: int | None


def _by_way(found: object) -> object:
    if isinstance(found, dict):
        return {way: total for way, total in found.items() if total is not None}
    return {} if found is None else {"the context": found}


Number = Annotated[int, Field(strict=True, ge=0, lt=LARGEST_NUMBER)]
Text = Annotated[str, Field(strict=True), AfterValidator(lambda text: printable(text[:4096]))]
"""It goes into logs and pages."""
Name = Annotated[Text, BeforeValidator(lambda found: "?" if found is None else found)]
Flag = Annotated[bool, BeforeValidator(lambda found: found is True)]


@dataclass(frozen=True, slots=True)
class SeenDevice:
    """A device as one library shows it. ``name`` is NVML's UUID, or CUDA's UUID in hexadecimal."""

    error: Text | None
    name: Annotated[Name, Field(validation_alias=AliasChoices("uuid_bytes", "uuid"))] = "?"
    totals: Annotated[dict[Text, Number], BeforeValidator(_by_way), Field(validation_alias="total_bytes")] = (
        field(default_factory=dict)
    )
    """Total memory in bytes, by the API call that returned it."""
    over: Annotated[Number | None, Field(validation_alias=AliasPath("over", "code"))] = None
    """The status of an allocation just above the limit, if it was tried."""


@dataclass(frozen=True, slots=True)
class Section:
    """What one library reports. It has devices only with status ``ok``."""

    status: Text
    error: Text | None = None
    code: Number | None = None
    devices: Annotated[tuple[SeenDevice, ...], Field(max_length=MOST_DEVICES)] = ()


@dataclass(frozen=True, slots=True)
class Mapped:
    """A mapped file with libfgpu's name."""

    path: Text
    device: Text
    inode: Number


@dataclass(frozen=True, slots=True)
class Preload:
    """The file that names the libraries loaded into every process."""

    error: Text | None
    content: Annotated[str, Field(strict=True)] = ""
    read_only: Flag = False
    mount: Flag = False


@dataclass(frozen=True, slots=True)
class ProbeReport:
    """A probe's report. ``libfgpu`` has the loaded libraries of that name; None if unknown."""

    probe: Literal[1]
    libfgpu: Annotated[tuple[Mapped, ...], Field(max_length=MOST_DEVICES)] | None
    preload: Preload
    cuda: Section
    nvml: Section
    allocate: Section | None = None
    nonce: object = None


@dataclass(frozen=True, slots=True)
class SlotReport:
    """Which processes have a slot in libfgpu's accounting file, and which of the requested ones run.

    ``lately``: requested processes that took a slot lately and may have ended. ``behind``: processes that could not
    read their changed limits and compute by the old ones. ``amounts`` has a row for each process: its number, then its
    charged bytes of each device. ``held`` is the sum of the rows by device; empty without an accounting file.
    """

    probe: Literal[1]
    slots: tuple[Number, ...]
    running: tuple[Number, ...]
    amounts: tuple[tuple[Number, ...], ...] = ()
    held: tuple[Number, ...] = ()
    behind: tuple[Number, ...] = ()
    lately: tuple[Number, ...] = ()
    nonce: object = None


@dataclass(frozen=True, slots=True)
class CheckpointedProcess:
    """What the driver did with one process: the state that it is left in, or the driver's error."""

    pid: Number
    state: Text
    error: Text | None
    ms: Number


@dataclass(frozen=True, slots=True)
class CheckpointReport:
    """What the driver did with the GPU memory of a session's processes.

    Unless it is ``done``, ``why`` has words for the log, and all processes are as before, except where their ``state``
    says otherwise.
    """

    probe: Literal[1]
    done: Flag
    processes: Annotated[tuple[CheckpointedProcess, ...], Field(max_length=MOST_PROCESSES)]
    why: Text | None = None
    nonce: object = None


ReportT = TypeVar("ReportT", ProbeReport, SlotReport, CheckpointReport)
_FORMS: Mapping[type, TypeAdapter[Any]] = {
    kind: TypeAdapter(kind) for kind in (ProbeReport, SlotReport, CheckpointReport)
}


def probe_command(nonce: str, limits: Limits, *, timeout_s: int) -> list[str]:
    """Return the probe's command for these limits. It tries to exceed the limit of each device that is not whole."""
    words = ["probe", "--nonce", nonce, "--timeout", str(timeout_s)]
    for limit in limits.devices:
        if not limit.whole:
            words += ["--allocate", f"{limit.uuid}={limit.memory_mib}"]
    return words


def static_command(nonce: str, *, timeout_s: int) -> list[str]:
    """Return the command of the static probe, which runs no code of the image."""
    return ["probe-static", "--nonce", nonce, "--timeout", str(timeout_s)]


def slots_command(nonce: str, accounting: str, pids: Sequence[int]) -> list[str]:
    asked = ",".join(map(str, pids))
    return ["probe-static", "--nonce", nonce, ACCOUNTING, accounting, "--processes", asked]


def checkpoint_command(nonce: str, accounting: str, what: str, *, timeout_s: int) -> list[str]:
    """Return the probe's command that moves the GPU memory of all processes of a session.

    ``what`` is ``park`` (to the host's memory), ``resume`` (back) or ``state`` (moves nothing). It has to run as the user
    of the session's processes.
    """
    return ["probe", "--nonce", nonce, "--timeout", str(timeout_s), f"--{what}", accounting]


# --- Reading ---


def read_answer(kind: type[ReportT], answer: Answer, nonce: str) -> ReportT:
    """Return the report of this kind with this nonce.

    Raises:
        BadReport: with words for the log and the owner that contain no text of the session. It is then unknown what the
            probe did.
    """
    if len(answer.output) > LARGEST_BYTES:
        raise BadReport("the check printed more than a check does")
    if answer.status not in (0, None):
        raise BadReport(f"the check {_ended(answer.status)}")
    try:
        found: ReportT = _FORMS[kind].validate_json(answer.output)
    except ValueError:
        raise BadReport("the check printed no report") from None
    if found.nonce != nonce:
        raise BadReport("the check printed another report than the one that was asked for")
    return found


def _ended(status: int) -> str:
    """Return an exit status in words. A signal is -N for a process of this host, 128 + N for one in a container."""
    number = -status if status < 0 else status - 128
    crashed = number in set(Signals) - {Signals.SIGKILL}
    return f"crashed by {Signals(number).name}" if crashed else f"ended with status {status}"


# --- What is wrong ---


def problems(limits: Limits, report: ProbeReport) -> list[str]:
    """Return where the session sees other limits or could exceed them; empty if nowhere."""
    found: list[str] = []
    by_uuid = {limit.uuid: limit for limit in limits.devices}
    by_bytes = {uuid_bytes(uuid): limit for uuid, limit in by_uuid.items()}
    for label, section, known in (("CUDA", report.cuda, by_bytes), ("NVML", report.nvml, by_uuid)):
        if section.status != "ok":
            found.append(f"{label} could not be asked: {_why(section)}")
            continue
        own = [device for device in section.devices if device.name in known]
        for uuid in (limit.uuid for name, limit in known.items() if name not in [d.name for d in own]):
            found.append(f"{label} does not show GPU {uuid}")
        if label == "CUDA" and len(own) != len(section.devices):
            # NVML may also show GPUs that cannot be used.
            found.append(f"{label} shows {len(section.devices) - len(own)} GPUs that are not the session's")
        for device in own:
            found.extend(_wrong_totals(label, known[device.name], device))
    if report.allocate is not None:
        found.extend(_wrong_allocations(by_uuid, report.allocate))
    elif any(not limit.whole for limit in limits.devices):
        found.append("allocating more than the limit was not tried")
    return found


def _why(section: Section) -> str:
    return section.status if section.error is None else f"{section.status}, {section.error[:200]}"


def _wrong_totals(label: str, limit: DeviceLimit, device: SeenDevice) -> list[str]:
    if device.error is not None:
        return [f"{label} fails for GPU {limit.uuid}: {device.error[:200]}"]
    if not device.totals:
        return [f"{label} does not tell the memory of GPU {limit.uuid}"]
    expected = limit.memory_mib * MIB
    return [
        f"{label} reported {total // MIB} MiB of GPU {limit.uuid} ({way}), not {limit.memory_mib} MiB"
        for way, total in sorted(device.totals.items())
        # The driver keeps some memory of a whole device to itself.
        if (total > expected or total == 0 if limit.whole else total != expected)
    ]


def _wrong_allocations(limits: Mapping[str, DeviceLimit], section: Section) -> list[str]:
    if section.status != "ok":
        full = section.status == "failed" and section.code == OUT_OF_MEMORY
        return [] if full else [f"allocating could not be tried: {_why(section)}"]
    found: list[str] = []
    tried = {device.name: device for device in section.devices}
    for uuid, limit in limits.items():
        if limit.whole:
            continue
        device = tried.get(uuid)
        if device is None:
            found.append(f"allocating on GPU {uuid} was not tried")
        elif device.error is not None:
            # Not even a context fits, so nothing above the limit does.
            if f"({OUT_OF_MEMORY})" not in device.error:
                found.append(f"allocating on GPU {uuid} could not be tried: {device.error[:200]}")
        elif device.over == 0:
            found.append(f"more than {limit.memory_mib} MiB of GPU {uuid} could be allocated")
        elif device.over != OUT_OF_MEMORY:
            found.append(
                f"allocating more than {limit.memory_mib} MiB of GPU {uuid} failed with {device.over}, "
                f"not with {OUT_OF_MEMORY}"
            )
    return found


def missing_library(report: ProbeReport, library: tuple[str, int] | str) -> list[str]:
    """Return what is wrong unless exactly the host's library is loaded into the session's processes.

    ``library`` is its device and inode; for another machine's host the path of its mount.
    """
    if report.libfgpu is None:
        return ["it cannot be told whether libfgpu is loaded"]
    mapped = [one.path if isinstance(library, str) else (one.device, one.inode) for one in report.libfgpu]
    if library not in mapped:
        return ["libfgpu is not loaded into the session's processes"]
    others = len(mapped) - 1
    return [f"{others} other libraries of its name are loaded beside libfgpu"] if others else []


def wrong_preload(report: ProbeReport | None, content: str) -> list[str]:
    """Return what is wrong with the file that names the library, as the static probe sees it."""
    if report is None:
        return ["/etc/ld.so.preload was not looked at"]
    preload = report.preload
    if preload.error is not None:
        return [f"/etc/ld.so.preload cannot be read: {preload.error[:100]}"]
    if preload.content != content:
        return ["/etc/ld.so.preload is not the one of the session"]
    if not (preload.mount and preload.read_only):
        return ["/etc/ld.so.preload is no read-only mount"]
    return []


def uuid_bytes(uuid: str) -> str:
    """Return a device's UUID as CUDA shows it, in hexadecimal."""
    name = uuid.partition("-")[2]
    digits = name.replace("-", "").lower()
    if re.fullmatch(r"[0-9a-f]{32}", digits):
        return digits
    # A simulated device's name is no UUID: CUDA shows its 128-bit FNV-1a hash.
    value = 0x6C62272E07BB014262B821756295C58D
    for byte in name.encode():
        value = (value ^ byte) * 0x0000000001000000000000000000013B % 2**128
    return f"{value:032x}"


def not_in_force(limits: Limits, found: Sequence[str], *, image: str) -> str:
    """Return the message for the owner of a session that was ended for these problems."""
    amounts = " and ".join(f"{limit.memory_mib} MiB" for limit in limits.devices)
    totals = [match[0] for p in found if (match := re.match(r"[A-Z]+ reported [0-9]+ MiB", p))]
    shown = (totals or found)[0]
    return (
        f"your session was ended because its GPU limit of {amounts} was not in force ({shown[:300]}); this is usually "
        f"the fault of the image ({image}): try another one, or ask an administrator"
    )
