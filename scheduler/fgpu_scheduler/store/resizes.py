"""Owners' requests to resize running sessions: the service writes them, the Hub carries them out."""

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
    """The state of a resize request: pending (ASKED), carried out, or refused."""

    ASKED = "ASKED"
    DONE = "DONE"
    REFUSED = "REFUSED"


@dataclass(frozen=True, slots=True)
class Resize:
    """The last resize request of a session; ``message`` is why it was refused."""

    session_id: int
    amount: Amount
    state: ResizeState
    message: str | None
    asked_by: str
    asked_at_s: int


class Resizes:
    """The resize requests of an installation. Thread-safe."""

    def __init__(self, store: StoreConnection) -> None:
        self._store = store

    def asked(self) -> tuple[Resize, ...]:
        """Return the pending requests, oldest first."""
        with self._store.reading() as connection:
            rows = connection.execute(
                select(table)
                .where(table.c.state == ResizeState.ASKED.value)
                .order_by(table.c.asked_at_s, table.c.session_id)
            )
            return tuple(_resize(row) for row in rows)

    def of_live(self) -> tuple[Resize, ...]:
        """Return the last request of each live session that has one, by session id."""
        with self._store.reading() as connection:
            live = select(sessions.c.id).where(is_live)
            chosen = select(table).where(table.c.session_id.in_(live)).order_by(table.c.session_id)
            return tuple(_resize(row) for row in connection.execute(chosen))

    def ask(self, session_id: int, amount: Amount, *, by: str, now_s: int) -> Resize:
        """Store a request instead of the session's last one, and delete the requests of ended sessions.

        Raises:
            InvalidTransition: the session's last request is still pending.
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
        """Store and log the result of a request, so that followers of the session look again."""
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
