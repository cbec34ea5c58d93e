"""Pre-emption on many nodes chooses the same victims as the reference algorithm, but faster."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from plain_preempt import plain_victims
from simulator import drawn

from fgpu_scheduler.core import preemption
from fgpu_scheduler.core.model import EndCause, NodeState, Session, SessionState, Snapshot
from fgpu_scheduler.core.placement import best_fit, free, place
from fgpu_scheduler.core.planner import Policy, plan
from fgpu_scheduler.core.policies import ORDERS, group_policy
from fgpu_scheduler.core.quota import Ledger

NOW_S = 10**6
AMOUNTS = (100, 200, 300, 500, 700, 1000, 1000, 2000, 3000, 4000)
MEMORIES_MIB = (1024, 4096, 8192, 16160)


def contested(rng: Random) -> Snapshot:
    """Return nearly full nodes with sessions of several priorities, some of them warned, and a queue."""
    nodes = tuple(
        replace(
            node,
            resource_group=drawn.GROUPS[0],
            state=rng.choice((NodeState.READY,) * 5 + (NodeState.CORDONED,)),
            devices=tuple(
                replace(d, cordon_reason="broken" if rng.randrange(12) == 0 else None) for d in node.devices
            ),
        )
        for node in drawn.nodes(rng)
    )
    lab = Snapshot(NOW_S, 1, nodes)
    for number in range(1, rng.randint(6, 34)):
        asked = replace(
            drawn.request(rng, drawn.GROUPS[0], AMOUNTS, MEMORIES_MIB), cpu_milli=rng.choice((100, 1000))
        )
        found = place(asked, free(lab), score=best_fit) if rng.randrange(8) else None
        if found is None:
            asked = replace(asked, priority=rng.choice((1, 2, 2, 3)))
            new = Session(number, asked, SessionState.PENDING, NOW_S - 50, held=rng.randrange(9) == 0)
        else:
            state = rng.choice((SessionState.RUNNING,) * 7 + (SessionState.TERMINATING,))
            warned = state is SessionState.RUNNING and rng.randrange(6) == 0
            new = Session(
                number,
                asked,
                state,
                NOW_S - 5000,
                placement=found[0],
                started_at_s=NOW_S - rng.choice((10, 10, 500, 4000)),
                ends_at_s=NOW_S if warned else None,
                ends_cause=EndCause.PREEMPTED if warned else None,
            )
        lab = lab.with_sessions((*lab.sessions, new))
    return lab


@pytest.mark.parametrize("tries", [preemption.TRIES, 4])
def test_preemption_victims_match_the_reference_algorithm(
    monkeypatch: pytest.MonkeyPatch, tries: int
) -> None:
    monkeypatch.setattr(preemption, "TRIES", tries)
    chosen = several = 0
    for seed in range(250):
        rng = Random(seed)
        lab = contested(rng)
        policy = Policy(group_policy(order=rng.choice(sorted(ORDERS))))
        spared = rng.sample(range(1, 34), rng.choice((0, 0, 3)))
        step = plan(lab, policy)
        found = preemption.victims(lab, step, Ledger(lab), groups=drawn.GROUPS, ending=(), spared=spared)
        assert found == plain_victims(lab, step, tries=tries, spared=spared), f"seed {seed}"
        chosen += len(found) > 0
        several += len(found) > 2
    assert chosen > 60, "too few of these worlds have anything to choose"
    assert several > 20, "too few of these worlds need several"
