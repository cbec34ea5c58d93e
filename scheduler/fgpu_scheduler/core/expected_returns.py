"""When each parked session that wants its shares back is expected to get them.

It gets them on its own GPUs only, so the ends of the sessions on these GPUs are enough to know: those that are announced,
those by time limits, and for the others how long similar sessions ran. A GPU is free sooner where a session is parked.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from fgpu_scheduler.core import lifecycle, placement
from fgpu_scheduler.core.expected_starts import (
    BASIS_LIMITS,
    BASIS_NO_NODE,
    BASIS_NOW,
    BASIS_QUOTA,
    BASIS_TYPICAL,
    BASIS_UNKNOWN,
    KnownEnd,
    known_end,
)
from fgpu_scheduler.core.forecast_accuracy import StartRange
from fgpu_scheduler.core.model import Node, NodeState, Session, Snapshot, WaitReason
from fgpu_scheduler.core.placement import without_machine
from fgpu_scheduler.core.policies import Policy
from fgpu_scheduler.core.quota import Ledger
from fgpu_scheduler.core.returning import returns
from fgpu_scheduler.core.run_lengths import RunLengths

#: An expected return is the middle one of these parts of similar sessions, and its range is from the first to the last.
PARTS = (0.1, 0.5, 0.9)


@dataclass(frozen=True, slots=True)
class ExpectedReturn:
    """When a parked session gets its shares back; ``waits`` None: now.

    ``range`` None: it is not known, and ``basis`` says why. Position 1 is the first that waits for shares of its GPUs.
    """

    session: Session
    position: int
    waits: WaitReason | None
    basis: str
    range: StartRange | None = None


def expected_returns(snapshot: Snapshot, policy: Policy, lengths: RunLengths) -> list[ExpectedReturn]:
    """Return when each parked session of one resource group gets the shares that it wants back, in their order."""
    sessions, found = {s.id: s for s in snapshot.sessions}, list[ExpectedReturn]()
    decided = [(sessions[d.session_id], d.waits) for d in returns(snapshot)]
    nodes, ledger = {node.id: node for node in snapshot.nodes}, Ledger(snapshot)

    def end_of(session: Session) -> KnownEnd:
        own = policy.of(session.request.resource_group)
        return known_end(session, snapshot.now_s, ledger=ledger, policy=own, rest=lengths.rest)

    starts: dict[str, list[tuple[dict[int, int], bool]]] = {}
    for session, waits in decided:
        node = nodes.get(session.placement.node_id) if session.placement else None
        if waits is None:
            now = StartRange(snapshot.now_s, snapshot.now_s, snapshot.now_s)
            found.append(ExpectedReturn(session, 0, None, BASIS_NOW, now))
            continue
        others = [e.session for e in found if e.waits is WaitReason.RESOURCES]
        position = 1 + sum(not session.device_uuids.isdisjoint(other.device_uuids) for other in others)
        if waits is WaitReason.QUOTA:
            found.append(ExpectedReturn(session, position, waits, BASIS_QUOTA))
        elif node is None or node.state not in (NodeState.READY, NodeState.CORDONED):
            found.append(ExpectedReturn(session, position, waits, BASIS_NO_NODE))
        else:
            if node.id not in starts:
                line = [s for s, why in decided if why is not WaitReason.QUOTA and _is_on(s, node)]
                starts[node.id] = [_starts_on(snapshot, node, line, end_of, part) for part in PARTS]
            instants = [(at_s.get(session.id), typical) for at_s, typical in starts[node.id]]
            known = [at_s for at_s, _ in instants if at_s is not None]
            if len(known) < len(PARTS):
                found.append(ExpectedReturn(session, position, waits, BASIS_UNKNOWN))
                continue
            basis = BASIS_TYPICAL if any(typical for _, typical in instants) else BASIS_LIMITS
            found.append(ExpectedReturn(session, position, waits, basis, StartRange(*sorted(known))))
    return found


def _starts_on(
    snapshot: Snapshot, node: Node, line: list[Session], end_of: Callable[[Session], KnownEnd], part: float
) -> tuple[dict[int, int], bool]:
    """Return by id when each session of ``line`` gets its shares if sessions end after this part of similar ones, and
    whether that rests on similar ones."""
    there = [s for s in snapshot.index.on_node.get(node.id, {}).values() if lifecycle.holds_shares(s)]
    left = placement.free_on_node(node.opened(), {s.id: s for s in there})
    left = replace(left, cpu_milli=0, memory_mib=0)
    ends, typical = [(snapshot.now_s, 0, None)], False
    for session in there:
        end = end_of(session)
        left_s = end.left_s((part,))
        typical = typical or end.rest is not None
        if left_s is not None:
            ends.append((snapshot.now_s + left_s[0], session.id, session))  # type: ignore[arg-type]
    found: dict[int, int] = {}
    for at_s, _, ended in sorted(ends, key=lambda end: end[:2]):
        if ended is not None:
            left = placement.released(left, without_machine(ended.request), ended.placement)
        blocked: set[str] = set()
        for session in line:
            if session.id in found or session.placement is None:
                continue
            own = without_machine(session.request)
            fits = placement.claimed_shares(left, own, session.placement)
            if fits is None or not blocked.isdisjoint(session.device_uuids):
                blocked |= session.device_uuids
            else:
                left, found[session.id] = fits, at_s
    return found, typical


def _is_on(session: Session, node: Node) -> bool:
    return session.placement is not None and session.placement.node_id == node.id
