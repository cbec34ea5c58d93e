"""Sessions and amounts in words, the same on every page and in every message. Pure."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence

from fgpu_scheduler import Ahead, EndCause, Request, Session, SessionState, format_milli

TURNING = frozenset(("R", "AL", "RLE", "RLO", "LRE", "LRO", "PDF", "RLI", "LRI", "FSI", "PDI"))
ISOLATES = dict.fromkeys(range(0x2066, 0x206A))


def isolated(text: str) -> str:
    """Return other people's words for the middle of a sentence: from right to left they turn nothing else around."""
    if all(unicodedata.bidirectional(letter) not in TURNING for letter in text):
        return text
    return f"\u2068{text.translate(ISOLATES)}\u2069"


def server_words(session: Session) -> str:
    """Return what people call a session: its server's name."""
    return session.request.server_name or "default server"


def amount_words(asked: Request) -> str:
    """Return what was asked for of a GPU: "0.5 fGPU", "5120 MiB + 25 %", or "5120 MiB" for memory only."""
    if asked.gpu_memory_mib is None:
        return f"{format_milli(asked.fgpu_milli)} fGPU"
    if asked.compute_percent is None:
        return f"{asked.gpu_memory_mib} MiB"
    return f"{asked.gpu_memory_mib} MiB + {asked.compute_percent} %"


WARNINGS = {
    EndCause.IDLE: "idle: it is ended unless you keep it or use it",
    EndCause.TIME_LIMIT: "its time limit is reached soon",
    EndCause.PREEMPTED: "a session of higher priority needs its place",
}


def warning_words(session: Session) -> str | None:
    """Return what the owner of a running session is warned of, or None. When it ends is said beside it."""
    if session.state is not SessionState.RUNNING or session.ends_cause is None:
        return None
    return WARNINGS.get(session.ends_cause, "it is about to be ended")


WITHDRAWN = (
    "its image is not in the catalogue any more: it is refused when its turn comes, unless that changes; cancel it and "
    "choose another image"
)
"""What the owner of a waiting session is told while nobody may start its image."""

MOST_NAMED = 3


def ahead_words(ahead: Ahead | None, names: Sequence[str] = ()) -> str | None:
    """Return who holds what would have to end first, or None where nobody does.

    ``names`` are those of them that the reader may know.
    """
    if ahead is None or not ahead.sessions:
        return None
    held = f"{format_milli(ahead.fgpu_milli)} fGPU"
    one = ahead.sessions == 1
    who = f"1 session that holds {held} has" if one else f"{ahead.sessions} sessions that hold {held} have"
    told = ", ".join(names[:MOST_NAMED])
    if told and ahead.sessions > min(len(names), MOST_NAMED):
        told = f"among them {told}"
    return f"{who} to end first" + (f" ({told})" if told else "")


def fgpu_of(session: Session) -> str | None:
    """Return what was asked for in fGPU, or what an exact amount came to; None while that is not known."""
    if session.request.gpu_memory_mib is None:
        return format_milli(session.request.fgpu_milli)
    if session.placement is None:
        return None
    return format_milli(sum(share.fgpu_milli for share in session.placement.shares))


def mib(amount: int) -> str:
    """Return memory exactly: in GiB where three decimals hold it, else in MiB."""
    return f"{gib(amount)} GiB" if is_gib(amount) else f"{amount} MiB"


def is_gib(amount: int) -> bool:
    """Return whether three decimals of a GiB hold this many MiB."""
    # 1/8 GiB is 128 MiB: the finest that three decimals hold.
    return amount % 128 == 0 and amount >= 512


def gib(amount: int) -> str:
    """Return MiB as GiB."""
    return format_milli(amount * 1000 // 1024)


def memory_words(amount_mib: int) -> str:
    """Return memory for people: exact GiB where these are short, else to a tenth; below half a GiB in MiB."""
    return mib(amount_mib) if is_gib(amount_mib) or amount_mib < 512 else f"{amount_mib / 1024:.1f} GiB"


def ordinal(number: int) -> str:
    """Return "1st", "2nd", "3rd", "4th", "11th", "21st"."""
    if number % 100 in (11, 12, 13):
        return f"{number}th"
    ending = {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"
