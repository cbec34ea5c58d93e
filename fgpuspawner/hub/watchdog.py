"""The watchdog: compares the GPU memory that the driver reports for each session with the session's limit.

libfgpu's accounting file can be written by the session, and a process can bypass libfgpu; the driver's figures cannot
be changed by either.

1. `compare` finds the sessions above their limit plus a tolerance in one snapshot of the GPUs.
2. `next_strikes` turns this into strikes. Each strike warns the owner; the third one ends the session.
3. Strikes fade slowly, so a session that frees its memory between snapshots still collects them and is ended.
4. `Judge` warns, ends, and writes the audit log.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Protocol, assert_never

from fgpu_scheduler import LAUNCHING, MIB, EndCause, FGPUError, Queue, Session, SystemClock, holds_shares
from fgpuspawner.engines.base import Launched
from fgpuspawner.isolation.backends import BACKENDS
from fgpuspawner.isolation.facts import CONTEXT_GUESS_MIB
from fgpuspawner.isolation.gpu_poller import GpuSnapshot, on_gpus
from fgpuspawner.isolation.manager import Isolation
from fgpuspawner.isolation.nvml_reader import DeviceUse

log = logging.getLogger("fgpu.watchdog")

WATCHED = frozenset(kind.name for kind in BACKENDS if kind.watched)
CODE_MIB = 128
"""What a process's kernels may take on a real GPU before libfgpu or the host counts it; the tolerance covers one process.
"""
STRIKES = 3
"""With this many strikes that have not faded, a session is ended."""
FADES_IN = 30
"""A strike fades after this many mean intervals within the limit."""
SAY_AGAIN_AFTER = 60
"""Snapshots after which a lasting trouble is logged again."""

Record = Callable[[Session, str, str], Awaitable[None]]
"""Adds a line to the audit log: session, action, details."""


@dataclass(frozen=True, slots=True)
class Allowance:
    """What a session may hold of a device, in MiB."""

    limit_mib: int
    #: For each process, where contexts are not charged to the limit.
    context_mib: int = 0
    #: For each process but the first.
    code_mib: int = 0


class Offence(Protocol):
    """An offence that a session is warned of and ended for."""

    @property
    def words(self) -> str:
        """What the session does, for the log: "holds ..."."""

    @property
    def advice(self) -> tuple[str, str, str]:
        """Words for its owner: what the session does, what is repeated ("if it is found ..."), and the advice."""

    @property
    def ended(self) -> str:
        """The message for the owner of the ended session."""


@dataclass(frozen=True, slots=True)
class OverLimit:
    """A session holds more of a device than it may."""

    session_id: int
    uuid: str
    used_mib: int
    limit_mib: int

    @property
    def words(self) -> str:
        return f"holds {self.used_mib} MiB of GPU {self.uuid}, above its limit of {self.limit_mib} MiB"

    @property
    def advice(self) -> tuple[str, str, str]:
        return (
            f"this session holds {self.used_mib} MiB of GPU memory, above its limit of {self.limit_mib} MiB",
            "above it",
            "End the programs that use the GPU",
        )

    @property
    def ended(self) -> str:
        return (
            f"your session was ended because it held {self.used_mib} MiB of GPU memory, above its limit of "
            f"{self.limit_mib} MiB, also after a warning; its programs took memory that the limit does not count, or "
            "got around it"
        )


@dataclass(frozen=True, slots=True)
class Found:
    """The result of one snapshot: sessions above their limit, sessions without figures, and (device, pid) of no
    session.
    """

    above: Mapping[int, OverLimit]
    unknown: frozenset[int]
    unknown_processes: frozenset[tuple[str, int]]


def compare(
    snapshot: GpuSnapshot, allowances: Mapping[int, Mapping[str, Allowance]], *, tolerance_mib: int
) -> Found:
    """Return the sessions that hold more than they may. Pure.

    ``allowances`` has the allowances of the watched sessions, by device. On any other device the limit is the
    tolerance.
    """
    above: dict[int, OverLimit] = {}
    silent = {uuid for uuid, use in snapshot.devices.items() if not isinstance(use, DeviceUse)}
    unknown = {s for s, own in allowances.items() if silent.intersection(own)}
    unknown_processes: set[tuple[str, int]] = set()
    for uuid, use in sorted(snapshot.devices.items()):
        used: dict[int, list[int]] = {}
        for process in use.processes if isinstance(use, DeviceUse) else ():
            session_id = snapshot.owners.get(process.pid)
            if session_id is None:
                unknown_processes.add((uuid, process.pid))
            elif session_id in allowances:
                if process.used_bytes is None:
                    unknown.add(session_id)
                # A process that has ended holds nothing, and gets no allowance for its context.
                if process.used_bytes != 0:
                    used.setdefault(session_id, []).append(process.used_bytes or 0)
        for session_id, amounts in sorted(used.items()):
            own = allowances[session_id].get(uuid, Allowance(0))
            allowed_mib = own.limit_mib + tolerance_mib + own.context_mib * len(amounts)
            allowed_mib += own.code_mib * (len(amounts) - 1)
            used_mib = -(-sum(amounts) // MIB)
            if used_mib > allowed_mib:
                above.setdefault(session_id, OverLimit(session_id, uuid, used_mib, own.limit_mib))
    # Known figures above the limit are enough.
    return Found(above, frozenset(unknown - set(above)), frozenset(unknown_processes))


class Consequence(Enum):
    """The consequence of one snapshot for one session."""

    NOTHING = auto()
    WARN = auto()
    END = auto()
    WITHDRAW = auto()


@dataclass(frozen=True, slots=True)
class Strikes:
    """A session's strikes that have not faded, the times of its last strike and last check, and whether it was warned."""

    count: float = 0.0
    last_at_s: float | None = None
    checked_at_s: float = 0.0
    warned: bool = False


def next_strikes(
    before: Strikes, *, at_s: float, is_above: bool | None, every_s: float
) -> tuple[Strikes, Consequence]:
    """Return a session's strikes after a check, and the consequence. Pure.

    ``is_above`` None (unknown) changes nothing. After a warning the session has one mean interval before the next
    strike.
    """
    now = replace(before, checked_at_s=at_s)
    match is_above:
        case None:
            return now, Consequence.NOTHING
        case False:
            within_limit_s = at_s - before.checked_at_s
            now = replace(
                now, count=max(0.0, before.count - within_limit_s / (FADES_IN * every_s)), warned=False
            )
            return now, Consequence.WITHDRAW if before.warned else Consequence.NOTHING
        case True:
            if before.last_at_s is not None and at_s - before.last_at_s < every_s:
                return now, Consequence.NOTHING
            now = replace(now, count=before.count + 1, last_at_s=at_s, warned=True)
            return now, Consequence.END if now.count > STRIKES - 1 else Consequence.WARN
        case _:
            assert_never(is_above)


def warning_words(offence: Offence, strikes: float, *, ends: bool = True) -> str:
    what, found, advice = offence.advice
    if not ends:
        return f"{what}. {advice}"
    more = int(STRIKES - strikes) or 1
    return f"{what}; if it is found {found} {'once' if more == 1 else f'{more} times'} more, it is ended. {advice}"


class Judge:
    """Counts strikes for one kind of offence, warns, ends, and takes warnings back. Without ``ends`` it only warns."""

    def __init__(self, queue: Queue, record: Record, *, every_s: float, ends: bool = True) -> None:
        self._queue = queue
        self._record = record
        self._every_s = every_s
        self._ends = ends
        self._strikes: dict[int, Strikes] = {}

    def keep(self, live: Sequence[Session]) -> None:
        self._strikes = {s.id: self._strikes[s.id] for s in live if s.id in self._strikes}

    async def judge(self, session_id: int, at_s: float, offence: Offence | None, *, known: bool) -> None:
        """Count one check of a session, and carry out the consequence."""
        before = self._strikes.get(session_id, Strikes(checked_at_s=at_s))
        is_above = offence is not None if known else None
        after, step = next_strikes(before, at_s=at_s, is_above=is_above, every_s=self._every_s)
        if await self._carry_out(session_id, step, offence, after):
            self._strikes[session_id] = after
        else:
            # A strike without a warning does not count; the next check tries again.
            self._strikes[session_id] = replace(before, checked_at_s=at_s)

    async def _carry_out(
        self, session_id: int, step: Consequence, offence: Offence | None, after: Strikes
    ) -> bool:
        """Carry out the consequence and return whether that worked; a failure for one session affects no other."""
        if step is Consequence.NOTHING:
            return True
        try:
            if step is Consequence.WITHDRAW:
                log.info("Session %d is within its GPU limit again", session_id)
                await self._queue.warn(session_id, None)
                return True
            assert offence is not None
            is_end = step is Consequence.END and self._ends
            words = f"{offence.words}; {after.count:.1f} of {STRIKES} strikes"
            if is_end:
                log.error("Session %d %s: it is ended", session_id, words)
                changed = await self._queue.end(session_id, EndCause.ISOLATION_FAILED, offence.ended)
            else:
                log.warning("Session %d %s: its owner is warned", session_id, words)
                changed = await self._queue.warn(
                    session_id, warning_words(offence, after.count, ends=self._ends)
                )
        except FGPUError as e:
            log.error("The watchdog could not do this: %s", e)
            return False
        except Exception:
            log.exception("The watchdog could not do this")
            return False
        try:
            await self._record(changed, "watchdog.end" if is_end else "watchdog.strike", words)
        except FGPUError as e:
            log.error("The audit log has no line of this: %s", e)
        return True


class Watchdog:
    """Checks every snapshot. ``every_s`` is the mean time between two of the same machine."""

    def __init__(
        self,
        isolation: Isolation,
        queue: Queue,
        record: Record,
        *,
        every_s: float,
        tolerance_mib: int,
    ) -> None:
        self._isolation = isolation
        self._judge = Judge(queue, record, every_s=every_s)
        self._tolerance_mib = tolerance_mib
        self._unknown_processes: frozenset[tuple[str, int]] = frozenset()
        self._troubles: dict[str, int] = {}

    async def observe(self, snapshot: GpuSnapshot, live: Sequence[Session]) -> None:
        """Warn and end the sessions that a snapshot shows above their limit."""
        self._judge.keep(live)
        there = watched_on(snapshot, live)
        watched = {s.id: self._allowances(s) for s in live if s.id in there and launched_with(s) in WATCHED}
        if not watched:
            return
        for uuid, use in snapshot.devices.items():
            silent: list[int] = []
            if isinstance(use, DeviceUse):
                self._log_recovery(uuid)
                silent = [process.pid for process in use.processes if process.used_bytes is None]
            else:
                self._log_trouble(uuid, f"GPU {uuid}: {use}")
            if silent:
                self._log_trouble(f"amounts of {uuid}", f"GPU {uuid} tells no amount for processes {silent}")
            else:
                self._log_recovery(f"amounts of {uuid}")
        found = compare(snapshot, watched, tolerance_mib=self._tolerance_mib)
        self._log_unknown_processes(snapshot.devices, found.unknown_processes, live)
        for session_id in watched:
            known = session_id not in found.unknown
            await self._judge.judge(session_id, snapshot.at_s, found.above.get(session_id), known=known)

    def _allowances(self, session: Session) -> dict[str, Allowance]:
        assert session.placement is not None
        if not holds_shares(session):
            return {share.device_uuid: Allowance(0) for share in session.placement.shares}
        real = {d.uuid: not d.simulated for d in self._isolation.devices_of(session)}
        charged = self._isolation.host.context_mib
        return {
            share.device_uuid: Allowance(
                share.memory_mib,
                context_mib=CONTEXT_GUESS_MIB
                if real.get(share.device_uuid) and not charged.get(share.device_uuid)
                else 0,
                code_mib=CODE_MIB if real.get(share.device_uuid) else 0,
            )
            for share in session.placement.shares
        }

    def _log_unknown_processes(
        self, uuids: Iterable[str], unknown_processes: frozenset[tuple[str, int]], live: Sequence[Session]
    ) -> None:
        """Log each process that uses a shared GPU outside any session, once."""
        # A container's processes are known to be a session's only once the container runs.
        if any(s.state in LAUNCHING for s in live):
            return
        for uuid, pid in sorted(unknown_processes - self._unknown_processes):
            log.warning("Process %d uses GPU %s and belongs to no session", pid, uuid)
        here = frozenset(uuids)
        self._unknown_processes = (
            frozenset(s for s in self._unknown_processes if s[0] not in here) | unknown_processes
        )

    def _log_trouble(self, about: str, words: str) -> None:
        """Log why the watchdog cannot check: at once, and again while it lasts."""
        checks = self._troubles.get(about, 0)
        if checks % SAY_AGAIN_AFTER == 0:
            log.error("The watchdog does not know what sessions hold, and ends nobody for it: %s", words)
        self._troubles[about] = checks + 1

    def _log_recovery(self, about: str) -> None:
        if self._troubles.pop(about, 0):
            log.warning("The watchdog sees again: %s", about)


def watched_on(snapshot: GpuSnapshot, live: Sequence[Session]) -> frozenset[int]:
    """Return the sessions to check in a snapshot: a parked one only if the snapshot is younger than its parking."""
    taken_at_s = SystemClock().now_s() - (time.monotonic() - snapshot.at_s)
    return on_gpus(
        snapshot.devices, [s for s in live if s.parked_at_s is None or s.parked_at_s + 1 < taken_at_s]
    )


def launched_with(session: Session) -> str | None:
    """Return the isolation that a session was launched with; the setting may have changed since."""
    launched = Launched.from_json(session.launched)
    return None if launched is None else launched.isolation
