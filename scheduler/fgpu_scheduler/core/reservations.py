"""The place that is kept for the first of a queue while it does not fit, and who may start beside it.

Where enough of those who hold what it needs have time limits, the instant is known by which they have ended: then
the place is kept from that instant on, and who ends before it may still use it (EASY backfill: Lifka, "The
ANL/IBM SP scheduling system", 1995). Where it is not known, the place is the one that lacks least, and nothing of
it is given to anybody else. What it lacks never grows then, and gets less with every end there; a change to another
place happens only to one that lacks less still. So the first of the queue starts, if sessions end.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from fgpu_scheduler.core.model import (
    Device,
    EndCause,
    NodeState,
    Placement,
    Request,
    Session,
    SessionState,
    Share,
)
from fgpu_scheduler.core.placement import DeviceFree, NodeFree, claimed
from fgpu_scheduler.core.shares import accepts_model, devices_needed, per_preferred_model, shares_of

LAUNCH_S = 600
"""No launch takes longer, as far as promises go: a time limit counts from the end of the launch."""
ENDING_S = 60
"""From the end of a session until its shares are free, as far as promises go."""

LENT = 4
"""Others may have one part in so many of the time until a promised start; of what is left, the same again in each plan.

On seeds 1 to 12 and 101 to 110 of bench/scheduler/lab.py (decision 0027).
"""

SURE_ENDS = (EndCause.TIME_LIMIT, EndCause.PREEMPTED)
"""What the owner was warned of and cannot avert; an end for being idle can be."""


@dataclass(frozen=True, slots=True)
class Reservation:
    """The place that is kept for a session.

    ``starts_at_s`` is when it can start at the latest, or None where that is not known. ``beside`` is what it leaves
    of the node then, below zero where others still hold what it needs. ``lent_until_s``: others may have it until then;
    None: until the start.
    """

    session_id: int
    placement: Placement
    starts_at_s: int | None
    beside: NodeFree
    lent_until_s: int | None = None

    def ends_before(self, free_at_s: int | None) -> bool:
        """Return whether what is free again at that instant is in time."""
        until_s = self.starts_at_s if self.lent_until_s is None else self.lent_until_s
        return until_s is not None and free_at_s is not None and free_at_s <= until_s

    def until(self, promised_at_s: int | None) -> Reservation:
        """Return it with the instant that was promised, if that is later: part of that time is lent to others."""
        if self.starts_at_s is None or promised_at_s is None or promised_at_s <= self.starts_at_s:
            return self
        lent_until_s = self.starts_at_s + (promised_at_s - self.starts_at_s) // LENT
        return replace(self, starts_at_s=promised_at_s, lent_until_s=lent_until_s)


def free_at_s(session: Session, now_s: int, *, limit_s: int | None) -> int | None:
    """Return the instant by which what a session holds, or would hold from now on, is free again.

    ``limit_s`` is the longest that it may run. None where no end is known; never before a moment from now.
    """
    if session.state is SessionState.TERMINATING:
        return now_s + ENDING_S
    if session.ends_at_s is not None and session.ends_cause in SURE_ENDS:
        end_s = session.ends_at_s
    elif limit_s is None:
        return None
    elif session.started_at_s is not None:
        # The clock may have been set back since.
        end_s = min(session.started_at_s, now_s) + limit_s
    else:
        placed_at_s = now_s if session.scheduled_at_s is None else min(session.scheduled_at_s, now_s)
        end_s = placed_at_s + LAUNCH_S + limit_s
    return max(end_s, now_s) + ENDING_S


def least_missing_place(session: Session, left: Mapping[str, NodeFree]) -> Reservation | None:
    """Return the place that lacks least, to be kept until it lacks nothing; None where no node could hold it."""
    asked = session.request
    found: tuple[tuple[int, int, str, tuple[str, ...]], Placement, NodeFree] | None = None
    for node_id, node in left.items():
        if node.node.state is not NodeState.READY or node.node.resource_group != asked.resource_group:
            continue
        if asked.cpu_milli > node.node.cpu_milli or asked.memory_mib > node.node.memory_mib:
            continue
        ways = (
            (at, shares) for at, one in enumerate(per_preferred_model(asked)) for shares in _places(node, one)
        )
        for at, shares in ways:
            placement = Placement(node_id, shares)
            beside, lacks = _claim(node, asked, placement)
            key = lacks, at, node_id, tuple(share.device_uuid for share in shares)
            if found is None or key < found[0]:
                found = key, placement, beside
    return None if found is None else Reservation(session.id, found[1], None, found[2])


def _places(left: NodeFree, asked: Request) -> Iterator[tuple[Share, ...]]:
    """Yield what a request would get on each device or, of whole ones, on those of which least is held."""
    if asked.fgpu_milli == 0 and asked.gpu_memory_mib is None and asked.compute_percent is None:
        yield ()
        return
    whole: dict[int, list[DeviceFree]] = {}
    for free in left.devices:
        device = free.device
        if device.cordoned:
            continue
        needed = devices_needed(asked.fgpu_milli, capacity_milli=device.capacity_milli)
        if needed == 1:
            shares = shares_of(asked, (device,))
            if shares is not None:
                yield shares
        elif needed is not None and accepts_model(asked, device.model):
            whole.setdefault(device.capacity_milli, []).append(free)
    for capacity, devices in sorted(whole.items()):
        needed = devices_needed(asked.fgpu_milli, capacity_milli=capacity) or 0
        devices.sort(key=lambda d: (_lack_as_whole(d), d.device.uuid))
        chosen: Sequence[Device] = sorted((d.device for d in devices[:needed]), key=lambda d: d.uuid)
        shares = shares_of(asked, chosen) if len(chosen) == needed else None
        if shares is not None:
            yield shares


def _claim(left: NodeFree, asked: Request, placement: Placement) -> tuple[NodeFree, int]:
    """Return what a place leaves once all that it needs is its own, and how much that lacks now.

    The lack is a sum over fGPU, GPU memory, compute, shares, CPU and memory, each in thousandths of the whole.
    """
    modes = {share.device_uuid: share.mode for share in placement.shares}
    beside = claimed(left, asked, placement)
    lacks = _lack(beside.cpu_milli, left.node.cpu_milli) + _lack(beside.memory_mib, left.node.memory_mib)
    devices = []
    for before, device in zip(left.devices, beside.devices, strict=True):
        whole = device.device
        if whole.uuid not in modes:
            devices.append(device)
            continue
        mode = modes[whole.uuid]
        if before.mode not in (None, mode):
            # Those of another mode have to end before the first share of this one: all of it is kept.
            held = whole.max_shares - before.shares
            device = replace(
                device, fgpu_milli=before.fgpu_milli - whole.capacity_milli - 1, shares=-held, mode=mode
            )
        lacks += _device_lack(device)
        devices.append(device)
    return replace(beside, devices=tuple(devices)), lacks


def _lack_as_whole(free: DeviceFree) -> int:
    """Return what a device would lack if all of it were claimed."""
    whole = free.device
    return (
        _lack(free.fgpu_milli - whole.capacity_milli, whole.capacity_milli)
        + _lack(free.memory_mib - whole.memory_mib, whole.memory_mib)
        + _lack(free.compute_percent - 100, 100)
        + _lack(free.shares, whole.max_shares)
    )


def _device_lack(free: DeviceFree) -> int:
    return (
        _lack(free.fgpu_milli, free.device.capacity_milli)
        + _lack(free.memory_mib, free.device.memory_mib)
        + _lack(free.compute_percent, 100)
        + _lack(free.shares, free.device.max_shares)
    )


def _lack(free: int, whole: int) -> int:
    # Rounded up: what lacks is never nothing.
    return -(-1000 * -free // whole) if free < 0 < whole else 0
