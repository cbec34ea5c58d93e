"""Whom a pass need not try: those who ask for the same as somebody ahead, and what cannot fit as less did not."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from copy import copy
from operator import attrgetter

from fgpu_scheduler.core.asked import AMOUNTS
from fgpu_scheduler.core.model import Session, WaitReason
from fgpu_scheduler.core.units import share_memory_mib

Amounts = tuple[int, int, int, int | None, int | None, tuple[str, ...]]
"""fGPU x 1000, CPU x 1000, memory in MiB, explicit GPU memory in MiB and compute in percent, GPU models."""

Room = tuple[int, int, int]
"""The CPU x 1000 and memory in MiB that a node has left, and the most fGPU x 1000 of one device."""

_, *_MEASURES = AMOUNTS  # All are of one resource group.

_ASKED = attrgetter(*_MEASURES)
_ASKED_FOR = attrgetter(*_MEASURES, "time_limit_s")
_ASKED_BY = attrgetter(*_MEASURES, "time_limit_s", "user", "groups")


class Lane:
    """Those of a queue who ask for exactly the same, next one first: only the first of them is ever tried."""

    __slots__ = ("at", "numbers", "reason", "shape")

    def __init__(self, shape: Amounts) -> None:
        self.shape = shape
        self.numbers: list[int] = []
        """Where each stands in the queue."""
        self.at = 0
        self.reason = WaitReason.RESOURCES
        """Why those wait who are left."""

    @property
    def left(self) -> bool:
        """Whether anybody is left."""
        return self.at < len(self.numbers)


class Lanes:
    """The queue of a resource group in its order, in lanes. Held sessions are in no lane: they are not placed.

    Two are in one lane if the same decides about both: with quotas, that is also who they are.
    """

    __slots__ = ("heads", "lane_of", "lanes", "promised", "sessions")

    def __init__(self, sessions: Sequence[Session], *, by_user: bool, held: bool = False) -> None:
        self.sessions = sessions
        key_of = _ASKED_BY if by_user else _ASKED_FOR
        found: dict[object, Lane] = {}
        self.promised: list[tuple[Session, Lane]] = []
        """To whom a start was promised, in their order, each with the lane that it has for itself."""
        self.lane_of = lane_of = list[Lane | None]()
        for number, session in enumerate(sessions):
            if session.held and not held:
                lane_of.append(None)
                continue
            # Who was refused a node is tried by itself: the others of its kind may still go there. So is who was promised
            # a start: what is kept for it is not for the others.
            alone = session.refused or session.promised_at_s is not None
            key = session.id if alone else key_of(session.request)
            lane = found.get(key)
            if lane is None:
                lane = found[key] = Lane(_ASKED(session.request))
            if session.promised_at_s is not None:
                self.promised.append((session, lane))
            lane.numbers.append(number)
            lane_of.append(lane)
        self.lanes = list(found.values())
        self.heads = sorted((lane.numbers[0], n) for n, lane in enumerate(self.lanes))
        """The first of each lane: where it stands in the queue, and which lane it is."""

    def copy(self) -> Lanes:
        """Return the same queue, which goes on by itself."""
        other = copy(self)
        other.lanes, other.heads = [copy(lane) for lane in self.lanes], list(self.heads)
        new = {id(old): lane for old, lane in zip(self.lanes, other.lanes, strict=True)}
        other.promised = [(session, new[id(lane)]) for session, lane in self.promised]
        return other

    def drop_started(self) -> None:
        """Take those out of the heads who have started."""
        lanes = self.lanes
        self.heads = [
            (at, n) for at, n in self.heads if lanes[n].left and lanes[n].numbers[lanes[n].at] == at
        ]


class Misfits:
    """Shapes that did not fit. Whoever asks for a fraction in vain rules out all who ask for at least as much of
    everything.

    That holds for amounts that any of the devices could hold by itself with some memory: on none of them is there so
    much left, and what is larger, whole devices too, would need one of them.
    """

    __slots__ = ("_devices", "_earlier", "_least", "_rules_out", "found")

    def __init__(self, devices: Iterable[tuple[int, int]]) -> None:
        """Take the fGPU x 1000 and the memory in MiB of every kind of device there is."""
        self._devices = frozenset(devices)
        self._rules_out: dict[int, bool] = {}
        self.found: dict[Amounts, None] = {}
        """Those that did not fit in this pass."""
        self._earlier: dict[Amounts, None] = {}
        """Those that did not in the passes before, and for which nothing has become free since."""
        self._least: list[Amounts] = []

    def begin(self, freed: Collection[Room]) -> None:
        """Begin another pass; ``freed`` are the nodes on which something has ended since the last one."""
        earlier = self._earlier | self.found
        if freed:
            least = min((capacity for capacity, _ in self._devices), default=0)
            earlier = {
                asked: None
                for asked in earlier
                if not any(
                    r[0] >= asked[1] and r[1] >= asked[2] and r[2] >= min(asked[0], least) for r in freed
                )
            }
        self._earlier, self.found, self._least = earlier, {}, []

    def copy(self) -> Misfits:
        """Return one that goes on from the same state."""
        other = Misfits(self._devices)
        other.found, other._earlier, other._least = dict(self.found), dict(self._earlier), list(self._least)
        return other

    def rule_out(self, asked: Amounts) -> bool:
        """Return whether it cannot fit, because something that asks for no more did not."""
        fgpu, cpu, memory, gpu_memory, compute, models = asked
        if asked in self._earlier:
            return True
        if gpu_memory is not None or compute is not None:
            return False
        # Not any(): a generator costs more than what it would look at, and this is asked of everybody in every pass.
        for least in self._least:
            if fgpu >= least[0] and cpu >= least[1] and memory >= least[2] and _among(models, least[5]):
                return True
        return False

    def add(self, asked: Amounts, *, ruled_out: bool = False) -> None:
        """Note one that did not fit; it adds nothing to what is known of others where it was ruled out."""
        self.found[asked] = None
        if not ruled_out and asked[3] is None and asked[4] is None and self._any_could_hold(asked[0]):
            self._least.append(asked)

    def _any_could_hold(self, fgpu_milli: int) -> bool:
        found = self._rules_out.get(fgpu_milli)
        if found is None:
            found = self._rules_out[fgpu_milli] = fgpu_milli > 0 and all(
                fgpu_milli <= capacity
                and share_memory_mib(fgpu_milli, capacity_milli=capacity, device_memory_mib=memory) > 0
                for capacity, memory in self._devices
            )
        return found


def _among(models: tuple[str, ...], others: tuple[str, ...]) -> bool:
    """Return whether whoever may be placed on these GPU models could be on others alone; none: any model."""
    return not others or models == others or (bool(models) and set(models) <= set(others))
