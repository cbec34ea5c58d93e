"""Worlds and viewers for the service's tests."""

from __future__ import annotations

from simulator import lasting

from fgpu_scheduler import (
    Device,
    Node,
    NodeState,
    Placement,
    Policy,
    Request,
    Session,
    SessionState,
    Share,
    Snapshot,
    outlook,
)
from fgpuspawner.service.api.capacity import capacity_object
from fgpuspawner.service.api.session_objects import sessions_object
from fgpuspawner.service.model import Site, Viewer, World, live_sessions
from fgpuspawner.service.pages.sessions_view import SessionsView, sessions_view

S = SessionState


ALICE = Viewer("alice", groups=("default",))


BOB = Viewer("bob", groups=("default", "class"))


ADMIN = Viewer("root", admin=True, groups=("default",))


SITE = Site("/", {"python": "Python 3.11"})


def gpu(node: str, index: int = 0, *, milli: int = 2000, simulated: bool = True) -> Device:
    return Device(f"GPU-{node}-{index}", node, index, "Model", 8192, milli, simulated)


def node(
    name: str = "n1", group: str = "default", *devices: Device, state: NodeState = NodeState.READY
) -> Node:
    return Node(name, group, 8000, 16384, devices or (gpu(name),), state)


def asked(user: str, server: str, milli: int, group: str = "default") -> Request:
    return Request(user, server, "python", group, milli, cpu_milli=1500, memory_mib=1024)


class Build:
    """A world, session by session."""

    def __init__(self, *nodes: Node) -> None:
        self.nodes = nodes or (node(),)
        self.sessions: list[Session] = []

    def running(
        self, user: str, milli: int, *, server: str = "", at: str = "n1", state: S = S.RUNNING
    ) -> Build:
        where = next(n for n in self.nodes if n.id == at)
        share = Share.of(where.devices[0], milli)
        number = len(self.sessions) + 1
        request = asked(user, server, milli, where.resource_group)
        self.sessions.append(
            Session(number, request, state, 100, placement=Placement(at, (share,)), started_at_s=110)
        )
        return self

    def pending(
        self, user: str, milli: int, *, server: str = "", group: str = "default", held: bool = False
    ) -> Build:
        number = len(self.sessions) + 1
        self.sessions.append(
            Session(number, asked(user, server, milli, group), S.PENDING, 200 + number, held=held)
        )
        return self

    def world(self, *, typical_length_s: int | None = None) -> World:
        snapshot = Snapshot(1000, 7, self.nodes, tuple(self.sessions))
        ahead = outlook(snapshot, Policy(), lambda group: lasting(typical_length_s))
        return World(snapshot, ahead.forecasts, {"default": 500}, wanted=ahead.wanted)


def shown(world: World, viewer: Viewer, *, group: str | None = None, everybody: bool = False) -> SessionsView:
    live = live_sessions(world, viewer, everybody=everybody)
    return sessions_view(
        sessions=sessions_object(live, world, viewer, SITE)["sessions"],
        ended=[],
        capacity=capacity_object(world, viewer),
        group=group,
        viewer=viewer,
        everybody=everybody,
        base_url="/",
        read_at_s=1000,
    )
