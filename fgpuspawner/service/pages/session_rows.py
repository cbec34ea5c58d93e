"""The rows of live sessions, in words and with the bars of their use. Pure, from the API's objects."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2s
from itertools import accumulate, pairwise
from operator import attrgetter

from fgpu_scheduler import (
    BASIS_LIMITS,
    UP,
    format_milli,
    parse_milli,
)
from fgpuspawner.meter.model import Meter
from fgpuspawner.service.csv_file import Cell
from fgpuspawner.service.objects import Resize, Saving, Session
from fgpuspawner.text.sessions import about_words, end_words, gib_words, place_words
from fgpuspawner.text.times import cell


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar: a part of a whole, in words. ``percent`` is its length, to a tenth."""

    label: str
    text: str
    percent: str


@dataclass(frozen=True, slots=True)
class BarPart:
    """One part of a stacked bar; ``x`` and ``width`` are in percent. ``words`` say the amount and its kind."""

    kind: str
    words: str
    x: str
    width: str


@dataclass(frozen=True, slots=True)
class StackedBar:
    """All of a resource, as parts. ``own`` is the viewer's use of what is available to them, or empty."""

    label: str
    text: str
    parts: tuple[BarPart, ...]
    own: str | None


@dataclass(frozen=True, slots=True)
class UseBars:
    """A running session's current use, or why it is unknown."""

    memory: Bar | None
    compute: Bar | None
    trouble: str
    lent: str = ""


def memory_bar(label: str, used_mib: int | None, limit_mib: int | None) -> Bar | None:
    """Return a bar of GPU memory against the session's limit; None if either is unknown."""
    if used_mib is None or not limit_mib:
        return None
    used, _ = numbers_of([used_mib, max(0, limit_mib - used_mib)], "memory_mib")
    return Bar(label, f"{format_milli(used)} of {gib_words(limit_mib)} GiB", percent(used_mib, limit_mib))


def use(meter: Meter | None) -> UseBars | None:
    """Return a session's meter in words; None if nothing was measured yet."""
    if meter is None:
        return None
    compute = None
    sm, entitled = meter.sm_percent, meter.compute_entitled_percent
    if sm is not None:
        compute = Bar(
            "Compute", compute_words(sm, entitled), percent(round(sm * 1000), (entitled or 100) * 1000)
        )
    memory = memory_bar("Memory", meter.memory_used_mib, meter.memory_limit_mib)
    if memory is not None and meter.memory_context_mib:
        memory = replace(memory, text=memory.text + context_words(meter.memory_context_mib))
    return UseBars(
        memory,
        compute,
        meter.trouble or "",
        lent_now(sm, entitled, meter.compute_lent_percent),
    )


def rounded(percent: float) -> int:
    """Return a percent as shown, with halves rounded up as in the scripts; "12.5:.0f" would be 12."""
    return math.floor(percent + 0.5)


def compute_words(computed: float, entitled: int | None) -> str:
    """Return the compute in use: against the share, or of the GPU if compute is not limited."""
    now = rounded(computed)
    if entitled is None:
        return f"{now} % of GPU"
    return f"{now} %" if now > entitled else f"{now} of {entitled} %"


def lent_now(computed: float | None, entitled: int | None, lent: float | None) -> str:
    """Return how much compute is borrowed, or how much of the share is lent to others.

    ``lent`` is None where compute is not lent: then the text is empty.
    """
    if computed is None or entitled is None or lent is None:
        return ""
    if (more := rounded(computed) - entitled) > 0:
        return f"{entitled} % share + {more} % borrowed"
    return f"others use {rounded(lent)} % of it" if rounded(lent) else ""


def context_words(mib: int) -> str:
    """Return how much of the memory in use is contexts and code, to follow that figure."""
    return f", {gib_words(mib)} of it contexts and code"


HELD = ("mine", "others", "used")
"""Kinds of parts that are held."""


def percent(part: int, whole: int) -> str:
    """Return a bar's length in percent, rounded down to a tenth; "0" for an empty whole."""
    if whole <= 0 or part <= 0:
        return "0"
    tenths = min(1000, part * 1000 // whole)
    return f"{tenths // 10}.{tenths % 10}"


def part_of(part: int, whole: int, key: str, unit: str) -> str:
    """Return "0.5 of 2 fGPU" of thousandths, or "1 of 16 GiB" of MiB."""
    own, rest = numbers_of([part, whole - part], key)
    return f"{format_milli(own)} of {format_milli(own + rest)} {unit}"


def numbers_of(amounts: Sequence[int], key: str) -> list[int]:
    """Return thousandths as they are, or MiB of memory in thousandths of a GiB.

    Memory is rounded so that the parts add up, and finely enough that none is shown as 0.
    """
    if key != "memory_mib":
        return list(amounts)
    found: list[int] = []
    for grain in (1,) if all(amount % 128 == 0 for amount in amounts) else (100, 10, 1):
        ends = [round(mib * 1000 / 1024 / grain) * grain for mib in accumulate(amounts, initial=0)]
        found = [end - begin for begin, end in pairwise(ends)]
        if all(found[n] for n, amount in enumerate(amounts) if amount):
            break
    return found


def stacked_bar(
    label: str, amounts: Sequence[tuple[str, str, int]], total: int, key: str, unit: str, own: str | None
) -> StackedBar:
    """Return a stacked bar of these kinds, words and amounts; empty parts are left out, except the free one."""
    # After an administrator made machines smaller, more can be held than there is.
    whole = max(total, sum(amount for _, _, amount in amounts), 1)
    found, begin = [], 0
    numbers = numbers_of([amount for _, _, amount in amounts], key)
    for (kind, words, amount), number in zip(amounts, numbers, strict=True):
        if amount > 0 or kind == "free":
            told = f"{format_milli(number)} {words}"
            found.append(BarPart(kind, told, percent(begin, whole), percent(amount, whole)))
            begin += amount
    held = sum(number for (kind, _, _), number in zip(amounts, numbers, strict=True) if kind in HELD)
    return StackedBar(
        label, f"{format_milli(held)} of {format_milli(sum(numbers))} {unit}", tuple(found), own
    )


def whole(amount: str | int) -> int:
    """Return an amount of the API in thousandths, or memory in MiB: sums stay exact."""
    return amount if isinstance(amount, int) else parse_milli(amount, field="amount")


STATE_WORDS = {
    "PENDING": "waiting in the queue",
    "SCHEDULED": "about to start",
    "PREPARING": "starting",
    "PULLING": "fetching its image",
    "RUNNING": "running",
    "PARKED": "parked",
    "RESUMING": "getting its GPU back",
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
class SessionRow:
    session: Session
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
    saving: str
    interrupted_from_s: int | None
    parks_at_s: int | None
    wishes: tuple[tuple[str, str], ...]
    can_resize: bool
    resizing: str
    open_url: str | None
    wait_url: str | None
    power: str | None
    use: UseBars | None = None
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


def row(session: Session, hub_host: str = "") -> SessionRow:
    """Return the row of a live session. ``hub_host`` is the host of its own paths, if that is another one."""
    state = session.state
    running, pending = state in UP, state == "PENDING"
    waits = pending or (session.parked is not None and session.parked.wanted)
    expected, basis = session.expected_start_at_s, session.forecast_basis or ""
    own_path = hub_host if session.mine else None
    return SessionRow(
        session=session,
        state_words=STATE_WORDS[state],
        # A message of a running session is a warning to its owner.
        why=(session.message or parked_words(session) or (session.wait_text if waits else "") or "")
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
        saving=saving_words(session.saving),
        interrupted_from_s=_interrupted_from_s(session),
        parks_at_s=session.meter.parks_at_s if session.meter else None,
        wishes=_parking_wishes(session),
        can_resize=session.resize is not None and session.resize.why_not is None,
        resizing=resizing_words(session.resize),
        # Administrators get no link to open other users' servers here.
        open_url=own_path + session.url if running and own_path is not None else None,
        wait_url=own_path + session.pending_url
        if (pending or state in LAUNCHING) and own_path is not None
        else None,
        power=None if state == "TERMINATING" else ("Cancel" if pending else "End"),
        use=use(session.meter),
    )


def _interrupted_from_s(session: Session) -> int | None:
    """Return from when on it may be pre-empted, if not from its start; None once it is warned."""
    from_s = session.preemptible_from_s
    return None if session.warning or from_s == session.started_at_s else from_s


def _parking_wishes(session: Session) -> tuple[tuple[str, str], ...]:
    offers = {
        ("park", "Park"): session.can_park,
        ("wake", "Get GPU"): session.parked is not None and not session.parked.wanted,
        ("never-park", "Never park"): session.never_park is False,
        ("may-park", "Allow parking"): session.never_park is True,
    }
    return tuple(wish for wish, offered in offers.items() if offered)


def parked_words(session: Session) -> str:
    """Return what a parked session keeps and how it gets its GPU, or why it is not parked as was asked, or nothing."""
    parked = session.parked
    if parked is None:
        return f"not parked: {session.park_refused}" if session.park_refused else ""
    kept = f"{gib_words(parked.memory_mib)} GiB of GPU memory kept. " if parked.memory_mib else ""
    way = "It waits for its GPU" if parked.wanted else "A cell that needs the GPU gets it"
    return f"{kept}{way}{' and then keeps it' if session.never_park else ''}"


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
