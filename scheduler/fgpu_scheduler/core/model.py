"""The values of the scheduler: devices, nodes, requests, sessions and one snapshot of them all.

All values are frozen; a change makes a new value. Tuples are in a stated order, so that equal snapshots give equal plans.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import NamedTuple, TypeVar

from fgpu_scheduler.core.run_lengths import PastRuns
from fgpu_scheduler.core.units import share_compute_percent, share_memory_mib

K = TypeVar("K")
V = TypeVar("V")

#: The default of the most sessions that share one GPU (product H1; Huawei CCE's limit).
MAX_SHARES = 20


class NodeState(StrEnum):
    """READY takes sessions. CORDONED keeps its sessions and takes no new ones. LOST does not answer and keeps their
    shares.

    GONE is a LOST node after an administrator has confirmed that nothing runs there: its sessions are ended, and it
    becomes LOST again.
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
    PARKED = "PARKED"
    RESUMING = "RESUMING"
    TERMINATING = "TERMINATING"
    TERMINATED = "TERMINATED"
    ERROR = "ERROR"
    CANCELLED = "CANCELLED"


class WaitReason(StrEnum):
    """Why a session is PENDING, or PARKED although it wants its shares back."""

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
    """What a share limits on its device."""

    MEMORY = "memory"
    MEMORY_COMPUTE = "memory+compute"


@dataclass(frozen=True, slots=True)
class Device:
    """One physical GPU.

    ``capacity_milli`` is the configured fGPU per GPU of its model x 1000; ``max_shares`` is how many sessions may
    share it. With a ``cordon_reason`` it keeps its sessions and takes no new ones.
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
        """Whether it takes no new sessions."""
        return self.cordon_reason is not None

    @property
    def shares_offered(self) -> int:
        """The number of sessions that may share it now, with the present ones."""
        return 0 if self.cordoned else self.max_shares


@dataclass(frozen=True, slots=True)
class Node:
    """The host of some devices (in order of their index), with CPU and memory for sessions.

    A node that its cluster has ``closed`` stays CORDONED until the cluster opens it, whatever administrators set here.
    """

    id: str
    resource_group: str
    cpu_milli: int
    memory_mib: int
    devices: tuple[Device, ...]
    state: NodeState = NodeState.READY
    closed: bool = False

    def opened(self) -> Node:
        """Return the node as if it and all its devices took sessions."""
        devices = tuple(replace(d, cordon_reason=None) if d.cordoned else d for d in self.devices)
        return replace(self, state=NodeState.READY, devices=devices, closed=False)


@dataclass(frozen=True, slots=True)
class Request:
    """The request for one session.

    ``fgpu_milli`` is a fraction of one device, or whole devices; CPU is in thousandths of a core. With ``gpu_memory_mib``
    it is 0, and the request is for that memory of one device, with ``compute_percent`` of its compute or, if that is
    None, without a compute limit. ``gpu_models`` are the accepted models, the preferred one first; empty accepts all.
    The first model on which the request fits now is taken. ``groups`` are the Hub groups of the user at submission,
    in order. ``name`` is the session's name for people; ``setup`` is the id of its own variables and start script, 0 for
    none. ``folders`` are the names of the shared folders that the user has chosen. ``account`` is the path of the account
    that is charged, "" if there are no accounts.
    A session ``on_demand`` starts parked: it waits for no GPU, and gets its shares when it wants them.
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
    name: str = ""
    setup: int = 0
    on_demand: bool = False
    account: str = ""
    folders: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Share:
    """The part of one device that a session holds. In mode MEMORY compute is not limited, and the percent is 0."""

    device_uuid: str
    fgpu_milli: int
    memory_mib: int
    compute_percent: int
    mode: ShareMode = ShareMode.MEMORY_COMPUTE

    @classmethod
    def of(cls, device: Device, fgpu_milli: int) -> Share:
        """Return the share that ``fgpu_milli`` of ``device`` is worth (product A3)."""
        capacity = device.capacity_milli
        memory_mib = share_memory_mib(
            fgpu_milli, capacity_milli=capacity, device_memory_mib=device.memory_mib
        )
        percent = share_compute_percent(fgpu_milli, capacity_milli=capacity)
        return cls(device.uuid, fgpu_milli, memory_mib, percent)


def compute_of(shares: Iterable[Share]) -> int | None:
    """Return the compute limit of a session with these shares in percent; None if they do not limit it."""
    return sum(share.compute_percent for share in shares) or None


@dataclass(frozen=True, slots=True)
class Placement:
    """Shares on one node. A placement never spans nodes."""

    node_id: str
    shares: tuple[Share, ...]

    @property
    def fgpu_milli(self) -> int:
        """The fGPU x 1000 of all shares."""
        shares = self.shares
        # Most placements have one share, and each pass reads this for every session.
        return shares[0].fgpu_milli if len(shares) == 1 else sum([share.fgpu_milli for share in shares])


@dataclass(frozen=True, slots=True)
class Size:
    """What a session held until it was resized, parked or resumed: fGPU x 1000, millionths of a GPU, memory, compute."""

    until_s: int
    fgpu_milli: int
    gpu_millionths: int
    memory_mib: int
    compute_percent: int


#: How long a node that refused a session is left out: at first, and at most. It doubles with each refusal.
REFUSED_S = 30
REFUSED_MOST_S = 300


@dataclass(frozen=True, slots=True)
class RefusedNode:
    """A node that the cluster refused to a session: the last instant, the number of times, and the cluster's words."""

    node_id: str
    at_s: int
    times: int
    words: str

    def until_s(self, now_s: int) -> int | None:
        """Return until when the node is left out; None if it is not, which includes a clock that was set back."""
        until_s = self.at_s + min(REFUSED_S << min(self.times - 1, 10), REFUSED_MOST_S)
        return until_s if self.at_s <= now_s < until_s else None


@dataclass(frozen=True, slots=True)
class Session:
    """One server of one user, from submission to end. Instants are UTC seconds."""

    id: int
    request: Request
    state: SessionState
    submitted_at_s: int
    #: Whether no launcher waits for it, after a restart of the Hub for example: it keeps its position and is not started.
    held: bool = False
    #: The number of launches; with the id it names the container.
    attempt: int = 0
    placement: Placement | None = None
    wait_reason: WaitReason | None = None
    scheduled_at_s: int | None = None
    started_at_s: int | None = None
    ended_at_s: int | None = None
    end_cause: EndCause | None = None
    message: str | None = None
    #: The launcher's own note on what it started; not interpreted here.
    launched: str | None = None
    #: The ended session that this one replaces after it was queued again.
    replaces: int | None = None
    #: The first start that was promised to it.
    promised_at_s: int | None = None
    #: When and why it is going to be ended, as its owner was warned.
    ends_at_s: int | None = None
    ends_cause: EndCause | None = None
    idle_since_s: int | None = None
    #: Until then it is neither ended for idleness nor parked.
    kept_until_s: int | None = None
    #: The first of the sessions that it replaces: it has that one's position in the queue.
    place_of: int | None = None
    #: The priority of its user, if an administrator has changed it.
    asked_priority: int | None = None
    #: When it was queued again; the submission is that of the session that it replaces.
    queued_at_s: int | None = None
    #: What its owner has added to the requested time limit.
    extended_s: int = 0
    #: The nodes that were refused to it, the last one last.
    refused: tuple[RefusedNode, ...] = ()
    #: The amounts that it held before it was resized, parked or resumed, in order; nothing while it was parked.
    sizes: tuple[Size, ...] = ()
    #: Since when it is parked: it holds no share, and its placement says where it had one. It stays set after its end.
    parked_at_s: int | None = None
    #: When a person last asked to have it parked, until it is.
    park_asked_at_s: int | None = None
    #: Why it was not parked then.
    park_refused: str | None = None
    #: Since when it wants its shares back, until it runs again.
    wanted_at_s: int | None = None
    #: The host memory in MiB that has the contents of its GPU memory, until it runs again.
    parked_mib: int = 0

    def refusing_nodes(self, now_s: int) -> tuple[RefusedNode, ...]:
        """Return the nodes that are left out now, because they refused it recently."""
        return tuple(node for node in self.refused if node.until_s(now_s) is not None)

    @property
    def device_uuids(self) -> set[str]:
        """The GPUs of its placement: those that it holds, or to which it returns when it is parked."""
        return {share.device_uuid for share in self.placement.shares} if self.placement else set()

    @property
    def time_limit_s(self) -> int | None:
        """Its own time limit with all extensions."""
        asked_s = self.request.time_limit_s
        return None if asked_s is None else asked_s + self.extended_s

    @property
    def waits_since_s(self) -> int:
        """The begin of its wait: its submission, or when it was queued again."""
        return self.submitted_at_s if self.queued_at_s is None else self.queued_at_s

    @property
    def place(self) -> int:
        """Its position in the order of submission: its id, or that of the session that it replaces."""
        return self.id if self.place_of is None else self.place_of

    @property
    def own_request(self) -> Request:
        """Its request with the priority of its user."""
        if self.asked_priority is None:
            return self.request
        return replace(self.request, priority=self.asked_priority)


@dataclass(frozen=True, slots=True)
class Usage:
    """The usage of a user's ended sessions in a resource group: fGPU x 1000 x seconds, decayed to the snapshot."""

    user: str
    resource_group: str
    fgpu_milli_s: int
    account: str = ""


@dataclass(frozen=True, slots=True)
class RequestCount:
    """How many recent requests in a resource group had these amounts; the fields are those of a `Request`."""

    resource_group: str
    fgpu_milli: int
    cpu_milli: int
    memory_mib: int
    gpu_memory_mib: int | None
    compute_percent: int | None
    gpu_models: tuple[str, ...]
    count: int


class QuotaScope(StrEnum):
    """What a quota limits: a user, all members of a Hub group together, an account, or all users together.

    The name "*" stands for each user, group or account; for all users it is the only one.
    """

    USER = "user"
    GROUP = "group"
    ACCOUNT = "account"
    ALL = "all"


@dataclass(frozen=True, slots=True)
class Quota:
    """An administrator's limits on sessions that hold shares, wait, or run. None is no limit.

    It counts the sessions of one resource group or, if that is None, of all together. An account's sessions within
    ``guaranteed_milli`` come first, see `core.guarantees`.
    """

    scope: QuotaScope
    name: str
    resource_group: str | None = None
    max_fgpu_milli: int | None = None
    max_sessions: int | None = None
    max_pending: int | None = None
    max_lifetime_s: int | None = None
    guaranteed_milli: int | None = None


#: A session before and after a change; None: it is not live.
Change = tuple[Session | None, Session | None]


class Holding(NamedTuple):
    """What the placed sessions of a user of an account hold in a resource group.

    Their usage at an instant is ``fgpu_milli`` x the instant + ``past``, in fGPU x 1000 x seconds.
    """

    sessions: int = 0
    fgpu_milli: int = 0
    past: int = 0

    def then(self, session: Session, sign: int) -> Holding:
        """Return it with (``sign`` 1) or without (-1) a session; one without a placement counts nothing."""
        if session.placement is None or session.scheduled_at_s is None:
            return self
        sessions, fgpu_milli, past = self
        since_s = session.scheduled_at_s
        for size in session.sizes:
            past += sign * size.fgpu_milli * max(0, size.until_s - since_s)
            since_s = max(since_s, size.until_s)
        if session.parked_at_s is None:
            fgpu_milli += sign * session.placement.fgpu_milli
            past -= sign * session.placement.fgpu_milli * since_s
        return Holding(sessions + sign, fgpu_milli, past)

    def used(self, at_s: int) -> int:
        """Return the usage until an instant; never less than 0, even after the clock was set back."""
        return max(0, self.fgpu_milli * at_s + self.past)


@dataclass(frozen=True, slots=True)
class SessionIndex:
    """The live sessions by the node of their placement, by queue, and by user; and what each user holds.

    A change copies only the groups that it touches; the others stay the same objects. No group is empty or sorted.
    """

    on_node: Mapping[str, Mapping[int, Session]]
    #: By resource group.
    waiting: Mapping[str, Mapping[int, Session]]
    of_user: Mapping[str, Mapping[int, Session]]
    #: By resource group and account, by user.
    holdings: Mapping[tuple[str, str], Mapping[str, Holding]]

    @classmethod
    def of(cls, sessions: Iterable[Session]) -> SessionIndex:
        """Return the index of these sessions."""
        return cls({}, {}, {}, {}).then([(None, s) for s in sessions])

    def then(self, changes: Sequence[Change]) -> SessionIndex:
        """Return the index after changes."""
        return SessionIndex(
            _regrouped(self.on_node, changes, lambda s: s.placement.node_id if s.placement else None),
            _regrouped(
                self.waiting,
                changes,
                lambda s: s.request.resource_group if s.state is SessionState.PENDING else None,
            ),
            _regrouped(self.of_user, changes, lambda s: s.request.user),
            self._holdings(changes),
        )

    def _holdings(self, changes: Sequence[Change]) -> Mapping[tuple[str, str], Mapping[str, Holding]]:
        changed: dict[tuple[str, str], dict[str, Holding]] = {}
        for sign, session in [(sign, s) for pair in changes for sign, s in zip((-1, 1), pair, strict=True)]:
            if session is not None and session.placement is not None:
                key, user = (session.request.resource_group, session.request.account), session.request.user
                users = changed.get(key)
                if users is None:
                    users = changed[key] = dict(self.holdings.get(key, {}))
                users[user] = users.get(user, Holding()).then(session, sign)
                if not users[user].sessions:
                    del users[user]
        return _with_groups(self.holdings, changed)


def _regrouped(
    groups: Mapping[str, Mapping[int, Session]],
    changes: Iterable[Change],
    name_of: Callable[[Session], str | None],
) -> Mapping[str, Mapping[int, Session]]:
    """Return groups of sessions after changes; a session without a name is in none."""
    changed: dict[str, dict[int, Session]] = {}

    def group(name: str) -> dict[int, Session]:
        if name not in changed:
            changed[name] = dict(groups.get(name, {}))
        return changed[name]

    for old, new in changes:
        before, after = (None if session is None else name_of(session) for session in (old, new))
        if old is not None and before is not None and before != after:
            group(before).pop(old.id, None)
        if new is not None and after is not None:
            group(after)[new.id] = new
    return _with_groups(groups, changed)


def _with_groups(groups: Mapping[K, V], changed: Mapping[K, V]) -> Mapping[K, V]:
    found = {**groups, **changed}
    for name, own in changed.items():
        if not own:
            del found[name]
    return found


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
    #: Recent requests; `core.request_counts` says which ones are counted.
    request_counts: tuple[RequestCount, ...] = ()
    #: How long the newest sessions ran that have ended.
    runs: PastRuns = field(default_factory=PastRuns)
    #: The sessions and their index, once it was needed; not part of the value.
    known: tuple[tuple[Session, ...], SessionIndex] | None = field(default=None, compare=False, repr=False)

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
        """Return what a forecast of this resource group depends on: its nodes and sessions.

        Groups share nothing but their users' quotas. With quotas, sessions that hold shares elsewhere count too.
        """
        shared = bool(self.quotas)
        sessions = tuple(
            s
            for s in self.sessions
            if s.request.resource_group == resource_group or (shared and s.state is not SessionState.PENDING)
        )
        usage = tuple(u for u in self.usage if u.resource_group == resource_group)
        nodes = tuple(n for n in self.nodes if shared or n.resource_group == resource_group)
        if (len(nodes), len(sessions), len(usage)) == (len(self.nodes), len(self.sessions), len(self.usage)):
            return self
        return replace(self, nodes=nodes, sessions=sessions, usage=usage)

    def session(self, session_id: int) -> Session | None:
        """Return the session with this id, or None."""
        return next((s for s in self.sessions if s.id == session_id), None)

    def changed(self, changes: Sequence[Change]) -> Snapshot:
        """Return this snapshot after changes, with an updated index."""
        gone = {old.id for old, _ in changes if old is not None}
        new = [session for _, session in changes if session is not None]
        there = tuple(sorted((*(s for s in self.sessions if s.id not in gone), *new), key=lambda s: s.id))
        return replace(self, sessions=there, known=(there, self.index.then(changes)))

    def with_sessions(self, sessions: Iterable[Session]) -> Snapshot:
        """Return this snapshot with other sessions, put in order of their ids."""
        ordered = tuple(sorted(sessions, key=lambda s: s.id))
        return replace(self, sessions=ordered)
