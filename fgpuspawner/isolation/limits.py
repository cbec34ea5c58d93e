"""The limits file of a session: read-only text that states the session's slice to libfgpu.

isolation/README.md has the format, version 1: the heading, ``session=``, ``managed=``, one ``device=UUID key=value
...`` line for each share, ``end``. libfgpu refuses every allocation if it cannot read the whole file.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from fgpu_scheduler import Device, FGPUError, Session, ShareMode, compute_of
from fgpuspawner.isolation.files import read_bounded, write_whole
from fgpuspawner.settings.isolation import MANAGED
from fgpuspawner.text.sessions import fgpu_of

VERSION = 1
REVISION_BYTES = 16
WORD_BYTES = 8
NAME = "limits"
REVISION = "revision"
"""File beside it, where a slice can change: a word that counts the changes, and the gate: 1 while it is closed.

libfgpu reads both before each call that needs the GPU. Sessions from before there was a gate have the first word only.
"""
LARGEST_BYTES = 16 * 1024
NOTHING = "fgpu-limits 1\nsession=0\nmanaged=refuse\nend\n"
"""Limits without a device: libfgpu refuses every allocation."""

HUNDREDTHS = 100

Slots = tuple[tuple[int, int], ...]
"""The hundredths of each period in which a session may run kernels: ``(first, end)`` without ``end``, ascending.

libfgpu counts the hundredths by the same clock in every session, so sessions with different slots run in turn.
"""

_DEVICE = re.compile(
    r"device=(?P<uuid>(?:GPU|MIG)-[!-~]{1,91}|[!-~]{1,253}/[!-~]{1,91})"
    r" memory_mib=(?P<memory>[0-9]{1,10}) device_mib=(?P<device>[0-9]{1,10})"
    r" context_mib=(?P<context>[0-9]{1,10}) compute_percent=(?P<percent>[0-9]{1,3})"
    r" mode=(?P<mode>memory|memory\+compute) slots=(?P<slots>[-0-9,]+)"
    r"(?: lending=(?P<lending>[0-9]{1,3}) most_percent=(?P<most>[0-9]{1,3}))?"
    r"(?: code_mib=(?P<code>0|[1-9][0-9]{0,9}))?"
)


class BadLimits(FGPUError):
    """A limits file cannot be read or written."""

    code = "bad_limits"


@dataclass(frozen=True, slots=True)
class DeviceLimit:
    """A session's limits on one device.

    ``slots`` is empty in mode memory. ``compute_percent`` is 0 for memory only. ``lending`` is its number among the
    sessions that lend there, from 1; 0 if it does not lend. ``most_percent`` caps its compute together with what it
    borrows. ``code_mib`` is the memory that the driver last counted for the code of kernels; None if that is not
    charged, as in sessions from before it was.
    """

    uuid: str
    memory_mib: int
    device_mib: int
    context_mib: int
    compute_percent: int
    mode: ShareMode
    slots: Slots
    lending: int = 0
    most_percent: int = 100
    code_mib: int | None = None

    @property
    def whole(self) -> bool:
        return self.memory_mib == self.device_mib


@dataclass(frozen=True, slots=True)
class Limits:
    """A session's limits on each of its devices."""

    session_id: int
    managed: str
    devices: tuple[DeviceLimit, ...]


def limits_of(
    session: Session,
    devices: Iterable[Device],
    neighbours: Iterable[Limits],
    *,
    managed: str,
    context_mib: Mapping[str, int],
    compute: bool = True,
    lends: bool = False,
    most_percent: int = 100,
) -> Limits:
    """Return the limits of a session that holds shares, with slots beside those of its ``neighbours``.

    ``context_mib`` is by UUID; a missing one is 0. Code is charged where contexts are, else the context would be counted
    as code. ``compute=False`` gives no slots, because something else limits
    compute. With ``lends`` idle compute is lent, up to ``most_percent``.

    Raises:
        BadLimits: a share's device is no longer configured.
    """
    assert session.placement is not None, "a session without shares has no limits"
    known = {d.uuid: d for d in devices}
    beside = [limit for n in neighbours if n.session_id != session.id for limit in n.devices]
    found: list[DeviceLimit] = []
    for share in session.placement.shares:
        device = known.get(share.device_uuid)
        if device is None:
            raise BadLimits(f"GPU {share.device_uuid} is no longer configured; ask for a new session")
        timed = compute and share.mode is ShareMode.MEMORY_COMPUTE
        others = [limit for limit in beside if limit.uuid == share.device_uuid]
        percent = share.compute_percent
        found.append(
            DeviceLimit(
                uuid=share.device_uuid,
                # A share from before a driver update can be larger than the device is now.
                memory_mib=min(share.memory_mib, device.memory_mib),
                device_mib=device.memory_mib,
                context_mib=context_mib.get(share.device_uuid, 0),
                compute_percent=percent,
                mode=ShareMode.MEMORY_COMPUTE if timed else ShareMode.MEMORY,
                slots=assign_slots([limit.slots for limit in others], percent) if timed else (),
                lending=_free_number(others) if timed and lends and percent < HUNDREDTHS else 0,
                most_percent=max(percent, most_percent) if timed and lends else HUNDREDTHS,
                code_mib=0 if device.simulated or context_mib.get(share.device_uuid) else None,
            )
        )
    return Limits(session.id, managed, tuple(found))


def resized(limits: Limits, session: Session, neighbours: Iterable[Limits]) -> Limits:
    """Return a session's limits, changed to its current share of its one device. The context charge stays.

    Raises:
        BadLimits: its shares are of other devices than its limits.
    """
    assert session.placement is not None, "a session without shares has no limits"
    shares = session.placement.shares
    own = [limit.uuid for limit in limits.devices]
    if len(own) != 1 or [share.device_uuid for share in shares] != own:
        raise BadLimits(f"the limits of session {session.id} are of other GPUs than its shares")
    (share,), (limit,) = shares, limits.devices
    percent = limit.compute_percent if limit.mode is ShareMode.MEMORY else share.compute_percent
    memory_mib = min(share.memory_mib, limit.device_mib)
    if (memory_mib, percent) == (limit.memory_mib, limit.compute_percent):
        return limits
    beside = [d.slots for n in neighbours for d in n.devices if d.uuid == limit.uuid]
    changed = replace(
        limit,
        memory_mib=memory_mib,
        compute_percent=percent,
        slots=assign_slots(beside, percent) if limit.mode is ShareMode.MEMORY_COMPUTE else (),
        most_percent=max(percent, limit.most_percent),
    )
    return replace(limits, devices=(changed,))


def parked(limits: Limits) -> Limits:
    """Return the limits of a parked session as its neighbours see them: it keeps its numbers and needs no slots."""
    return replace(limits, devices=tuple(replace(d, slots=()) for d in limits.devices))


def rejoined(limits: Limits, neighbours: Iterable[Limits]) -> Limits:
    """Return the limits of a session that was parked, with slots beside those of its neighbours."""
    others = list(neighbours)

    def slots(limit: DeviceLimit) -> Slots:
        beside = [d.slots for n in others for d in n.devices if d.uuid == limit.uuid]
        return assign_slots(beside, limit.compute_percent) if limit.slots else ()

    return replace(limits, devices=tuple(replace(d, slots=slots(d)) for d in limits.devices))


def _free_number(others: Iterable[DeviceLimit]) -> int:
    """Return the least number that no other session has; there are as many as there can be shares."""
    used = {limit.lending for limit in others}
    return next((number for number in range(1, HUNDREDTHS + 1) if number not in used), 0)


def render(limits: Limits) -> str:
    lines = [f"fgpu-limits {VERSION}", f"session={limits.session_id}", f"managed={limits.managed}"]
    lines.extend(
        f"device={d.uuid} memory_mib={d.memory_mib} device_mib={d.device_mib} context_mib={d.context_mib}"
        f" compute_percent={d.compute_percent} mode={d.mode} slots={render_slots(d.slots) or '-'}"
        + (f" lending={d.lending} most_percent={d.most_percent}" if d.lending else "")
        + (f" code_mib={d.code_mib}" if d.code_mib is not None else "")
        for d in limits.devices
    )
    return "\n".join([*lines, "end", ""])


def parse(text: str) -> Limits:
    """Return the limits in the text of a limits file; raises BadLimits if it is not one."""
    lines = text.split("\n")
    session = re.fullmatch(r"session=([0-9]{1,18})", lines[1]) if len(lines) > 1 else None
    if lines[0] != f"fgpu-limits {VERSION}" or session is None or lines[-2:] != ["end", ""]:
        raise BadLimits(f"not limits of version {VERSION}, or not all of them")
    managed = lines[2].removeprefix("managed=")
    if managed not in MANAGED or len(lines) < 6:
        raise BadLimits("line 3 must be managed=charge or managed=refuse, and devices must follow")
    return Limits(int(session[1]), managed, tuple(_device(line) for line in lines[3:-2]))


def _device(line: str) -> DeviceLimit:
    match = _DEVICE.fullmatch(line)
    if match is None:
        raise BadLimits(f"{line[:120]!r} is no device")
    mode, text = ShareMode(match["mode"]), match["slots"]
    try:
        own = () if text == "-" and mode is ShareMode.MEMORY else parse_slots(text)
    except ValueError as e:
        raise BadLimits(str(e)) from None
    return DeviceLimit(
        uuid=match["uuid"],
        memory_mib=int(match["memory"]),
        device_mib=int(match["device"]),
        context_mib=int(match["context"]),
        compute_percent=int(match["percent"]),
        mode=mode,
        slots=own,
        lending=int(match["lending"] or 0),
        most_percent=int(match["most"] or HUNDREDTHS),
        code_mib=None if match["code"] is None else int(match["code"]),
    )


def write(folder: Path, limits: Limits) -> Path:
    """Write the limits file into a session's folder, atomically and read-only, and return its path."""
    text = render(limits).encode("ascii")
    if len(text) > LARGEST_BYTES:
        raise BadLimits(f"the limits of {len(limits.devices)} devices are more than {LARGEST_BYTES} bytes")
    return write_whole(folder / NAME, text, mode=0o444)


def begin_revisions(folder: Path) -> Path:
    """Write the file that counts the changes of the limits, with an open gate, and return its path."""
    return write_whole(folder / REVISION, bytes(REVISION_BYTES), mode=0o444)


def change(folder: Path, limits: Limits) -> None:
    """Replace the limits of a running session; libfgpu reads them before its next grant.

    The limits are written before the count, so a process that sees the new count finds the new limits. After a crash in
    between, running processes keep the old limits until the next change.

    Raises:
        BadLimits: the session was launched with limits that cannot change.
    """
    if not (folder / REVISION).is_file():
        raise BadLimits(
            f"{folder} has no {REVISION}: the session was launched with limits that cannot change"
        )
    write(folder, limits)
    _set_word(folder, 0, lambda before: before + 1)


def close_gate(folder: Path) -> None:
    """Make a session's CUDA calls wait, from their next one on, until `open_gate`; idempotent.

    Raises:
        BadLimits: the session was launched by a version without a gate.
    """
    _set_word(folder, 1, lambda _: 1)


def open_gate(folder: Path) -> None:
    """Let a session's CUDA calls go on; idempotent, also for a session without a gate."""
    if gate_closed(folder):
        _set_word(folder, 1, lambda _: 0)


def gate_closed(folder: Path) -> bool:
    """Return whether a session's CUDA calls wait; they never do in a session without a gate."""
    try:
        return read_bounded(folder / REVISION, REVISION_BYTES)[WORD_BYTES:] not in (b"", bytes(WORD_BYTES))
    except FileNotFoundError:
        return False


def _set_word(folder: Path, index: int, new: Callable[[int], int]) -> None:
    """Change a word of the file ``revision`` by one store, so that a reader sees the old value or the new one."""
    path = folder / REVISION
    if not path.is_file() or path.stat().st_size < (index + 1) * WORD_BYTES:
        raise BadLimits(f"{path} has no gate: the session was launched by an older version")
    path.chmod(0o644)
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            with mmap.mmap(descriptor, (index + 1) * WORD_BYTES) as page:
                word = ctypes.c_uint64.from_buffer(page, index * WORD_BYTES)
                word.value = new(word.value)
                del word
                page.flush()
        finally:
            os.close(descriptor)
    finally:
        path.chmod(0o444)


def read(folder: Path) -> Limits:
    """Return the limits in a session's folder; raises BadLimits if the file cannot be read."""
    try:
        return parse(read_bounded(folder / NAME, LARGEST_BYTES).decode("ascii"))
    except (OSError, UnicodeDecodeError) as e:
        raise BadLimits(f"{folder / NAME} cannot be read: {e}") from e


def environment(session: Session, *, limits_path: str, simulated: bool) -> dict[str, str]:
    """Return the variables that describe the slice to the session; only the limits file is enforced."""
    assert session.placement is not None
    shares = session.placement.shares
    uuids = ",".join(s.device_uuid for s in shares)
    return {
        "FGPU_SESSION_ID": str(session.id),
        "FGPU_AMOUNT": fgpu_of(session) or "",
        "FGPU_MEMORY_MIB": str(sum(s.memory_mib for s in shares)),
        "FGPU_COMPUTE_PERCENT": str(compute_of(shares) or ""),
        "FGPU_LIMITS_FILE": limits_path,
        "FGPU_SIMULATED": "1" if simulated else "0",
        "NVIDIA_VISIBLE_DEVICES": uuids,
        "NVIDIA_DRIVER_CAPABILITIES": "compute,utility",
        "CUDA_VISIBLE_DEVICES": uuids,
    }


# -- slots ------------------------------------------------------------------------------------------------


def assign_slots(taken: Iterable[Slots], percent: int) -> Slots:
    """Return slots of ``percent`` hundredths in all, beside those that the neighbours have ``taken``.

    1. The smallest gap that is large enough, the first of equal ones, so that large gaps stay whole.
    2. Otherwise the largest gaps first.
    3. If the gaps are too small (an administrator changed the unit while sessions ran), the rest overlaps the
       hundredths with the fewest holders.

    Raises:
        ValueError: ``percent`` is not 1 to 100.
    """
    if not 1 <= percent <= HUNDREDTHS:
        raise ValueError(f"{percent} is no share of compute; it must be 1 to 100")
    holders = [0] * HUNDREDTHS
    for slots in taken:
        for first, end in slots:
            for hundredth in range(first, end):
                holders[hundredth] += 1
    gaps = sorted(_runs(h for h in range(HUNDREDTHS) if not holders[h]), key=lambda gap: gap[1] - gap[0])
    for first, end in gaps:
        if end - first >= percent:
            return ((first, first + percent),)
    chosen: list[int] = []
    for first, end in sorted(gaps, key=lambda gap: (gap[0] - gap[1], gap[0])):
        chosen.extend(range(first, min(end, first + percent - len(chosen))))
    held = sorted((h for h in range(HUNDREDTHS) if holders[h]), key=lambda h: (holders[h], -h))
    chosen.extend(held[: percent - len(chosen)])
    return tuple(_runs(sorted(chosen)))


def render_slots(slots: Slots) -> str:
    return ",".join(f"{first}-{end}" for first, end in slots)


def parse_slots(text: str) -> Slots:
    """Return the slots in such a text; raises ValueError if it is not one."""
    found: list[tuple[int, int]] = []
    for piece in text.split(","):
        first, dash, end = piece.partition("-")
        if not (dash and first.isascii() and first.isdigit() and end.isascii() and end.isdigit()):
            raise ValueError(f"{piece!r} is no slot such as 50-75")
        slot = int(first), int(end)
        if not (found[-1][1] if found else 0) <= slot[0] < slot[1] <= HUNDREDTHS:
            raise ValueError(f"{piece!r} is not within 0-100, or not after the slot before it")
        found.append(slot)
    return tuple(found)


def _runs(ascending: Iterable[int]) -> list[tuple[int, int]]:
    runs: list[tuple[int, int]] = []
    for number in ascending:
        if runs and runs[-1][1] == number:
            runs[-1] = runs[-1][0], number + 1
        else:
            runs.append((number, number + 1))
    return runs
