"""The API's JSON objects (docs/rest-api.md), built from one consistent reading of the store. Pure.

What a caller may see is decided here and nowhere else: of others' sessions an ordinary user gets the
numbers, never a name or an id.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from typing import Any
from urllib.parse import quote

from fgpu_scheduler import (
    HOLDING,
    LAUNCHING,
    Device,
    EndCause,
    Forecast,
    NodeState,
    Refusal,
    Request,
    RequestForecast,
    Session,
    SessionState,
    Share,
    Snapshot,
    format_milli,
    free,
)
from fgpu_scheduler.core.forecast import Ahead
from fgpu_scheduler.core.quota import Ledger
from fgpu_scheduler.core.reclaim import AllRules, lifetime_s
from fgpu_scheduler.store.banner import Notice
from fgpu_scheduler.store.private_image import ImageState, PrivateImage
from fgpuspawner.images.icons import icon_name
from fgpuspawner.images.model import Image
from fgpuspawner.images.pull_state import PullState
from fgpuspawner.isolation.choice import Chosen
from fgpuspawner.meter.model import Live, Told
from fgpuspawner.text.sessions import WITHDRAWN, ahead_words, amount_words, fgpu_of, warning_words

Json = dict[str, Any]

SIMULATED_PREFIX = "GPU-simulated-"
"""How UUIDs of simulated GPUs begin: all that is known of a GPU that is no longer configured."""


@dataclass(frozen=True, slots=True)
class Viewer:
    """Who asks. ``user`` is None for another service, which has no sessions of its own.

    ``groups`` are the resource groups that they may use; ``server_name`` is the server whose token asks.
    """

    user: str | None
    admin: bool = False
    groups: tuple[str, ...] = ()
    server_name: str | None = None
    hub_groups: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Site:
    """The Hub's base URL, and the names of the images by their slugs.

    ``is_offered`` tells of a request whether whoever made it may still start its image. ``hub_host`` and ``own_host``
    (``https://HOST``) are where the Hub and the service are when each has a domain of its own, else empty.
    """

    base_url: str = "/"
    image_names: Mapping[str, str] = field(default_factory=dict)
    hub_host: str = ""
    own_host: str = ""
    is_offered: Callable[[Request], bool] = lambda request: True

    @property
    def hub_base_url(self) -> str:
        """Where links from the service's pages to the Hub and to servers begin."""
        return self.hub_host + self.base_url


class Savers(StrEnum):
    """Who may save a running session as a private image."""

    NOBODY = "nobody"
    ADMINISTRATORS = "administrators"
    OWNERS = "owners"
    """And administrators."""


@dataclass(frozen=True)
class World:
    """One reading of the store and what follows from it.

    ``largest_now`` is, by resource group, the largest amount that starts now; ``isolation`` what holds the sessions of
    each node; ``rules`` what ends them; ``pulls`` how far the images are that sessions wait for; ``private`` every
    private image, and ``savers`` who may save a session as one; ``banner`` what every page announces; ``meters`` what
    running sessions hold and use of their GPUs.
    """

    snapshot: Snapshot
    forecasts: Mapping[int, Forecast] = field(default_factory=dict)
    largest_now: Mapping[str, int | None] = field(default_factory=dict)
    isolation: tuple[Chosen, ...] = ()
    rules: AllRules = field(default_factory=AllRules)
    pulls: Mapping[int, PullState] = field(default_factory=dict)
    private: tuple[PrivateImage, ...] = ()
    savers: Savers = Savers.NOBODY
    banner: Notice | None = None
    meters: Told = field(default_factory=Told)

    @cached_property
    def devices(self) -> Mapping[str, Device]:
        """The configured devices by UUID."""
        return {d.uuid: d for n in self.snapshot.nodes for d in n.devices}

    @cached_property
    def _by_id(self) -> Mapping[int, Session]:
        return {s.id: s for s in self.snapshot.sessions}

    def session(self, session_id: int) -> Session | None:
        """Return the live session with this id, or None."""
        return self._by_id.get(session_id)

    @cached_property
    def ledger(self) -> Ledger:
        """What is held against every quota."""
        return Ledger(self.snapshot)

    @cached_property
    def groups(self) -> tuple[str, ...]:
        """The resource groups that have a node, by name."""
        return tuple(sorted({n.resource_group for n in self.snapshot.nodes}))

    def simulated(self, groups: Iterable[str] | None = None) -> bool:
        """Return whether any GPU of these groups (of all, if None) is simulated."""
        wanted = None if groups is None else tuple(groups)
        return any(
            d.simulated
            for n in self.snapshot.nodes
            if wanted is None or n.resource_group in wanted
            for d in n.devices
        )


@dataclass(frozen=True, slots=True)
class Amounts:
    """Sums of fGPU, CPU (both in thousandths) and memory."""

    fgpu_milli: int = 0
    cpu_milli: int = 0
    memory_mib: int = 0

    def __add__(self, other: Amounts) -> Amounts:
        return Amounts(
            self.fgpu_milli + other.fgpu_milli,
            self.cpu_milli + other.cpu_milli,
            self.memory_mib + other.memory_mib,
        )

    def as_json(self) -> Json:
        """Return the API's ``amounts``."""
        return {
            "fgpu": format_milli(self.fgpu_milli),
            "cpu": format_milli(self.cpu_milli),
            "memory_mib": self.memory_mib,
        }


def is_mine(session: Session, viewer: Viewer) -> bool:
    """Return whether the session is the viewer's own."""
    return viewer.user is not None and session.request.user == viewer.user


def is_visible(session: Session, viewer: Viewer) -> bool:
    """Return whether the viewer may know whose session this is."""
    return viewer.admin or is_mine(session, viewer)


def is_simulated(session: Session, world: World) -> bool:
    """Return whether any GPU that the session holds, held, or waits for is simulated."""
    if session.placement is None:
        return world.simulated([session.request.resource_group])
    return any(_share_is_simulated(share, world) for share in session.placement.shares)


def _share_is_simulated(share: Share, world: World) -> bool:
    device = world.devices.get(share.device_uuid)
    return share.device_uuid.startswith(SIMULATED_PREFIX) if device is None else device.simulated


# --- Objects ---


def me_object(viewer: Viewer, world: World) -> Json:
    """Return who asks, and which resource groups they may use."""
    return {
        "user": viewer.user,
        "admin": viewer.admin,
        "server_name": viewer.server_name,
        "groups": list(viewer.groups),
        "banner": world.banner.as_json() if world.banner else None,
        "simulated": world.simulated(groups_of(viewer, world)),
    }


def session_object(session: Session, world: World, viewer: Viewer, site: Site) -> Json:
    """Return one session with all that is known of it. The viewer must be allowed to see it."""
    asked = session.request
    shares = session.placement.shares if session.placement else ()
    found = world.forecasts.get(session.id) if session.state is SessionState.PENDING else None
    server = "/".join(quote(part, safe="@~") for part in (asked.user, asked.server_name) if part)
    return {
        "id": session.id,
        "user": asked.user,
        "server_name": asked.server_name,
        "display_name": asked.server_name or "default server",
        "state": session.state.value,
        "image": asked.image,
        "image_name": site.image_names.get(asked.image, asked.image),
        "resource_group": asked.resource_group,
        "amount": amount_words(asked),
        "fgpu": fgpu_of(session),
        "gpu_model": asked.gpu_model,
        "cpu": format_milli(asked.cpu_milli),
        "memory_mib": asked.memory_mib,
        "gpu_memory_mib": sum(s.memory_mib for s in shares) if shares else None,
        "compute_percent": sum(s.compute_percent for s in shares) if shares else None,
        "node": session.placement.node_id if session.placement else None,
        "gpus": [_gpu_object(share, world) for share in shares],
        "wait_reason": _wait_reason(session, found),
        "wait_text": found.text if found else None,
        "position": found.position if found else None,
        "ahead": max(0, found.position - 1) if found else None,
        "expected_start_at_s": found.expected_start_at_s if found else None,
        "forecast_basis": found.basis if found else None,
        "waits_for": _waits_for(found.ahead if found else None, world, viewer),
        "pull": _pull(session, world),
        "submitted_at_s": session.submitted_at_s,
        "started_at_s": session.started_at_s,
        "time_limit_s": asked.time_limit_s,
        "priority": asked.priority,
        **_end_object(session, world),
        "ended_at_s": session.ended_at_s,
        "end_cause": session.end_cause.value if session.end_cause else None,
        "message": session.message or _withdrawn(session, site),
        "url": f"{site.base_url}user/{server}/",
        "pending_url": f"{site.base_url}hub/spawn-pending/{server}",
        "saving": saving_object(session, world),
        "can_save": may_save(session, world, viewer),
        "meter": meter_object(meter_of(session, world)),
        "mine": is_mine(session, viewer),
        "simulated": is_simulated(session, world),
    }


def meter_of(session: Session, world: World) -> Live | None:
    """Return what the meter tells of a session; None where it does not run, or was not looked at yet."""
    if session.state is not SessionState.RUNNING:
        return None
    return world.meters.of(session.id, world.snapshot.now_s)


def meter_object(live: Live | None) -> Json | None:
    """Return the API's ``meter``."""
    return None if live is None else asdict(live.now)


def _withdrawn(session: Session, site: Site) -> str | None:
    waits = session.state is SessionState.PENDING and not site.is_offered(session.request)
    return WITHDRAWN if waits else None


def may_save(session: Session, world: World, viewer: Viewer) -> bool:
    """Return whether the viewer may have a session saved as a private image, as far as it runs."""
    allowed = world.savers is Savers.OWNERS and is_mine(session, viewer)
    return session.state is SessionState.RUNNING and (
        allowed or (world.savers is not Savers.NOBODY and viewer.admin)
    )


def saving_object(session: Session, world: World) -> Json | None:
    """Return how far the image is that a session is being saved as; None where it is not."""
    making = (ImageState.WISHED, ImageState.COMMITTING)
    found = next((i for i in world.private if i.session_id == session.id and i.state in making), None)
    if found is None:
        return None
    return {"id": found.id, "name": found.name, "state": found.state.value, "message": found.message}


def _waits_for(ahead: Ahead | None, world: World, viewer: Viewer) -> Json | None:
    """Return who holds what would have to end first. Only those that the viewer may know of are listed."""
    found = [world.session(i) for i in ahead.ids] if ahead else []
    known = [s for s in found if s is not None and is_visible(s, viewer)]
    text = ahead_words(ahead, [_name_for(s, viewer) for s in known])
    if ahead is None or text is None:
        return None
    listed = [
        {"id": s.id, "user": s.request.user, "server_name": s.request.server_name, "mine": is_mine(s, viewer)}
        for s in known
    ]
    return {
        "count": ahead.sessions,
        "fgpu": format_milli(ahead.fgpu_milli),
        "sessions": listed,
        "text": text,
    }


def _pull(session: Session, world: World) -> Json | None:
    """Return how far the image is that a session waits for, in the queue or at its start."""
    state = world.pulls.get(session.id)
    if state is None or session.state not in (SessionState.PENDING, SessionState.SCHEDULED, *LAUNCHING):
        return None
    return state.as_json()


def _name_for(session: Session, viewer: Viewer) -> str:
    name = session.request.server_name or "default server"
    return f"your {name}" if is_mine(session, viewer) else f"{name} of {session.request.user}"


def _end_object(session: Session, world: World) -> Json:
    """Return when a running session ends and why, as far as that is settled, and whether its owner can put it off."""
    if session.state is not SessionState.RUNNING:
        return {"ends_at_s": None, "ends_cause": None, "warning": None, "can_keep": False}
    at_s, cause = session.ends_at_s, session.ends_cause
    limit_s = lifetime_s(session, world.rules.of(session.request.resource_group), world.ledger)
    if at_s is None and limit_s is not None and session.started_at_s is not None:
        at_s, cause = session.started_at_s + limit_s, EndCause.TIME_LIMIT
    return {
        "ends_at_s": at_s,
        "ends_cause": cause.value if cause else None,
        "warning": warning_words(session),
        "can_keep": cause is EndCause.IDLE,
    }


def _wait_reason(session: Session, found: Forecast | None) -> str | None:
    if session.state is not SessionState.PENDING:
        return None
    reason = found.reason if found else session.wait_reason
    return reason.value if reason else None


def _gpu_object(share: Share, world: World) -> Json:
    device = world.devices.get(share.device_uuid)
    return {
        "uuid": share.device_uuid,
        "model": device.model if device else None,
        "fgpu": format_milli(share.fgpu_milli),
        "memory_mib": share.memory_mib,
        "compute_percent": share.compute_percent,
        "simulated": _share_is_simulated(share, world),
    }


def live_sessions(world: World, viewer: Viewer, *, everybody: bool) -> tuple[Session, ...]:
    """Return the live sessions to list, in order of their ids. ``everybody`` is for administrators."""
    return tuple(s for s in world.snapshot.sessions if is_mine(s, viewer) or (everybody and viewer.admin))


def sessions_object(sessions: Iterable[Session], world: World, viewer: Viewer, site: Site) -> Json:
    """Return a list of sessions. The viewer must be allowed to see each."""
    shown = [session_object(s, world, viewer, site) for s in sessions]
    return {
        "sessions": shown,
        "simulated": world.simulated(groups_of(viewer, world)) or any(s["simulated"] for s in shown),
    }


def queue_object(group: str, world: World, viewer: Viewer) -> Json:
    """Return a resource group's queue, next one first; others are anonymous to ordinary users."""
    waiting = [
        (found, session)
        for found in world.forecasts.values()
        if (session := world.session(found.session_id)) is not None
        and session.request.resource_group == group
    ]
    return {
        "group": group,
        "length": len(waiting),
        "entries": [
            {
                "position": found.position,
                "mine": is_mine(session, viewer),
                "id": session.id if is_visible(session, viewer) else None,
                "user": session.request.user if is_visible(session, viewer) else None,
                "amount": amount_words(session.request),
                "fgpu": fgpu_of(session),
                "state": session.state.value,
                "wait_reason": found.reason.value,
                "expected_start_at_s": found.expected_start_at_s,
                "submitted_at_s": session.submitted_at_s,
            }
            for found, session in waiting
        ],
        "simulated": world.simulated([group]),
    }


# --- Capacity ---


def total_of(world: World, group: str) -> Amounts:
    """Return what the nodes of a group have, whether they take sessions or not."""
    nodes = [n for n in world.snapshot.nodes if n.resource_group == group]
    return Amounts(
        sum(d.capacity_milli for n in nodes for d in n.devices),
        sum(n.cpu_milli for n in nodes),
        sum(n.memory_mib for n in nodes),
    )


def used_of(world: World, group: str) -> Amounts:
    """Return what the sessions of everybody hold in a group."""
    left = [n for n in free(world.snapshot) if n.node.resource_group == group]
    total = total_of(world, group)
    return Amounts(
        total.fgpu_milli - sum(d.fgpu_milli for n in left for d in n.devices),
        total.cpu_milli - sum(n.cpu_milli for n in left),
        total.memory_mib - sum(n.memory_mib for n in left),
    )


def mine_in(world: World, viewer: Viewer, group: str) -> Amounts:
    """Return what the viewer's own sessions hold in a group. What still waits holds nothing."""
    own = [
        s
        for s in world.snapshot.sessions
        if s.state in HOLDING and is_mine(s, viewer) and s.request.resource_group == group
    ]
    return Amounts(
        # Of the shares, because an exact amount was not asked for in fGPU.
        sum(share.fgpu_milli for s in own if s.placement for share in s.placement.shares),
        sum(s.request.cpu_milli for s in own),
        sum(s.request.memory_mib for s in own),
    )


def allocatable_in(world: World, viewer: Viewer, group: str) -> Amounts:
    """Return what the viewer could still get in a group: what is free on nodes that take sessions, inside their quotas.

    Nothing where the viewer may not use the group. Never negative, even where nodes were made smaller.
    """
    if group not in viewer.groups:
        return Amounts()
    left = [
        n for n in free(world.snapshot) if n.node.resource_group == group and n.node.state is NodeState.READY
    ]
    # A GPU that is shared by as many sessions as may share it has nothing to give.
    milli = sum(max(0, d.fgpu_milli) for n in left for d in n.devices if d.shares > 0)
    return Amounts(
        _inside_quotas(milli, world, viewer, group),
        sum(max(0, n.cpu_milli) for n in left),
        sum(max(0, n.memory_mib) for n in left),
    )


def _inside_quotas(milli: int, world: World, viewer: Viewer, group: str, *, in_all: bool = False) -> int:
    """Return how much of this fGPU the viewer's quotas let them have."""
    asker = Request(viewer.user or "", "/", "", group, 0, 0, 0, groups=viewer.hub_groups)
    room = world.ledger.room_milli(asker, in_all=in_all)
    return milli if room is None else min(milli, room)


def groups_of(viewer: Viewer, world: World) -> tuple[str, ...]:
    """Return the groups shown: the viewer's, those where their sessions still are, all for administrators."""
    own = {s.request.resource_group for s in world.snapshot.sessions if is_mine(s, viewer)}
    there = set(world.groups) | own
    first = [g for g in viewer.groups if g in there]
    rest = sorted(there if viewer.admin else own)
    return (*first, *(g for g in rest if g not in first))


def capacity_object(world: World, viewer: Viewer, *, fgpu_step_milli: int) -> Json:
    """Return totals, what is used, the viewer's own, and what they could still get.

    Administrators are also told of each node its state, and what holds its sessions to their slices.
    """
    groups = groups_of(viewer, world)
    mine, allocatable = Amounts(), Amounts()
    for group in groups:
        mine += mine_in(world, viewer, group)
        allocatable += allocatable_in(world, viewer, group)
    for group in groups[:1]:
        most = _inside_quotas(allocatable.fgpu_milli, world, viewer, group, in_all=True)
        allocatable = replace(allocatable, fgpu_milli=most)
    found = {
        "groups": [_group_object(g, world, viewer, fgpu_step_milli) for g in groups],
        "mine_overall": mine.as_json(),
        "allocatable_overall": allocatable.as_json(),
        "simulated": world.simulated(groups),
    }
    if viewer.admin:
        chosen = {own.node_id: own for own in world.isolation}
        found["nodes"] = [
            {
                "name": node.id,
                "group": node.resource_group,
                "state": node.state.value,
                "isolation": chosen[node.id].backend if node.id in chosen else None,
                "reason": chosen[node.id].reason if node.id in chosen else None,
            }
            for node in world.snapshot.nodes
        ]
    return found


def _group_object(group: str, world: World, viewer: Viewer, fgpu_step_milli: int) -> Json:
    largest = world.largest_now.get(group)
    nodes = [node for node in world.snapshot.nodes if node.resource_group == group]
    return {
        "name": group,
        "nodes": len(nodes),
        "nodes_lost": sum(node.state in (NodeState.LOST, NodeState.GONE) for node in nodes),
        "total": total_of(world, group).as_json(),
        "used": used_of(world, group).as_json(),
        "mine": mine_in(world, viewer, group).as_json(),
        "allocatable": allocatable_in(world, viewer, group).as_json(),
        "largest_fgpu_now": None if largest is None else format_milli(largest),
        "fgpu_step": format_milli(fgpu_step_milli),
        "waiting": waiting_in(world, group),
        "devices": _device_objects(group, world, viewer),
    }


def waiting_in(world: World, group: str) -> int:
    """Return the length of a group's queue."""
    return sum(
        1
        for s in world.snapshot.sessions
        if s.state is SessionState.PENDING and s.request.resource_group == group
    )


def _device_objects(group: str, world: World, viewer: Viewer) -> list[Json]:
    held: dict[str, list[Json]] = {}
    for session in world.snapshot.sessions:
        if session.state in HOLDING and session.placement is not None:
            for share in session.placement.shares:
                held.setdefault(share.device_uuid, []).append(
                    {
                        "fgpu": format_milli(share.fgpu_milli),
                        "mine": is_mine(session, viewer),
                        "session_id": session.id if is_visible(session, viewer) else None,
                    }
                )
    return [
        {
            "uuid": left.device.uuid,
            "node": node.node.id,
            "index": left.device.index,
            "model": left.device.model,
            "memory_mib": left.device.memory_mib,
            "fgpu_total": format_milli(left.device.capacity_milli),
            "fgpu_used": format_milli(left.device.capacity_milli - left.fgpu_milli),
            "simulated": left.device.simulated,
            "shares": held.get(left.device.uuid, []),
        }
        for node in free(world.snapshot)
        if node.node.resource_group == group
        for left in node.devices
    ]


# --- Forecasts and images ---


def forecast_object(
    found: RequestForecast, world: World, viewer: Viewer, *, count: int, simulated: bool
) -> Json:
    """Return what would become of ``count`` sessions that may queue, and which amount would start now or sooner."""
    waiting = count - found.startable_now
    return {
        "starts_now": waiting == 0,
        "startable_now": found.startable_now,
        "count": count,
        "position": found.position,
        "expected_start_at_s": found.expected_start_at_s,
        "basis": found.basis,
        "text": _forecast_text(found, count),
        "wait_reason": None if found.reason is None else found.reason.value,
        "waits_for": _waits_for(found.ahead, world, viewer),
        "largest_now": None if found.largest_now_milli is None else format_milli(found.largest_now_milli),
        "soonest": None if found.soonest_milli is None else format_milli(found.soonest_milli),
        "soonest_at_s": found.soonest_at_s,
        "refusals": [],
        "simulated": simulated,
    }


def _forecast_text(found: RequestForecast, count: int) -> str:
    waiting = count - found.startable_now
    if not waiting:
        return "starts now" if count == 1 else f"all {count} start now"
    wait = "waits" if waiting == 1 else "wait"
    if count == 1:
        return f"waits: {found.text}"
    if not found.startable_now:
        return f"all {count} wait: {found.text}"
    start = "starts" if found.startable_now == 1 else "start"
    return f"{found.startable_now} {start} now, {waiting} {wait}: after those, {found.text}"


def refused_object(refusals: Sequence[Refusal], *, count: int, simulated: bool) -> Json:
    """Return why a request can never run; each reason names the field, the limit and what would work."""
    return {
        "starts_now": False,
        "startable_now": 0,
        "count": count,
        "position": None,
        "expected_start_at_s": None,
        "basis": "refused",
        "text": "; ".join(r.message for r in refusals),
        "wait_reason": None,
        "waits_for": None,
        "largest_now": None,
        "soonest": None,
        "soonest_at_s": None,
        "refusals": [
            {"field": r.field, "code": r.code, "message": r.message, "limit": r.limit, "nearest": r.nearest}
            for r in refusals
        ],
        "simulated": simulated,
    }


def images_object(images: Iterable[Image], *, default: Image | None, simulated: bool) -> Json:
    """Return the images that a caller is shown, in the catalogue's order."""
    return {
        "images": [_image_object(image, default=image == default) for image in images],
        "simulated": simulated,
    }


def _image_object(image: Image, *, default: bool) -> Json:
    return {
        "slug": image.slug,
        "name": image.name,
        "framework": image.framework,
        "version": image.version,
        "python": image.python,
        "description": image.description,
        "icon": icon_name(image),
        "kernels": list(image.kernels),
        "gpu_architectures": list(image.gpu_architectures),
        "cuda": image.cuda or None,
        "minimum": _amounts_object(
            image.min_fgpu_milli, image.min_gpu_memory_mib, image.min_cpu_milli, image.min_memory_mib
        ),
        "recommended": _amounts_object(
            image.recommended_fgpu_milli,
            image.recommended_gpu_memory_mib,
            image.recommended_cpu_milli,
            image.recommended_memory_mib,
        ),
        "sudo": image.sudo,
        "deprecated": image.deprecated or None,
        "private": bool(image.owner),
        "default": default,
    }


def _amounts_object(fgpu_milli: int, gpu_memory_mib: int, cpu_milli: int, memory_mib: int) -> Json:
    return {
        "fgpu": format_milli(fgpu_milli) if fgpu_milli else None,
        "gpu_memory_mib": gpu_memory_mib or None,
        "cpu": format_milli(cpu_milli) if cpu_milli else None,
        "memory_mib": memory_mib or None,
    }
