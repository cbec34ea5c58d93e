"""Requests that a pass can skip: equal to one ahead in the queue, or at least as large as one that did not fit."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from copy import copy
from operator import attrgetter

from fgpu_scheduler.core.model import Session, WaitReason
from fgpu_scheduler.core.request_counts import AMOUNTS
from fgpu_scheduler.core.units import share_memory_mib

#: fGPU x 1000, CPU x 1000, memory in MiB, explicit GPU memory in MiB and compute in percent, GPU models.
Amounts = tuple[int, int, int, int | None, int | None, tuple[str, ...]]

#: The free CPU x 1000 and memory in MiB of a node, and the most free fGPU x 1000 of one of its devices.
FreeAmounts = tuple[int, int, int]

_, *_MEASURES = AMOUNTS  # Without the resource group: a queue has only one.

_AMOUNTS = attrgetter(*_MEASURES)
_KEY = attrgetter(*_MEASURES, "time_limit_s")
_KEY_WITH_USER = attrgetter(*_MEASURES, "time_limit_s", "user", "groups", "account")


class EquivalentRequests:
    """The sessions of a queue with identical requests, in queue order. A pass tries only the first that waits."""

    __slots__ = ("amounts", "first", "positions", "reason")

    def __init__(self, amounts: Amounts) -> None:
        self.amounts = amounts
        #: The position of each session in the queue.
        self.positions: list[int] = []
        #: The index in ``positions`` of the first session that still waits; those before it have started.
        self.first = 0
        #: Why the sessions from ``first`` on wait.
        self.reason = WaitReason.RESOURCES

    @property
    def waits(self) -> bool:
        """Whether a session still waits."""
        return self.first < len(self.positions)


class PendingQueue:
    """The sorted queue of a resource group, split into sets of identical requests. Held sessions are in no set.

    Two sessions are in one set if the planner must decide the same for both; with quotas the user and groups count too.
    """

    __slots__ = ("heads", "promised", "sessions", "set_of", "sets")

    def __init__(self, sessions: Sequence[Session], *, by_user: bool, held: bool = False) -> None:
        self.sessions = sessions
        key_of = _KEY_WITH_USER if by_user else _KEY
        found: dict[object, EquivalentRequests] = {}
        #: The sessions with a promised start, in queue order, each with its own set.
        self.promised: list[tuple[Session, EquivalentRequests]] = []
        #: The set of each session, by its position in the queue; None where it is held.
        self.set_of = set_of = list[EquivalentRequests | None]()
        for position, session in enumerate(sessions):
            if session.held and not held:
                set_of.append(None)
                continue
            # A session that a node refused has its own set: equal requests may still start on that node. So has a
            # session with a promised start: its reservation is not for the others.
            alone = session.refused or session.promised_at_s is not None
            key = session.id if alone else key_of(session.request)
            same = found.get(key)
            if same is None:
                same = found[key] = EquivalentRequests(_AMOUNTS(session.request))
            if session.promised_at_s is not None:
                self.promised.append((session, same))
            same.positions.append(position)
            set_of.append(same)
        self.sets = list(found.values())
        #: For the first waiting session of each set, its position in the queue and the number of the set.
        self.heads = sorted((same.positions[0], n) for n, same in enumerate(self.sets))

    def copy(self) -> PendingQueue:
        """Return an independent copy."""
        other = copy(self)
        other.sets, other.heads = [copy(same) for same in self.sets], list(self.heads)
        new = {id(old): same for old, same in zip(self.sets, other.sets, strict=True)}
        other.promised = [(session, new[id(same)]) for session, same in self.promised]
        return other

    def drop_started(self) -> None:
        """Remove sessions that have started from ``heads``."""
        sets = self.sets
        self.heads = [
            (at, n) for at, n in self.heads if sets[n].waits and sets[n].positions[sets[n].first] == at
        ]


class UnschedulableRequests:
    """The requests that did not fit. A fraction that did not fit rules out requests for at least as much of everything.

    This holds for a fraction that every single device could hold when empty: no device has that much free, and a larger
    request, whole devices included, would need such a device.
    """

    __slots__ = ("_devices", "_earlier", "_held_when_empty", "_least", "found")

    def __init__(self, devices: Iterable[tuple[int, int]]) -> None:
        """Begin with the fGPU x 1000 and the memory in MiB of each kind of device."""
        self._devices = frozenset(devices)
        #: By fGPU x 1000, whether every device could hold that much when empty.
        self._held_when_empty: dict[int, bool] = {}
        #: The requests that did not fit in this pass.
        self.found: dict[Amounts, None] = {}
        #: The requests that did not fit in earlier passes, and for which no node has freed enough since.
        self._earlier: dict[Amounts, None] = {}
        #: Of the requests in ``found``, those that rule out larger ones.
        self._least: list[Amounts] = []

    def begin(self, freed: Collection[FreeAmounts]) -> None:
        """Begin another pass; ``freed`` are the free amounts of nodes on which a session ended since the last one."""
        earlier = self._earlier | self.found
        if freed:
            least = min((capacity for capacity, _ in self._devices), default=0)
            earlier = {
                amounts: None
                for amounts in earlier
                if not any(
                    f[0] >= amounts[1] and f[1] >= amounts[2] and f[2] >= min(amounts[0], least)
                    for f in freed
                )
            }
        self._earlier, self.found, self._least = earlier, {}, []

    def copy(self) -> UnschedulableRequests:
        """Return an independent copy."""
        other = UnschedulableRequests(self._devices)
        other.found, other._earlier, other._least = dict(self.found), dict(self._earlier), list(self._least)
        return other

    def rule_out(self, amounts: Amounts) -> bool:
        """Return whether a request cannot fit, because one for at most the same amounts did not."""
        fgpu, cpu, memory, gpu_memory, compute, models = amounts
        if amounts in self._earlier:
            return True
        if gpu_memory is not None or compute is not None:
            return False
        # Not any(): a generator costs more than the comparisons, and this runs for every set in every pass.
        for least in self._least:
            if fgpu >= least[0] and cpu >= least[1] and memory >= least[2] and _among(models, least[5]):
                return True
        return False

    def add(self, amounts: Amounts, *, ruled_out: bool = False) -> None:
        """Note a request that did not fit. One that was ``ruled_out`` by a smaller one rules out nothing new."""
        self.found[amounts] = None
        if not ruled_out and amounts[3] is None and amounts[4] is None and self._each_could_hold(amounts[0]):
            self._least.append(amounts)

    def _each_could_hold(self, fgpu_milli: int) -> bool:
        found = self._held_when_empty.get(fgpu_milli)
        if found is None:
            found = self._held_when_empty[fgpu_milli] = fgpu_milli > 0 and all(
                fgpu_milli <= capacity
                and share_memory_mib(fgpu_milli, capacity_milli=capacity, device_memory_mib=memory) > 0
                for capacity, memory in self._devices
            )
        return found


def _among(models: tuple[str, ...], others: tuple[str, ...]) -> bool:
    """Return whether all of ``models`` are among ``others``. An empty tuple stands for every model."""
    return not others or models == others or (bool(models) and set(models) <= set(others))
