"""What a plan makes of the sessions that wait, once it is checked again that it holds.

The one check of every store, with the fit and the quotas of the planner.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import replace
from operator import attrgetter

from fgpu_scheduler.core import lifecycle, placement
from fgpu_scheduler.core.model import Session, SessionState, Snapshot
from fgpu_scheduler.core.planner import Decision, Plan, ReserveDecision, StartDecision
from fgpu_scheduler.core.quota import Ledger
from fgpu_scheduler.errors import StaleVersion


def committed(plan: Plan, world: Snapshot, *, now_s: int) -> tuple[tuple[Session, Session], ...]:
    """Return each session that the plan changes, as it is in ``world`` and as it is then, in the plan's order.

    That the world is the one of the plan's version is the store's to know.

    Raises:
        StaleVersion: a decision does not hold.
    """
    waiting = {number: s for line in world.index.waiting.values() for number, s in line.items()}
    left = _left_on(world, plan)
    ledger = Ledger(world)
    found = []
    for decision in plan.decisions:
        session = waiting.pop(decision.session_id, None)
        if session is None:
            raise StaleVersion(f"session {decision.session_id} does not wait")
        if isinstance(decision, StartDecision):
            new = _placed(session, decision, left, ledger, now_s=now_s)
        else:
            new = _waits(session, decision)
        if new is not session:
            found.append((session, new))
    return tuple(found)


def _placed(
    session: Session, place: StartDecision, left: dict[str, placement.NodeFree], ledger: Ledger, *, now_s: int
) -> Session:
    node_id = place.placement.node_id
    leaves = (
        placement.after(left[node_id], session.request, place.placement)
        if node_id in left and not session.held
        else None
    )
    if leaves is None:
        raise StaleVersion(f"session {session.id} does not fit where it was placed")
    if not ledger.allows(session, place.placement):
        raise StaleVersion(f"session {session.id} was placed over a quota")
    left[node_id] = leaves
    ledger.take(session, place.placement)
    scheduled = lifecycle.moved(session, SessionState.SCHEDULED, now_s=now_s)
    return replace(scheduled, placement=place.placement)


def _waits(session: Session, decision: Decision) -> Session:
    assert not isinstance(decision, StartDecision)
    promised_at_s = session.promised_at_s
    if promised_at_s is None and isinstance(decision, ReserveDecision):
        # What was promised first is what is held against the scheduler.
        promised_at_s = decision.starts_at_s
    if (session.wait_reason, session.promised_at_s) == (decision.reason, promised_at_s):
        return session
    return replace(session, wait_reason=decision.reason, promised_at_s=promised_at_s)


def _left_on(world: Snapshot, plan: Plan) -> dict[str, placement.NodeFree]:
    """Return what is free on the nodes where the plan places, as far as they exist.

    Only of the devices that it takes: the rest of a large node would be counted for nothing.
    """
    node_ids = {place.placement.node_id for place in plan.placed}
    uuids = {share.device_uuid for place in plan.placed for share in place.placement.shares}
    on_node = world.index.on_node
    left = {}
    for node_id in node_ids:
        at = bisect_left(world.nodes, node_id, key=attrgetter("id"))
        if at < len(world.nodes) and world.nodes[at].id == node_id:
            node = world.nodes[at]
            taken = replace(node, devices=tuple(device for device in node.devices if device.uuid in uuids))
            left[node_id] = placement.free_on_node(taken, on_node.get(node_id, {}))
    return left
