"""Finds processes that compute without libfgpu: compares the driver's samples with libfgpu's accounting file.

Neither source is enough alone. A process under libfgpu may exceed its share for a while, by long kernels or lent
compute. A process without a slot may compute nothing.

1. `above_share` finds sessions that computed more than their share since the last snapshot.
2. Such a session is asked for its slots. The question starts a program in its container, so an answer is reused: for
   the processes that every snapshot since has seen, and each time twice as long.
3. A process counts as held if it has a slot, or had one and has ended. `uncontrolled` adds up the others; silence counts
   against the session.
4. A proven offence is a strike, and the next snapshot is taken early.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence, Set
from dataclasses import dataclass, replace

from fgpu_scheduler import FGPUError, Placement, Queue, Session, ShareMode, holds_shares
from fgpuspawner.hub.watchdog import Judge, Record, launched_with, watched_on
from fgpuspawner.isolation.backends import DriverCgroup, Interposer
from fgpuspawner.isolation.gpu_poller import GpuSnapshot, NvmlSource
from fgpuspawner.isolation.nvml_reader import DeviceUse
from fgpuspawner.isolation.report import BadReport, SlotReport

log = logging.getLogger("fgpu.watchdog")

WATCHED = frozenset((Interposer.name, DriverCgroup.name))
TOLERANCE_PERCENT = 10
"""Percent of a GPU by which the driver's samples may exceed the share."""
STRIKE_AFTER_S = 5.0
"""Between two strikes, and between a strike and the next snapshot."""
POLL_EVERY_S = 5
"""On the mean. Two snapshots are at most four times that apart, so a program without libfgpu is ended within 30 s."""
TRUSTED_S = 60.0
"""The longest time for which an answer is reused; a first one holds until the next snapshot. In that time a process
that libfgpu held can compute without it, by executing another program.
"""
CHANGED = "it could not read its changed limits"
START_AGAIN = "End it, and start it again: it cannot read its changed limits"
LET_IT_RUN = (
    "End programs that stop others, or leave them no processor time or memory: a check of them got no answer"
)
MOST_PROCESSES = 1024
"""Processes of one session that are asked for: those that computed most. The others must have a slot."""

Ask = Callable[[Session, Sequence[int]], Awaitable[SlotReport]]
"""Returns which processes of a session hold a slot, and which of the given ones run.

Raises BadReport if the session itself prevented the answer, and other FGPUErrors otherwise.
"""


@dataclass(frozen=True, slots=True)
class Computed:
    """What a session above its share computed of a device since the last snapshot, by its own process numbers."""

    uuid: str
    share: int
    percents: Mapping[int, float]


@dataclass(frozen=True, slots=True)
class Uncontrolled:
    """Processes that may not be under libfgpu and compute more than the session's share.

    ``pids`` is empty if unknown. ``remedy`` is the advice for the owner.
    """

    uuid: str
    percent: int
    share: int
    pids: tuple[int, ...] = ()
    cause: str = "a statically linked program does that, for one"
    remedy: str = "End it, and run a program that is linked dynamically"

    @property
    def _what(self) -> str:
        return f"{_programs(self.pids)} that computed {self.percent} % of a GPU around its share of {self.share} %"

    @property
    def words(self) -> str:
        return f"has {self._what} ({self.uuid}); {self.cause}"

    @property
    def advice(self) -> tuple[str, str, str]:
        return f"this session has {self._what}", "doing so", self.remedy

    @property
    def ended(self) -> str:
        return f"your session was ended because it had {self._what}, also after a warning; {self.cause}"


@dataclass(frozen=True, slots=True)
class TrustedAnswer:
    """A session's last answer: the processes that libfgpu holds, and until when it is trusted."""

    placement: Placement
    held: frozenset[int]
    for_s: float
    until_s: float


def _programs(pids: Sequence[int]) -> str:
    shown = ", ".join(map(str, pids[:3]))
    many = f"{len(pids)} programs (processes {shown})" if pids else "programs"
    return f"a program (process {shown})" if len(pids) == 1 else many


def above_share(snapshot: GpuSnapshot, session: Session) -> list[Computed] | None:
    """Return where a session computed more than its share; None if the driver does not tell. Pure.

    Sessions without a share of compute, or with a whole GPU, have no limit. A parked session may compute nothing.
    """
    assert session.placement is not None
    found, parked = [], not holds_shares(session)
    for share in session.placement.shares:
        use = snapshot.devices.get(share.device_uuid)
        timed = share.mode is ShareMode.MEMORY_COMPUTE and 0 < share.compute_percent < 100
        percent = 0 if parked else share.compute_percent
        if not (timed or parked) or use is None:
            continue
        if not isinstance(use, DeviceUse):
            return None
        percents: dict[int, float] = {}
        for process in use.processes:
            if snapshot.owners.get(process.pid) != session.id:
                continue
            if process.sm_percent is None:
                return None
            if process.sm_percent > 0:
                percents[process.inner_pid] = percents.get(process.inner_pid, 0.0) + process.sm_percent
        if sum(percents.values()) > percent + TOLERANCE_PERCENT:
            found.append(Computed(share.device_uuid, percent, percents))
    return found


def uncontrolled(
    computed: Computed, *, held: Collection[int], behind: Set[int] = frozenset()
) -> Uncontrolled | None:
    """Return the processes that are not ``held``, if these exceed the share. Pure.

    Processes under libfgpu count as the share at most. Those ``behind`` are not in ``held``.
    """
    without = {p: sm for p, sm in computed.percents.items() if p not in held}
    alone = sum(without.values())
    by_libfgpu = min(computed.share, sum(computed.percents.values()) - alone)
    if alone + by_libfgpu <= computed.share + TOLERANCE_PERCENT:
        return None
    pids = tuple(sorted(without))
    found = Uncontrolled(computed.uuid, round(alone), computed.share, pids)
    return replace(found, cause=CHANGED, remedy=START_AGAIN) if not behind.isdisjoint(pids) else found


class ComputeWatch:
    """Observes every snapshot. ``snapshot_soon(source, s)`` takes the next one early; without ``ends`` it only warns."""

    def __init__(
        self,
        queue: Queue,
        record: Record,
        ask: Ask,
        *,
        snapshot_soon: Callable[[NvmlSource, float], None],
        ends: bool,
    ) -> None:
        self._judge = Judge(queue, record, every_s=STRIKE_AFTER_S, ends=ends)
        self._ask = ask
        self._snapshot_soon = snapshot_soon
        self._asking: dict[int, asyncio.Task[None]] = {}
        self._trusted: dict[int, TrustedAnswer] = {}
        self._silent: set[str] = set()

    async def observe(self, snapshot: GpuSnapshot, live: Sequence[Session]) -> None:
        """Ask the sessions that computed too much for their slots, concurrently."""
        self._judge.keep(live)
        self._trusted = {s.id: self._trusted[s.id] for s in live if s.id in self._trusted}
        there = watched_on(snapshot, live)
        for session in live:
            if session.id not in there or launched_with(session) not in WATCHED:
                continue
            self._distrust_ended(session, snapshot)
            computed = above_share(snapshot, session)
            if computed is None:
                await self._judge.judge(session.id, snapshot.at_s, None, known=False)
            elif not computed or self._is_trusted(session, snapshot, computed):
                await self._judge.judge(session.id, snapshot.at_s, None, known=True)
            elif session.id not in self._asking:
                self._asking[session.id] = asyncio.create_task(
                    self._ask_and_judge(session, snapshot, computed)
                )
        self._log_silent_gpus(snapshot)

    async def answered(self) -> None:
        while self._asking:
            await asyncio.wait(tuple(self._asking.values()))

    def _distrust_ended(self, session: Session, snapshot: GpuSnapshot) -> None:
        """Drop processes that have ended from the last answer: their numbers may be reused."""
        trusted = self._trusted.get(session.id)
        if trusted is None:
            return
        seen = {
            process.inner_pid
            for use in snapshot.devices.values()
            if isinstance(use, DeviceUse)
            for process in use.processes
            if snapshot.owners.get(process.pid) == session.id
        }
        self._trusted[session.id] = replace(trusted, held=trusted.held & seen)

    def _is_trusted(self, session: Session, snapshot: GpuSnapshot, computed: Sequence[Computed]) -> bool:
        """Return whether the last answer still proves that libfgpu holds what exceeded the share."""
        trusted = self._trusted.get(session.id)
        return (
            trusted is not None
            and trusted.placement == session.placement
            and snapshot.at_s < trusted.until_s
            and all(uncontrolled(one, held=trusted.held) is None for one in computed)
        )

    def _trust(self, session: Session, snapshot: GpuSnapshot, held: frozenset[int]) -> None:
        before = self._trusted.get(session.id)
        again = (
            before is not None and before.placement == session.placement and snapshot.at_s >= before.until_s
        )
        for_s = min(TRUSTED_S, 2 * before.for_s) if before is not None and again else POLL_EVERY_S
        assert session.placement is not None
        self._trusted[session.id] = TrustedAnswer(session.placement, held, for_s, snapshot.at_s + for_s)

    async def _ask_and_judge(
        self, session: Session, snapshot: GpuSnapshot, computed: Sequence[Computed]
    ) -> None:
        try:
            await self._ask_and_count(session, snapshot, computed)
        finally:
            del self._asking[session.id]

    async def _ask_and_count(
        self, session: Session, snapshot: GpuSnapshot, computed: Sequence[Computed]
    ) -> None:
        pids = {pid: sm for one in computed for pid, sm in one.percents.items()}
        asked = sorted(pids, key=lambda p: -pids[p])[:MOST_PROCESSES]
        offence: Uncontrolled | None
        try:
            found = await self._ask(session, asked)
        except BadReport as e:
            one, cause = computed[0], f"no answer told whether libfgpu holds them: {e}"
            offence = Uncontrolled(
                one.uuid, round(sum(one.percents.values())), one.share, cause=cause, remedy=LET_IT_RUN
            )
        except FGPUError as e:
            log.warning(
                "Session %d computes more than its share, and it cannot be told whether around libfgpu: %s",
                session.id,
                e,
            )
            await self._judge.judge(session.id, snapshot.at_s, None, known=False)
            return
        else:
            behind = frozenset(found.behind)
            held = (frozenset(found.slots) | frozenset(found.lately) - frozenset(found.running)) - behind
            offence = next(
                (o for one in computed if (o := uncontrolled(one, held=held, behind=behind))), None
            )
        if offence is None:
            self._trust(session, snapshot, held.intersection(asked))
        else:
            self._trusted.pop(session.id, None)
        await self._judge.judge(session.id, snapshot.at_s, offence, known=True)
        if offence is not None:
            self._snapshot_soon(snapshot.source, STRIKE_AFTER_S)

    def _log_silent_gpus(self, snapshot: GpuSnapshot) -> None:
        """Log once which GPUs do not report compute by process."""
        for uuid, use in snapshot.devices.items():
            tells = isinstance(use, DeviceUse) and all(p.sm_percent is not None for p in use.processes)
            if tells:
                self._silent.discard(uuid)
            elif isinstance(use, DeviceUse) and uuid not in self._silent:
                self._silent.add(uuid)
                log.warning(
                    "GPU %s does not tell how much each process computes: compute without libfgpu is not noticed",
                    uuid,
                )
