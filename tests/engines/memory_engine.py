"""An engine that runs sessions as threads of the Hub's process: the smallest complete engine.

It is the example of docs/engines.md. A Hub runs with it by ``configure(c, runtime="memory_engine:MemorySpawner")``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from fgpu_scheduler import EndCause, Observed, Seen, Session
from fgpuspawner.engines.base import (
    Capabilities,
    Ended,
    Endpoint,
    Engine,
    EngineSilent,
    Installation,
    LaunchFailed,
    LaunchSpec,
)
from fgpuspawner.isolation.report import Answer
from fgpuspawner.spawner.base import QueuedSpawner

Serve = Callable[[LaunchSpec, "Room"], None]


@dataclass
class Room:
    """What one attempt of a session runs in, as a container would be."""

    observed: Observed
    server: ThreadingHTTPServer | None = None
    ended: Ended | None = None
    killed: threading.Event = field(default_factory=threading.Event)

    def end(self, ended: Ended) -> None:
        self.ended = self.ended or ended
        self.killed.set()
        if self.server is not None:
            self.server.shutdown()
            self.server.server_close()
            self.server = None


@dataclass
class World:
    """What outlives an engine object, as containers outlive a Hub; one for each installation."""

    rooms: dict[str, Room] = field(default_factory=dict)
    silent: bool = False


WORLDS: dict[str, World] = {}


class Placeholder(BaseHTTPRequestHandler):
    """Answers with a placeholder page."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("X-JupyterHub-Version", "6.1")
        self.end_headers()
        self.wfile.write(b"a session in memory")

    def log_message(self, *args: object) -> None:
        pass


def placeholder(spec: LaunchSpec, room: Room) -> None:
    """Serve the page at the port in the session's environment."""
    room.server = ThreadingHTTPServer(("127.0.0.1", spec.port), Placeholder)
    threading.Thread(target=room.server.serve_forever, args=(0.02,), daemon=True).start()


class MemoryEngine(Engine):
    """Runs sessions as threads; each calls ``serve``."""

    capabilities = Capabilities("threads of the Hub's own process")

    def __init__(self, installation: Installation, *, serve: Serve = placeholder) -> None:
        self._node_ids = tuple(installation.settings.node_ids())
        self._serve = serve
        self._changed: Callable[[], None] = lambda: None
        self.world = WORLDS.setdefault(installation.id, World())

    # -- what runs ------------------------------------------------------------------------------------

    def watch(self, changed: Callable[[], None]) -> None:
        self._changed = changed

    async def observe(self) -> Seen:
        if self.world.silent:
            return Seen((), ())
        rooms = list(self.world.rooms.values())
        return Seen([_as_it_is(room) for room in rooms], self._node_ids)

    async def remove(self, observed: Observed) -> bool:
        return self._gone([observed.handle])

    def _gone(self, handles: Sequence[str]) -> bool:
        if self.world.silent:
            return False
        for handle in handles:
            room = self.world.rooms.get(handle)
            if room is not None:
                room.end(Ended(0, EndCause.EXITED, "its thread was ended"))
                del self.world.rooms[handle]
        return True

    # -- one session ----------------------------------------------------------------------------------

    async def start(self, spec: LaunchSpec) -> Endpoint:
        if self.world.silent:
            raise LaunchFailed("the engine does not answer", EndCause.NODE_LOST)
        session, placement = spec.session, spec.session.placement
        assert placement is not None
        handle = _handle(session, session.attempt)
        room = Room(Observed(placement.node_id, session.id, session.attempt, handle, alive=True))
        self.world.rooms[handle] = room
        self._serve(spec, room)
        return Endpoint("127.0.0.1", spec.port)

    async def ended(self, session: Session) -> Ended | None:
        if self.world.silent:
            return None
        room = self.world.rooms.get(_handle(session, session.attempt))
        return (
            room.ended if room is not None else Ended(1, EndCause.EXITED, "its thread is not there any more")
        )

    async def probe(
        self, session: Session, command: Sequence[str], *, environment: Mapping[str, str], timeout_s: float
    ) -> Answer:
        raise LaunchFailed("a thread has no limits of its own that could be proved")

    async def stop(self, session: Session, *, now: bool) -> bool:
        return self._gone([_handle(session, n) for n in range(1, session.attempt + 1)])

    def is_away(self, session: Session) -> bool:
        return self.world.silent

    def sessions_of(self, pids: Sequence[int], node_id: str | None = None) -> Mapping[int, int]:
        if self.world.silent:
            raise EngineSilent("the engine does not say whose processes use the GPUs")
        return {}  # Threads have no processes of their own.


def _handle(session: Session, attempt: int) -> str:
    return f"{session.id}-{attempt}"


def _as_it_is(room: Room) -> Observed:
    seen, ended = room.observed, room.ended
    if ended is None:
        return seen
    return Observed(
        seen.node_id, seen.session_id, seen.attempt, seen.handle, False, ended.cause, ended.message
    )


class MemorySpawner(QueuedSpawner):
    """The spawner of a Hub with this engine, without settings."""

    capabilities = MemoryEngine.capabilities

    @classmethod
    def make_engine(cls, installation: Installation) -> Engine:
        return MemoryEngine(installation)
