"""Which sessions a list shows and in which order, from its address. Pure; shared by the page and its CSV file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from urllib.parse import urlencode

from fgpu_scheduler import parse_milli
from fgpuspawner.service.objects import Session
from fgpuspawner.service.pages.session_rows import LAUNCHING
from fgpuspawner.service.problems import bad_argument

STATES = {
    "running": ("RUNNING",),
    "waiting": ("PENDING",),
    "starting": LAUNCHING,
    "ending": ("TERMINATING",),
}
"""Choices of the status filter, with the states that each means."""

_ORDER = ("RUNNING", "PULLING", "PREPARING", "SCHEDULED", "PENDING", "TERMINATING")
LONGEST_TEXT = 200

Key = tuple[float | str, ...] | None
"""The sort key of a session; None sorts last in both directions."""


def _used(session: Session) -> Key:
    used = None if session.meter is None else session.meter.memory_used_mib
    return None if used is None else (used,)


def _amount(session: Session) -> Key:
    if session.fgpu is not None:
        return 0, parse_milli(session.fgpu, field="fgpu")
    # The fGPU of an exact amount is known once it is placed.
    return 1, session.gpu_memory_mib or 0, session.amount


SORTS: Mapping[str, Callable[[Session], Key]] = {
    "name": lambda s: (s.display_name.casefold(),),
    "user": lambda s: (s.user.casefold(),),
    "status": lambda s: (_ORDER.index(s.state), s.position or 0),
    "image": lambda s: (s.image_name.casefold(),),
    "amount": _amount,
    "use": _used,
    "started": lambda s: None if s.started_at_s is None else (s.started_at_s,),
}
"""Sortable columns."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The filters and order of a list. Without ``sort`` the order is that of submission."""

    sort: str = ""
    descending: bool = False
    state: str = ""
    user: str = ""
    text: str = ""

    @property
    def narrows(self) -> bool:
        """Whether anything may be left out."""
        return bool(self.state or self.user or self.text)

    def query(self, **changes: str | bool) -> str:
        """Return an address's query for this choice, with changes; empty if nothing is chosen."""
        made = replace(self, **changes)  # type: ignore[arg-type]
        given = {"sort": made.sort, "state": made.state, "user": made.user, "q": made.text}
        if made.sort and made.descending:
            given["order"] = "descending"
        return urlencode({name: value for name, value in given.items() if value})

    def direction(self, name: str) -> str:
        """Return a column's ``aria-sort``."""
        if name != self.sort:
            return "none"
        return "descending" if self.descending else "ascending"

    def turned(self, name: str) -> str:
        """Return the query of a column's title: ascending first, then descending, then as submitted."""
        if name != self.sort:
            return self.query(sort=name, descending=False)
        return self.query(sort="", descending=False) if self.descending else self.query(descending=True)


def read_choice(argument: Callable[[str], str], *, admin: bool) -> Choice:
    """Return the choice of an address, read with ``argument``.

    Raises:
        Problem: 400, an unknown choice, or too long a text.
    """
    for name, known in (
        ("sort", tuple(SORTS)),
        ("state", tuple(STATES)),
        ("order", ("ascending", "descending")),
    ):
        value = argument(name)
        if value and value not in known:
            raise bad_argument(name, f"must be one of {', '.join(known)}")
    for name in ("q", "user"):
        if len(argument(name)) > LONGEST_TEXT:
            raise bad_argument(name, f"must have at most {LONGEST_TEXT} characters")
    return Choice(
        sort=argument("sort"),
        descending=argument("order") == "descending",
        state=argument("state"),
        user=argument("user") if admin else "",
        text=argument("q").strip(),
    )


def chosen(sessions: Sequence[Session], choice: Choice) -> list[Session]:
    """Return the chosen sessions in order; equal ones in order of submission."""
    found = [s for s in sessions if _shown(s, choice)]
    if not choice.sort:
        return found
    key = SORTS[choice.sort]
    known = [(own, s) for s in found if (own := key(s)) is not None]
    rest = [s for s in found if key(s) is None]
    known.sort(key=lambda pair: pair[0], reverse=choice.descending)
    return [s for _, s in known] + rest


def _shown(session: Session, choice: Choice) -> bool:
    if choice.state and session.state not in STATES[choice.state]:
        return False
    if choice.user and session.user != choice.user:
        return False
    return not choice.text or any(choice.text.casefold() in text for text in _texts(session))


def _texts(session: Session) -> tuple[str, ...]:
    texts = (
        session.display_name,
        session.user,
        session.image_name,
        session.amount,
        session.state,
        session.message or "",
    )
    return tuple(text.casefold() for text in texts)
