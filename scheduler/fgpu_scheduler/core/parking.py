"""Which idle sessions are parked: their GPU memory goes to the host's memory, and their shares to others.

`plan_parking` decides by the rules of the resource group. The caller parks the sessions that are due one after the other
and asks again after each, because one parked session may be enough for the sessions that wait.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from fgpu_scheduler.core import lifecycle
from fgpu_scheduler.core.model import Session, SessionState, Snapshot, WaitReason
from fgpu_scheduler.core.reclaim import FOR_GOOD_S, AllRules, is_kept
from fgpu_scheduler.core.returning import parked_mib
from fgpu_scheduler.core.shares import accepts_model
from fgpu_scheduler.core.units import memory_words

#: The idle time after which a session on demand is parked for others where the rules park no session.
ON_DEMAND_AFTER_S = 600
#: For how long a person's wish stands: else the driver's refusal would stop the session again and again.
ASKED_FOR_S = 600
#: How long before it is parked the owner of an idle session is warned, at most for the second half of the idle time.
WARNED_FOR_S = 300
#: The wait reasons of sessions that other shares could start.
WAITS_FOR_SHARES = (WaitReason.RESOURCES, WaitReason.RESERVED, WaitReason.PRIORITY)


@dataclass(frozen=True, slots=True)
class ParkingPlan:
    """The sessions to park now: first those that people ask for, then the one that has been idle for longest.

    By session id, ``soon`` says when each idle session will be due, for a warning, and ``no_room`` why one that is due
    does not fit into the host memory of its node.
    """

    due: tuple[Session, ...] = ()
    soon: Mapping[int, int] = field(default_factory=dict)
    no_room: Mapping[int, str] = field(default_factory=dict)


def plan_parking(
    snapshot: Snapshot,
    rules: AllRules,
    *,
    gpu_idle_since_s: Mapping[int, int],
    held_mib: Mapping[int, int],
    host_mib: Mapping[str, int],
) -> ParkingPlan:
    """Return which sessions are parked now, and which ones soon.

    By session id, ``gpu_idle_since_s`` says since when its GPU is idle (UTC seconds; none: it is busy, or unknown), and
    ``held_mib`` how much GPU memory it holds (none: it is unknown, and the session is left out). ``host_mib`` is the host
    memory that each node has for parked sessions: those that are due fit there together.
    """
    now_s, used = snapshot.now_s, parked_mib(snapshot)
    wished, idle, soon, no_room = list[Session](), list[Session](), dict[int, int](), dict[int, str]()
    for session in snapshot.sessions:
        where, since_s = session.placement, gpu_idle_since_s.get(session.id)
        own = rules.of(session.request.resource_group)
        after_s = own.park_after_s
        if after_s is None and session.request.on_demand:
            after_s = ON_DEMAND_AFTER_S
        if (
            session.state is not SessionState.RUNNING
            or not where
            or not where.shares
            or session.id not in held_mib
        ):
            continue
        if is_asked_for(session, now_s):
            wished.append(session)
        elif after_s is not None and since_s is not None and not is_kept(session, own, now_s):
            warned_for_s = min(WARNED_FOR_S, after_s // 2)
            due_at_s = since_s + after_s
            if session.kept_until_s not in (None, FOR_GOOD_S):
                # Its owner has not been warned until parking was allowed again.
                due_at_s = max(due_at_s, session.kept_until_s + warned_for_s)
            is_warned = now_s >= due_at_s - warned_for_s
            if is_warned and (own.park_always or _could_help(session, snapshot)):
                if now_s < due_at_s:
                    soon[session.id] = due_at_s
                else:
                    idle.append(session)
    wished.sort(key=lambda s: (s.park_asked_at_s or 0, s.id))
    idle.sort(key=lambda s: (gpu_idle_since_s[s.id], s.id))
    due = list[Session]()
    for session in (*wished, *idle):
        assert session.placement is not None
        node_id, mib = session.placement.node_id, held_mib[session.id]
        whole_mib, used_mib = host_mib.get(node_id, 0), used.get(node_id, 0)
        if used_mib + mib <= whole_mib:
            used[node_id] = used_mib + mib
            due.append(session)
        else:
            no_room[session.id] = (
                f"it holds {memory_words(mib)} of GPU memory, and {node_id} has "
                f"{memory_words(max(0, whole_mib - used_mib))} left of the {memory_words(whole_mib)} for parked sessions"
            )
    return ParkingPlan(tuple(due), soon, no_room)


def is_asked_for(session: Session, now_s: int) -> bool:
    """Return whether a person has asked to have a session parked, and this wish still stands."""
    asked_at_s = session.park_asked_at_s
    return asked_at_s is not None and session.park_refused is None and now_s < asked_at_s + ASKED_FOR_S


def _could_help(session: Session, snapshot: Snapshot) -> bool:
    """Return whether another session waits for a share that this one holds."""
    uuids, group = session.device_uuids, session.request.resource_group
    for other in filter(lifecycle.claims_shares, snapshot.sessions):
        if not uuids.isdisjoint(other.device_uuids):
            return True
    models = [d.model for node in snapshot.nodes for d in node.devices if d.uuid in uuids]
    return any(
        other.wait_reason in WAITS_FOR_SHARES
        and not other.request.on_demand
        and not other.held
        and all(accepts_model(other.request, model) for model in models)
        for other in snapshot.index.waiting.get(group, {}).values()
    )
