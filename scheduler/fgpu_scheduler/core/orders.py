"""The order of a queue. Higher priority comes first, then aged requests, then the ranks of the policy's order.

An order ranks by arrival (`fifo`, `lifo`), by past usage (`fair_share`, `usage_size_age`) or by dominant shares (`drf`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import sqrt
from operator import attrgetter, mul
from typing import NamedTuple

from fgpu_scheduler.core.accounts import Accounts, Member, Standings, fair_ranks
from fgpu_scheduler.core.lifecycle import HOLDING, holds_shares
from fgpu_scheduler.core.model import Session, Snapshot
from fgpu_scheduler.core.quota import Ledger
from fgpu_scheduler.core.usage import member_of, taken_by_account, taken_milli, used_by_account

#: The assumed length of a session without a time limit when too few have ended to estimate it.
UNLIMITED_S = 4 * 3600
#: The shortest estimate: it limits what a user gains by many short sessions before a long one.
LEAST_GUESS_S = 900


@dataclass(frozen=True, slots=True)
class QueueSnapshot:
    """The waiting sessions of one resource group, in the order of their positions, and what an order may use.

    ``waited_s`` is how long each has waited: never less than a session behind it, even after the clock was set,
    except for sessions that were queued again after they had run.
    """

    snapshot: Snapshot
    resource_group: str
    waiting: Sequence[Session]
    waited_s: Sequence[int]
    accounts: Accounts = field(default_factory=Accounts)


#: Returns a rank for each waiting session. Lower comes first; equal ranks go by position.
Order = Callable[[QueueSnapshot], Sequence[float]]


def queue_snapshots(snapshot: Snapshot, accounts: Accounts | None = None) -> dict[str, QueueSnapshot]:
    """Return the queue of each resource group with waiting sessions, by name; sessions on demand pass the queue."""
    found, accounts = {}, accounts or Accounts()
    for group, waiting in sorted(snapshot.index.waiting.items()):
        own = by_place([s for s in waiting.values() if not s.request.on_demand])
        if not own:
            continue
        found[group] = QueueSnapshot(snapshot, group, own, waited_s(own, snapshot.now_s), accounts)
    return found


def by_place(waiting: Iterable[Session]) -> list[Session]:
    """Return sessions in the order of their positions in the queue; equal ones by id."""
    own = sorted(waiting, key=attrgetter("id"))
    if any([s.place_of is not None for s in own]):
        own.sort(key=attrgetter("place"))
    return own


def waited_s(waiting: Sequence[Session], now_s: int) -> list[int]:
    """Return how long each session has waited; ``waiting`` is in the order of the positions.

    Positions say who came first. Instants do not: after the clock was set back, later sessions seem to have waited
    longer. So no session counts as having waited less than one behind it. The exception is a session that was queued
    again: it has its old position, and did not wait while it ran.
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


def aged_from_s(queue: QueueSnapshot, longest_wait_s: int) -> dict[int, int]:
    """Return by session id the instant from which a request for several GPUs comes first within its priority.

    A request for n GPUs may wait for an n-th of ``longest_wait_s``. It needs the rest of its time in the queue until
    enough GPUs of one node are free together; a smaller request fits as soon as any session has ended.
    """
    now_s = queue.snapshot.now_s
    nodes = (node for node in queue.snapshot.nodes if node.resource_group == queue.resource_group)
    # The number of GPUs is by the capacity of the first one.
    whole_milli = next((d.capacity_milli for node in nodes for d in node.devices), 1)
    return {
        session.id: now_s - waited_s + longest_wait_s // (session.request.fgpu_milli // whole_milli)
        for session, waited_s in zip(queue.waiting, queue.waited_s, strict=True)
        if session.request.fgpu_milli >= 2 * whole_milli
    }


def in_order(queue: QueueSnapshot, ranks: Sequence[float], aged: Collection[int] = ()) -> list[int]:
    """Return the indexes of the waiting sessions, the next one first.

    Higher priority comes first, then the ``aged`` ones: the largest first, equal ones by position.
    """
    found = sorted(range(len(ranks)), key=ranks.__getitem__)
    if aged:
        first = dict.fromkeys(sorted(aged, key=lambda n: (-queue.waiting[n].request.fgpu_milli, n)))
        found = [*first, *(n for n in found if n not in first)]
    if any([s.request.priority for s in queue.waiting]):
        found.sort(key=lambda n: -queue.waiting[n].request.priority)
    return found


def lengths_s(queue: QueueSnapshot) -> list[float]:
    """Return how long each waiting session is assumed to run: its time limit, or an estimate.

    The estimate is the mean of past runs as in a forecast: of the same user and image, if enough ended. It affects
    only the order: no session ends by it, and no promise rests on it.
    """
    guesses: dict[tuple[str, str], float] = {}
    found: list[float] = []
    for session in queue.waiting:
        asked = session.request
        if asked.time_limit_s is not None:
            found.append(asked.time_limit_s)
            continue
        who = asked.user, asked.image
        if who not in guesses:
            rest = queue.snapshot.runs.lengths(queue.resource_group).rest(*who, 0)
            mean_s = None if rest is None else rest.mean_s()
            guesses[who] = UNLIMITED_S if mean_s is None else max(LEAST_GUESS_S, mean_s)
        found.append(guesses[who])
    return found


def asked_milli(queue: QueueSnapshot) -> list[int]:
    """Return the requested fGPU x 1000 of each session; for explicit amounts the least that they are worth."""
    found = [s.request.fgpu_milli for s in queue.waiting]
    if 0 not in found:
        return found
    ledger = Ledger(queue.snapshot)
    return [ledger.milli(session) for session in queue.waiting]


def fifo(queue: QueueSnapshot) -> Sequence[float]:
    """First come, first served, by position: a session that is queued again keeps its old one."""
    return [0] * len(queue.waiting)


def lifo(queue: QueueSnapshot) -> Sequence[float]:
    """Last come, first served."""
    return range(len(queue.waiting), 0, -1)


def fair_share(queue: QueueSnapshot) -> Sequence[float]:
    """Rank by the decayed usage of accounts and users, and of their own requests ahead: fGPU x 1000 x seconds.

    So a user's second request stands behind the first ones of all users with as little usage.
    """
    by_account = used_by_account(queue.snapshot, queue.resource_group)
    used = {(path, user): (n,) for path, users in by_account.items() for user, n in users.items()}
    asked = list(map(mul, asked_milli(queue), lengths_s(queue)))
    return fair_ranks(queue.accounts, used, [member_of(s) for s in queue.waiting], [asked])


# Set on seeds 1 to 12 of bench/scheduler/lab.py (docs/decisions/0027).
#: The weight of usage as high as the average user's.
USAGE = 0.3
#: The weight, without a time limit, of holding as much as the average user who holds shares.
TAKEN = 3.0
#: A session that has waited for this long counts as half its size.
PATIENCE_S = 3600


def usage_size_age(queue: QueueSnapshot) -> Sequence[float]:
    """Rank by size, higher with the user's usage, and lower with the time waited.

    The size is the square of the time limit, times the root of the fGPU: limits predict the waits that a session causes
    better than amounts do. Without a limit the estimated length counts once, since it predicts less. Usage is that of
    `fair_share`, with the user's own requests ahead; that of each account above counts like the user's. Without a limit,
    the fGPU that they hold now counts as well, so that users who request much at a time are held back.
    """
    used = Standings(queue.accounts, used_by_account(queue.snapshot, queue.resource_group))
    taken = Standings(queue.accounts, taken_by_account(queue.snapshot, queue.resource_group))
    ranks = []
    sizes: dict[tuple[int, float, int | None], float] = {}
    lengths = lengths_s(queue)
    for session, waited_s, milli, length_s in zip(
        queue.waiting, queue.waited_s, asked_milli(queue), lengths, strict=True
    ):
        asked = session.request
        member, limit_s = member_of(session), asked.time_limit_s
        size = sizes.get((milli, length_s, limit_s))
        if size is None:
            size = sqrt(milli) * length_s * (limit_s or UNLIMITED_S)
            sizes[milli, length_s, limit_s] = size
        rank = size * (1 + USAGE * used.of(member)) / (PATIENCE_S + waited_s)
        used.add(member, milli * length_s)
        if limit_s is None:
            rank *= 1 + TAKEN * taken.of(member)
            taken.add(member, milli)
        ranks.append(rank)
    return ranks


def drf(queue: QueueSnapshot) -> Sequence[float]:
    """Rank by the dominant share of accounts and users in millionths of the resource group: of fGPU, CPU or memory.

    It counts the sessions of the user and their own requests ahead (dominant resource fairness: Ghodsi et al., NSDI
    2011).
    """
    snapshot, group = queue.snapshot, queue.resource_group
    nodes = [n for n in snapshot.nodes if n.resource_group == group]
    fgpu = 10**6 / max(1, sum(d.capacity_milli for n in nodes for d in n.devices))
    cpu = 10**6 / max(1, sum(n.cpu_milli for n in nodes))
    memory = 10**6 / max(1, sum(n.memory_mib for n in nodes))

    taken: dict[Member, list[float]] = {}
    for session in snapshot.sessions:
        asked = session.request
        if session.state in HOLDING and asked.resource_group == group:
            own = taken.setdefault(member_of(session), [0, 0, 0])
            own[0] += taken_milli(session) * fgpu if holds_shares(session) else 0
            own[1] += asked.cpu_milli * cpu
            own[2] += asked.memory_mib * memory
    requests = [session.request for session in queue.waiting]
    shares = (
        [milli * fgpu for milli in asked_milli(queue)],
        [asked.cpu_milli * cpu for asked in requests],
        [asked.memory_mib * memory for asked in requests],
    )
    return fair_ranks(queue.accounts, taken, [member_of(s) for s in queue.waiting], shares)


class NamedOrder(NamedTuple):
    """An order that an administrator can choose, and the times that it uses."""

    order: Order
    times: tuple[str, ...]


#: Each order by its name in a configuration. In one without ``longest_wait_s`` no request overtakes another.
ORDERS: Mapping[str, NamedOrder] = {
    "default": NamedOrder(usage_size_age, ("longest_wait_s", "half_life_s")),
    "fair-share": NamedOrder(fair_share, ("longest_wait_s", "half_life_s")),
    "drf": NamedOrder(drf, ("longest_wait_s",)),
    "fifo-skip": NamedOrder(fifo, ("longest_wait_s",)),
    "fifo": NamedOrder(fifo, ()),
    "lifo": NamedOrder(lifo, ("longest_wait_s",)),
}
