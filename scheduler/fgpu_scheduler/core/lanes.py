"""Whom a pass need not try: those who ask for the same as somebody ahead, and what cannot fit as less did not."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import attrgetter

from fgpu_scheduler.core.asked import AMOUNTS
from fgpu_scheduler.core.model import Session, WaitReason
from fgpu_scheduler.core.units import share_memory_mib

Amounts = tuple[int, int, int, int | None, int | None, tuple[str, ...]]
"""fGPU x 1000, CPU x 1000, memory in MiB, explicit GPU memory in MiB and compute in percent, GPU models."""

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

    __slots__ = ("lane_of", "lanes", "promised", "sessions")

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


class Misfits:
    """Shapes that did not fit. Whoever asks for a fraction in vain rules out all who ask for at least as much of
    everything.

    That holds for amounts that any of the devices could hold by itself with some memory: on none of them is there so
    much left, and what is larger, whole devices too, would need one of them.
    """

    __slots__ = ("_devices", "_least", "_rules_out", "found")

    def __init__(self, devices: Iterable[tuple[int, int]]) -> None:
        """Take the fGPU x 1000 and the memory in MiB of every kind of device there is."""
        self._devices = frozenset(devices)
        self._rules_out: dict[int, bool] = {}
        self.found: dict[Amounts, None] = {}
        """Those that did not fit."""
        self._least: list[Amounts] = []

    def forget(self) -> None:
        """Begin anew."""
        self.found.clear()
        self._least = []

    def rule_out(self, asked: Amounts) -> bool:
        """Return whether it cannot fit, because something that asks for no more did not."""
        fgpu, cpu, memory, gpu_memory, compute, models = asked
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
