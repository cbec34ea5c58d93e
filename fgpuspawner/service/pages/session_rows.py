"""One line of the sessions page, and one of what has ended. Pure: from the API's objects, so both always agree."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from hashlib import blake2s

from fgpuspawner.service.csv_file import Cell
from fgpuspawner.service.model import Json
from fgpuspawner.service.pages.bars import Use, use
from fgpuspawner.text.sessions import mib, ordinal
from fgpuspawner.text.times import cell, hours_minutes

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


SHOWN = [
    "id",
    "display_name",
    "user",
    "mine",
    "image_name",
    "amount",
    "state",
    "submitted_at_s",
    "started_at_s",
    "ends_at_s",
    "can_keep",
    "simulated",
]
"""What a line shows of its session as it is, beside what is put in words."""


@dataclass(frozen=True, slots=True)
class Row:
    """One session in the table."""

    session: Json
    gpu_memory: str
    state_words: str
    why: str
    position: str
    expected_at_s: int | None
    basis: str
    unexpected: str
    waits_for: str
    pull: str
    warning: str
    can_save: bool
    saving: str
    time_limit: str
    open_url: str | None
    wait_url: str | None
    power: str | None
    use: Use | None = None
    """Not part of the digest: pages ask for it by itself, and often."""

    @property
    def digest(self) -> str:
        """Return what is another once the line has to be shown again."""
        shown = {key: self.session[key] for key in SHOWN}
        values = json.dumps(asdict(replace(self, session=shown, use=None)), sort_keys=True)
        return blake2s(values.encode(), digest_size=6).hexdigest()


def row(session: Json, hub_host: str = "") -> Row:
    """Return the line of a live session. ``hub_host`` is what its own paths are on, if that is another host."""
    state = session["state"]
    running, waits = state == "RUNNING", state == "PENDING"
    expected, basis = session["expected_start_at_s"], session["forecast_basis"] or ""
    own_path = hub_host if session["mine"] else None
    return Row(
        session=session,
        gpu_memory="" if session["gpu_memory_mib"] is None else mib(session["gpu_memory_mib"]),
        state_words=STATE_WORDS[state],
        # A message of a session that runs is a warning to its owner.
        why=(session["message"] or (session["wait_text"] if waits else "") or "")
        if waits or running
        else STATE_WORDS[state],
        position=position_words(session["position"], session["ahead"]) if session["position"] else "",
        # To the minute: it moves with the clock, and nobody is to see the line made again for that.
        expected_at_s=expected - expected % MINUTE_S if waits and expected is not None else None,
        basis=basis,
        unexpected=basis if waits and expected is None else "",
        waits_for=session["waits_for"]["text"] if session["waits_for"] else "",
        pull=session["pull"]["text"] if session["pull"] else "",
        warning=session["warning"] or "",
        can_save=session["can_save"] and session["saving"] is None,
        saving=saving_words(session["saving"]),
        time_limit="" if session["time_limit_s"] is None else hours_minutes(session["time_limit_s"]),
        # Others' servers are not for an administrator to walk into from here.
        open_url=own_path + session["url"] if running and own_path is not None else None,
        wait_url=own_path + session["pending_url"]
        if (waits or state in LAUNCHING) and own_path is not None
        else None,
        power=None if state == "TERMINATING" else ("Cancel" if waits else "End"),
        use=use(session.get("meter")),
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


SESSION_COLUMNS = [
    "id",
    "user",
    "session",
    "state",
    "why",
    "position",
    "image",
    "resource_group",
    "amount",
    "fgpu",
    "gpu_memory_mib",
    "gpu_memory_used_mib",
    "gpu_compute_percent",
    "cpu",
    "memory_mib",
    "node",
    "submitted",
    "started",
    "ends",
    "simulated",
]
"""Of the CSV file, in this order."""


def session_cells(session: Json) -> list[Cell]:
    """Return a session's line of the CSV file, in the order of `SESSION_COLUMNS`. Instants are UTC."""
    meter = session.get("meter") or {}
    waits = session["state"] == "PENDING"
    words = {
        "session": session["display_name"],
        "why": session["message"]
        or (session["wait_text"] if waits else "")
        or end_words(session["end_cause"], None),
        "image": session["image_name"],
        "gpu_memory_used_mib": meter.get("memory_used_mib"),
        "gpu_compute_percent": meter.get("sm_percent"),
        "submitted": cell(session["submitted_at_s"]),
        "started": cell(session["started_at_s"]),
        "ends": cell(session["ends_at_s"]),
        "simulated": "yes" if session["simulated"] else "no",
    }
    return [words[name] if name in words else session[name] for name in SESSION_COLUMNS]
