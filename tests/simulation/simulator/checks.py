"""Invariants that must hold after every write, checked on snapshots and on the containers that really run.

Each check is a function that yields complaints. None uses the code that it checks: sums are computed here again, and
changes are found by comparing two snapshots.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from fgpu_scheduler.core.lifecycle import ENDED, HOLDING, LAUNCHING, LEGAL, LIVE, SERVING, UP
from fgpu_scheduler.core.model import (
    EndCause,
    NodeState,
    Session,
    SessionState,
    Share,
    ShareMode,
    Snapshot,
    WaitReason,
)
from fgpu_scheduler.core.policies import Policy
from fgpu_scheduler.core.reclaim import AllRules
from simulator.met import Coverage
from simulator.order_checks import Promises, overtaken
from simulator.quota_checks import falsely_stopped, over_quota
from simulator.reclaim_checks import Warned

S = SessionState


class Violation(AssertionError):
    """An invariant was violated."""


@dataclass(frozen=True, slots=True)
class Container:
    """A container as it really is, observed or not.

    ``orphan``: the Hub that requested it died before it appeared. No Hub can wait for it, so it may outlive its share
    for a while, but it must be removed in the end.
    """

    handle: str
    node_id: str
    session_id: int
    attempt: int
    alive: bool
    orphan: bool = False
    on_gpu: bool = True
    """Whether its memory is on the GPU; else the host has it."""


HOST_MIB = 4000
"""The host memory of each node for parked sessions."""

Find = Callable[[int], Session | None]


class Checks:
    """Checks a store and the engines. Call `look` after every write and every change of a container."""

    def __init__(
        self, snapshot: Snapshot, policy: Policy, rules: AllRules | None = None, *, steady_s: int = 0
    ) -> None:
        self._last = snapshot
        self._policy = policy
        self._steady_s = steady_s
        self.warned = Warned(rules or AllRules())
        self.promises = Promises()
        self.met = Coverage(snapshot, policy)
        self._states: dict[int, SessionState] = {s.id: s.state for s in snapshot.sessions}
        self._containers: dict[str, Container] = {}
        self.looks = 0

    def submitted(self, sessions: Iterable[Session]) -> None:
        """Note accepted sessions; call this before the next `look`."""
        for session in sessions:
            if session.id in self._states:
                raise Violation(f"session {session.id} was submitted twice")
            self._states[session.id] = session.state

    def look(
        self,
        now: Snapshot,
        containers: Sequence[Container],
        find: Find,
        *,
        steady_s: int = 0,
        planned: bool = False,
    ) -> None:
        """Check the state and compare it with the last look.

        ``steady_s`` is a monotonic time; ``planned`` is whether a plan was committed in between.

        Raises:
            Violation: with every complaint.
        """
        self.looks += 1
        last, self._last = self._last, now
        passed_s, self._steady_s = steady_s - self._steady_s, steady_s
        before = {s.id: s for s in last.sessions}
        after = {s.id: s for s in now.sessions}
        for session_id in before:
            if session_id not in after and (gone := find(session_id)) is not None:
                after[session_id] = gone
        # Sessions that are queued again are not submitted; `Warned` checks their reason.
        self._states.update(
            (s.id, s.state) for s in now.sessions if s.replaces is not None and s.id not in self._states
        )
        complaints = [
            *over_capacity(last, now),
            *wrongly_held(now),
            *mixed_modes(now),
            *badly_placed(before, now),
            *served_twice(now),
            *illegal_changes(self._states, now, find),
            *overtaken(before, after.values(), self._policy, last),
            *self.promises.look(last, now, steady_s=steady_s, passed_s=passed_s, planned=planned),
            *over_quota(before, now),
            *falsely_stopped(before, now),
            *self.warned.look(last, before, after, now_s=now.now_s, steady_s=steady_s),
            *freed_too_early(before, after, containers),
            *ended_alive(before, after, containers),
            *wrongly_late(before, after),
            *on_gpu_without_shares(after, containers),
            *over_host_memory(now),
            *wanted_shares_given_away(before, now),
            *unowned(self._containers, after, containers),
            *removed_in_use(self._containers, after, containers),
        ]
        self.met.look(before, after, now)
        self._states.update((s.id, s.state) for s in after.values())
        self._containers = {c.handle: c for c in containers}
        if complaints:
            raise Violation("; ".join(complaints))

    def ended(self, containers: Sequence[Container]) -> None:
        """Check that every session has ended and nothing is held.

        Raises:
            Violation: with what is left.
        """
        left = [f"session {i} is {state}" for i, state in self._states.items() if state not in ENDED]
        left += [f"session {s.id} is still live" for s in self._last.sessions]
        left += [f"container {c.handle} still stands" for c in containers]
        if left:
            raise Violation("not everything ended: " + "; ".join(left))


def over_capacity(last: Snapshot, now: Snapshot) -> Iterator[str]:
    """No capacity is given twice: GPU memory, compute, number of shares, fGPU, CPU, memory.

    After a device or node has shrunk, its sessions may exceed its capacity, but must not grow. Limits of compute and of
    the number of shares never change, so they always hold.
    """
    earlier = _sums(last)
    sums = _sums(now)

    def above(key: str, most: int) -> bool:
        return sums.get(key, 0) > most and sums.get(key, 0) > earlier.get(key, 0)

    for node in now.nodes:
        if above(f"{node.id} cpu", node.cpu_milli):
            yield f"node {node.id}: {sums[f'{node.id} cpu']} milli-CPU of {node.cpu_milli} are held"
        if above(f"{node.id} memory", node.memory_mib):
            yield f"node {node.id}: {sums[f'{node.id} memory']} MiB of {node.memory_mib} are held"
        for device in node.devices:
            if above(f"{device.uuid} fgpu", device.capacity_milli):
                yield f"{device.uuid}: {sums[f'{device.uuid} fgpu']} of {device.capacity_milli} milli-fGPU are held"
            if above(f"{device.uuid} memory", device.memory_mib):
                held = sums[f"{device.uuid} memory"]
                yield f"{device.uuid}: {held} of {device.memory_mib} memory are held"
            for what, most in (
                ("compute", 100),
                ("shares", device.max_shares),
            ):
                if sums.get(f"{device.uuid} {what}", 0) > most:
                    yield f"{device.uuid}: {sums[f'{device.uuid} {what}']} of {most} {what} are held"


def _sums(snapshot: Snapshot) -> dict[str, int]:
    sums: dict[str, int] = {}

    def add(key: str, amount: int) -> None:
        sums[key] = sums.get(key, 0) + amount

    for session in snapshot.sessions:
        if session.state not in HOLDING or session.placement is None:
            continue
        add(f"{session.placement.node_id} cpu", session.request.cpu_milli)
        add(f"{session.placement.node_id} memory", session.request.memory_mib)
        for share in held_shares(session):
            add(f"{share.device_uuid} fgpu", share.fgpu_milli)
            add(f"{share.device_uuid} memory", share.memory_mib)
            add(f"{share.device_uuid} compute", share.compute_percent)
            add(f"{share.device_uuid} shares", 1)
    return sums


def wrongly_held(now: Snapshot) -> Iterator[str]:
    """A session has shares exactly in the holding states, and they are worth what was requested."""
    for session in now.sessions:
        holds = session.placement is not None
        if session.state not in LIVE:
            yield f"session {session.id} is {session.state} in a snapshot of live sessions"
        elif holds != (session.state in HOLDING):
            yield f"session {session.id} is {session.state} and holds {session.placement}"
        elif session.placement is not None:
            shares = session.placement.shares
            asked = session.request
            if asked.gpu_memory_mib is not None:
                least = asked.gpu_memory_mib, asked.compute_percent or 0
                if len(shares) != 1 or any(
                    (s.memory_mib, s.compute_percent) != least and s.compute_percent < 100 for s in shares
                ):
                    yield f"session {session.id} asked for {least} and holds {shares}"
            elif sum(s.fgpu_milli for s in shares) != asked.fgpu_milli:
                yield f"session {session.id} asked for {asked.fgpu_milli} and holds {shares}"
            if any(
                min(s.fgpu_milli, s.memory_mib) <= 0
                or (s.compute_percent <= 0) != (s.mode is ShareMode.MEMORY)
                for s in shares
            ):
                yield f"session {session.id} holds a share of nothing: {shares}"


def mixed_modes(now: Snapshot) -> Iterator[str]:
    """All shares of one device have the same mode."""
    modes: dict[str, ShareMode] = {}
    for session in now.sessions:
        for share in held_shares(session):
            if modes.setdefault(share.device_uuid, share.mode) is not share.mode:
                yield f"session {session.id}: the modes of the shares of {share.device_uuid} differ"


def badly_placed(before: dict[int, Session], now: Snapshot) -> Iterator[str]:
    """A new placement is on a ready node of its group: a fraction on one device, or whole devices, none cordoned."""
    nodes = {n.id: n for n in now.nodes}
    for session in now.sessions:
        old = before.get(session.id)
        if session.placement is None or (old is not None and old.placement is not None):
            continue
        node = nodes.get(session.placement.node_id)
        if node is None or node.state is not NodeState.READY:
            yield f"session {session.id} was placed on {session.placement.node_id}, which takes nothing"
            continue
        if node.resource_group != session.request.resource_group:
            yield f"session {session.id} was placed on {node.id} of group {node.resource_group}"
        devices = {d.uuid: d for d in node.devices}
        shares = session.placement.shares
        if len({s.device_uuid for s in shares}) != len(shares) or any(
            s.device_uuid not in devices for s in shares
        ):
            yield f"session {session.id} has shares of no or of equal devices: {shares}"
        elif any(devices[s.device_uuid].cordoned for s in shares):
            yield f"session {session.id} was placed on a cordoned device: {shares}"
        elif len(shares) > 1 and any(
            (s.fgpu_milli, s.memory_mib)
            != (devices[s.device_uuid].capacity_milli, devices[s.device_uuid].memory_mib)
            for s in shares
        ):
            yield f"session {session.id} straddles devices: {shares}"


def served_twice(now: Snapshot) -> Iterator[str]:
    """A server has at most one current session."""
    seen: dict[tuple[str, str], int] = {}
    for session in now.sessions:
        server = session.request.user, session.request.server_name
        if session.state in SERVING:
            if server in seen:
                yield f"sessions {seen[server]} and {session.id} both serve {server}"
            seen[server] = session.id


def illegal_changes(known: dict[int, SessionState], now: Snapshot, find: Find) -> Iterator[str]:
    """No session appears without a submission, is lost, comes back, or makes a transition that is not in the table."""
    live = {s.id: s for s in now.sessions}
    for session in now.sessions:
        if session.id not in known:
            yield f"session {session.id} was never submitted"
    for session_id, old in known.items():
        if old in ENDED:
            if session_id in live:
                yield f"session {session_id} was {old} and lives again"
            continue
        current = live.get(session_id) or find(session_id)
        if current is None:
            yield f"session {session_id} was {old} and is lost"
        elif session_id not in live and current.state not in ENDED:
            yield f"session {session_id} is {current.state} and not in the snapshot"
        elif current.state is not old and current.state not in LEGAL[old]:
            # `new_attempt` after a restart: back to PREPARING with the shares still held.
            relaunched = old in LAUNCHING and current.state is S.PREPARING and current.attempt > 1
            if not relaunched:
                yield f"session {session_id}: {old} -> {current.state} is not legal"
        if current is not None and current.state in ENDED and current.end_cause is None:
            yield f"session {session_id} is {current.state} without a cause"


def freed_too_early(
    before: dict[int, Session], after: dict[int, Session], containers: Sequence[Container]
) -> Iterator[str]:
    """No share is freed while a container of its session is alive, even on a silent node."""
    alive = {c.session_id: c.handle for c in containers if c.alive and not c.orphan}
    for session_id, old in before.items():
        new = after.get(session_id)
        frees = old.state in HOLDING and (new is None or new.state not in HOLDING)
        if frees and session_id in alive:
            yield f"the share of session {session_id} was freed while {alive[session_id]} is alive"


def ended_alive(
    before: dict[int, Session], after: dict[int, Session], containers: Sequence[Container]
) -> Iterator[str]:
    """No session is recorded as exited while its process is alive."""
    alive = {(c.session_id, c.attempt): c.handle for c in containers if c.alive}
    for session_id, old in before.items():
        new = after.get(session_id)
        if old.state in UP and new is not None and new.end_cause in (EndCause.EXITED, EndCause.OOM):
            handle = alive.get((session_id, old.attempt))
            if new.state not in UP and handle is not None:
                yield f"session {session_id} was ended as {new.end_cause} while {handle} is alive"


def wrongly_late(before: dict[int, Session], after: dict[int, Session]) -> Iterator[str]:
    """No session times out in the queue after it was placed, unless it waits to be resumed."""
    for session_id, old in before.items():
        new = after.get(session_id)
        if new is None or new.end_cause is not EndCause.QUEUE_TIMEOUT or old.end_cause is not None:
            continue
        if old.state is not S.PENDING and not old.held:
            yield f"session {session_id} was given up as late when it was {old.state}"


def held_shares(session: Session) -> Sequence[Share]:
    """Return the shares that a session holds: none while it is parked."""
    holds = session.placement is not None and session.state in HOLDING and session.parked_at_s is None
    return session.placement.shares if holds and session.placement is not None else ()


def on_gpu_without_shares(after: dict[int, Session], containers: Sequence[Container]) -> Iterator[str]:
    """A session has memory on a GPU only while it holds a share of it."""
    for container in containers:
        owner = after.get(container.session_id)
        if owner is None or not container.alive or not container.on_gpu or owner.attempt != container.attempt:
            continue
        if owner.parked_at_s is not None and owner.state not in ENDED:
            yield f"session {owner.id} is {owner.state}, holds no share, and is on its GPU"


def over_host_memory(now: Snapshot) -> Iterator[str]:
    """The parked sessions of a node fit into its memory for them."""
    for node in now.nodes:
        there = [s for s in now.sessions if s.placement is not None and s.placement.node_id == node.id]
        parked_mib = sum(s.parked_mib for s in there)
        if parked_mib > HOST_MIB:
            yield f"{node.id}: {parked_mib} of {HOST_MIB} MiB are held by parked sessions"


def wanted_shares_given_away(before: dict[int, Session], now: Snapshot) -> Iterator[str]:
    """Nothing starts in the place of a session that wants its shares back, and these get them in their order."""
    nodes = {d.uuid: d for node in now.nodes for d in node.devices}
    claims = [s for s in now.sessions if _claims(s) and s.id in before and _claims(before[s.id])]
    if not claims:
        return
    sums = _sums(now)
    for session in now.sessions:
        old = before.get(session.id)
        returns = session.state is S.RESUMING and old is not None and old.state is S.PARKED
        starts = session.state is S.SCHEDULED and (old is None or old.state is S.PENDING)
        if not (returns or starts):
            continue
        for share in held_shares(session):
            others = [
                (other, own)
                for other in claims
                for own in (other.placement.shares if other.placement else ())
                if own.device_uuid == share.device_uuid and share.device_uuid in nodes
            ]
            for other, _ in others:
                if returns and _wants_since(other) < _wants_since(session):
                    yield f"session {session.id} has its shares back before {other.id}, which has waited longer"
            wanted = sum(own.fgpu_milli for _, own in others)
            held = sums.get(f"{share.device_uuid} fgpu", 0)
            if others and starts and held + wanted > nodes[share.device_uuid].capacity_milli:
                yield f"session {session.id} was placed on {share.device_uuid}, which others want back"


def _claims(session: Session) -> bool:
    wants = session.state is S.PARKED and session.wanted_at_s is not None
    return wants and session.wait_reason is not WaitReason.QUOTA


def _wants_since(session: Session) -> tuple[int, int]:
    return session.wanted_at_s or 0, session.id


def unowned(
    known: dict[str, Container], sessions: dict[int, Session], containers: Sequence[Container]
) -> Iterator[str]:
    """No container appears for a session without shares, or beside another container of its session."""
    for container in containers:
        if container.handle in known or not container.alive or container.orphan:
            continue
        owner = sessions.get(container.session_id)
        if owner is None or owner.placement is None or owner.state not in HOLDING:
            yield f"container {container.handle} came up without a share"
        elif owner.placement.node_id != container.node_id:
            yield f"container {container.handle} came up on {container.node_id}, not where its share is"
        else:
            for other in containers:
                same = other.session_id == container.session_id and other.handle != container.handle
                if same and other.alive and not other.orphan:
                    yield f"containers {other.handle} and {container.handle} share what one session holds"


def removed_in_use(
    known: dict[str, Container], sessions: dict[int, Session], containers: Sequence[Container]
) -> Iterator[str]:
    """No container is removed while its session uses it or is about to."""
    standing = {c.handle: None for c in containers}
    for handle, container in known.items():
        owner = sessions.get(container.session_id)
        if handle in standing or owner is None or owner.attempt != container.attempt:
            continue
        if owner.state in (*LAUNCHING, *UP):
            yield f"container {handle} was removed while its session is {owner.state}"
