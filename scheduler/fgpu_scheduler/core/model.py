"""The values of the scheduler: devices, nodes, requests, sessions and one snapshot of them all.

Everything is frozen; a change makes a new value. Tuples are in a stated order, so that equal
snapshots give equal plans.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from fgpu_scheduler.core.persistent_map import PersistentMap, part_of_id, part_of_name
from fgpu_scheduler.core.run_lengths import PastRuns
from fgpu_scheduler.core.units import share_compute_percent, share_memory_mib

MAX_SHARES = 20
"""Slices on one GPU at the most, where nothing else is configured (product H1; Huawei CCE's limit)."""


class NodeState(StrEnum):
    """READY takes sessions; CORDONED keeps those it has; LOST does not answer and keeps their shares.

    GONE is what an administrator makes of a LOST node who knows that nothing runs there any more: its sessions are
    ended, and it is LOST again.
    """

    READY = "READY"
    CORDONED = "CORDONED"
    LOST = "LOST"
    GONE = "GONE"


class SessionState(StrEnum):
    """Where a session is in its life; `lifecycle` holds the legal changes."""

    PENDING = "PENDING"
    SCHEDULED = "SCHEDULED"
    PREPARING = "PREPARING"
    PULLING = "PULLING"
    RUNNING = "RUNNING"
    TERMINATING = "TERMINATING"
    TERMINATED = "TERMINATED"
    ERROR = "ERROR"
    CANCELLED = "CANCELLED"


class WaitReason(StrEnum):
    """Why a session is PENDING."""

    RESOURCES = "RESOURCES"
    QUOTA = "QUOTA"
    PRIORITY = "PRIORITY"
    RESERVED = "RESERVED"
    HELD = "HELD"
    CLUSTER = "CLUSTER"


class EndCause(StrEnum):
    """Why a session ended, or never ran."""

    USER = "USER"
    EXITED = "EXITED"
    IDLE = "IDLE"
    TIME_LIMIT = "TIME_LIMIT"
    QUEUE_TIMEOUT = "QUEUE_TIMEOUT"
    PREEMPTED = "PREEMPTED"
    NODE_LOST = "NODE_LOST"
    PULL_FAILED = "PULL_FAILED"
    LAUNCH_FAILED = "LAUNCH_FAILED"
    OOM = "OOM"
    ISOLATION_FAILED = "ISOLATION_FAILED"
    DISK_LIMIT = "DISK_LIMIT"
    HUB_STOPPED = "HUB_STOPPED"


class ShareMode(StrEnum):
    """What of a device a share limits."""

    MEMORY = "memory"
    MEMORY_COMPUTE = "memory+compute"


@dataclass(frozen=True, slots=True)
class Device:
    """One physical GPU.

    ``capacity_milli`` is the administrator's fGPU per GPU of its model x 1000; ``max_shares`` is how many
    sessions may share it. While it is cordoned, for ``cordon_reason``, it keeps its sessions and takes no more.
    """

    uuid: str
    node_id: str
    index: int
    model: str
    memory_mib: int
    capacity_milli: int
    simulated: bool = False
    max_shares: int = MAX_SHARES
    cordon_reason: str | None = None

    @property
    def cordoned(self) -> bool:
        """Whether an administrator lets it take no new sessions."""
        return self.cordon_reason is not None

    @property
    def shares_offered(self) -> int:
        """How many sessions may share it now, with those that do."""
        return 0 if self.cordoned else self.max_shares


@dataclass(frozen=True, slots=True)
class Node:
    """The host of some devices (in order of their index), with CPU and memory for sessions.

    One that its cluster has ``closed`` is CORDONED until that opens it, whatever administrators here said meanwhile.
    """

    id: str
    resource_group: str
    cpu_milli: int
    memory_mib: int
    devices: tuple[Device, ...]
    state: NodeState = NodeState.READY
    closed: bool = False

    def opened(self) -> Node:
        """Return it as it is when it takes sessions on all of its devices, whatever administrators said."""
        devices = tuple(replace(d, cordon_reason=None) if d.cordoned else d for d in self.devices)
        return replace(self, state=NodeState.READY, devices=devices, closed=False)


@dataclass(frozen=True, slots=True)
class Request:
    """What was asked for one session.

    ``fgpu_milli`` is a fraction of one device, or whole devices; CPU is in thousandths of a core. With
    ``gpu_memory_mib`` it is 0, and that much memory of one device is asked for: with ``compute_percent`` of its
    compute, or, where that is None, memory only. ``gpu_models`` are those that it may be placed on, the most liked first;
    none: any. Of those that it fits on now the most liked is taken. ``groups`` are the Hub groups of the user, in order,
    at submission.
    """

    user: str
    server_name: str
    image: str
    resource_group: str
    fgpu_milli: int
    cpu_milli: int
    memory_mib: int
    gpu_memory_mib: int | None = None
    compute_percent: int | None = None
    gpu_models: tuple[str, ...] = ()
    time_limit_s: int | None = None
    priority: int = 0
    groups: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Share:
    """What a session holds, or would hold, of one device. In mode MEMORY compute is not limited: the percent is 0."""

    device_uuid: str
    fgpu_milli: int
    memory_mib: int
    compute_percent: int
    mode: ShareMode = ShareMode.MEMORY_COMPUTE

    @classmethod
    def of(cls, device: Device, fgpu_milli: int) -> Share:
        """Return the share that ``fgpu_milli`` of ``device`` is worth (product A3)."""
        return cls(
            device_uuid=device.uuid,
            fgpu_milli=fgpu_milli,
            memory_mib=share_memory_mib(
                fgpu_milli,
                capacity_milli=device.capacity_milli,
                device_memory_mib=device.memory_mib,
            ),
            compute_percent=share_compute_percent(fgpu_milli, capacity_milli=device.capacity_milli),
        )


def compute_of(shares: Iterable[Share]) -> int | None:
    """Return the percent of compute that shares limit a session to; None if they do not limit it, or there are none."""
    return sum(share.compute_percent for share in shares) or None


@dataclass(frozen=True, slots=True)
class Placement:
    """Proposed shares on one node. A placement never spans nodes."""

    node_id: str
    shares: tuple[Share, ...]


@dataclass(frozen=True, slots=True)
class Size:
    """What a session held until an instant, when it was resized: fGPU x 1000, millionths of a GPU, memory and compute."""

    until_s: int
    fgpu_milli: int
    gpu_millionths: int
    memory_mib: int
    compute_percent: int


REFUSED_S = 30
REFUSED_MOST_S = 300
"""So long a node that was refused is left out at first, and, doubled each time, at the most."""


@dataclass(frozen=True, slots=True)
class RefusedNode:
    """A node that the engine did not give a session after all: last at that instant, in these ``words`` of its own."""

    node_id: str
    at_s: int
    times: int
    words: str

    def until_s(self, now_s: int) -> int | None:
        """Return until when the session is not put there again; None where it may be, as after a clock was set back."""
        until_s = self.at_s + min(REFUSED_S << min(self.times - 1, 10), REFUSED_MOST_S)
        return until_s if self.at_s <= now_s < until_s else None


@dataclass(frozen=True, slots=True)
class Session:
    """One server of one user, from submission to end.

    ``held`` is true while nobody waits to launch it (its Hub restarted, say): it keeps its place but
    is not placed. ``attempt`` counts launches; with the id it names the container. ``launched`` is the
    launcher's own note on what it started, opaque here. ``promised_at_s`` is the start that was first promised to it
    while it was at the head of the queue. ``ends_at_s`` with ``ends_cause`` is when and why it is going to be ended, as
    its owner was warned; until ``kept_until_s`` it is not ended for being idle, which it is since ``idle_since_s``.
    One that was queued again ``replaces`` the one that ended, and stands at the place in the queue of ``place_of``, the
    first of those that it goes back to. ``asked_priority`` is what its user asked for, where an administrator has given
    it another priority since. ``queued_at_s`` is when one was queued again; its submission is that of the one before.
    ``extended_s`` is what its owner has added to the time limit that was asked for. ``refused`` are the nodes that it
    was placed on and then not given, the last one last. ``sizes`` are the amounts that it held before the one it has,
    in order; its request is for that one.
    """

    id: int
    request: Request
    state: SessionState
    submitted_at_s: int
    held: bool = False
    attempt: int = 0
    placement: Placement | None = None
    wait_reason: WaitReason | None = None
    scheduled_at_s: int | None = None
    started_at_s: int | None = None
    ended_at_s: int | None = None
    end_cause: EndCause | None = None
    message: str | None = None
    launched: str | None = None
    replaces: int | None = None
    promised_at_s: int | None = None
    ends_at_s: int | None = None
    ends_cause: EndCause | None = None
    idle_since_s: int | None = None
    kept_until_s: int | None = None
    place_of: int | None = None
    asked_priority: int | None = None
    queued_at_s: int | None = None
    extended_s: int = 0
    refused: tuple[RefusedNode, ...] = ()
    sizes: tuple[Size, ...] = ()

    def refusing_nodes(self, now_s: int) -> tuple[RefusedNode, ...]:
        """Return the nodes that it is not put on now, because it was refused there a moment ago."""
        return tuple(node for node in self.refused if node.until_s(now_s) is not None)

    @property
    def time_limit_s(self) -> int | None:
        """Return how long it may run by its own time limit, with what this was extended by."""
        asked_s = self.request.time_limit_s
        return None if asked_s is None else asked_s + self.extended_s

    @property
    def waits_since_s(self) -> int:
        """Since when it waits, or waited: its submission, or when it was queued again after it had run."""
        return self.submitted_at_s if self.queued_at_s is None else self.queued_at_s

    @property
    def place(self) -> int:
        """Where it stands in the order of submission: its id, or that of the session whose place it keeps."""
        return self.id if self.place_of is None else self.place_of

    @property
    def own_request(self) -> Request:
        """What its user asked for, whatever priority an administrator has given it."""
        if self.asked_priority is None:
            return self.request
        return replace(self.request, priority=self.asked_priority)


@dataclass(frozen=True, slots=True)
class Usage:
    """What a user's ended sessions have used of a resource group: fGPU x 1000 x seconds, decayed to the snapshot."""

    user: str
    resource_group: str
    fgpu_milli_s: int


@dataclass(frozen=True, slots=True)
class RequestCount:
    """How often a resource group was lately asked for just these amounts; the fields are those of a `Request`."""

    resource_group: str
    fgpu_milli: int
    cpu_milli: int
    memory_mib: int
    gpu_memory_mib: int | None
    compute_percent: int | None
    gpu_models: tuple[str, ...]
    count: int


class QuotaScope(StrEnum):
    """Whom a quota is for: a user, all members of a Hub group together, or everybody together.

    The name "*" stands for each user, or for each group; of everybody it is the only one.
    """

    USER = "user"
    GROUP = "group"
    ALL = "all"


@dataclass(frozen=True, slots=True)
class Quota:
    """An administrator's limit on what is taken, waits and lasts. None is no limit; the strictest of several counts.

    It counts the sessions of one resource group, or, where that is None, of all together.
    """

    scope: QuotaScope
    name: str
    resource_group: str | None = None
    max_fgpu_milli: int | None = None
    max_sessions: int | None = None
    max_pending: int | None = None
    max_lifetime_s: int | None = None


Change = tuple[Session | None, Session | None]
"""A session as it was and as it is; None: it is not live."""


@dataclass(frozen=True, slots=True)
class SessionIndex:
    """The live sessions as decisions look them up: by the node they have a place on, by the queue they wait in, by user.

    A change makes only those groups anew that it touches; the others stay the same objects. No group is empty, and none
    is in any order.
    """

    on_node: PersistentMap[str, Mapping[int, Session]]
    waiting: PersistentMap[str, PersistentMap[int, Session]]
    """By resource group."""
    of_user: PersistentMap[str, Mapping[int, Session]]

    @classmethod
    def of(cls, sessions: Iterable[Session]) -> SessionIndex:
        """Group sessions."""
        return cls(
            PersistentMap(part_of_name), PersistentMap(part_of_name), PersistentMap(part_of_name)
        ).then([(None, s) for s in sessions])

    def then(self, changes: Sequence[Change]) -> SessionIndex:
        """Return the groups after changes."""
        on_node = _by(changes, lambda s: s.placement.node_id if s.placement else None)
        waiting = _by(
            changes, lambda s: s.request.resource_group if s.state is SessionState.PENDING else None
        )
        of_user = _by(changes, lambda s: s.request.user)
        nobody = PersistentMap[int, Session](part_of_id)
        return SessionIndex(
            self.on_node.then({k: _small(self.on_node.get(k), own) for k, own in on_node.items()}),
            # The only ones that grow large.
            self.waiting.then(
                {k: self.waiting.get(k, nobody).then(own) or None for k, own in waiting.items()}
            ),
            self.of_user.then({k: _small(self.of_user.get(k), own) for k, own in of_user.items()}),
        )


def _by(
    changes: Iterable[Change], name_of: Callable[[Session], str | None]
) -> dict[str, dict[int, Session | None]]:
    """Return by group what changes there: who is in it from now on, and None of whom is not."""
    found: dict[str, dict[int, Session | None]] = {}
    for old, new in changes:
        if old is not None and (name := name_of(old)) is not None:
            found.setdefault(name, {})[old.id] = None
        if new is not None and (name := name_of(new)) is not None:
            found.setdefault(name, {})[new.id] = new
    return found


def _small(
    group: Mapping[int, Session] | None, changes: Mapping[int, Session | None]
) -> Mapping[int, Session] | None:
    found = {**(group or {}), **changes}
    return {number: session for number, session in found.items() if session is not None} or None


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All that a decision may depend on: nodes by id and live sessions by id, at one instant.

    ``version`` changes with every commit of the store, so that a plan made on a stale snapshot is refused.
    """

    now_s: int
    version: int
    nodes: tuple[Node, ...]
    sessions: tuple[Session, ...] = field(default=())
    usage: tuple[Usage, ...] = ()
    quotas: tuple[Quota, ...] = ()
    request_counts: tuple[RequestCount, ...] = ()
    """What people have asked for lately; `core.request_counts` says which requests are counted."""
    runs: PastRuns = field(default_factory=PastRuns)
    """How long the newest sessions ran that have ended: what lengths are guessed from."""
    known: tuple[tuple[Session, ...], SessionIndex] | None = field(default=None, compare=False, repr=False)
    """The groups of the very sessions that are beside them, once somebody knows them: no part of the value."""

    @property
    def index(self) -> SessionIndex:
        """The sessions by node, by queue and by user."""
        if self.known is None or self.known[0] is not self.sessions:
            object.__setattr__(self, "known", (self.sessions, SessionIndex.of(self.sessions)))
        assert self.known is not None
        return self.known[1]

    @property
    def resource_groups(self) -> list[str]:
        """The resource groups that have nodes, by name."""
        return sorted({node.resource_group for node in self.nodes})

    def of_group(self, resource_group: str) -> Snapshot:
        """Return what a forecast of this resource group depends on: its nodes, and its sessions.

        Groups share nothing but their users' quotas: where there are any, the sessions that hold something elsewhere
        count, and who waits elsewhere is left out.
        """
        groups = {one.resource_group for one in self.nodes} | {one.resource_group for one in self.usage}
        if groups == {resource_group} and all(
            s.request.resource_group == resource_group for s in self.sessions
        ):
            return self
        usage = tuple(u for u in self.usage if u.resource_group == resource_group)
        shared = bool(self.quotas)
        sessions = tuple(
            s
            for s in self.sessions
            if s.request.resource_group == resource_group or (shared and s.state is not SessionState.PENDING)
        )
        if shared:
            return replace(self, sessions=sessions, usage=usage)
        nodes = tuple(n for n in self.nodes if n.resource_group == resource_group)
        return replace(self, nodes=nodes, sessions=sessions, usage=usage)

    def session(self, session_id: int) -> Session | None:
        """Return the session with this id, or None."""
        return next((s for s in self.sessions if s.id == session_id), None)

    def changed(self, changes: Sequence[Change]) -> Snapshot:
        """Return this snapshot after changes; its groups are carried on."""
        gone = {old.id for old, _ in changes if old is not None}
        new = [session for _, session in changes if session is not None]
        there = tuple(sorted((*(s for s in self.sessions if s.id not in gone), *new), key=lambda s: s.id))
        return replace(self, sessions=there, known=(there, self.index.then(changes)))

    def with_sessions(self, sessions: Iterable[Session]) -> Snapshot:
        """Return this snapshot with other sessions, put in order of their ids."""
        ordered = tuple(sorted(sessions, key=lambda s: s.id))
        return replace(self, sessions=ordered)
