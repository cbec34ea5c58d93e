"""Sessions and amounts in words, the same on every page and in every message. Pure."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence

from fgpu_scheduler import (
    BASIS_LIMITS,
    UP,
    BlockingSessions,
    EndCause,
    Request,
    Session,
    format_milli,
    memory_words,
)

TURNING = frozenset(("R", "AL", "RLE", "RLO", "LRE", "LRO", "PDF", "RLI", "LRI", "FSI", "PDI"))
ISOLATES = dict.fromkeys(range(0x2066, 0x206A))


def isolated(text: str) -> str:
    """Return user text for the middle of a sentence, isolated so that right-to-left text does not reorder the rest."""
    if all(unicodedata.bidirectional(letter) not in TURNING for letter in text):
        return text
    return f"\u2068{text.translate(ISOLATES)}\u2069"


WRITTEN = ("JAX", "Julia", "MXNet", "Python", "PyTorch", "R", "RAPIDS", "TensorFlow")
TITLES = {title.casefold(): title for title in WRITTEN}
"""How frameworks write their names; others are shown as the catalogue has them."""


def session_name(asked: Request) -> str:
    """Return a session's name for people."""
    return asked.name or default_name(asked.image, asked.server_name)


def default_name(framework: str, server_name: str) -> str:
    """Return the name of a session that was given none: "PyTorch 2" for an unnamed or numbered server, else its name."""
    numbered = re.fullmatch(r"(?:gpu-([0-9-]+))?", server_name)
    title = TITLES.get(framework.casefold(), framework)
    return f"{title} {numbered[1] or 1}" if numbered else server_name


def amount_words(asked: Request) -> str:
    """Return a requested amount: "0.5 fGPU", "5 GiB + 25 %", or "5 GiB" for memory only."""
    if asked.gpu_memory_mib is None:
        return f"{format_milli(asked.fgpu_milli)} fGPU"
    if asked.compute_percent is None:
        return memory_words(asked.gpu_memory_mib)
    return f"{memory_words(asked.gpu_memory_mib)} + {asked.compute_percent} %"


WARNINGS = {
    EndCause.IDLE: "it is idle: use it or keep it running",
    EndCause.TIME_LIMIT: "it reaches its time limit soon",
    EndCause.PREEMPTED: "a request that goes first needs its place",
}


def warning_words(session: Session) -> str | None:
    """Return the warning to a running session's owner, or None. Pages show the time beside it."""
    if session.state not in UP or session.ends_cause is None:
        return None
    return WARNINGS.get(session.ends_cause, "it ends soon")


END_WORDS = {
    "USER": "ended on request",
    "EXITED": "its server ended",
    "IDLE": "ended because it was idle",
    "TIME_LIMIT": "reached its time limit",
    "QUEUE_TIMEOUT": "waited longer than the queue allows",
    "PREEMPTED": "ended for a request that goes first",
    "NODE_LOST": "its node was lost",
    "PULL_FAILED": "its image could not be fetched",
    "LAUNCH_FAILED": "it could not be started",
    "OOM": "it ran out of memory",
    "ISOLATION_FAILED": "its GPU limit could not be put in force",
    "HUB_STOPPED": "ended because JupyterHub was stopped",
    "DISK_LIMIT": "it took too much of the disk",
}


def end_words(cause: str | None, message: str | None) -> str:
    why, said = END_WORDS.get(cause or "", ""), message or ""
    return f"{why}: {said}" if why and said else (why or said)


WITHDRAWN = (
    "its image is not in the catalogue any more, so it cannot start; cancel it and choose another image"
)
"""Told to the owner of a waiting session when its image was disabled."""

MOST_NAMED = 3


def about_words(basis: str) -> str:
    """Return "at the latest" if the forecast comes from time limits only, else "about"."""
    return "at the latest" if basis == BASIS_LIMITS else "about"


def ahead_words(ahead: BlockingSessions | None, names: Sequence[str] = ()) -> str | None:
    """Return the ends with which a session starts: "starts when 2 sessions end (1.5 fGPU)"; None if none are needed.

    ``names`` are those that the reader may know.
    """
    if ahead is None or not ahead.sessions:
        return None
    who = "1 session ends" if ahead.sessions == 1 else f"{ahead.sessions} sessions end"
    told = ", ".join(names[:MOST_NAMED])
    if told and ahead.sessions > min(len(names), MOST_NAMED):
        told += " and others"
    held = f"{format_milli(ahead.fgpu_milli)} fGPU"
    return f"starts when {who} ({f'{held}: {told}' if told else held})"


def fgpu_of(session: Session) -> str | None:
    """Return the requested fGPU, or what an exact amount came to; None while unknown."""
    if session.request.gpu_memory_mib is None:
        return format_milli(session.request.fgpu_milli)
    return None if session.placement is None else format_milli(session.placement.fgpu_milli)


def mib(amount: int) -> str:
    """Return memory exactly: in GiB where three decimals hold it, else in MiB."""
    # 1/8 GiB is 128 MiB: the finest that three decimals hold.
    return f"{gib(amount)} GiB" if amount % 128 == 0 and amount >= 512 else f"{amount} MiB"


def gib(amount: int) -> str:
    return format_milli(amount * 1000 // 1024)


def gib_words(amount_mib: int) -> str:
    """Return MiB as GiB for people: exact if short, else to a tenth; a used amount is never shown as 0."""
    return (
        gib(amount_mib) if amount_mib % 128 == 0 else f"{max(0.1, amount_mib / 1024):.1f}".removesuffix(".0")
    )


def ordinal(number: int) -> str:
    """Return "1st", "2nd", "3rd", "4th", "11th", "21st"."""
    if number % 100 in (11, 12, 13):
        return f"{number}th"
    ending = {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"


def place_words(position: int | None) -> str:
    """Return a waiting session's position: "Next in the queue", "2nd in the queue", or "" without one."""
    if not position:
        return ""
    return "Next in the queue" if position == 1 else f"{ordinal(position)} in the queue"
