"""One line of the sessions page, and one of what has ended. Pure: from the API's objects, so both always agree."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from hashlib import blake2s

from fgpuspawner.service.figures import Instant, Use, instant, mib, ordinal, use
from fgpuspawner.service.view import Json
from fgpuspawner.text.sessions import hours_minutes

STATE_WORDS = {
    "PENDING": "waiting in the queue",
    "SCHEDULED": "about to start",
    "PREPARING": "starting",
    "PULLING": "fetching its image",
    "RUNNING": "running",
    "TERMINATING": "ending",
    "TERMINATED": "ended",
    "ERROR": "failed",
    "CANCELLED": "cancelled",
}
END_WORDS = {
    "USER": "ended on request",
    "EXITED": "its server ended by itself",
    "IDLE": "ended because it was idle",
    "TIME_LIMIT": "reached its time limit",
    "QUEUE_TIMEOUT": "waited longer than the queue allows",
    "PREEMPTED": "ended for a session of higher priority",
    "NODE_LOST": "its node was lost",
    "PULL_FAILED": "its image could not be fetched",
    "LAUNCH_FAILED": "it could not be started",
    "OOM": "it ran out of memory",
    "ISOLATION_FAILED": "its GPU limit could not be put in force",
}
LAUNCHING = ("SCHEDULED", "PREPARING", "PULLING")
MINUTE_S = 60


@dataclass(frozen=True, slots=True)
class Row:
    """One session in the table."""

    id: int
    name: str
    user: str
    mine: bool
    image: str
    amount: str
    gpu_memory: str
    state: str
    state_words: str
    why: str
    position: str
    expected: Instant | None
    basis: str
    unexpected: str
    waits_for: str
    pull: str
    submitted: Instant
    started: Instant | None
    warning: str
    ends: Instant | None
    can_keep: bool
    can_save: bool
    saving: str
    time_limit: str
    open_url: str | None
    wait_url: str | None
    power: str | None
    simulated: bool
    use: Use | None = None
    """Not part of the digest: pages ask for it by itself, and often."""

    @property
    def digest(self) -> str:
        """Return what is another once the line has to be shown again."""
        values = json.dumps(asdict(replace(self, use=None)), sort_keys=True)
        return blake2s(values.encode(), digest_size=6).hexdigest()


@dataclass(frozen=True, slots=True)
class Past:
    """One session that has ended."""

    id: int
    name: str
    user: str
    amount: str
    image: str
    state: str
    why: str
    ended: Instant | None


def row(session: Json, hub_host: str = "") -> Row:
    """Return the line of a live session. ``hub_host`` is what its own paths are on, if that is another host."""
    state, position = session["state"], session["position"]
    running = state == "RUNNING"
    waits = state == "PENDING"
    expected, started = session["expected_start_at_s"], session["started_at_s"]
    limit_s = session["time_limit_s"]
    words = STATE_WORDS[state]
    return Row(
        id=session["id"],
        name=session["display_name"],
        user=session["user"],
        mine=session["mine"],
        image=session["image_name"],
        amount=session["amount"],
        gpu_memory="" if session["gpu_memory_mib"] is None else mib(session["gpu_memory_mib"]),
        state=state,
        state_words=words,
        # A message of a session that runs is a warning to its owner.
        why=(session["message"] or (session["wait_text"] if waits else "") or "")
        if waits or running
        else words,
        position=position_words(position, session["ahead"]) if position else "",
        # To the minute: it moves with the clock, and nobody is to see the line made again for that.
        expected=instant(expected - expected % MINUTE_S) if waits and expected is not None else None,
        basis=session["forecast_basis"] or "",
        waits_for=session["waits_for"]["text"] if session["waits_for"] else "",
        pull=session["pull"]["text"] if session["pull"] else "",
        unexpected=(session["forecast_basis"] or "") if waits and expected is None else "",
        submitted=instant(session["submitted_at_s"]),
        started=instant(started) if started is not None else None,
        warning=session["warning"] or "",
        ends=instant(session["ends_at_s"]) if session["ends_at_s"] is not None else None,
        can_keep=session["can_keep"],
        can_save=session["can_save"] and session["saving"] is None,
        saving=saving_words(session["saving"]),
        time_limit="" if limit_s is None else hours_minutes(limit_s),
        # Others' servers are not for an administrator to walk into from here.
        open_url=hub_host + session["url"] if running and session["mine"] else None,
        wait_url=hub_host + session["pending_url"]
        if (waits or state in LAUNCHING) and session["mine"]
        else None,
        power=None if state == "TERMINATING" else ("Cancel" if waits else "End"),
        simulated=session["simulated"],
        use=use(session.get("meter")),
    )


def past(session: Json) -> Past:
    """Return the line of a session that has ended."""
    return Past(
        id=session["id"],
        name=session["display_name"],
        user=session["user"],
        amount=session["amount"],
        image=session["image_name"],
        state=session["state"],
        why=end_words(session["end_cause"], session["message"]),
        ended=instant(session["ended_at_s"]) if session["ended_at_s"] is not None else None,
    )


def end_words(cause: str | None, message: str | None) -> str:
    """Return why a session ended."""
    why, said = END_WORDS.get(cause or "", ""), message or ""
    return f"{why}: {said}" if why and said else (why or said)


def saving_words(saving: Json | None) -> str:
    """Return how far the image is that a session is being saved as; empty where it is not."""
    if saving is None:
        return ""
    how_far = saving["message"] or "it waits for its turn"
    return f"being saved as {saving['name']}: {how_far}"


def position_words(position: int, ahead: int) -> str:
    """Return a place in the queue in words: "1st in the queue, nobody is ahead"."""
    if ahead == 0:
        return "1st in the queue, nobody is ahead"
    return f"{ordinal(position)} in the queue, {ahead} {'is' if ahead == 1 else 'are'} ahead"
