"""The ends named as unblocking the head of a queue start it, and no others do."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from property_worlds import worlds
from test_forecasts import queues

from fgpu_scheduler.core.lifecycle import HOLDING
from fgpu_scheduler.core.model import SessionState, Snapshot
from fgpu_scheduler.core.planner import applied, plan
from fgpu_scheduler.core.policies import Policy, group_policy
from fgpu_scheduler.core.unblocking import unblocking


@st.composite
def policies(draw: st.DrawFn) -> Policy:
    """Every order, also those in which an end changes the head of the queue."""
    return Policy(group_policy(order=draw(st.sampled_from(("fifo", "fifo-skip", "lifo", "drf")))))


@given(st.one_of(queues(), worlds()), policies())
def test_head_starts_exactly_when_the_named_sessions_end(lab: Snapshot, policy: Policy) -> None:
    for group in sorted({n.resource_group for n in lab.nodes}):
        own = lab.of_group(group)
        own = applied(own, plan(own, policy))
        found = unblocking(own, policy, tries=100)
        if found is None or found.by_itself:
            continue
        for session in own.sessions:
            if session.state not in HOLDING or session.state is SessionState.TERMINATING:
                continue
            without = own.with_sessions(s for s in own.sessions if s.id != session.id)
            starts = found.head_id in [p.session_id for p in plan(without, policy).placed]
            assert starts == (session.id in found.ids)
