"""The watchdog: what the driver says that each session holds, against what it may.

What libfgpu counts is in a file that the session itself can write, and a process can get around libfgpu. Neither
changes what the driver says. Each look that finds a session above its limit and a tolerance is a strike, of which its
owner is warned. Strikes fade slowly: who frees the memory between looks gathers them all the same, and is ended.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Protocol, assert_never

from fgpu_scheduler import LAUNCHING, EndCause, FGPUError, Session
from fgpuspawner.engines.base import Launched
from fgpuspawner.isolation.facts import CONTEXT_GUESS_MIB
from fgpuspawner.isolation.gpu_poller import GpuSnapshot, running_on
from fgpuspawner.isolation.manager import BACKENDS, Isolation
from fgpuspawner.isolation.nvml_reader import DeviceUse

log = logging.getLogger("fgpu.watchdog")

MIB = 2**20
WATCHED = frozenset(kind.name for kind in BACKENDS if kind.watched)
CODE_MIB = 256
"""What a process's kernels take beside its context on a real GPU: nothing counts it, and the tolerance covers one."""
STRIKES = 3
"""With so many, as far as they have not faded, a session is ended."""
FADES_IN = 30
"""So many times the time between two looks it takes for a strike to fade, in which the session keeps to its limit."""
SAY_AGAIN_AFTER = 60
"""Looks after which a trouble that lasts is logged again."""

Record = Callable[[Session, str, str], Awaitable[None]]
"""Writes a line of a session, an action and details into the audit log."""


@dataclass(frozen=True, slots=True)
class Allowance:
    """What a session may hold of a device."""

    limit_mib: int
    context_mib: int = 0
    """For each process, where contexts are not charged to the limit."""
    code_mib: int = 0
    """For each process but one."""


class Offence(Protocol):
    """What a session is warned of, and ended for."""

    @property
    def words(self) -> str:
        """What it does, for the log: "holds ..."."""

    @property
    def advice(self) -> tuple[str, str, str]:
        """For its owner: what it does, "if it is found ...", and what they should do."""

    @property
    def ended(self) -> str:
        """What its owner is told when it was ended."""


@dataclass(frozen=True, slots=True)
class Above:
    """A session that holds more of a device than it may."""

    session_id: int
    uuid: str
    used_mib: int
    limit_mib: int

    @property
    def words(self) -> str:
        """What it does, for the log."""
        return f"holds {self.used_mib} MiB of GPU {self.uuid}, above its limit of {self.limit_mib} MiB"

    @property
    def advice(self) -> tuple[str, str, str]:
        """What its owner is told at a strike."""
        return (
            f"this session holds {self.used_mib} MiB of GPU memory, above its limit of {self.limit_mib} MiB",
            "above it",
            "End the programs that use the GPU",
        )

    @property
    def ended(self) -> str:
        """What its owner is told when it was ended."""
        return (
            f"your session was ended because it held {self.used_mib} MiB of GPU memory, above its limit of "
            f"{self.limit_mib} MiB, also after a warning; its programs took memory that the limit does not count, or "
            "got around it"
        )


@dataclass(frozen=True, slots=True)
class Found:
    """What one look says: who is above, of whom that is not known, and the processes (device, number) of nobody's."""

    above: Mapping[int, Above]
    unknown: frozenset[int]
    strangers: frozenset[tuple[str, int]]


def compare(
    snapshot: GpuSnapshot, allowances: Mapping[int, Mapping[str, Allowance]], *, tolerance_mib: int
) -> Found:
    """Return who holds more than they may. Pure.

    ``allowances`` are those of the watched sessions, by device; of a device that it has no share of a session may
    hold nothing but the tolerance.
    """
    above: dict[int, Above] = {}
    silent = {uuid for uuid, use in snapshot.devices.items() if not isinstance(use, DeviceUse)}
    unknown = {s for s, own in allowances.items() if silent.intersection(own)}
    strangers: set[tuple[str, int]] = set()
    for uuid, use in sorted(snapshot.devices.items()):
        used: dict[int, list[int]] = {}
        for process in use.processes if isinstance(use, DeviceUse) else ():
            session_id = snapshot.owners.get(process.pid)
            if session_id is None:
                strangers.add((uuid, process.pid))
            elif session_id in allowances:
                if process.used_bytes is None:
                    unknown.add(session_id)
                # One that has ended holds nothing, and is allowed nothing for its context.
                if process.used_bytes != 0:
                    used.setdefault(session_id, []).append(process.used_bytes or 0)
        for session_id, amounts in sorted(used.items()):
            own = allowances[session_id].get(uuid, Allowance(0))
            allowed_mib = own.limit_mib + tolerance_mib + own.context_mib * len(amounts)
            allowed_mib += own.code_mib * (len(amounts) - 1)
            used_mib = -(-sum(amounts) // MIB)
            if used_mib > allowed_mib:
                above.setdefault(session_id, Above(session_id, uuid, used_mib, own.limit_mib))
    # What is known is enough.
    return Found(above, frozenset(unknown - set(above)), frozenset(strangers))


class Step(Enum):
    """What follows from one look for one session."""

    NOTHING = auto()
    WARN = auto()
    END = auto()
    TAKE_BACK = auto()


@dataclass(frozen=True, slots=True)
class Strikes:
    """The strikes of a session that have not faded, when it got the last, and when it was looked at last."""

    count: float = 0.0
    last_at_s: float | None = None
    looked_at_s: float = 0.0
    warned: bool = False


def after_look(
    before: Strikes, *, at_s: float, is_above: bool | None, every_s: float
) -> tuple[Strikes, Step]:
    """Return a session's strikes after a look, and what follows. Pure.

    What is not known, None, changes nothing. A warning is given time, from one mean pause between looks to the
    next, before a look is another strike.
    """
    now = replace(before, looked_at_s=at_s)
    match is_above:
        case None:
            return now, Step.NOTHING
        case False:
            kept_to_it_s = at_s - before.looked_at_s
            now = replace(
                now, count=max(0.0, before.count - kept_to_it_s / (FADES_IN * every_s)), warned=False
            )
            return now, Step.TAKE_BACK if before.warned else Step.NOTHING
        case True:
            if before.last_at_s is not None and at_s - before.last_at_s < every_s:
                return now, Step.NOTHING
            now = replace(now, count=before.count + 1, last_at_s=at_s, warned=True)
            return now, Step.END if now.count > STRIKES - 1 else Step.WARN
        case _:
            assert_never(is_above)


def warning_words(offence: Offence, strikes: float, *, ends: bool = True) -> str:
    """Return what the owner of a session is told at a strike."""
    what, found, advice = offence.advice
    if not ends:
        return f"{what}. {advice}"
    more = int(STRIKES - strikes) or 1
    return f"{what}; if it is found {found} {'once' if more == 1 else f'{more} times'} more, it is ended. {advice}"


class Sessions(Protocol):
    """The scheduler, as far as the watchdog needs it."""

    async def warn(self, session_id: int, message: str | None) -> Session: ...

    async def end(self, session_id: int, cause: EndCause, message: str | None = None) -> Session: ...


class Judge:
    """Warns, ends and takes back for one kind of offence, and writes it down. ``ends``: otherwise it only tells."""

    def __init__(self, sessions: Sessions, record: Record, *, every_s: float, ends: bool = True) -> None:
        self._sessions = sessions
        self._record = record
        self._every_s = every_s
        self._ends = ends
        self._strikes: dict[int, Strikes] = {}

    def keep(self, live: Sequence[Session]) -> None:
        """Forget who is gone."""
        self._strikes = {s.id: self._strikes[s.id] for s in live if s.id in self._strikes}

    async def judge(self, session_id: int, at_s: float, offence: Offence | None, *, known: bool) -> None:
        """Count a look at a session, and do what follows."""
        before = self._strikes.get(session_id, Strikes(looked_at_s=at_s))
        is_above = offence is not None if known else None
        after, step = after_look(before, at_s=at_s, is_above=is_above, every_s=self._every_s)
        if await self._done(session_id, step, offence, after):
            self._strikes[session_id] = after
        else:
            # Who was not warned gets no strike for it, and what could not be done is done at the next look.
            self._strikes[session_id] = replace(before, looked_at_s=at_s)

    async def _done(self, session_id: int, step: Step, offence: Offence | None, after: Strikes) -> bool:
        """Do what follows; return whether it was done. Whatever becomes of one session hides no other."""
        if step is Step.NOTHING:
            return True
        try:
            if step is Step.TAKE_BACK:
                log.info("Session %d is within its GPU limit again", session_id)
                await self._sessions.warn(session_id, None)
                return True
            assert offence is not None
            is_end = step is Step.END and self._ends
            words = f"{offence.words}; {after.count:.1f} of {STRIKES} strikes"
            if is_end:
                log.error("Session %d %s: it is ended", session_id, words)
                told = await self._sessions.end(session_id, EndCause.ISOLATION_FAILED, offence.ended)
            else:
                log.warning("Session %d %s: its owner is warned", session_id, words)
                told = await self._sessions.warn(
                    session_id, warning_words(offence, after.count, ends=self._ends)
                )
        except FGPUError as e:
            log.error("The watchdog could not do this: %s", e)
            return False
        except Exception:
            log.exception("The watchdog could not do this")
            return False
        try:
            await self._record(told, "watchdog.end" if is_end else "watchdog.strike", words)
        except FGPUError as e:
            log.error("The audit log has no line of this: %s", e)
        return True


class Watchdog:
    """Is told of every look. ``every_s`` is the mean time between two at the same machine."""

    def __init__(
        self, isolation: Isolation, sessions: Sessions, record: Record, *, every_s: float, tolerance_mib: int
    ) -> None:
        self._isolation = isolation
        self._judge = Judge(sessions, record, every_s=every_s)
        self._tolerance_mib = tolerance_mib
        self._strangers: frozenset[tuple[str, int]] = frozenset()
        self._troubles: dict[str, int] = {}

    async def observe(self, snapshot: GpuSnapshot, live: Sequence[Session]) -> None:
        """Warn and end whom a look finds above their limit."""
        self._judge.keep(live)
        there = running_on(snapshot.devices, live)
        watched = {s.id: self._allowances(s) for s in live if s.id in there and launched_with(s) in WATCHED}
        if not watched:
            return
        for uuid, use in snapshot.devices.items():
            silent: list[int] = []
            if isinstance(use, DeviceUse):
                self._fine(uuid)
                silent = [process.pid for process in use.processes if process.used_bytes is None]
            else:
                self._trouble(uuid, f"GPU {uuid}: {use}")
            if silent:
                self._trouble(f"amounts of {uuid}", f"GPU {uuid} tells no amount for processes {silent}")
            else:
                self._fine(f"amounts of {uuid}")
        found = compare(snapshot, watched, tolerance_mib=self._tolerance_mib)
        self._say_strangers(snapshot.devices, found.strangers, live)
        for session_id in watched:
            known = session_id not in found.unknown
            await self._judge.judge(session_id, snapshot.at_s, found.above.get(session_id), known=known)

    def _allowances(self, session: Session) -> dict[str, Allowance]:
        assert session.placement is not None
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

    def _say_strangers(
        self, uuids: Iterable[str], strangers: frozenset[tuple[str, int]], live: Sequence[Session]
    ) -> None:
        """Log who uses a shared GPU and is no session, once each."""
        # A launch is known by its session only from when its container runs.
        if any(s.state in LAUNCHING for s in live):
            return
        for uuid, pid in sorted(strangers - self._strangers):
            log.warning("Process %d uses GPU %s and belongs to no session", pid, uuid)
        here = frozenset(uuids)
        self._strangers = frozenset(s for s in self._strangers if s[0] not in here) | strangers

    def _trouble(self, about: str, words: str) -> None:
        """Log what keeps the watchdog from looking: at once, and again while it lasts."""
        looks = self._troubles.get(about, 0)
        if looks % SAY_AGAIN_AFTER == 0:
            log.error("The watchdog does not know what sessions hold, and ends nobody for it: %s", words)
        self._troubles[about] = looks + 1

    def _fine(self, about: str) -> None:
        if self._troubles.pop(about, 0):
            log.warning("The watchdog sees again: %s", about)


def launched_with(session: Session) -> str | None:
    """Return which isolation a session was launched with: the setting can be another one by now."""
    launched = Launched.from_json(session.launched)
    return None if launched is None else launched.isolation
