"""The API's event stream."""

from __future__ import annotations

import json
import time

from tornado.iostream import StreamClosedError
from tornado.web import HTTPError

from fgpu_scheduler import StoreUnavailable
from fgpuspawner.service.api.base import Api
from fgpuspawner.service.handler import viewer_of
from fgpuspawner.service.model import is_visible
from fgpuspawner.service.problems import bad_argument
from fgpuspawner.service.reader import Changes

KEEPALIVE_S = 8.0
"""Seconds between signs of life: the proxy keeps the stream open, and silent, when this service is killed."""


class Events(Api):
    """Server-sent events, until the caller leaves, may no longer listen, or the store fails."""

    async def get(self) -> None:
        after_id = self._last_event_id()
        listener = await self.service.watcher.listen(str(self.current_user["name"]))
        self._left = listener.end
        try:
            sent = await self._begin(after_id)
            # It may be open for hours.
            self.leave_turn()
            checked_at = time.monotonic()
            while True:
                quiet, changes = False, None
                try:
                    changes = await listener.next(KEEPALIVE_S)
                except TimeoutError:
                    quiet = True
                # Also checked while there are events: in a large installation they never stop.
                if quiet or time.monotonic() - checked_at >= KEEPALIVE_S:
                    if not await self._still_allowed():
                        return
                    checked_at = time.monotonic()
                if quiet:
                    await self._send("event: alive\ndata: {}\n\n")
                elif changes is None:
                    return
                elif changes.last_event_id > sent:
                    await self._tell(changes, sent)
                    sent = changes.last_event_id
        except StreamClosedError:
            pass
        except StoreUnavailable:
            if not self._headers_written:
                raise
        finally:
            self.service.watcher.leave(listener)

    def _last_event_id(self) -> int | None:
        given = self.request.headers.get("Last-Event-ID") or self.get_query_argument("last_event_id", "")
        if not given:
            return None
        if not (given.isascii() and given.isdigit() and len(given) < 19):
            raise bad_argument("Last-Event-ID", "must be an event's number")
        return int(given)

    async def _begin(self, after_id: int | None) -> int:
        """Send the missed events, or the current number; return the id up to which all is sent."""
        reader = self.service.reader
        newest = await reader.last_event_id()
        changes = None if after_id is None or after_id > newest else await reader.changes(after_id)
        if changes is None:
            # Without an event to resume from, clients read everything once.
            changes = Changes(newest, ())
        await reader.world()
        self.set_header("Content-Type", "text/event-stream; charset=utf-8")
        # Some proxies otherwise buffer the stream until it ends.
        self.set_header("X-Accel-Buffering", "no")
        await self._send("retry: 2000\n\n")
        await self._tell(changes, after_id or 0)
        return changes.last_event_id

    async def _tell(self, changes: Changes, after_id: int) -> None:
        world = await self.service.reader.world()
        for event_id, session in changes.sessions:
            if event_id > after_id and is_visible(session, self.viewer):
                await self._event("change", event_id, self.object_of(session, world).as_json())
        simulated = world.simulated(None if self.viewer.admin else self.viewer.groups)
        about = {"version": world.snapshot.version, "simulated": simulated}
        await self._event("queue", changes.last_event_id, json.dumps(about))

    async def _event(self, name: str, event_id: int, data: str) -> None:
        await self._send(f"event: {name}\nid: {event_id}\ndata: {data}\n\n")

    async def _send(self, text: str) -> None:
        self.write(text)
        await self.flush()

    async def _still_allowed(self) -> bool:
        """Ask the Hub again (it is cached for a while): a stream must not outlive its token."""
        try:
            model = await self.hub_auth.user_for_token(
                self.token, session_id=self.hub_auth.get_session_id(self), sync=False
            )
        except HTTPError:
            # The Hub restarts: current listeners stay until it answers.
            return True
        if model is None or not self.hub_auth.check_scopes(self.needs_scope, model):
            return False
        self.viewer = viewer_of(model, self.service.settings, self.hub_auth)
        return True

    def on_connection_close(self) -> None:
        super().on_connection_close()
        left = getattr(self, "_left", None)
        if left is not None:
            left()
