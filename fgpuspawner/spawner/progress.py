"""The events of the Hub's waiting page while a session waits and starts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from fgpu_scheduler import LAUNCHING, Forecast, Session, SessionState, StoreUnavailable
from fgpuspawner.hub.runtime import Runtime
from fgpuspawner.images.pull_state import PullState
from fgpuspawner.service.api.session_objects import start_words
from fgpuspawner.service.model import Viewer, World
from fgpuspawner.text.sessions import WITHDRAWN, amount_words, session_name

EVENT_WITHIN_S = 6.0
"""A waiting page gets an event within this time: if nothing else, that the database does not answer."""
EVENT_EVERY_S, PULL_EVENT_EVERY_S = 20, 1.0
BEHIND_FROM_S = 10
"""Younger forecasts are as good as new ones: starts are shown to the minute."""

_STARTING = {
    SessionState.SCHEDULED: (40, "Your share is reserved. Starting"),
    SessionState.PREPARING: (60, "Starting your session"),
    SessionState.PULLING: (60, "Fetching the image"),
}


async def events(
    runtime: Runtime, session_id: Callable[[], int | None], is_fetched: Callable[[], bool]
) -> AsyncIterator[dict[str, Any]]:
    """Yield the events of a server's session, whenever they change, until it runs or has ended.

    ``session_id`` returns None until the session is queued. ``is_fetched`` tells whether its launch waits for no image.
    """

    def interval_s() -> float:
        current = session_id()
        return EVENT_EVERY_S if current is None or runtime.pull_of(current) is None else PULL_EVENT_EVERY_S

    last: dict[str, Any] | None = None
    async for _ in runtime.queue.changes(at_least_every_s=interval_s):
        try:
            async with asyncio.timeout(EVENT_WITHIN_S):
                event = await _event(runtime, session_id(), is_fetched)
        except (StoreUnavailable, TimeoutError):
            event = away_event(last)
        if event is None:
            return
        if event != last:
            yield event
            last = event


async def _event(
    runtime: Runtime, session_id: int | None, is_fetched: Callable[[], bool]
) -> dict[str, Any] | None:
    if runtime.queue.database_is_away:
        raise StoreUnavailable("the scheduler's database does not answer")
    if session_id is None:
        return {"progress": 0, "message": "Asking the scheduler"}
    session, pull = await runtime.queue.session(session_id), runtime.pull_of(session_id)
    if session.state is SessionState.PENDING:
        ahead = await runtime.queue.outlook()
        return waiting_event(
            session,
            World(ahead.snapshot, ahead.forecasts, unblockings=ahead.unblockings),
            simulated=runtime.simulated,
            pull=pull,
            withdrawn=runtime.catalogue.of(session.request) is None,
            behind_s=runtime.queue.forecasts_behind_s(),
        )
    if session.state is SessionState.SCHEDULED or session.state in LAUNCHING:
        return starting_event(session, simulated=runtime.simulated, pull=pull, fetched=is_fetched())
    return None


def waiting_event(
    session: Session,
    world: World,
    *,
    simulated: bool,
    pull: PullState | None = None,
    withdrawn: bool = False,
    behind_s: int = 0,
) -> dict[str, Any]:
    """Return the progress event of a PENDING session; ``fgpu`` carries the facts, ``message`` the sentence.

    ``world`` limits it to what its owner may know of other sessions. ``pull`` is the progress of its image, if that is
    fetched early. ``withdrawn``: the owner may not start the image now. ``behind_s`` is the age of the forecast, if the
    queue has changed since.
    """
    found = world.forecasts.get(session.id)
    begins, sooner = start_words(session, world, Viewer(session.request.user))
    facts = _facts(session, found, simulated=simulated, pull=pull) | {
        "text": found.text if found else None,
        "waits_for": begins or None,
        "sooner": sooner or None,
        "behind_s": behind_s if behind_s >= BEHIND_FROM_S else None,
    }
    if withdrawn:
        progress, message = 5, WITHDRAWN[:1].upper() + WITHDRAWN[1:]
    elif found is None:
        progress, message = 5, "Waiting in the queue"
    elif found.position == 0:
        progress, message = 30, "Starting"
    else:
        ahead = found.position - 1
        place = "You're next in the queue" if ahead == 0 else f"{ahead} ahead of you in the queue"
        progress, message = 10, f"{place}: {found.text}"
    return {"progress": progress, "message": message, "fgpu": facts}


def away_event(last: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the progress event of a session whose state cannot be read now; ``last`` is the event before."""
    message = "The queue's database does not answer. Your place is safe; this page goes on when it is back"
    return {"progress": last["progress"] if last else 0, "message": message}


def starting_event(
    session: Session, *, simulated: bool, pull: PullState | None = None, fetched: bool = False
) -> dict[str, Any]:
    """Return the progress event of a session that has its share and is being launched.

    ``fetched`` says that its image is complete: it starts, although its state is still PULLING.
    """
    progress, message = _STARTING[session.state]
    if session.state is SessionState.PULLING and fetched:
        progress, message = 90, "The image is here. Starting your session"
    elif pull is not None:
        # The amount done stands in ``pull``: screen readers read the sentence again whenever it changes.
        step = pull.step()
        message = step[:1].upper() + step[1:]
        done = pull.progress
        if done.bytes_total:
            progress += 30 * done.bytes_done // done.bytes_total
    facts = _facts(session, None, simulated=simulated, pull=pull) | {"text": message}
    return {"progress": progress, "message": f"{message} ({facts['amount']})", "fgpu": facts}


def _facts(
    session: Session, found: Forecast | None, *, simulated: bool, pull: PullState | None
) -> dict[str, Any]:
    return {
        "session_id": session.id,
        "name": session_name(session.request),
        "state": session.state.value,
        "amount": amount_words(session.request),
        "simulated": simulated,
        "position": found.position if found else None,
        "reason": found.reason.value if found else None,
        "text": None,
        "expected_start_at_s": found.expected_start_at_s if found else None,
        "early_start_at_s": found.early_at_s if found else None,
        "late_start_at_s": found.late_at_s if found else None,
        "basis": found.basis if found else None,
        "waits_for": None,
        "sooner": None,
        "behind_s": None,
        "submitted_at_s": session.submitted_at_s,
        "pull": pull.as_json() if pull is not None else None,
    }
