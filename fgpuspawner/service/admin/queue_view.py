"""Every resource group's queue for administrators: in order, with reasons and marks for long waits. Pure."""

from __future__ import annotations

from fgpu_scheduler import Forecast, NodeState, Session, format_milli
from fgpuspawner.service.admin.objects import Queues, WaitingEntry, WaitingQueue
from fgpuspawner.service.api.session_objects import session_object
from fgpuspawner.service.capacity import allocatable_in, used_of
from fgpuspawner.service.model import Site, Viewer, World

LONG_WAIT_S = 3600
"""A longer wait is marked, in seconds."""
STUCK_AFTER_S = 600
"""A longer wait without a forecast is marked, in seconds."""


def queues_object(
    world: World,
    viewer: Viewer,
    site: Site,
    *,
    now_s: int,
    most: int | None = None,
) -> Queues:
    """Return each resource group's queue, next one first, with a limited number of entries. For administrators only.

    Marks are counted over all waiting requests.
    """
    groups = sorted({*world.groups, *world.queues})
    queues = [_queue(group, world, viewer, site, now_s, most) for group in groups]
    return Queues(queues=queues, simulated=world.simulated())


def _queue(
    group: str,
    world: World,
    viewer: Viewer,
    site: Site,
    now_s: int,
    most: int | None,
) -> WaitingQueue:
    own = world.queues.get(group, ())
    nodes = [n for n in world.snapshot.nodes if n.resource_group == group]
    ready = [n for n in nodes if n.state is NodeState.READY]
    waits_s = [max(0, now_s - session.waits_since_s) for _, session in own]
    marks = [_mark(forecast, waited_s) for (forecast, _), waited_s in zip(own, waits_s, strict=True)]
    return WaitingQueue(
        group=group,
        length=len(own),
        marked=sum(mark is not None for mark in marks),
        longest_wait_s=max(waits_s, default=0),
        nodes=len(nodes),
        nodes_ready=len(ready),
        fgpu_used=format_milli(max(0, used_of(world, group).fgpu_milli)),
        fgpu_free=format_milli(max(0, _free(world, group))),
        entries=[_entry(forecast, session, world, viewer, site, now_s) for forecast, session in own[:most]],
    )


def _free(world: World, group: str) -> int:
    # As for a user without quotas.
    return allocatable_in(world, Viewer(None, groups=(group,)), group).fgpu_milli


def _entry(
    forecast: Forecast,
    session: Session,
    world: World,
    viewer: Viewer,
    site: Site,
    now_s: int,
) -> WaitingEntry:
    waited_s = max(0, now_s - session.waits_since_s)
    return WaitingEntry.of(
        session_object(session, world, viewer, site),
        session,
        asked_priority=session.own_request.priority,
        waited_s=waited_s,
        mark=_mark(forecast, waited_s),
    )


def _mark(forecast: Forecast, waited_s: int) -> str | None:
    if forecast.expected_start_at_s is None and waited_s >= STUCK_AFTER_S:
        return "stuck"
    return "long" if waited_s >= LONG_WAIT_S else None
