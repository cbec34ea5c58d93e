"""Small worlds for tests: ``world(devices=2).running("a", "0.6").pending("b", "0.5")``."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from fgpu_scheduler.core import placement
from fgpu_scheduler.core.expected_starts import SOON_S
from fgpu_scheduler.core.forecast_accuracy import ForecastHistory
from fgpu_scheduler.core.lifecycle import HOLDING
from fgpu_scheduler.core.model import (
    MAX_SHARES,
    Device,
    Node,
    NodeState,
    Placement,
    Request,
    Session,
    SessionState,
    Snapshot,
)
from fgpu_scheduler.core.planner import Plan, StartDecision
from fgpu_scheduler.core.run_lengths import LengthSource, RemainingTime, RunLengths
from fgpu_scheduler.core.shares import shares_of
from fgpu_scheduler.core.units import parse_milli

NOW_S = 1_000_000
"""The time of a world by default."""


@dataclass(frozen=True)
class World(Snapshot):
    """A snapshot with methods that return a changed copy. Each session is its user's server "", with ids from 1."""

    def node(
        self,
        node_id: str,
        *,
        devices: int = 1,
        fgpu_per_gpu: int | str = 1,
        memory_mib: int = 8192,
        cpu: int | str = 32,
        node_memory_mib: int = 262144,
        group: str = "default",
        model: str = "Test GPU",
        max_shares: int = MAX_SHARES,
        state: NodeState = NodeState.READY,
    ) -> World:
        """Add a node with the devices ``GPU-<node>-<index>``."""
        capacity = parse_milli(str(fgpu_per_gpu), field="fgpu_per_gpu")
        found = tuple(
            Device(f"GPU-{node_id}-{i}", node_id, i, model, memory_mib, capacity, max_shares=max_shares)
            for i in range(devices)
        )
        new = Node(node_id, group, parse_milli(str(cpu), field="cpu"), node_memory_mib, found, state)
        return replace(self, nodes=tuple(sorted((*self.nodes, new), key=lambda n: n.id)))

    def pending(
        self,
        user: str,
        fgpu: str,
        *,
        cpu: int | str = 1,
        memory_mib: int = 1024,
        group: str = "default",
        held: bool = False,
    ) -> World:
        """Add a pending session at the end of the queue."""
        asked = request(user, fgpu, cpu=cpu, memory_mib=memory_mib, group=group)
        new = Session(self._next_id(), asked, SessionState.PENDING, self.now_s, held)
        return replace(self, sessions=(*self.sessions, new))

    def running(
        self,
        user: str,
        fgpu: str,
        *,
        on: str | None = None,
        cpu: int | str = 1,
        memory_mib: int = 1024,
        group: str = "default",
        started_ago_s: int = 0,
        state: SessionState = SessionState.RUNNING,
    ) -> World:
        """Add a running session: on the device ``on``, or where the planner would place it."""
        asked = request(user, fgpu, cpu=cpu, memory_mib=memory_mib, group=group)
        return self.holding(asked, on=on, started_ago_s=started_ago_s, state=state)

    def holding(
        self,
        asked: Request,
        *,
        on: str | None = None,
        started_ago_s: int = 0,
        state: SessionState = SessionState.RUNNING,
    ) -> World:
        """Add a session that holds shares for this request: on the device ``on``, or where they fit best."""
        assert state in HOLDING
        where = self._best(asked) if on is None else self._on(on, asked)
        at_s = self.now_s - started_ago_s
        new = Session(
            self._next_id(),
            asked,
            state,
            submitted_at_s=at_s,
            attempt=0 if state is SessionState.SCHEDULED else 1,
            placement=where,
            scheduled_at_s=at_s,
            started_at_s=at_s if state is SessionState.RUNNING else None,
        )
        return replace(self, sessions=(*self.sessions, new))

    def cordoned(self, node_id: str) -> World:
        """Cordon a node."""
        return self._in_state(node_id, NodeState.CORDONED)

    def cordoned_gpu(self, uuid: str) -> World:
        """Cordon one device."""
        nodes = (
            replace(
                n,
                devices=tuple(replace(d, cordon_reason="broken") if d.uuid == uuid else d for d in n.devices),
            )
            for n in self.nodes
        )
        return replace(self, nodes=tuple(nodes))

    def lost(self, node_id: str) -> World:
        """Set a node LOST."""
        return self._in_state(node_id, NodeState.LOST)

    def unit(self, fgpu_per_gpu: int | str) -> World:
        """Give every device another capacity; held shares do not change."""
        capacity = parse_milli(str(fgpu_per_gpu), field="fgpu_per_gpu")
        nodes = (
            replace(n, devices=tuple(replace(d, capacity_milli=capacity) for d in n.devices))
            for n in self.nodes
        )
        return replace(self, nodes=tuple(nodes))

    def ended(self, user: str) -> World:
        """Remove the sessions of a user."""
        return replace(self, sessions=tuple(s for s in self.sessions if s.request.user != user))

    def of(self, user: str) -> Session:
        """Return the newest session of a user."""
        return next(s for s in reversed(self.sessions) if s.request.user == user)

    def having(self, user: str, **values: object) -> World:
        """Change these fields of the newest session of a user, or of its request."""
        old = self.of(user)
        asked = {field.name: values.pop(field.name) for field in fields(Request) if field.name in values}
        new = replace(old, request=replace(old.request, **asked), **values)  # type: ignore[arg-type]
        return replace(self, sessions=tuple(new if s.id == old.id else s for s in self.sessions))

    def device(self, uuid: str) -> placement.DeviceFree:
        """Return the free capacity of a device."""
        return next(d for n in placement.free(self) for d in n.devices if d.device.uuid == uuid)

    def placed(self, plan: Plan) -> World:
        """Return the world in which the sessions that ``plan`` places run."""
        where = {p.session_id: p.placement for p in plan.placed}
        return replace(
            self,
            sessions=tuple(
                replace(
                    s,
                    state=SessionState.RUNNING,
                    placement=where[s.id],
                    attempt=1,
                    scheduled_at_s=self.now_s,
                    started_at_s=self.now_s,
                )
                if s.id in where
                else s
                for s in self.sessions
            ),
        )

    def _next_id(self) -> int:
        return max((s.id for s in self.sessions), default=0) + 1

    def _best(self, asked: Request) -> Placement:
        found = placement.place(asked, placement.free(self), score=placement.best_fit)
        assert found is not None, f"{asked} does not fit into this world"
        return found[0]

    def _on(self, uuid: str, asked: Request) -> Placement:
        device = next(d for n in self.nodes for d in n.devices if d.uuid == uuid)
        shares = shares_of(asked, (device,))
        assert shares is not None, f"{asked} is worth nothing on {device}"
        return Placement(device.node_id, shares)

    def _in_state(self, node_id: str, state: NodeState) -> World:
        assert any(n.id == node_id for n in self.nodes)
        return replace(
            self, nodes=tuple(replace(n, state=state) if n.id == node_id else n for n in self.nodes)
        )


def world(
    *,
    devices: int = 1,
    fgpu_per_gpu: int | str = 1,
    memory_mib: int = 8192,
    cpu: int | str = 32,
    node_memory_mib: int = 262144,
    group: str = "default",
    now_s: int = NOW_S,
) -> World:
    """Return a world with one node ``n1``, or without a node if ``devices`` is 0; `World.node` adds others."""
    empty = World(now_s=now_s, version=1, nodes=())
    if devices == 0:
        return empty
    return empty.node(
        "n1",
        devices=devices,
        fgpu_per_gpu=fgpu_per_gpu,
        memory_mib=memory_mib,
        cpu=cpu,
        node_memory_mib=node_memory_mib,
        group=group,
    )


def request(
    user: str = "u",
    fgpu: str = "1",
    *,
    cpu: int | str = 1,
    memory_mib: int = 1024,
    group: str = "default",
    server_name: str = "",
    image: str = "image",
    gpu_memory_mib: int | None = None,
    compute_percent: int | None = None,
    gpu_models: tuple[str, ...] = (),
) -> Request:
    """Return a request in the launch form's notation; one for explicit GPU memory has fGPU "0"."""
    return Request(
        user=user,
        server_name=server_name,
        image=image,
        resource_group=group,
        fgpu_milli=parse_milli(fgpu, field="fgpu"),
        cpu_milli=parse_milli(str(cpu), field="cpu"),
        memory_mib=memory_mib,
        gpu_memory_mib=gpu_memory_mib,
        compute_percent=compute_percent,
        gpu_models=gpu_models,
    )


def decided(snapshot: Snapshot, plan: Plan) -> list[str]:
    """Return a plan in words, in its order: ``"a: GPU-n1-0"``, ``"b waits: RESOURCES"``."""
    users = {s.id: s.request.user for s in snapshot.sessions}
    return [
        f"{users[d.session_id]}: {' + '.join(s.device_uuid for s in d.placement.shares)}"
        if isinstance(d, StartDecision)
        else f"{users[d.session_id]} waits: {d.reason}"
        for d in plan.decisions
    ]


class _Alike(RunLengths):
    def __init__(self, length_s: int) -> None:
        super().__init__("")
        self._length_s = length_s

    def __bool__(self) -> bool:
        return True

    def rest(self, user: str, image: str, ran_s: int) -> RemainingTime:
        left_s = self._length_s - ran_s
        return RemainingTime(LengthSource.GROUP, ran_s, (ran_s + (left_s if left_s > 0 else SOON_S),))


def lasting(length_s: int | None) -> ForecastHistory:
    """Return the experience that every session runs this long; None: no experience."""
    return ForecastHistory() if length_s is None else ForecastHistory(_Alike(length_s))
