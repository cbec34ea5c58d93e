"""The base of a simulation: its random faults, its clock, and a store that is checked after every write."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from fgpu_scheduler.core import admission, planner
from fgpu_scheduler.core.model import (
    EndCause,
    Node,
    NodeState,
    Quota,
    Request,
    Session,
    SessionIndex,
    Snapshot,
)
from fgpu_scheduler.core.planner import Plan, Policy
from fgpu_scheduler.core.reclaim import AllRules
from fgpu_scheduler.errors import StaleVersion
from simulator import drawn
from simulator.checks import Checks, Container, Violation
from simulator.order_checks import less_liked, refused_again
from simulator.virtual import VirtualLoop
from simulator.watched import WatchedStore

EPOCH_S = 1_800_000_000


@dataclass(frozen=True, slots=True)
class Faults:
    """How often faults happen: chances in percent, and weights among the external events."""

    late_pull: int = 10
    failed_pull: int = 12
    failed_create: int = 6
    late_create: int = 15
    failed_start: int = 6
    failed_stop: int = 10
    not_bound: int = 8
    inventory: int = 8
    """Weight of changes of the nodes between placing and launching."""
    slow_thread: int = 3
    """Chance that a call of the database takes seconds."""
    lost_answer: int = 3
    """Chance that a write is committed but its caller gets StoreUnavailable."""
    never_resumed: int = 15
    failed_restore: int = 10
    outages: bool = True
    """Whether processes die, nodes are lost, clocks jump, and administrators change things."""


CALM = Faults(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, outages=False)


@dataclass(order=True, slots=True)
class _Due:
    at_s: float
    number: int
    act: Callable[[], object] = field(compare=False)


class Lab:
    """The state that all parts of a simulation share. ``hub`` counts the Hub's lives."""

    _loop: VirtualLoop

    def __init__(
        self,
        seed: int,
        folder: Path | None,
        *,
        policy: Policy | None,
        rules: AllRules | None,
        faults: Faults | None,
        nodes: int | None,
    ) -> None:
        self.seed = seed
        self.step = 0
        self.lines: list[str] = []
        self._rng = random.Random(seed)
        self._faults = faults or Faults()
        self._at_s = float(EPOCH_S)
        self._skew_s = 0
        self._set_back = False
        """Whether the clock was ever set back."""
        self._away_until_s = 0.0
        self._hub = 0
        self._due: list[_Due] = []
        self._numbers = 0
        self._broken: Exception | None = None
        self._containers: dict[str, Container] = {}
        self._causes: dict[str, EndCause] = {}
        self._images: dict[tuple[str, str], None] = {}
        self._idle: dict[int, int] = {}
        self._unreachable: dict[str, None] = {}
        self._accepted: list[Request] = []
        self._submitted = self._ran = self._stale = self._restarts = self._orphans = 0
        self._caps = admission.Caps(fgpu_step_milli=100, max_count=5, max_pending_per_user=6)
        found = drawn.nodes(self._rng, nodes)
        # Few different amounts, so that the order among equal requests can be checked.
        fitting = admission.amounts_that_fit(found, self._caps)
        self._amounts = [self._rng.choice(fitting) for _ in range(3)]
        drawn_policy, drawn_rules = drawn.policy(self._rng), drawn.rules(self._rng)
        self._policy = policy or drawn_policy
        self._rules = rules or drawn_rules
        self._queue_timeout_s = self._rng.choice((300, 3600, 24 * 3600))
        self._quotas: tuple[Quota, ...] = ()
        self._whole = {node.id: node for node in found}
        """The complete nodes."""
        self._offered = dict(self._whole)
        """The nodes with what they have now."""
        self._is_file = folder is not None
        self._url = "sqlite://" if folder is None else f"sqlite:///{folder / 'fgpu.sqlite'}"
        self._store = self._watched()
        self._store.open()
        self._beside = self._store
        """The store of the service and of administrators: another process's if the store is a file."""
        if folder is not None:
            self._beside = self._watched()
            self._beside.connect()
        first = replace(self._snapshot(), nodes=found)
        self._checks = Checks(first, self._policy, self._rules, steady_s=self._time_s)

    def _watched(self) -> WatchedStore:
        return WatchedStore(
            self._url,
            self,
            half_life_s=lambda group: self._policy.of(group).half_life_s,
            away=lambda: self._at_s < self._away_until_s,
            loses=lambda: self._chance(self._faults.lost_answer),
        )

    def close(self) -> None:
        self._beside.close()
        self._store.close()

    # --- Time ---

    @property
    def _time_s(self) -> int:
        return int(self._at_s)

    def now_s(self) -> int:
        """Return the time that the Hub's clock shows."""
        return self._time_s + self._skew_s

    def _takes_s(self) -> float:
        """Draw the duration of a call in a thread of the Hub."""
        slow = self._chance(self._faults.slow_thread)
        return self._rng.uniform(0.5, 6) if slow else self._rng.uniform(0.001, 0.02)

    def _elsewhere(self, least_s: float, most_s: float, act: Callable[[], object]) -> None:
        """Schedule an event that happens even if the Hub dies."""
        self._numbers += 1
        at_s = self._at_s + self._rng.uniform(least_s, most_s)
        heapq.heappush(self._due, _Due(at_s, self._numbers, act))

    def _next(self, until_s: float) -> bool:
        """Take the Hub's next step or the next external event; return whether one was due by then."""
        if self._loop.step():
            self._judge()
            return True
        hub_at_s = self._loop.next_at_s()
        at_s = min(
            until_s if hub_at_s is None else hub_at_s, self._due[0].at_s if self._due else until_s, until_s
        )
        self._at_s = max(self._at_s, at_s)
        self._loop.pass_to(self._at_s)
        if self._due and self._due[0].at_s <= self._at_s:
            heapq.heappop(self._due).act()
            self._judge()
            return True
        found = self._loop.step()
        self._judge()
        return found

    def _pass_time(self, seconds: float) -> None:
        until_s = self._at_s + seconds
        while self._next(until_s):
            pass

    def _judge(self) -> None:
        if self._broken is not None:
            raise self._broken
        if self._loop.failures:
            raise Violation(f"nobody took what went wrong: {self._loop.failures}")

    def _chance(self, percent: int) -> bool:
        return self._rng.randrange(100) < percent

    def _say(self, what: str) -> None:
        self.lines.append(f"{self._time_s - EPOCH_S} {what}")

    # --- Checks of the store ---

    def _snapshot(self) -> Snapshot:
        """Read a snapshot without changing the Hub's cache."""
        with self._beside.faultless():
            return self._beside.snapshot(self.now_s())

    def _look(self, store: WatchedStore | None = None, *, planned: bool = False) -> None:
        store = store or self._beside
        with store.faultless():
            self._checks.look(
                store.snapshot(self.now_s()),
                self._standing(),
                store.session,
                steady_s=self._time_s,
                planned=planned,
            )

    def wrote(self, store: WatchedStore, submitted: Sequence[Session], *, planned: bool) -> None:
        """Check the store after a write."""
        try:
            self._checks.submitted(submitted)
            self._accepted += [session.request for session in submitted]
            self._look(store, planned=planned)
        except Exception as e:
            # Keep it: in a thread of the Hub the exception would only be logged.
            self._broken = self._broken or e
            raise

    def decided(self, snapshot: Snapshot, plan: Plan) -> None:
        """Check that a plan equals a fresh one, avoids refused nodes and uses the preferred models."""
        complaints = [*refused_again(snapshot, plan), *less_liked(snapshot, plan)]
        if plan != planner.plan(replace(snapshot, known=None), self._policy):
            complaints.append("what earlier plans have left changes the plan")
        if snapshot.index != SessionIndex.of(snapshot.sessions):
            complaints.append("the groups that were carried are not those of the sessions")
        self._complain(complaints)

    def committed(self, decided_on: int, found: int) -> None:
        """Check that a plan was committed on the version that it was made on."""
        if decided_on != found:
            self._complain([f"a decision of version {decided_on} was committed at version {found}"])

    def refused(self, why: StaleVersion, decided_on: int, found: int) -> None:
        """Check that a plan was refused because of another write or a clock that was set back."""
        self._stale += 1
        self._say("stale")
        # On the same version, only a clock that was set back is a reason to refuse.
        if decided_on == found and not self._set_back:
            self._complain([f"a decision of this very version was refused: {why}"])

    def _complain(self, complaints: Sequence[str]) -> None:
        if complaints:
            self._broken = self._broken or Violation("; ".join(complaints))
            raise self._broken

    def _standing(self) -> tuple[Container, ...]:
        return tuple(self._containers.values())

    def _get(self, session_id: int) -> Session:
        with self._beside.faultless():
            found = self._beside.session(session_id)
        if found is None:
            raise Violation(f"session {session_id} is unknown")
        return found

    # --- The nodes ---

    def _there(self) -> list[Node]:
        """Return the nodes as the engines report them."""
        return [
            replace(node, state=NodeState.LOST if node.id in self._unreachable else NodeState.READY)
            for node in self._offered.values()
        ]

    def _has_devices(self, session: Session) -> bool:
        """Return whether the devices of a session's shares still exist."""
        node = self._offered.get(node_of(session))
        there = {device.uuid for device in node.devices} if node is not None else set()
        assert session.placement is not None
        return there.issuperset(share.device_uuid for share in session.placement.shares)


def node_of(session: Session) -> str:
    """Return the node of a placed session."""
    assert session.placement is not None
    return session.placement.node_id
