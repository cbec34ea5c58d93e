"""The event stream's listeners."""

from __future__ import annotations

from fgpuspawner.service.reader import Changes
from fgpuspawner.service.stream import MAX_BEHIND, Listener


async def test_slow_listener_gets_its_queue_then_ends() -> None:
    listener = Listener("alice")
    for number in range(MAX_BEHIND + 1):
        listener.tell(Changes(number, ()))
    told = [await listener.next(1) for _ in range(MAX_BEHIND)]
    assert [changes.last_event_id for changes in told if changes] == list(range(MAX_BEHIND))
    assert await listener.next(1) is None
