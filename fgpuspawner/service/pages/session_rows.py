"""One row of the sessions page, and one of the ended sessions. Pure: from the API's objects, so both always agree."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import blake2s
from operator import attrgetter

from fgpu_scheduler import BASIS_LIMITS, memory_words
from fgpuspawner.service.csv_file import Cell
from fgpuspawner.service.objects import Resize, Saving, Session
from fgpuspawner.service.pages.bars import Use, use
from fgpuspawner.text.sessions import about_words, end_words, place_words
from fgpuspawner.text.times import cell, duration

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
LAUNCHING = ("SCHEDULED", "PREPARING", "PULLING")
MINUTE_S = 60
RANGE_GRAIN_S = 300
"""Ends of a range are rounded to five minutes; one of at most two of these is shown as an instant."""


IN_WORDS = {
    "meter",
    "expected_start_at_s",
    "early_start_at_s",
    "late_start_at_s",
    "pull",
    "waits_for",
    "resize",
}
"""Fields of a session's object that change more often than their words in the row."""


@dataclass(frozen=True, slots=True)
class Row:
    session: Session
    gpu_memory: str
    state_words: str
    why: str
    place: str
    ahead: str
    expected_at_s: int | None
    between_s: tuple[int, int] | None
    basis: str
    about: str
    unexpected: str
    waits_for: str
    pull: str
    warning: str
    can_save: bool
    saving: str
    time_limit: str
    interrupted_from_s: int | None
    extend_by: str
    can_resize: bool
    resizing: str
    room: str
    open_url: str | None
    wait_url: str | None
    power: str | None
    use: Use | None = None
    """Not part of the digest: pages ask for it separately and often."""

    @property
    def digest(self) -> str:
        """A text that changes when the row must be shown again."""
        shown = self.session.model_dump_json(exclude=IN_WORDS)
        values = json.dumps(
            [getattr(self, name) for name in self.__slots__ if name not in ("session", "use")]
        )
        return blake2s((shown + values).encode(), digest_size=6).hexdigest()


def _between_s(session: Session) -> tuple[int, int] | None:
    """Return the range in which a start probably lies; None for a narrow one, or if only the latest instant is known."""
    early_s, late_s = session.early_start_at_s, session.late_start_at_s
    latest = session.forecast_basis == BASIS_LIMITS
    if latest or early_s is None or late_s is None or late_s - early_s <= 2 * RANGE_GRAIN_S:
        return None
    return early_s - early_s % RANGE_GRAIN_S, late_s + -late_s % RANGE_GRAIN_S


def row(session: Session, hub_host: str = "") -> Row:
    """Return the row of a live session. ``hub_host`` is the host of its own paths, if that is another one."""
    state = session.state
    running, waits = state == "RUNNING", state == "PENDING"
    expected, basis = session.expected_start_at_s, session.forecast_basis or ""
    own_path = hub_host if session.mine else None
    return Row(
        session=session,
        gpu_memory="" if session.gpu_memory_mib is None else memory_words(session.gpu_memory_mib),
        state_words=STATE_WORDS[state],
        # A message of a running session is a warning to its owner.
        why=(session.message or (session.wait_text if waits else "") or "")
        if waits or running
        else STATE_WORDS[state],
        place=place_words(session.position),
        ahead=ahead_words(session.ahead or 0) if session.position else "",
        # To the minute: it moves with the clock, and the row should not be redrawn for that.
        expected_at_s=expected - expected % MINUTE_S if waits and expected is not None else None,
        between_s=_between_s(session) if waits else None,
        basis=basis,
        about=about_words(basis),
        unexpected=basis if waits and expected is None else "",
        waits_for=session.waits_for.text if session.waits_for else "",
        pull=session.pull.text if session.pull else "",
        warning=session.warning or "",
        can_save=session.can_save and session.saving is None,
        saving=saving_words(session.saving),
        time_limit="" if session.time_limit_s is None else duration(session.time_limit_s),
        interrupted_from_s=_interrupted_from_s(session),
        extend_by=duration(session.extend_by_s or 0),
        can_resize=session.resize is not None and session.resize.why_not is None,
        resizing=resizing_words(session.resize),
        room=f"{session['cpu']} CPU, {memory_words(session['memory_mib'])} memory",
        # Administrators get no link to open other users' servers here.
        open_url=own_path + session.url if running and own_path is not None else None,
        wait_url=own_path + session.pending_url
        if (waits or state in LAUNCHING) and own_path is not None
        else None,
        power=None if state == "TERMINATING" else ("Cancel" if waits else "End"),
        use=use(session.meter),
    )


def _interrupted_from_s(session: Session) -> int | None:
    """Return from when on it may be pre-empted, if not from its start; None once it is warned."""
    from_s = session.preemptible_from_s
    return None if session.warning or from_s == session.started_at_s else from_s


def saving_words(saving: Saving | None) -> str:
    """Return the progress of saving a session as an image; empty if it is not being saved."""
    if saving is None:
        return ""
    how_far = saving.message or "it waits for its turn"
    return f"being saved as {saving.name}: {how_far}"


def resizing_words(resize: Resize | None) -> str:
    """Return the state of an open or failed resize request; empty if there is none."""
    if resize is None or resize.state in (None, "DONE"):
        return ""
    if resize.state == "ASKED":
        return f"being resized to {resize.asked}"
    message = resize.message or ""
    return f"not resized to {resize.asked}: {message[:1].lower()}{message[1:]}"


def ahead_words(ahead: int) -> str:
    """Return how many requests come before: "No request is ahead"."""
    return "No request is ahead" if ahead == 0 else f"{ahead} {'is' if ahead == 1 else 'are'} ahead"


def _why(session: Session) -> str:
    waits = session.state == "PENDING"
    return str(session.message or (session.wait_text if waits else "") or end_words(session.end_cause, None))


def _metered(name: str) -> Callable[[Session], Cell]:
    return lambda session: getattr(session.meter, name, None)


SESSION_COLUMNS: Mapping[str, Callable[[Session], Cell]] = {
    "id": attrgetter("id"),
    "user": attrgetter("user"),
    "session": attrgetter("display_name"),
    "state": attrgetter("state"),
    "why": _why,
    "position": attrgetter("position"),
    "image": attrgetter("image_name"),
    "resource_group": attrgetter("resource_group"),
    "amount": attrgetter("amount"),
    "fgpu": attrgetter("fgpu"),
    "gpu_memory_mib": attrgetter("gpu_memory_mib"),
    "gpu_memory_used_mib": _metered("memory_used_mib"),
    "gpu_compute_percent": _metered("sm_percent"),
    "cpu": attrgetter("cpu"),
    "memory_mib": attrgetter("memory_mib"),
    "node": attrgetter("node"),
    "submitted": lambda session: cell(session.submitted_at_s),
    "started": lambda session: cell(session.started_at_s),
    "ends": lambda session: cell(session.ends_at_s),
    "simulated": lambda session: "yes" if session.simulated else "no",
}
"""Columns of the CSV file, in order. Instants are UTC."""


def session_cells(session: Session) -> list[Cell]:
    return [read(session) for read in SESSION_COLUMNS.values()]
