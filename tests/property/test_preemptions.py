"""Pre-emption on many nodes chooses the same victims as the reference algorithm, but faster."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from plain_preempt import plain_victims
from simulator import drawn

from fgpu_scheduler.core import preemption
from fgpu_scheduler.core.model import EndCause, NodeState, Session, SessionIndex, SessionState, Snapshot
from fgpu_scheduler.core.persistent_map import PersistentMap, part_of_id
from fgpu_scheduler.core.placement import best_fit, free, place
from fgpu_scheduler.core.planner import Policy, plan
from fgpu_scheduler.core.policies import ORDERS, group_policy
from fgpu_scheduler.core.preemption_candidates import PreemptionCandidates
from fgpu_scheduler.core.quota import Ledger
from fgpu_scheduler.store.snapshot_cache import Contents

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


def test_cached_preemption_state_chooses_the_same_victims() -> None:
    """Between rounds sessions start and end, nodes change, and warnings are withdrawn or get another cause."""
    chosen = changes = 0
    for seed in range(60):
        rng = Random(seed)
        lab, clearings = contested(rng), PreemptionCandidates()
        kept = Contents(1, lab.nodes, _sessions(lab), {}, (), (), 99, SessionIndex.of(lab.sessions))
        for _ in range(8):
            now = kept.snapshot(NOW_S)
            step = plan(now, Policy(group_policy()))
            spared = rng.sample(range(1, 34), rng.choice((0, 0, 3)))
            ending = rng.sample(range(1, 34), rng.choice((0, 0, 2)))
            about = {"groups": drawn.GROUPS, "ending": ending, "spared": spared}
            found = preemption.victims(now, step, Ledger(now), **about, clearings=clearings)
            assert found == preemption.victims(now, step, Ledger(now), **about), f"seed {seed}"
            chosen += len(found) > 0
            kept, changed = _a_moment_later(rng, kept, found)
            changes += changed
    assert chosen > 150, "too few of these rounds have anything to choose"
    assert changes > 150, "too little changes between these rounds"


def _sessions(lab: Snapshot) -> PersistentMap[int, Session]:
    return PersistentMap[int, Session](part_of_id).then({s.id: s for s in lab.sessions})


def _a_moment_later(rng: Random, kept: Contents, found: tuple[int, ...]) -> tuple[Contents, bool]:
    """Return the contents after warnings, one end, one requested end and sometimes a cordoned GPU."""
    runs = [s for s in kept.sessions.values() if s.state is SessionState.RUNNING]
    changed = {
        s.id: replace(s, ends_cause=EndCause.PREEMPTED, ends_at_s=NOW_S)
        for s in runs
        if s.id in found and rng.randrange(2)
    }
    for session in rng.sample(runs, min(len(runs), rng.choice((0, 1, 2)))):
        to = rng.choice((SessionState.TERMINATING, SessionState.TERMINATED))
        changed[session.id] = replace(session, state=to)
    kept = kept.then(changed, {}, lambda newest_id: kept.asked)
    if rng.randrange(4) == 0:
        node = rng.choice(kept.nodes)
        cordoned = tuple(replace(d, cordon_reason=rng.choice((None, "broken"))) for d in node.devices)
        nodes = (replace(n, devices=cordoned) if n is node else n for n in kept.nodes)
        kept = replace(kept, nodes=tuple(nodes))
    return kept, bool(changed)
