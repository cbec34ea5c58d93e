"""Faults and administrators' changes in a simulated lab: dying processes and nodes, clock jumps, edits."""

from __future__ import annotations

from dataclasses import replace

from fgpu_scheduler.core.model import EndCause, NodeState, SessionState
from simulator import drawn
from simulator.checks import Container
from simulator.users import Users

S = SessionState


class Outages(Users):
    """The external events of a simulation."""

    def _process_dies(self) -> None:
        alive = [c for c in self._standing() if c.alive]
        if alive:
            self._dies(self._rng.choice(alive), self._rng.choice((EndCause.EXITED, EndCause.OOM)))

    def _dies(self, container: Container, cause: EndCause) -> None:
        self._containers[container.handle] = replace(container, alive=False)
        self._causes[container.handle] = cause
        self._say(f"{container.handle} dies: {cause}")
        self._look()
        if self._chance(50):
            self._changed()

    def _node_lost(self) -> None:
        nodes = [n.id for n in self._snapshot().nodes if n.id not in self._unreachable]
        if nodes:
            node_id = self._rng.choice(nodes)
            self._unreachable[node_id] = None
            self._say(f"node {node_id} does not answer")

    def _node_returns(self) -> None:
        if self._unreachable:
            self._back(self._rng.choice(list(self._unreachable)))

    def _back(self, node_id: str) -> None:
        rebooted = self._chance(30)
        for container in self._standing():
            if rebooted and container.node_id == node_id and container.alive:
                self._dies(container, EndCause.EXITED)
        del self._unreachable[node_id]
        self._say(f"node {node_id} answers again")

    def _set_node(self, node_id: str, state: NodeState) -> None:
        self._beside.set_node_state(node_id, state, now_s=self.now_s())
        self._say(f"node {node_id} is {state}")

    def _cordon(self) -> None:
        ready = [n.id for n in self._snapshot().nodes if n.state is NodeState.READY]
        if ready:
            self._set_node(self._rng.choice(ready), NodeState.CORDONED)

    def _uncordon(self) -> None:
        cordoned = [n.id for n in self._snapshot().nodes if n.state is NodeState.CORDONED]
        if cordoned:
            self._set_node(self._rng.choice(cordoned), NodeState.READY)

    def _set_cordon(self, device_uuid: str, reason: str | None) -> None:
        self._beside.set_cordon(device_uuid, reason, now_s=self.now_s())
        self._say(f"device {device_uuid} takes {'' if reason is None else 'no more '}sessions")

    def _cordon_gpu(self) -> None:
        open_ = [d.uuid for n in self._snapshot().nodes for d in n.devices if not d.cordoned]
        if open_:
            self._set_cordon(self._rng.choice(open_), "broken")

    def _uncordon_gpu(self) -> None:
        cordoned = [d.uuid for n in self._snapshot().nodes for d in n.devices if d.cordoned]
        if cordoned:
            self._set_cordon(self._rng.choice(cordoned), None)

    def _clock_jumps(self) -> None:
        before_s, self._skew_s = self._skew_s, self._rng.randint(-7200, 7200)
        self._set_back = self._set_back or self._skew_s < before_s
        self._say(f"the clock is {self._skew_s} s off")

    def _database_away(self) -> None:
        self._away_until_s = self._at_s + self._rng.choice((0.1, 3, 20, 60))
        self._say("the database does not answer")

    def _unit_changes(self) -> None:
        """Change the capacity of one node's devices."""
        chosen = self._rng.choice(sorted(self._whole))
        capacity = 1000 * self._rng.choice((1, 2, 5))
        for nodes in (self._whole, self._offered):
            if chosen in nodes:
                devices = tuple(replace(d, capacity_milli=capacity) for d in nodes[chosen].devices)
                nodes[chosen] = replace(nodes[chosen], devices=devices)
        self._say(f"node {chosen} has {capacity} milli-fGPU per GPU")
        self._offer()

    def _quotas_change(self) -> None:
        """Set other quotas, or none."""
        self._quotas = drawn.quotas(self._rng)
        self._beside.set_quotas(self._quotas, now_s=self.now_s())
        self._say(f"the quotas are {self._quotas}")
