"""The ground of a simulation: its chances, its clock, and a store that is looked at after every write."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from fgpu_scheduler.core import admission
from fgpu_scheduler.core.model import Device, EndCause, Node, NodeState, Session, SessionState, Snapshot
from fgpu_scheduler.core.planner import Policy
from fgpu_scheduler.core.reclaim import AllRules
from fgpu_scheduler.errors import InvalidTransition
from fgpu_scheduler.store.sessions import SessionStore
from fgpu_scheduler.testing import drawn
from fgpu_scheduler.testing.checks import Checks, Standing, Violation
from fgpu_scheduler.testing.memory import MemoryStore

EPOCH_S = 1_800_000_000


@dataclass(frozen=True, slots=True)
class Faults:
    """How often something goes wrong: chances in percent, and weights among what happens outside."""

    late_pull: int = 10
    failed_pull: int = 12
    failed_create: int = 6
    late_create: int = 15
    failed_start: int = 6
    failed_stop: int = 10
    not_bound: int = 8
    inventory: int = 8
    """Whether the nodes are others between placing and launching."""
    late_commit: int = 40
    never_resumed: int = 15
    outages: bool = True
    """Whether anything dies, is lost or jumps, and whether administrators change anything."""
    tells_launches: bool = True
    """Whether the Hub tells `reconcile` of the launches that are under way. False is a bug to be found."""


CALM = Faults(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, outages=False)


@dataclass(order=True, slots=True)
class _Due:
    at_s: int
    number: int
    hub: int | None = field(compare=False)
    act: Callable[[], None] = field(compare=False)


class Lab:
    """What every part of a simulation stands on. ``hub`` counts the Hub's lives: what a dead one had planned is void."""

    def __init__(
        self,
        seed: int,
        store: SessionStore | None,
        *,
        policy: Policy | None,
        rules: AllRules | None,
        faults: Faults | None,
    ) -> None:
        self.seed = seed
        self.step = 0
        self.lines: list[str] = []
        self._rng = random.Random(seed)
        self._faults = faults or Faults()
        self._time_s = EPOCH_S
        self._skew_s = 0
        self._hub = 1
        self._due: list[_Due] = []
        self._numbers = 0
        self._store: SessionStore = store if store is not None else MemoryStore()
        self._containers: dict[str, Standing] = {}
        self._causes: dict[str, EndCause] = {}
        self._images: dict[tuple[str, str], None] = {}
        self._unreachable: dict[str, None] = {}
        self._creating: dict[int, int] = {}
        self._submitted = self._ran = self._stale = self._restarts = self._orphans = 0
        self._caps = admission.Caps(fgpu_step_milli=100, max_count=5, max_pending_per_user=6)
        found = drawn.nodes(self._rng)
        # Most people ask for the same few amounts, so that there is an order to keep.
        fitting = admission.amounts_that_fit(found, self._caps)
        self._amounts = [self._rng.choice(fitting) for _ in range(3)]
        drawn_policy, drawn_rules = drawn.policy(self._rng), drawn.rules(self._rng)
        self._policy = policy or drawn_policy
        self._rules = rules or drawn_rules
        self._whole = {node.id: node for node in found}
        """The nodes as they are when nothing of them is missing."""
        self._offered = dict(self._whole)
        """The nodes as they are now."""
        self._cordons: dict[str, str | None] = {}
        self._store.set_nodes(found, now_s=self._now_s())
        self._checks = Checks(self._snapshot(), self._policy, self._rules, steady_s=self._time_s)

    # --- Time ---

    def _now_s(self) -> int:
        return self._time_s + self._skew_s

    def _pass_time(self, seconds: int) -> None:
        self._time_s += seconds

    def _later(self, least_s: int, most_s: int, act: Callable[[], None]) -> None:
        """Let the Hub do something later, if it lives until then."""
        self._put(self._rng.randint(least_s, most_s), self._hub, act)

    def _elsewhere(self, least_s: int, most_s: int, act: Callable[[], None]) -> None:
        """Let something happen later whatever becomes of the Hub."""
        self._put(self._rng.randint(least_s, most_s), None, act)

    def _put(self, delay_s: int, hub: int | None, act: Callable[[], None]) -> None:
        self._numbers += 1
        heapq.heappush(self._due, _Due(self._time_s + delay_s, self._numbers, hub, act))

    def _next(self) -> None:
        due = heapq.heappop(self._due)
        self._time_s = max(self._time_s, due.at_s)
        if due.hub is None or due.hub == self._hub:
            due.act()

    def _chance(self, percent: int) -> bool:
        return self._rng.randrange(100) < percent

    def _say(self, what: str) -> None:
        self.lines.append(f"{self._time_s - EPOCH_S} {what}")

    # --- The store, watched ---

    def _snapshot(self) -> Snapshot:
        return self._store.snapshot(self._now_s())

    def _look(self, *, planned: bool = False) -> None:
        self._checks.look(
            self._snapshot(),
            self._standing(),
            self._store.session,
            steady_s=self._time_s,
            planned=planned,
        )

    def _standing(self) -> tuple[Standing, ...]:
        return tuple(self._containers.values())

    def _move(
        self,
        session_id: int,
        to: SessionState,
        expect: Sequence[SessionState],
        *,
        attempt: int | None = None,
        cause: EndCause | None = None,
        message: str | None = None,
        launched: str | None = None,
    ) -> Session | None:
        """Return the session in its new state, or None where something else was faster."""
        try:
            moved = self._store.move(
                session_id,
                to,
                now_s=self._now_s(),
                cause=cause,
                message=message,
                launched=launched,
                expect=expect,
                attempt=attempt,
            )
        except InvalidTransition:
            self._say(f"session {session_id} is not {to}: it has moved on")
            return None
        self._say(f"session {session_id} -> {to} {cause or ''}")
        self._look()
        return moved

    def _get(self, session_id: int) -> Session:
        found = self._store.session(session_id)
        if found is None:
            raise Violation(f"session {session_id} is unknown")
        return found

    def _set_node(self, node_id: str, state: NodeState) -> None:
        self._store.set_node_state(node_id, state, now_s=self._now_s())
        self._say(f"node {node_id} is {state}")
        self._look()

    def _inventory_changes(self) -> None:
        """A node comes, goes, is closed or opened by its cluster, or has less or more than before."""
        rng, node_id = self._rng, self._rng.choice(sorted(self._whole))
        whole = self._whole[node_id]
        match rng.randrange(6):
            case 0:
                self._offered.pop(node_id, None)
            case 1:
                self._offered[node_id] = replace(whole, closed=True)
            case 2:
                some = rng.sample(whole.devices, rng.randrange(len(whole.devices) + 1))
                self._offered[node_id] = replace(whole, devices=tuple(d for d in whole.devices if d in some))
            case 3:
                less = tuple(replace(d, memory_mib=d.memory_mib // 2) for d in whole.devices)
                self._offered[node_id] = replace(whole, devices=less)
            case 4:
                self._offered[node_id] = replace(whole, cpu_milli=2000, memory_mib=4096)
            case _:
                self._offered[node_id] = whole
        self._offer()

    def _offer(self) -> None:
        """Let the nodes be those that there are now; one that is there again answers, if it is not lost otherwise."""
        self._say(f"the nodes are {list(self._offered.values())}")
        there = [
            replace(n, state=NodeState.LOST, devices=self._with_cordons(n)) for n in self._offered.values()
        ]
        self._store.set_nodes(there, now_s=self._now_s(), keep_states=True)
        self._look()
        for node in self._snapshot().nodes:
            if node.id not in self._offered:
                # Of what is not there any more the Hub starts nothing.
                for session in self._snapshot().sessions:
                    if session.state is SessionState.SCHEDULED and node_of(session) == node.id:
                        self._move(session.id, SessionState.PENDING, (SessionState.SCHEDULED,))
            elif node.state is NodeState.LOST and node.id not in self._unreachable:
                self._set_node(node.id, NodeState.READY)

    def _with_cordons(self, node: Node) -> tuple[Device, ...]:
        return tuple(replace(d, cordon_reason=self._cordons.get(d.uuid)) for d in node.devices)

    def _set_cordon(self, device_uuid: str, reason: str | None) -> None:
        self._cordons[device_uuid] = reason
        self._store.set_cordon(device_uuid, reason, now_s=self._now_s())
        self._say(f"device {device_uuid} takes {'' if reason is None else 'no more '}sessions")
        self._look()


def node_of(session: Session) -> str:
    """Return the node of a session that has its shares."""
    assert session.placement is not None
    return session.placement.node_id
