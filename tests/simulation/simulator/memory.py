"""An in-memory store with only what scheduling decisions depend on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from fgpu_scheduler.core import lifecycle
from fgpu_scheduler.core.forecast_accuracy import ForecastHistory
from fgpu_scheduler.core.lifecycle import past_runs
from fgpu_scheduler.core.model import (
    Node,
    NodeState,
    Quota,
    RequestCount,
    Session,
    SessionIndex,
    SessionState,
    Snapshot,
)
from fgpu_scheduler.core.persistent_map import PersistentMap, part_of_id
from fgpu_scheduler.core.request_counts import count_requests, counted_ids
from fgpu_scheduler.core.run_lengths import LEAST, NEWEST_RUNS, PastRuns, RunLengths
from fgpu_scheduler.core.usage import HALF_LIFE_S, HalfLife
from fgpu_scheduler.errors import BadSettings, UnknownSession
from fgpu_scheduler.store import quotas as accounts
from fgpu_scheduler.store.sessions import SessionStore, server_of
from fgpu_scheduler.store.snapshot_cache import Contents

S = SessionState


class MemoryStore(SessionStore):
    """A `SessionStore` in memory, for tests and the simulator."""

    def __init__(self, nodes: Iterable[Node] = (), *, half_life_s: HalfLife = lambda _: HALF_LIFE_S) -> None:
        super().__init__(half_life_s=half_life_s)
        self._world = Contents(
            1,
            tuple(sorted(nodes, key=lambda n: n.id)),
            PersistentMap(part_of_id),
            {},
            (),
            (),
            0,
            SessionIndex.of(()),
        )
        self._states = {node.id: node.state for node in self._world.nodes}
        """The states that were set; the nodes have whether their clusters closed them."""
        self._ended: dict[int, Session] = {}

    @contextmanager
    def writing(self, *, now_s: int) -> Iterator[MemoryWrite]:
        write = MemoryWrite(self._world, self._ended, now_s)
        yield write
        if write.changed:
            self._ended |= {s.id: s for s in write.changed.values() if s.state in lifecycle.ENDED}
            self._world = write.then()

    # --- Nodes and quotas ---

    def set_nodes(self, nodes: Sequence[Node], *, now_s: int, keep_states: bool = False) -> None:
        ids = {n.id for n in nodes}
        live = self._world.sessions.values()
        held = {s.placement.node_id for s in live if s.state in lifecycle.HOLDING and s.placement}
        left_out = (n for n in self._world.nodes if n.id not in ids and n.id in held)
        known = self._states if keep_states else {}
        states = {n.id: known.get(n.id, n.state) for n in nodes}
        gone = {n.id: known.get(n.id, NodeState.LOST) if n.closed else NodeState.LOST for n in left_out}
        left = [replace(n, closed=True) for n in self._world.nodes if n.id in gone]
        self._set_nodes((*nodes, *left), states | gone)

    def set_node_state(
        self, node_id: str, state: NodeState, *, now_s: int, only: NodeState | None = None
    ) -> NodeState:
        old = self._states.get(node_id)
        if old is None:
            raise BadSettings(f"there is no node {node_id!r}")
        if only in (None, old):
            self._set_nodes(self._world.nodes, {**self._states, node_id: state})
        return old

    def set_cordon(self, device_uuid: str, reason: str | None, *, now_s: int) -> str | None:
        node = next((n for n in self._world.nodes for d in n.devices if d.uuid == device_uuid), None)
        if node is None:
            raise BadSettings(f"there is no GPU {device_uuid!r}")
        (old,) = (d.cordon_reason for d in node.devices if d.uuid == device_uuid)
        devices = tuple(
            replace(d, cordon_reason=reason) if d.uuid == device_uuid else d for d in node.devices
        )
        changed = (replace(n, devices=devices) if n is node else n for n in self._world.nodes)
        self._set_nodes(changed, self._states)
        return old

    def _set_nodes(self, nodes: Iterable[Node], states: dict[str, NodeState]) -> None:
        ordered = tuple(_as_it_is(n, states[n.id]) for n in sorted(nodes, key=lambda n: n.id))
        if (ordered, states) != (self._world.nodes, self._states):
            self._states = states
            self._world = replace(self._world, version=self._world.version + 1, nodes=ordered)

    def set_quotas(self, quotas: Sequence[Quota], *, now_s: int) -> None:
        found = accounts.checked(quotas)
        if found != self._world.quotas:
            self._world = replace(self._world, version=self._world.version + 1, quotas=found)

    # --- Reading ---

    def version(self) -> int:
        return self._world.version

    def snapshot(self, now_s: int) -> Snapshot:
        return self._world.snapshot(now_s, self._world.usage(now_s, self._half_life_s))

    def session(self, session_id: int) -> Session | None:
        return self._world.sessions.get(session_id) or self._ended.get(session_id)

    def serving(self, user: str, server_name: str) -> Session | None:
        found = (s for s in self._world.sessions.values() if server_of(s.request) == (user, server_name))
        return next((s for s in found if s.state in lifecycle.SERVING), None)

    def held_sessions(self) -> tuple[Session, ...]:
        early = (S.PENDING, S.SCHEDULED, *lifecycle.LAUNCHING)
        held = (s for s in self._world.sessions.values() if s.held and s.state in early)
        return tuple(sorted(held, key=lambda s: (s.state is S.PENDING, s.submitted_at_s, s.id)))

    def experience(self, resource_group: str) -> ForecastHistory:
        ran = past_runs(self._ended.values())
        own = PastRuns().then(one for one in ran if one.resource_group == resource_group)
        newest = sorted(ran, key=lambda one: (one.ended_at_s, one.session_id), reverse=True)[:NEWEST_RUNS]
        runs = own.of_group.get(resource_group, ())
        return ForecastHistory(RunLengths(resource_group, runs if len(runs) >= LEAST else newest))


def _as_it_is(node: Node, state: NodeState) -> Node:
    """Return the node in this state, or CORDONED if it is READY but its cluster has closed it."""
    return replace(node, state=NodeState.CORDONED if node.closed and state is NodeState.READY else state)


class MemoryWrite:
    """One write of a `MemoryStore`, without a log. Shares are part of the sessions, so they need no write."""

    def __init__(self, world: Contents, ended: dict[int, Session], now_s: int) -> None:
        self.world = world
        self.now_s = now_s
        self.changed: dict[int, Session] = {}
        self.used: dict[tuple[str, str], tuple[float, int]] = {}
        self._ended = ended
        self._newest_id = world.newest_id

    def then(self) -> Contents:
        return self.world.then(self.changed, self.used, self.asked)

    def one(self, session_id: int) -> Session:
        found = self.world.sessions.get(session_id) or self._ended.get(session_id)
        if found is None:
            raise UnknownSession(f"there is no session {session_id}")
        return found

    def add(self, new: Session) -> Session:
        self._newest_id += 1
        new = replace(new, id=self._newest_id)
        self.changed[new.id] = new
        return new

    def asked(self, newest_id: int) -> tuple[RequestCount, ...]:
        """Count the recently requested amounts, including new sessions."""
        found = (
            self.changed.get(session_id) or self.one(session_id) for session_id in counted_ids(newest_id)
        )
        return count_requests(session.request for session in found)

    def save(self, changed: Sequence[Session]) -> None:
        self.changed.update((session.id, session) for session in changed)

    def give_shares(self, placed: Sequence[Session]) -> None:
        """They are part of the sessions here."""

    def take_shares(self, session_id: int) -> None:
        """They are part of the sessions here."""

    def set_used(self, user: str, resource_group: str, fgpu_milli_s: float) -> None:
        self.used[user, resource_group] = fgpu_milli_s, self.now_s

    def take_message(self, session_id: int) -> str | None:
        return None

    def event(
        self,
        kind: str,
        session: Session | None = None,
        *,
        was: SessionState | None = None,
        reason: str | None = None,
    ) -> None:
        """Log nothing."""
