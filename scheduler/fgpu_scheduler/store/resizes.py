"""What owners wish of the slices of running sessions, and what became of it: the service writes, the Hub acts."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from sqlalchemy import delete, select, update

from fgpu_scheduler.core.model import SessionState
from fgpu_scheduler.core.resizing import Amount
from fgpu_scheduler.errors import InvalidTransition
from fgpu_scheduler.store.connection import StoreConnection
from fgpu_scheduler.store.schema import is_live, sessions
from fgpu_scheduler.store.schema import resizes as table
from fgpu_scheduler.store.upsert import put

MOST_WORDS = 500


class ResizeState(StrEnum):
    """Where a wish is: the Hub is to act on it, or it came to its end."""

    ASKED = "ASKED"
    DONE = "DONE"
    REFUSED = "REFUSED"


@dataclass(frozen=True, slots=True)
class Resize:
    """The last wish for a session's slice, and of one that was refused, why."""

    session_id: int
    amount: Amount
    state: ResizeState
    message: str | None
    asked_by: str
    asked_at_s: int


class Resizes:
    """The wishes of one installation. Thread-safe, as its store is."""

    def __init__(self, store: StoreConnection) -> None:
        self._store = store

    def asked(self) -> tuple[Resize, ...]:
        """Return the wishes that are to be acted on, the oldest first."""
        with self._store.reading() as connection:
            rows = connection.execute(
                select(table)
                .where(table.c.state == ResizeState.ASKED.value)
                .order_by(table.c.asked_at_s, table.c.session_id)
            )
            return tuple(_resize(row) for row in rows)

    def of_live(self) -> tuple[Resize, ...]:
        """Return the last wish for each live session that was ever wished something, by session."""
        with self._store.reading() as connection:
            live = select(sessions.c.id).where(is_live)
            chosen = select(table).where(table.c.session_id.in_(live)).order_by(table.c.session_id)
            return tuple(_resize(row) for row in connection.execute(chosen))

    def ask(self, session_id: int, amount: Amount, *, by: str, now_s: int) -> Resize:
        """Keep what is wished; the last wish of before is forgotten, and those of sessions that have ended are.

        Raises:
            InvalidTransition: the wish before it is still to be acted on.
        """
        new = Resize(session_id, amount, ResizeState.ASKED, None, by, now_s)
        with self._store.writing_unversioned() as connection:
            live = select(sessions.c.id).where(is_live)
            connection.execute(delete(table).where(table.c.session_id.not_in(live)))
            state = select(table.c.state).where(table.c.session_id == session_id)
            if connection.execute(state).scalar_one_or_none() == ResizeState.ASKED:
                raise InvalidTransition(f"session {session_id} is being resized")
            row = {**asdict(new), **asdict(amount), "state": new.state.value}
            del row["amount"]
            put(connection, table, [row])
        return new

    def answer(self, session_id: int, state: ResizeState, message: str | None = None, *, now_s: int) -> None:
        """Keep what became of a wish, and log it, so that all who follow the session look again."""
        with self._store.writing(now_s=now_s) as write:
            own = table.c.session_id == session_id
            values = {"state": state.value, "message": None if message is None else message[:MOST_WORDS]}
            if write.connection.execute(update(table).where(own).values(**values)).rowcount:
                session = write.one(session_id)
                if session.state is SessionState.RUNNING:
                    write.event("answered", session, reason=state)


def _resize(row: Any) -> Resize:
    return Resize(
        row.session_id,
        Amount(row.fgpu_milli, row.gpu_memory_mib, row.compute_percent),
        ResizeState(row.state),
        row.message,
        row.asked_by,
        row.asked_at_s,
    )
