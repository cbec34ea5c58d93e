"""The watchdog: what the driver says that each session holds, against what it may.

What libfgpu counts is in a file that the session itself can write, and a process can get around libfgpu. Neither
changes what the driver says. Above its limit and a tolerance a session is warned, and at the next look ended.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from fgpu_scheduler import LAUNCHING, EndCause, FGPUError, Session, SessionState
from fgpuspawner.concurrency.background import Background
from fgpuspawner.engines.base import Launched
from fgpuspawner.isolation.drivers import Drivers, Place
from fgpuspawner.isolation.facts import CONTEXT_GUESS_MIB
from fgpuspawner.isolation.manager import BACKENDS, Isolation
from fgpuspawner.isolation.nvml_reader import Held, NvmlUnknown

log = logging.getLogger("fgpu.watchdog")

MIB = 2**20
WATCHED = frozenset(kind.name for kind in BACKENDS if kind.watched)
CODE_MIB = 256
"""What a process's kernels take beside its context on a real GPU: nothing counts it, and the tolerance covers one."""
MOST_WARNINGS = 3
"""A session that had so many is ended the next time without one: it goes above between looks."""
LONGEST_LOOK_S = 5.0
"""So long a round waits for a machine. One that takes longer is looked at again when it has answered."""
SAY_AGAIN_AFTER = 60
"""Looks after which a trouble that lasts is logged again."""

Looked = Mapping[str, tuple[Held, ...] | NvmlUnknown]


@dataclass(frozen=True, slots=True)
class Allowance:
    """What a session may hold of a device."""

    limit_mib: int
    context_mib: int = 0
    """For each process, where contexts are not charged to the limit."""
    code_mib: int = 0
    """For each process but one."""


@dataclass(frozen=True, slots=True)
class Above:
    """A session that holds more of a device than it may."""

    session_id: int
    uuid: str
    used_mib: int
    limit_mib: int


@dataclass(frozen=True, slots=True)
class Verdict:
    """What follows from one look. ``above`` are all who were above, for the next look."""

    warn: tuple[Above, ...]
    end: tuple[Above, ...]
    recovered: tuple[int, ...]
    above: frozenset[int]
    strangers: frozenset[tuple[str, int]]


def judge(
    looked: Looked,
    owners: Mapping[int, int],
    allowances: Mapping[int, Mapping[str, Allowance]],
    before: frozenset[int],
    *,
    tolerance_mib: int,
    warnings: Mapping[int, int] | None = None,
) -> Verdict:
    """Return who is to be warned or ended. Pure.

    ``allowances`` are those of the watched sessions, by device; of a device that it has no share of a session may
    hold nothing but the tolerance. ``before`` are the sessions that were above at the last look, ``warnings`` how many
    each had so far. What NVML does not tell changes nothing: who was above stays so, and nobody is ended for it.
    """
    found: dict[int, Above] = {}
    unknown = [uuid for uuid, held in looked.items() if isinstance(held, NvmlUnknown)]
    strangers: set[tuple[str, int]] = set()
    uncertain: set[int] = set()
    for uuid in sorted(looked):
        held = looked[uuid]
        if isinstance(held, NvmlUnknown):
            continue
        used: dict[int, list[int]] = {}
        for process in held:
            session_id = owners.get(process.pid)
            if session_id is None:
                strangers.add((uuid, process.pid))
            elif session_id in allowances:
                if process.used_bytes is None:
                    uncertain.add(session_id)
                used.setdefault(session_id, []).append(process.used_bytes or 0)
        for session_id, amounts in sorted(used.items()):
            own = allowances[session_id].get(uuid, Allowance(0))
            allowed_mib = own.limit_mib + tolerance_mib + own.context_mib * len(amounts)
            allowed_mib += own.code_mib * (len(amounts) - 1)
            used_mib = -(-sum(amounts) // MIB)
            if used_mib > allowed_mib and session_id not in found:
                found[session_id] = Above(session_id, uuid, used_mib, own.limit_mib)
    unseen = {
        session_id
        for session_id in before
        if session_id in allowances
        and session_id not in found
        and (session_id in uncertain or any(uuid in allowances[session_id] for uuid in unknown))
    }
    had = warnings or {}
    warned = {s for s in found if s in before or had.get(s, 0) >= MOST_WARNINGS}
    return Verdict(
        warn=tuple(a for s, a in sorted(found.items()) if s not in warned),
        end=tuple(a for s, a in sorted(found.items()) if s in warned),
        recovered=tuple(sorted(s for s in before if s in allowances and s not in found and s not in unseen)),
        above=frozenset(found) | frozenset(unseen),
        strangers=frozenset(strangers),
    )


def warning_words(above: Above, every_s: int) -> str:
    """Return what the owner of a session is told first."""
    return (
        f"this session holds {above.used_mib} MiB of GPU memory, above its limit of {above.limit_mib} MiB; "
        f"if it still does in {every_s} seconds, it is ended. End the programs that use the GPU"
    )


def ended_words(above: Above) -> str:
    """Return what the owner of a session that was ended is told."""
    return (
        f"your session was ended because it held {above.used_mib} MiB of GPU memory, above its limit of "
        f"{above.limit_mib} MiB, also after a warning; its programs took memory that the limit does not count, or got "
        "around it"
    )


class Sessions(Protocol):
    """The scheduler, as far as the watchdog needs it."""

    async def live(self) -> tuple[Session, ...]: ...

    async def warn(self, session_id: int, message: str | None) -> Session: ...

    async def end(self, session_id: int, cause: EndCause, message: str | None = None) -> Session: ...


class Watchdog:
    """Looks at every machine, again and again, until it is cancelled."""

    def __init__(
        self,
        isolation: Isolation,
        sessions: Sessions,
        drivers: Drivers,
        *,
        every_s: int,
        tolerance_mib: int,
    ) -> None:
        self._isolation = isolation
        self._sessions = sessions
        self._drivers = drivers
        self._every_s = every_s
        self._tolerance_mib = tolerance_mib
        self._looking: dict[Place, asyncio.Task[None]] = {}
        self._above: dict[Place, frozenset[int]] = {}
        self._warnings: Counter[int] = Counter()
        self._strangers: frozenset[tuple[str, int]] = frozenset()
        self._troubles: dict[str, int] = {}

    def begin(self, background: Background) -> None:
        """Look every ``every_s`` seconds."""
        background.every(
            self._every_s,
            self.look,
            failed="The watchdog could not look",
            first_after_s=self._every_s,
            level=logging.ERROR,
        )

    async def look(self) -> None:
        """Look once."""
        live = await self._sessions.live()
        self._warnings = Counter({s.id: self._warnings[s.id] for s in live if s.id in self._warnings})
        self._strangers = frozenset(s for s in self._strangers if s[0] in self._uuids())
        looks: dict[asyncio.Task[None], Place] = {}
        for place, uuids in self._drivers.places().items():
            watched = [s for s in live if self._is_watched(s) and _uses(s, uuids)]
            if watched:
                look = self._looking.get(place)
                if look is None or look.done():
                    look = asyncio.create_task(self._looked_at(place, uuids, watched, live))
                    self._looking[place] = look
                looks[look] = place
            else:
                self._above.pop(place, None)
        # Side by side: a machine that does not answer hides no other.
        if looks:
            _, late = await asyncio.wait(looks, timeout=LONGEST_LOOK_S)
            for look in late:
                self._trouble(str(looks[look]), f"{looks[look]}: no answer within {LONGEST_LOOK_S:.0f} s")
        await asyncio.to_thread(self._isolation.trim_files)

    def _uuids(self) -> set[str]:
        return {d.uuid for node in self._isolation.nodes for d in node.devices}

    @staticmethod
    def _is_watched(session: Session) -> bool:
        # Under what it was launched: the setting can be another one by now.
        launched = Launched.from_json(session.launched)
        return (
            session.state is SessionState.RUNNING and launched is not None and launched.isolation in WATCHED
        )

    async def _looked_at(
        self, place: Place, uuids: Sequence[str], watched: Sequence[Session], live: Sequence[Session]
    ) -> None:
        try:
            await self._look_at(place, uuids, watched, live)
        except FGPUError as e:
            self._trouble(str(place), f"{place}: {e}")
        except Exception:
            log.exception("The watchdog could not look at %s", place)

    async def _look_at(
        self, place: Place, uuids: Sequence[str], watched: Sequence[Session], live: Sequence[Session]
    ) -> None:
        try:
            looked = await self._drivers.reader(place).look(uuids)
        except NvmlUnknown as e:
            self._trouble(str(place), str(e))
            return
        for uuid in uuids:
            held = looked[uuid]
            if isinstance(held, NvmlUnknown):
                self._trouble(uuid, f"GPU {uuid}: {held}")
            else:
                self._fine(uuid)
                silent = [process.pid for process in held if process.used_bytes is None]
                if silent:
                    self._trouble(f"amounts of {uuid}", f"GPU {uuid} tells no amount for processes {silent}")
                else:
                    self._fine(f"amounts of {uuid}")
        pids = sorted({h.pid for held in looked.values() if not isinstance(held, NvmlUnknown) for h in held})
        owners = await self._drivers.owners(place, pids)
        self._fine(str(place))
        verdict = judge(
            looked,
            owners,
            {s.id: self._allowances(s) for s in watched},
            self._above.get(place, frozenset()),
            tolerance_mib=self._tolerance_mib,
            warnings=self._warnings,
        )
        self._say_strangers(uuids, verdict.strangers, live)
        untold = await self._act(verdict)
        # Who was not warned is not ended at the next look, and who was not told of the recovery is told then.
        self._above[place] = verdict.above - untold | (untold & frozenset(verdict.recovered))

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

    async def _act(self, verdict: Verdict) -> frozenset[int]:
        """Return those who could not be told. Whatever becomes of one hides no other."""
        untold: set[int] = set()
        for above in verdict.end:
            log.error(
                "Session %d holds %d MiB of GPU %s, still above its limit of %d MiB: it is ended",
                above.session_id,
                above.used_mib,
                above.uuid,
                above.limit_mib,
            )
            await self._told(
                self._sessions.end(above.session_id, EndCause.ISOLATION_FAILED, ended_words(above))
            )
        for above in verdict.warn:
            log.warning(
                "Session %d holds %d MiB of GPU %s, above its limit of %d MiB: its owner is warned",
                above.session_id,
                above.used_mib,
                above.uuid,
                above.limit_mib,
            )
            if await self._told(self._sessions.warn(above.session_id, warning_words(above, self._every_s))):
                self._warnings[above.session_id] += 1
            else:
                untold.add(above.session_id)
        for session_id in verdict.recovered:
            log.info("Session %d is within its GPU limit again", session_id)
            if not await self._told(self._sessions.warn(session_id, None)):
                untold.add(session_id)
        return frozenset(untold)

    @staticmethod
    async def _told(telling: Awaitable[Session]) -> bool:
        try:
            await telling
        except FGPUError as e:
            log.error("The watchdog could not do this: %s", e)
            return False
        except Exception:
            log.exception("The watchdog could not do this")
            return False
        return True

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


def _uses(session: Session, uuids: Iterable[str]) -> bool:
    assert session.placement is not None
    own = {share.device_uuid for share in session.placement.shares}
    return any(uuid in own for uuid in uuids)
