"""Which idle sessions are parked: their GPU memory goes to the host's memory, and their shares to others.

`due_for_parking` decides by the rules of the resource group. The caller parks them one after the other and asks again
after each, because one parked session may be enough for the sessions that wait.
"""

from __future__ import annotations

from collections.abc import Mapping

from fgpu_scheduler.core import lifecycle
from fgpu_scheduler.core.model import Session, SessionState, Snapshot, WaitReason
from fgpu_scheduler.core.reclaim import AllRules
from fgpu_scheduler.core.returning import parked_mib
from fgpu_scheduler.core.shares import accepts_model
from fgpu_scheduler.core.units import memory_words

#: The idle time after which a session on demand is parked for others where the rules park no session.
ON_DEMAND_AFTER_S = 600
#: For how long a person's wish stands: else the driver's refusal would stop the session again and again.
ASKED_FOR_S = 600
#: The wait reasons of sessions that other shares could start.
WAITS_FOR_SHARES = (WaitReason.RESOURCES, WaitReason.RESERVED, WaitReason.PRIORITY)


def due_for_parking(
    snapshot: Snapshot,
    rules: AllRules,
    *,
    gpu_idle_since_s: Mapping[int, int],
    held_mib: Mapping[int, int],
    host_mib: Mapping[str, int],
) -> tuple[Session, ...]:
    """Return the sessions to park now: first those that people ask for, then the one that has been idle for longest.

    By session id, ``gpu_idle_since_s`` says since when its GPU is idle (UTC seconds; none: it is busy, or unknown), and
    ``held_mib`` how much GPU memory it holds (none: it is unknown, and the session is left out). ``host_mib`` is the host
    memory that each node has for parked sessions: those returned fit there together.
    """
    return _due(snapshot, rules, gpu_idle_since_s, held_mib, host_mib)[0]


def no_room_to_park(
    snapshot: Snapshot,
    rules: AllRules,
    *,
    gpu_idle_since_s: Mapping[int, int],
    held_mib: Mapping[int, int],
    host_mib: Mapping[str, int],
) -> Mapping[int, str]:
    """Return, by id, why sessions that are due do not fit into the host memory of their node."""
    return _due(snapshot, rules, gpu_idle_since_s, held_mib, host_mib)[1]


def _due(
    snapshot: Snapshot,
    rules: AllRules,
    gpu_idle_since_s: Mapping[int, int],
    held_mib: Mapping[int, int],
    host_mib: Mapping[str, int],
) -> tuple[tuple[Session, ...], dict[int, str]]:
    used, found, no_room = parked_mib(snapshot), list[Session](), dict[int, str]()
    for session in _wished_or_idle(snapshot, rules, gpu_idle_since_s):
        mib = held_mib.get(session.id)
        if mib is None or session.placement is None:
            continue
        node_id = session.placement.node_id
        whole_mib, used_mib = host_mib.get(node_id, 0), used.get(node_id, 0)
        if used_mib + mib <= whole_mib:
            used[node_id] = used_mib + mib
            found.append(session)
        else:
            no_room[session.id] = (
                f"it is not parked: it holds {memory_words(mib)} of GPU memory, and {node_id} has "
                f"{memory_words(max(0, whole_mib - used_mib))} left of the {memory_words(whole_mib)} for parked sessions"
            )
    return tuple(found), no_room


def _wished_or_idle(
    snapshot: Snapshot, rules: AllRules, gpu_idle_since_s: Mapping[int, int]
) -> list[Session]:
    """Return the running sessions to park by a person's wish or by the rules, in their order."""
    now_s, found = snapshot.now_s, []
    for session in snapshot.sessions:
        if session.state is not SessionState.RUNNING or not session.placement or not session.placement.shares:
            continue
        asked_at_s = session.park_asked_at_s
        if asked_at_s is not None and now_s < asked_at_s + ASKED_FOR_S:
            found.append((0, asked_at_s, session.id, session))
            continue
        own, since_s = rules.of(session.request.resource_group), gpu_idle_since_s.get(session.id)
        after_s = own.park_after_s
        if after_s is None and session.request.on_demand:
            after_s = ON_DEMAND_AFTER_S
        kept = session.kept_until_s is not None and now_s < session.kept_until_s
        if after_s is None or since_s is None or kept or now_s < since_s + after_s:
            continue
        if own.park_always or _could_help(session, snapshot):
            found.append((1, since_s, session.id, session))
    return [one[-1] for one in sorted(found, key=lambda one: one[:3])]


def _could_help(session: Session, snapshot: Snapshot) -> bool:
    """Return whether another session waits for a share that this one holds."""
    assert session.placement is not None
    uuids = {share.device_uuid for share in session.placement.shares}
    group = session.request.resource_group
    for other in filter(lifecycle.claims_shares, snapshot.sessions):
        if other.placement and any(share.device_uuid in uuids for share in other.placement.shares):
            return True
    models = [d.model for node in snapshot.nodes for d in node.devices if d.uuid in uuids]
    return any(
        other.wait_reason in WAITS_FOR_SHARES
        and not other.request.on_demand
        and not other.held
        and all(accepts_model(other.request, model) for model in models)
        for other in snapshot.index.waiting.get(group, {}).values()
    )
