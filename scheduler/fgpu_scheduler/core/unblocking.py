"""Which single end would start the first session of a queue, for users who look at a full cluster.

It makes the same `plan` as the scheduler, in a world without one of the running sessions.
"""

from __future__ import annotations

from dataclasses import dataclass

from fgpu_scheduler.core.lifecycle import taken_placement
from fgpu_scheduler.core.model import Session, SessionState, Snapshot, WaitReason
from fgpu_scheduler.core.placement import fits_on, may_fit, released
from fgpu_scheduler.core.planner import Plan, PlanCache, StartDecision, plan
from fgpu_scheduler.core.policies import Policy
from fgpu_scheduler.core.usage import taken_milli

#: The most sessions that are tried: each costs a plan of the whole group, with every forecast of the queue.
TRIED = 16

#: The wait reasons of a session that waits for an end. A session over a quota is not the head of its queue.
BLOCKED = (WaitReason.RESERVED, WaitReason.RESOURCES)


@dataclass(frozen=True, slots=True)
class Unblocking:
    """The head of a queue, and each session whose end alone would start it: the same user's first, then the smallest.

    ``by_itself`` is true if the head starts once the TERMINATING sessions have ended; then ``ids`` is empty.
    ``untried`` is the number of other sessions that were not tried. ``never`` is true if the head would not start
    even after all other sessions had ended: it waits for something else.
    """

    head_id: int
    ids: tuple[int, ...] = ()
    by_itself: bool = False
    untried: int = 0
    never: bool = False


def unblocking(
    snapshot: Snapshot, policy: Policy, cache: PlanCache | None = None, *, tries: int = TRIED
) -> Unblocking | None:
    """Return what would start the head of the queue of one resource group, or None if no session is blocked.

    The snapshot is of that group alone (`Snapshot.of_group`), and the sessions that start now have started there. At most
    ``tries`` sessions are tried.
    """
    cache = cache or PlanCache()
    now = plan(snapshot, policy, cache)
    head_id = _head(now)
    if head_id is None:
        return None
    # Sessions behind the head take nothing from it, unless a start was promised to them. Without the others each of the
    # many plans is fast.
    line = [d.session_id for d in now.decisions]
    promised = {s.id for s in snapshot.sessions if s.promised_at_s is not None}
    behind = set(line[line.index(head_id) + 1 :]) - promised
    queue = [s for s in snapshot.sessions if s.id in behind]
    world = snapshot.changed([(s, None) for s in queue])
    head = world.session(head_id)
    assert head is not None
    ending = [(s, None) for s in world.sessions if s.state is SessionState.TERMINATING]
    if ending and _starts(world.changed(ending), policy, head_id, cache):
        return Unblocking(head_id, by_itself=True)
    user = head.request.user
    candidates = sorted(
        _worth_a_try(world, head, cache), key=lambda s: (s.request.user != user, taken_milli(s), s.id)
    )

    def without(ended: Session) -> Snapshot:
        # In an order by usage, the user of the ended session may come first now: their requests are part of the plan.
        back = [(None, s) for s in queue if s.request.user == ended.request.user]
        return world.changed([(ended, None), *back])

    found = [s for s in candidates[:tries] if _starts(without(s), policy, head_id, cache)]
    if not found and not _starts(world.with_sessions([head]), policy, head_id, cache):
        return Unblocking(head_id, never=True)
    return Unblocking(head_id, tuple(s.id for s in found), untried=max(0, len(candidates) - tries))


def _head(now: Plan) -> int | None:
    for decision in now.decisions:
        if not isinstance(decision, StartDecision) and decision.reason in BLOCKED:
            return decision.session_id
    return None


def _worth_a_try(world: Snapshot, head: Session, cache: PlanCache) -> list[Session]:
    """Return the sessions that leave a place for the head on their node when they end."""
    left = {free.node.id: free for free in cache.nodes_of(head.request.resource_group)}
    found = []
    for session in world.sessions:
        where = taken_placement(session)
        if session.state is SessionState.TERMINATING or where is None or where.node_id not in left:
            continue
        free, gives = left[where.node_id], {share.device_uuid: share.fgpu_milli for share in where.shares}
        # On most nodes of a full cluster one end does not free enough.
        if may_fit(free, head.request, gives) and fits_on(
            released(free, session.request, where), head.request
        ):
            found.append(session)
    return found


def _starts(world: Snapshot, policy: Policy, head_id: int, cache: PlanCache) -> bool:
    return any(placed.session_id == head_id for placed in plan(world, policy, cache).placed)
