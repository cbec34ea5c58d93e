"""One consistent reading of the store, the viewer, and what the viewer may see of it. Pure.

An ordinary user gets only numbers of other users' sessions, never a name or an id: that is decided here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from typing import Any

from fgpu_scheduler import (
    FOR_GOOD_S,
    UP,
    AllRules,
    Amount,
    Device,
    Extension,
    Forecast,
    Ledger,
    NodeState,
    Notice,
    Placement,
    PrivateImage,
    Request,
    Resize,
    Session,
    SessionState,
    Share,
    Snapshot,
    Unblocking,
    compute_of,
    format_milli,
    holds_shares,
    why_not_resizable,
)
from fgpuspawner.images.availability import Availabilities
from fgpuspawner.images.pull_state import PullState
from fgpuspawner.isolation.choice import StoredChoice
from fgpuspawner.meter.gpu_health import GpuHealthState
from fgpuspawner.meter.model import Live, MeterState
from fgpuspawner.service import objects
from fgpuspawner.settings.folders import SharedFolder
from fgpuspawner.text.resizing import amounts, most_memory_mib, not_resized_words
from fgpuspawner.text.sessions import amount_words, isolated, session_name

Json = dict[str, Any]


SIMULATED_PREFIX = "GPU-simulated-"
"""Prefix of simulated GPUs' UUIDs; it identifies one that is no longer configured."""


@dataclass(frozen=True, slots=True)
class Viewer:
    """The caller. ``user`` is None for another service, which has no sessions.

    ``groups`` are the resource groups that they may use. ``server_name`` is the server that the token belongs to.
    ``admin`` is true for administrators of everything; ``administers`` has the resource groups of other administrators.
    """

    user: str | None
    admin: bool = False
    groups: tuple[str, ...] = ()
    server_name: str | None = None
    hub_groups: tuple[str, ...] = ()
    administers: tuple[str, ...] = ()

    def may_administer(self, group: str) -> bool:
        return self.admin or group in self.administers

    @property
    def sees_others(self) -> bool:
        """Whether the viewer sees sessions of other users."""
        return self.admin or bool(self.administers)


NODE_WORDS = {
    NodeState.READY: "takes sessions",
    NodeState.CORDONED: "takes no new sessions",
    NodeState.LOST: "does not answer; what it runs keeps its shares",
    NodeState.GONE: "is gone, an administrator said; its sessions are being ended",
}
"""A node's state, to follow its name."""


@dataclass(frozen=True, slots=True)
class Site:
    """The Hub's base URL, and the names of images by their slugs.

    ``is_offered`` says whether a request's user may still start its image; ``folders_of`` returns its shared folders.
    ``hub_host`` and ``own_host`` (``https://HOST``) are the hosts of the Hub and the service if they have domains of
    their own, else empty.
    """

    base_url: str = "/"
    image_names: Mapping[str, str] = field(default_factory=dict)
    hub_host: str = ""
    own_host: str = ""
    is_offered: Callable[[Request], bool] = lambda request: True
    folders_of: Callable[[Request], Sequence[SharedFolder]] = lambda request: ()

    @property
    def hub_base_url(self) -> str:
        return self.hub_host + self.base_url


class Savers(StrEnum):
    """Who may save a running session as a private image."""

    NOBODY = "nobody"
    ADMINISTRATORS = "administrators"
    OWNERS = "owners"
    """Owners and administrators."""


@dataclass(frozen=True)
class World:
    """One reading of the store and what follows from it."""

    snapshot: Snapshot
    forecasts: Mapping[int, Forecast] = field(default_factory=dict)
    #: The largest amount that starts now, in thousandths of an fGPU, by resource group.
    largest_now: Mapping[str, int | None] = field(default_factory=dict)
    #: The isolation backend of each node.
    isolation: tuple[StoredChoice, ...] = ()
    #: What ends running sessions.
    rules: AllRules = field(default_factory=AllRules)
    #: Progress of the images that sessions wait for, by session.
    pulls: Mapping[int, PullState] = field(default_factory=dict)
    private: tuple[PrivateImage, ...] = ()
    savers: Savers = Savers.NOBODY
    banner: Notice | None = None
    #: What running sessions hold and use of their GPUs.
    meters: MeterState = field(default_factory=MeterState)
    #: What running sessions take of the disk.
    disks: Mapping[int, str] = field(default_factory=dict)
    #: What owners may add to a time limit.
    extension: Extension = field(default_factory=Extension)
    #: Use, temperature, power and errors of each GPU.
    gpus: GpuHealthState = field(default_factory=GpuHealthState)
    #: The last resize request of each session.
    resizes: Mapping[int, Resize] = field(default_factory=dict)
    #: The step of amounts in a resize, in thousandths of an fGPU.
    step_milli: int = 100
    #: What would start the first request of the queue, by resource group.
    unblockings: Mapping[str, Unblocking] = field(default_factory=dict)
    #: When each parked session that wants its shares gets them back.
    wanted: Mapping[int, Forecast] = field(default_factory=dict)
    #: Where the images are.
    available: Availabilities = field(default_factory=Availabilities)

    @cached_property
    def devices(self) -> Mapping[str, Device]:
        return {d.uuid: d for n in self.snapshot.nodes for d in n.devices}

    @cached_property
    def _by_id(self) -> Mapping[int, Session]:
        return {s.id: s for s in self.snapshot.sessions}

    @cached_property
    def held(self) -> Mapping[str, Sequence[tuple[Session, Share]]]:
        """The shares of each device that sessions hold, by its UUID, in order of the sessions' ids."""
        found: dict[str, list[tuple[Session, Share]]] = {}
        for session in sorted(self.snapshot.sessions, key=lambda s: s.id):
            if session.placement is not None and holds_shares(session):
                for share in session.placement.shares:
                    found.setdefault(share.device_uuid, []).append((session, share))
        return found

    @cached_property
    def queues(self) -> Mapping[str, Sequence[tuple[Forecast, Session]]]:
        """The waiting sessions of each resource group that has any, next one first."""
        found: dict[str, list[tuple[Forecast, Session]]] = {}
        for forecast in self.forecasts.values():
            if (session := self.session(forecast.session_id)) is not None:
                found.setdefault(session.request.resource_group, []).append((forecast, session))
        return found

    def session(self, session_id: int) -> Session | None:
        return self._by_id.get(session_id)

    @cached_property
    def ledger(self) -> Ledger:
        return Ledger(self.snapshot)

    @cached_property
    def groups(self) -> tuple[str, ...]:
        return tuple(sorted({n.resource_group for n in self.snapshot.nodes}))

    def simulated(self, groups: Iterable[str] | None = None) -> bool:
        """Return whether any GPU of these groups (all groups, if None) is simulated."""
        wanted = None if groups is None else tuple(groups)
        return any(
            d.simulated
            for n in self.snapshot.nodes
            if wanted is None or n.resource_group in wanted
            for d in n.devices
        )


def is_mine(session: Session, viewer: Viewer) -> bool:
    return viewer.user is not None and session.request.user == viewer.user


def is_visible(session: Session, viewer: Viewer) -> bool:
    """Return whether the viewer may know the owner of this session."""
    return is_mine(session, viewer) or viewer.may_administer(session.request.resource_group)


def administered(world: World, viewer: Viewer) -> World:
    """Return the world without nodes and sessions of resource groups that the viewer does not administer.

    Every page and answer for administrators is built from it, so none can show more.
    """
    if viewer.admin:
        return world
    whole = world.snapshot
    nodes = tuple(n for n in whole.nodes if viewer.may_administer(n.resource_group))
    sessions = tuple(s for s in whole.sessions if viewer.may_administer(s.request.resource_group))
    return replace(world, snapshot=replace(whole, nodes=nodes, sessions=sessions))


def session_label(session: Session, viewer: Viewer) -> str:
    """Return a session's name within a sentence: "your PyTorch 2"; of other users' only what the viewer may know."""
    if is_mine(session, viewer):
        return f"your {isolated(session_name(session.request))}"
    if is_visible(session, viewer):
        return f"{isolated(session_name(session.request))} of {isolated(session.request.user)}"
    return "another user's"


def is_simulated(session: Session, world: World) -> bool:
    """Return whether any GPU that the session holds, held, or waits for is simulated."""
    if session.placement is None:
        return world.simulated([session.request.resource_group])
    return any(share_is_simulated(share, world) for share in session.placement.shares)


def share_is_simulated(share: Share, world: World) -> bool:
    device = world.devices.get(share.device_uuid)
    return share.device_uuid.startswith(SIMULATED_PREFIX) if device is None else device.simulated


def meter_of(session: Session, world: World) -> Live | None:
    """Return the meter's reading of a session, or None if it does not run or was not measured yet."""
    if session.state is not SessionState.RUNNING:
        return None
    live = world.meters.of(session.id, world.snapshot.now_s)
    if live is None or session.placement is None:
        return live
    # A reading from before a resize still has the old limits.
    shares = session.placement.shares
    memory_mib, percent = sum(s.memory_mib for s in shares), compute_of(shares)
    return replace(live, now=replace(live.now, memory_limit_mib=memory_mib, compute_entitled_percent=percent))


def may_save(session: Session, world: World, viewer: Viewer) -> bool:
    """Return whether the viewer may save this session, if it runs, as a private image."""
    allowed = world.savers is Savers.OWNERS and is_mine(session, viewer)
    return session.state in UP and (allowed or (world.savers is not Savers.NOBODY and viewer.admin))


def extension_of(session: Session, world: World) -> Extension:
    """Return what the owner may add to a session's time limit, up to the longest of its limits."""
    limits = (
        world.extension.longest_s,
        world.rules.of(session.request.resource_group).max_lifetime_s,
        world.ledger.limit_s(session.request),
    )
    return replace(world.extension, longest_s=min((s for s in limits if s is not None), default=None))


def live_sessions(world: World, viewer: Viewer, *, everybody: bool) -> tuple[Session, ...]:
    """Return the live sessions to list, in order of their ids: the viewer's own, or with ``everybody`` all that they
    may see.
    """
    may = is_visible if everybody else is_mine
    return tuple(s for s in world.snapshot.sessions if may(s, viewer))


def groups_of(viewer: Viewer, world: World) -> tuple[str, ...]:
    """Return the groups to show: those that the viewer may use or administers, and those where their sessions still
    are.
    """
    own = {s.request.resource_group for s in world.snapshot.sessions if is_mine(s, viewer)}
    there = set(world.groups) | own
    first = [g for g in viewer.groups if g in there]
    rest = sorted(g for g in there if g in own or viewer.may_administer(g))
    return (*first, *(g for g in rest if g not in first))


def resize_object(session: Session, world: World) -> objects.Resize | None:
    """Return a running session's possible amounts and its last resize request; None for one that does not run."""
    if session.state is not SessionState.RUNNING or session.placement is None:
        return None
    wish = world.resizes.get(session.id)
    why = why_fixed(session, world)
    return objects.Resize.of(
        wish,
        why_not=why,
        amounts=[] if why else map(format_milli, amounts(world.snapshot, session, world.step_milli)),
        most_memory_mib=None if why else most_memory_mib(world.snapshot, session),
        asked=None if wish is None else amount_words(request_of(session, wish.amount)),
    )


def request_of(session: Session, amount: Amount) -> Request:
    """Return a session's request with another amount."""
    return replace(
        session.request,
        fgpu_milli=amount.fgpu_milli,
        gpu_memory_mib=amount.gpu_memory_mib,
        compute_percent=amount.compute_percent,
    )


def why_fixed(session: Session, world: World) -> str | None:
    """Return why a session cannot be resized at all, or None."""
    against = why_not_resizable(world.snapshot, session)
    if against is not None:
        nothing = Amount.of(session)
        return not_resized_words(against, session, nothing, world.snapshot, step_milli=world.step_milli)
    assert session.placement is not None
    own = next((c for c in world.isolation if c.node_id == session.placement.node_id), None)
    if own is not None and own.fixed:
        return f"{own.fixed[0].upper()}{own.fixed[1:]}."
    return None


def why_not_parked(session: Session, world: World) -> str | None:
    """Return why a session cannot be parked now, or None."""
    if session.state is not SessionState.RUNNING or session.placement is None:
        return "Only a running session can be parked."
    return _why_unparkable(session.placement, world)


def why_no_choice(session: Session, world: World) -> str | None:
    """Return why its owner cannot choose whether a session is parked, or None. A parked one's choice is for later."""
    if session.state not in UP or session.placement is None:
        return "Only a running or parked session has this choice."
    if session.request.on_demand:
        return "A session on demand has no such choice: it gives its GPU back while it is idle."
    if not world.rules.of(session.request.resource_group).park_opt_out:
        return f"Owners have no such choice in resource group {session.request.resource_group}; ask an administrator."
    return _why_unparkable(session.placement, world)


def _why_unparkable(where: Placement, world: World) -> str | None:
    if not where.shares:
        return "It has no GPU."
    own = next((c for c in world.isolation if c.node_id == where.node_id), None)
    why = "it is not known whether its machine can do it" if own is None else own.unparkable
    return f"It can't be parked: {why}." if why else None


def never_park(session: Session, world: World) -> bool | None:
    """Return whether a session is never parked, as its owner chose; None where its owner has no choice."""
    return None if why_no_choice(session, world) is not None else session.kept_until_s == FOR_GOOD_S
