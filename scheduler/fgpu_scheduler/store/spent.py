"""Reads which shares sessions held in a period, and how long they waited, for reports."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from operator import attrgetter
from typing import Any

from sqlalchemy import or_, select

from fgpu_scheduler.core.records import HeldShares
from fgpu_scheduler.store.connection import StoreConnection
from fgpu_scheduler.store.rows import groups_of, sizes_of
from fgpu_scheduler.store.schema import devices, meters, sessions, shares

AT_ONCE = 1000
"""How many rows are in memory at a time: a year may have hundreds of thousands."""


def spent_between(store: StoreConnection, from_s: int, to_s: int) -> Iterator[HeldShares]:
    """Yield by id every session that held shares at any time in ``from_s <= t < to_s``.

    One read transaction stays open until the last session, so all are of one instant.

    Raises:
        StoreUnavailable: the store cannot be read.
    """
    held = (
        sessions.c.scheduled_at_s < to_s,
        or_(sessions.c.ended_at_s.is_(None), sessions.c.ended_at_s > from_s),
        sessions.c.node_id.is_not(None),
    )
    chosen = (
        select(*_COLUMNS, meters.c.gpu_millionths)
        .join_from(sessions, meters, sessions.c.id == meters.c.session_id, isouter=True)
        .where(*held)
        .order_by(sessions.c.id)
    )
    parts = (
        select(shares.c.session_id, shares.c.fgpu_milli, shares.c.compute_percent, devices.c.capacity_milli)
        .join_from(shares, sessions, shares.c.session_id == sessions.c.id)
        .join(devices, devices.c.uuid == shares.c.device_uuid, isouter=True)
        .where(*held)
        .order_by(shares.c.session_id)
    )
    with store.reading() as connection:
        connection = connection.execution_options(yield_per=AT_ONCE)
        by_session = groupby(connection.execute(parts), attrgetter("session_id"))
        of_id, own = next(by_session, _NO_PARTS)
        for row in connection.execute(chosen):
            if of_id == row.id:
                yield _spent(row, tuple(own))
                of_id, own = next(by_session, _NO_PARTS)
            else:
                yield _spent(row, ())


_NO_PARTS: tuple[None, Iterator[Any]] = None, iter(())
_COLUMNS = (
    sessions.c.id,
    sessions.c.user_name,
    sessions.c.resource_group,
    sessions.c.groups,
    sessions.c.image,
    sessions.c.submitted_at_s,
    sessions.c.queued_at_s,
    sessions.c.scheduled_at_s,
    sessions.c.started_at_s,
    sessions.c.ended_at_s,
    sessions.c.sizes,
)


def _spent(row: Any, parts: Sequence[Any]) -> HeldShares:
    return HeldShares(
        row.id,
        row.user_name,
        row.resource_group,
        groups_of(row.groups),
        row.image,
        row.submitted_at_s if row.queued_at_s is None else row.queued_at_s,
        row.scheduled_at_s,
        row.started_at_s,
        row.ended_at_s,
        _gpu_millionths(row.gpu_millionths, parts),
        sum(part.fgpu_milli for part in parts),
        sizes_of(row.sizes),
    )


def _gpu_millionths(measured: int | None, parts: Sequence[Any]) -> int:
    """Return the shares in millionths of a GPU, as in receipts.

    This is the value that was stored while the session ran; without one, the GPUs' current capacity counts, or the
    compute percent of a share if its GPU was removed.
    """
    if measured:
        return measured
    return sum(
        round(1_000_000 * part.fgpu_milli / part.capacity_milli)
        if part.capacity_milli
        else 10_000 * part.compute_percent
        for part in parts
    )
