"""State cached from earlier plans makes later plans faster and never different, on large clusters."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from simulator import drawn
from simulator.order_checks import less_liked

from fgpu_scheduler.core.lifecycle import ENDED, LEGAL
from fgpu_scheduler.core.model import Device, EndCause, Node, NodeState, SessionIndex, SessionState
from fgpu_scheduler.core.planner import PlanCache, plan
from fgpu_scheduler.core.scores.placements import LEAST_ASKED
from fgpu_scheduler.errors import FGPUError
from fgpu_scheduler.store.store import Store

S = SessionState
ENDS = (S.TERMINATING, S.CANCELLED, S.TERMINATED, S.ERROR)


def cluster(rng: Random) -> tuple[Node, ...]:
    """Enough nodes for the column search, of two kinds, in two groups."""
    nodes = []
    for n in range(30):
        name, model = f"n{n:02}", drawn.MODELS[n % 3 == 0]
        devices = tuple(
            Device(f"GPU-{name}-{i}", name, i, model, 24576, 1000, max_shares=rng.choice((3, 20)))
            for i in range(rng.choice((2, 4)))
        )
        nodes.append(Node(name, drawn.GROUPS[n % 5 == 0], 16000, 65536, devices))
    return tuple(nodes)


class History:
    """A store with random events, and the cached state of the plans made from it."""

    def __init__(self, seed: int) -> None:
        self.rng = Random(seed)
        self.nodes = cluster(self.rng)
        self.store = Store("sqlite://")
        self.store.open()
        self.store.set_nodes(self.nodes, now_s=0)
        self.memory = PlanCache()
        self.policy = drawn.policy(self.rng)
        self.now_s = 1000
        self.servers = 0
        self.of_several = 0
        """Number of placements of requests for several GPU models."""

    def submit(self) -> None:
        group = self.rng.choice(drawn.GROUPS)
        asked = drawn.request(self.rng, group, (100, 300, 500, 1000, 1000, 2000, 4000), (1024, 24576))
        self.servers += 1
        self.store.submit([replace(asked, server_name=str(self.servers))], now_s=self.now_s)

    def commit(self) -> None:
        self.store.commit(plan(self.store.snapshot(self.now_s), self.policy, self.memory), now_s=self.now_s)

    def plan_without_committing(self) -> None:
        """Plan without committing: capacity that the plan used stays free."""
        plan(self.store.snapshot(self.now_s), self.policy, self.memory)

    def move(self) -> None:
        session = self.rng.choice(self.store.snapshot(self.now_s).sessions)
        to = self.rng.choice([state for state in LEGAL[session.state] if state is not S.SCHEDULED])
        cause = EndCause.USER if to in ENDS else None
        self.store.move(session.id, to, now_s=self.now_s, cause=cause)

    def end(self) -> None:
        session = self.rng.choice(self.store.snapshot(self.now_s).sessions)
        while session.state not in ENDED:
            to = self.rng.choice([state for state in LEGAL[session.state] if state in ENDS] or [S.RUNNING])
            to = S.PREPARING if session.state is S.SCHEDULED else to
            session = self.store.move(session.id, to, now_s=self.now_s, cause=EndCause.USER)

    def give_back(self) -> None:
        session = self.rng.choice([s for s in self.store.snapshot(0).sessions if s.state is S.PREPARING])
        self.store.give_back(session.id, "no", attempt=session.attempt, now_s=self.now_s)

    def hold(self) -> None:
        session = self.rng.choice(self.store.snapshot(self.now_s).sessions)
        self.store.set_held(session.id, self.rng.randrange(3) == 0, now_s=self.now_s)

    def node(self) -> None:
        state = self.rng.choice((NodeState.READY, NodeState.READY, NodeState.CORDONED, NodeState.LOST))
        self.store.set_node_state(self.rng.choice(self.nodes).id, state, now_s=self.now_s)

    def quota(self) -> None:
        self.store.set_quotas(drawn.quotas(self.rng), now_s=self.now_s)

    def forget(self) -> None:
        self.memory = PlanCache()

    def time(self) -> None:
        self.now_s += self.rng.choice((1, 60, 600, -30))

    def step(self) -> bool:
        """Cause a random event and compare the plans; return False if the event was impossible."""
        often = (self.submit, self.commit, self.commit, self.move, self.end, self.end, self.time)
        seldom = (self.plan_without_committing, self.give_back, self.hold, self.node, self.quota, self.forget)
        step = self.rng.choice(seldom if self.rng.randrange(8) == 0 else often)
        try:
            step()
        except (FGPUError, IndexError):
            return False
        snapshot = self.store.snapshot(self.now_s)
        assert snapshot.index == SessionIndex.of(snapshot.sessions)
        from_nothing = plan(replace(snapshot, known=None), self.policy)
        assert plan(snapshot, self.policy, self.memory) == from_nothing
        assert not list(less_liked(snapshot, from_nothing))
        sessions = {s.id: s for s in snapshot.sessions}
        chosen = [sessions[p.session_id].request.gpu_models for p in from_nothing.placed]
        self.of_several += sum(len(models) > 1 for models in chosen)
        return True


def live_through(seeds: range, steps: int) -> int:
    happened = 0
    for seed in seeds:
        history = History(seed)
        happened += sum(history.step() for _ in range(steps))
        assert history.servers > LEAST_ASKED
        assert history.of_several > 10
        history.store.close()
    return happened


def test_plan_with_cached_state_equals_a_fresh_plan() -> None:
    assert live_through(range(6), 600) > 2000


@pytest.mark.slow
def test_plan_with_cached_state_is_equal_after_100000_events() -> None:
    assert live_through(range(100, 250), 1000) > 100_000
