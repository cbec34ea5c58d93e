"""The payload that every tab of this server polls: this session, the others, the queue.

`hub` is the state of the connection to the service:

- `ok`: the service answered `as_of_s` seconds ago.
- `unreachable`: it does not answer. Its last answer is still shown, with its age in `as_of_s`;
  if it never answered, `as_of_s` is null and this session's fields come from its environment.
- `forbidden`: it does not accept this server's token; its earlier answers are not shown.
- `absent`: there is no service to ask.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Callable, Generic, TypeVar

from .amounts import bars
from .environment import NoService, Service, Slice
from .gpu_memory import Device, GpuMemory, Used
from .service_client import (
    SCHEMAS,
    Forbidden,
    Refused,
    ServiceClient,
    ServiceError,
    Session,
    Unreachable,
    defaults,
)

T = TypeVar("T")

ENDED = ("TERMINATED", "ERROR", "CANCELLED")
SLOW_EVERY_S = 30.0
"""Age in seconds of banner and bars: they change rarely, and every server asks for them."""
BARS_LAST_S = 300.0
"""Seconds for which the last bars are shown if they cannot be read again."""


@dataclass(frozen=True)
class HubView:
    """The service's last answer, and whether it is current."""

    hub: str
    message: str | None = None
    session: Session | None = None
    others: tuple[Session, ...] = ()
    queue: dict[str, Any] | None = None
    queue_reason: str | None = None
    read_at: float | None = None
    user: str | None = None
    banner: dict[str, Any] | None = None
    bars: dict[str, Any] | None = None


@dataclass(frozen=True)
class Reading:
    """One moment of the Hub's view and of the GPU's memory."""

    view: HubView
    session: Session | None
    source: str | None
    used: tuple[Used, ...]


class StatusReader:
    """Reads the service and the GPU; every failure becomes a state with a reason."""

    def __init__(
        self,
        *,
        service: Service | NoService,
        slice_: Slice | None,
        gpu_memory: GpuMemory,
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._absent_reason = service.reason if isinstance(service, NoService) else None
        self.client = ServiceClient(service, timeout_s=timeout_s) if isinstance(service, Service) else None
        self._slice = slice_
        self._gpu_memory = gpu_memory
        self._clock = clock
        self._last: HubView | None = None
        self._caller: dict[str, Any] | None = None
        self._bars: dict[str, Any] | None = None
        self._slow_at: float | None = None
        self._bars_at = 0.0

    async def read(self) -> Reading:
        """Ask the service, then the GPU; failures do not raise."""
        view = await self._ask_hub()
        session, source = view.session, "service"
        if session is None and self._slice is not None and view.read_at is None:
            session, source = session_from_environment(self._slice), "environment"
        gpus = [] if session is None else session["gpus"]
        used = await self._gpu_memory.sample([Device(gpu["uuid"], gpu["memory_mib"]) for gpu in gpus])
        return Reading(view, session, None if session is None else source, tuple(used))

    async def act(self, action: str, session_id: int, sent: Mapping[str, Any]) -> Session:
        """Pass an action, such as `keep` or `resize` with what was sent, to the service; raises ServiceError.

        With this server's token the service resizes only this session.
        """
        if self.client is None:
            raise Unreachable("absent", self._absent_reason or "There is no fGPU service.")
        if action == "rename":
            return await self.client.rename(session_id, sent.get("name"))
        if action not in ("stop", "resize"):
            return await self.client.request(action, session_id)
        # The bars change with it.
        self._slow_at = None
        if action == "stop":
            return await self.client.stop(session_id)
        return await self.client.resize(session_id, sent)

    def payload(self, reading: Reading) -> dict[str, Any]:
        """Return what the browser gets; `as_of_s` is the age at this moment."""
        view = reading.view
        age_s = None if view.read_at is None else max(0, int(self._clock() - view.read_at))
        return {
            "hub": view.hub,
            "hub_message": view.message,
            "as_of_s": age_s,
            "session": _with_use(reading),
            "others": list(view.others),
            "queue": {
                "group": None if view.queue is None else view.queue["group"],
                "length": None if view.queue is None else view.queue["length"],
                "reason": view.queue_reason,
            },
            "user": view.user,
            "banner": view.banner,
            "bars": view.bars,
            "simulated": _simulated(reading),
        }

    async def _ask_hub(self) -> HubView:
        if self.client is None:
            return HubView("absent", self._absent_reason, queue_reason=self._absent_reason)
        try:
            self._last = await self._fresh_view(self.client)
            return self._last
        except Forbidden as error:
            self._last = None
            self._slow_at = None
            return HubView("forbidden", error.message, queue_reason=error.message)
        except ServiceError as error:
            stale = self._last or HubView("unreachable", queue_reason=error.message)
            return replace(stale, hub="unreachable", message=error.message)

    async def _fresh_view(self, client: ServiceClient) -> HubView:
        now = self._clock()
        slow = self._caller is None or self._slow_at is None or now - self._slow_at >= SLOW_EVERY_S
        if slow:
            self._caller = await client.me()
        assert self._caller is not None
        sessions = await client.sessions()
        session = self._this_session(sessions, self._caller["server_name"])
        others = tuple(s for s in sessions if s is not session and s["state"] not in ENDED)
        queue, reason = await self._queue(client, session, others)
        if slow or self._have_changed(session, others):
            self._slow_at = now
            await self._read_bars(client, None if queue is None else queue["group"])
        return HubView(
            hub="ok",
            session=session,
            others=others,
            queue=queue,
            queue_reason=reason,
            read_at=self._clock(),
            user=self._caller["user"],
            banner=self._caller["banner"],
            bars=self._bars,
        )

    def _have_changed(self, session: Session | None, others: Sequence[Session]) -> bool:
        """Return whether a session of the user has come, gone or changed its state since."""
        if self._last is None:
            return True
        before = [*self._last.others, *([self._last.session] if self._last.session else [])]
        after = [*others, *([session] if session else [])]
        return {(s["id"], s["state"]) for s in before} != {(s["id"], s["state"]) for s in after}

    async def _read_bars(self, client: ServiceClient, group: str | None) -> None:
        """Read the bars again; an unreachable service is reported by the sessions."""
        now = self._clock()
        try:
            self._bars, self._bars_at = bars(await client.capacity(), group), now
        except (Forbidden, Refused):
            self._bars = None
        except ServiceError:
            # One lost call means nothing: they stay until the next reading.
            self._slow_at = None
            if now - self._bars_at >= BARS_LAST_S:
                self._bars = None

    async def _queue(
        self, client: ServiceClient, session: Session | None, others: Sequence[Session]
    ) -> tuple[dict[str, Any] | None, str | None]:
        known = ([session] if session is not None else []) + list(others)
        group = known[0]["resource_group"] if known else None
        try:
            return await client.queue(group), None
        except (Forbidden, Refused) as error:
            # Sessions are readable without the right to read the queue.
            return None, error.message

    def _this_session(self, sessions: Sequence[Session], server_name: str | None) -> Session | None:
        own_id = None if self._slice is None else self._slice.session_id
        if server_name is not None:
            sessions = [s for s in sessions if s["server_name"] == server_name]
            # While a server restarts, its ended session and its new one share the name.
            sessions = sorted(sessions, key=lambda s: (s["id"] != own_id, s["state"] in ENDED))
            return sessions[0] if sessions else None
        return next((s for s in sessions if own_id is not None and s["id"] == own_id), None)


def session_from_environment(slice_: Slice) -> Session:
    """Return this session as its environment tells; it is running, since this code runs in it."""
    # With several devices the environment gives only their sum.
    memory_mib = slice_.memory_mib if len(slice_.uuids) == 1 else None
    compute_percent = slice_.compute_percent if len(slice_.uuids) == 1 else None
    return {
        **dict.fromkeys(SCHEMAS["Session"]["properties"]),
        **defaults(SCHEMAS["Session"]),
        "id": slice_.session_id,
        "server_name": slice_.server_name or "",
        "display_name": slice_.server_name or "",
        "state": "RUNNING",
        "amount": None if slice_.fgpu is None else f"{slice_.fgpu} fGPU",
        "fgpu": slice_.fgpu,
        "gpu_memory_mib": slice_.memory_mib,
        "compute_percent": slice_.compute_percent,
        "gpus": [
            {
                **dict.fromkeys(SCHEMAS["Gpu"]["properties"]),
                "uuid": uuid,
                "memory_mib": memory_mib,
                "compute_percent": compute_percent,
                "simulated": slice_.simulated,
            }
            for uuid in slice_.uuids
        ],
        "simulated": slice_.simulated,
    }


def _with_use(reading: Reading) -> dict[str, Any] | None:
    session = reading.session
    if session is None:
        return None
    total = total_use(reading.used)
    return {
        **session,
        "source": reading.source,
        "gpu_memory_used_mib": total.mib,
        "gpu_memory_used_reason": total.reason,
    }


def total_use(used: Sequence[Used]) -> Used:
    """Return the sum over the devices; one unknown makes the sum unknown."""
    if not used:
        return Used(None, "it is not known which GPU this session has")
    for reading in used:
        if reading.mib is None:
            return reading
    return Used(sum(reading.mib or 0 for reading in used), None)


def _simulated(reading: Reading) -> bool:
    sessions = [*reading.view.others, *([] if reading.session is None else [reading.session])]
    return any(session["simulated"] for session in sessions)


class SharedRead(Generic[T]):
    """The result of `read`, at most `max_age_s` old, with one read at a time.

    A caller that leaves (a closed tab) does not cancel the read that others wait for.
    """

    def __init__(
        self,
        read: Callable[[], Awaitable[T]],
        *,
        max_age_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._read = read
        self._max_age_s = max_age_s
        self._clock = clock
        self._task: asyncio.Task[T] | None = None
        self._done_at = 0.0

    async def get(self) -> T:
        """Return the kept value, or wait for the read under way; its error is raised."""
        task = self._task
        if task is None or (task.done() and self._clock() - self._done_at >= self._max_age_s):
            task = self._task = asyncio.ensure_future(self._stamped())
        return await asyncio.shield(task)

    async def fresh(self) -> T:
        """Return a value read after this call, and keep it; its error is raised."""
        before = self._task
        if before is not None and not before.done():
            # A read that began earlier may have an older value.
            await asyncio.wait([before])
        task = self._task
        if task is before or task is None:
            task = self._task = asyncio.ensure_future(self._stamped())
        return await asyncio.shield(task)

    def forget(self) -> None:
        """Make the next `get` read again, because something here changed the answer."""
        self._task = None

    async def _stamped(self) -> T:
        try:
            return await self._read()
        finally:
            self._done_at = self._clock()
