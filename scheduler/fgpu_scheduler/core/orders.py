"""The order of a queue: what is common to all orders, then each of them: by arrival, by use, by dominant shares."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from math import sqrt
from operator import attrgetter

from fgpu_scheduler.core.lifecycle import HOLDING
from fgpu_scheduler.core.model import Session, Snapshot
from fgpu_scheduler.core.quota import least_milli
from fgpu_scheduler.core.usage import taken_by_user, taken_milli, used_by_user

UNLIMITED_S = 4 * 3600
"""What a session without a time limit is taken to run where too few have ended to guess by."""
LEAST_GUESS_S = 900
"""Nobody is guessed to run for less: so little can be gained by many short sessions before a long one."""


@dataclass(frozen=True, slots=True)
class QueueSnapshot:
    """Those who wait in one resource group, in the order of their places, and what an order may look at.

    ``waited_s`` is for each how long it has waited: nobody less than somebody behind, however the clock was set, but for
    those that were queued again after they had run.
    """

    snapshot: Snapshot
    resource_group: str
    waiting: Sequence[Session]
    waited_s: Sequence[int]


Order = Callable[[QueueSnapshot], Sequence[float]]
"""A rank for each in the line; lower comes first, and who has the earlier place where ranks are equal."""


def queue_snapshots(snapshot: Snapshot) -> dict[str, QueueSnapshot]:
    """Return the line of each resource group in which somebody waits, by name."""
    waiting = snapshot.index.waiting
    return {group: line(snapshot, group, waiting[group].values()) for group in sorted(waiting)}


def line(snapshot: Snapshot, resource_group: str, waiting: Iterable[Session]) -> QueueSnapshot:
    """Return the line of these sessions of a resource group."""
    own = by_place(waiting)
    return QueueSnapshot(snapshot, resource_group, own, waited_s(own, snapshot.now_s))


def by_place(waiting: Iterable[Session]) -> list[Session]:
    """Return sessions in the order of their places: first come first, by ids where two have one place."""
    own = sorted(waiting, key=attrgetter("id"))
    if any([s.place_of is not None for s in own]):
        own.sort(key=attrgetter("place"))
    return own


def waited_s(waiting: Sequence[Session], now_s: int) -> list[int]:
    """Return how long each has waited, given in the order of their places.

    Places tell who came first. Instants do not: after the clock was set back those who come later seem to
    have waited longer. So nobody has waited less than somebody behind. Only one that was queued again has: it stands
    at its old place, and while it ran it did not wait.
    """
    first = now_s
    found = []
    for session in reversed(waiting):
        if session.queued_at_s is not None:
            found.append(max(0, now_s - session.queued_at_s))
            continue
        if session.submitted_at_s < first:
            first = session.submitted_at_s
        found.append(now_s - first)
    found.reverse()
    return found


def aged_from_s(line: QueueSnapshot, longest_wait_s: int) -> dict[int, int]:
    """Return the instant from which each request for several GPUs comes before all others of its priority, by id.

    A request for n GPUs may wait for an n-th of ``longest_wait_s``. It needs the rest of its time in the queue until
    enough GPUs of one node are free together; a smaller request fits as soon as any session has ended.
    """
    now_s = line.snapshot.now_s
    return {
        session.id: now_s - waited_s + longest_wait_s // gpus
        for session, waited_s in zip(line.waiting, line.waited_s, strict=True)
        if (gpus := _gpus(session, line)) > 1
    }


def _gpus(session: Session, line: QueueSnapshot) -> int:
    """Return how many GPUs a request needs, counted by the first GPU of the resource group."""
    nodes = (node for node in line.snapshot.nodes if node.resource_group == line.resource_group)
    whole = next((d.capacity_milli for node in nodes for d in node.devices), 1)
    return session.request.fgpu_milli // whole


def in_order(line: QueueSnapshot, ranks: Sequence[float], aged: Collection[int] = ()) -> list[int]:
    """Return the indexes of the waiting requests, next one first.

    Higher priority comes first, then the ``aged``: the largest first, of equal ones by their places.
    """
    found = sorted(range(len(ranks)), key=ranks.__getitem__)
    if aged:
        first = dict.fromkeys(sorted(aged, key=lambda n: (-line.waiting[n].request.fgpu_milli, n)))
        found = [*first, *(n for n in found if n not in first)]
    if any([s.request.priority for s in line.waiting]):
        found.sort(key=lambda n: -line.waiting[n].request.priority)
    return found


def lengths_s(line: QueueSnapshot) -> list[float]:
    """Return how long each in the line is taken to run: its time limit, or a guess.

    The guess is the mean of those sessions that a forecast would go by: of the same user and image, if enough ended. It
    orders, and is no limit: nobody ends by it, and nothing is promised by it.
    """
    guesses: dict[tuple[str, str], float] = {}
    found: list[float] = []
    for session in line.waiting:
        asked = session.request
        if asked.time_limit_s is not None:
            found.append(asked.time_limit_s)
            continue
        who = asked.user, asked.image
        if who not in guesses:
            rest = line.snapshot.runs.lengths(line.resource_group).rest(*who, 0)
            mean_s = None if rest is None else rest.mean_s()
            guesses[who] = UNLIMITED_S if mean_s is None else max(LEAST_GUESS_S, mean_s)
        found.append(guesses[who])
    return found


def asked_milli(line: QueueSnapshot) -> list[int]:
    """Return the fGPU x 1000 that each in the line asks for; of GPU memory and compute the least they are worth."""
    found = [s.request.fgpu_milli for s in line.waiting]
    if 0 not in found:
        return found
    nodes = line.snapshot.nodes
    worth: dict[tuple[int | None, int | None, tuple[str, ...]], int] = {}
    for at, session in enumerate(line.waiting):
        asked = session.request
        if asked.gpu_memory_mib is not None:
            shape = asked.gpu_memory_mib, asked.compute_percent, asked.gpu_models
            if shape not in worth:
                worth[shape] = least_milli(asked, nodes)
            found[at] = worth[shape]
    return found


def fifo(line: QueueSnapshot) -> Sequence[float]:
    """First come, first served: in the order of their places.

    A session that is queued again has the place of the one that it replaces.
    """
    return [0] * len(line.waiting)


def lifo(line: QueueSnapshot) -> Sequence[float]:
    """Last come, first served."""
    return range(len(line.waiting), 0, -1)


def fair_share(line: QueueSnapshot) -> Sequence[float]:
    """Rank by what a user has used, decayed, and what their own requests ahead would use: fGPU x 1000 x seconds.

    So a user's second request stands behind the first of all who have used as little.
    """
    used: dict[str, float] = {**used_by_user(line.snapshot, line.resource_group)}
    ranks = []
    for session, milli, length_s in zip(line.waiting, asked_milli(line), lengths_s(line), strict=True):
        user = session.request.user
        before = used.get(user, 0)
        ranks.append(before)
        used[user] = before + milli * length_s
    return ranks


# Set on seeds 1 to 12 of bench/scheduler/lab.py (docs/decisions/0027).
USAGE = 0.3
"""How much it counts to have used as much as users have on average."""
TAKEN = 3.0
"""How much it counts, without a time limit, to hold as much as users who hold something do on average."""
PATIENCE_S = 3600
"""Who has waited for that long counts as half the size."""


def usage_size_age(line: QueueSnapshot) -> Sequence[float]:
    """Rank by size, more with the user's usage, and less with the time waited.

    The size is the square of the time limit, times the root of the fGPU: limits tell more of the wait that a session
    causes than amounts do. Without a limit the length is guessed from sessions that have ended, and counts once: it says
    less. Usage is that of `fair_share`, with the user's own requests ahead. Where no limit tells when a
    session ends, what its user holds now counts as well, and holds up those who ask for much at a time.
    """
    used: dict[str, float] = {**used_by_user(line.snapshot, line.resource_group)}
    taken = taken_by_user(line.snapshot, line.resource_group)
    usage = USAGE / max(1.0, sum(used.values()) / max(1, len(used)))
    taking = TAKEN / max(1.0, sum(taken.values()) / max(1, len(taken)))
    ranks = []
    sizes: dict[tuple[int, float, int | None], float] = {}
    lengths = lengths_s(line)
    for session, waited_s, milli, length_s in zip(
        line.waiting, line.waited_s, asked_milli(line), lengths, strict=True
    ):
        asked = session.request
        user, limit_s = asked.user, asked.time_limit_s
        size = sizes.get((milli, length_s, limit_s))
        if size is None:
            size = sqrt(milli) * length_s * (limit_s or UNLIMITED_S)
            sizes[milli, length_s, limit_s] = size
        before = used.get(user, 0)
        used[user] = before + milli * length_s
        rank = size * (1 + usage * before) / (PATIENCE_S + waited_s)
        if limit_s is None:
            beside = taken.get(user, 0)
            taken[user] = beside + milli
            rank *= 1 + taking * beside
        ranks.append(rank)
    return ranks


MILLION = 10**6


def drf(line: QueueSnapshot) -> Sequence[float]:
    """Rank by the user's dominant share, in millionths of the resource group: of fGPU, CPU or memory the largest.

    It counts what the user holds now and their own requests ahead (dominant resource fairness: Ghodsi et al., NSDI 2011).
    """
    snapshot, group = line.snapshot, line.resource_group
    nodes = [n for n in snapshot.nodes if n.resource_group == group]
    fgpu = MILLION / max(1, sum(d.capacity_milli for n in nodes for d in n.devices))
    cpu = MILLION / max(1, sum(n.cpu_milli for n in nodes))
    memory = MILLION / max(1, sum(n.memory_mib for n in nodes))
    taken: dict[str, list[float]] = {}
    """Of each user the share of fGPU, CPU and memory."""
    for session in snapshot.sessions:
        asked = session.request
        if session.state in HOLDING and asked.resource_group == group:
            own = taken.setdefault(asked.user, [0, 0, 0])
            own[0] += taken_milli(session) * fgpu
            own[1] += asked.cpu_milli * cpu
            own[2] += asked.memory_mib * memory
    ranks = []
    for session, milli in zip(line.waiting, asked_milli(line), strict=True):
        asked = session.request
        own = taken.get(asked.user) or taken.setdefault(asked.user, [0, 0, 0])
        # Rounded: sums that differ only by the order in which they were made are equal.
        ranks.append(int(max(own) + 0.5))
        own[0] += milli * fgpu
        own[1] += asked.cpu_milli * cpu
        own[2] += asked.memory_mib * memory
    return ranks
