"""What the service stores for the Hub to carry out: requests to resize a session, and messages for an end."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from sqlalchemy import Connection, Select, delete, select, update

from fgpu_scheduler.core.lifecycle import UP
from fgpu_scheduler.core.resizing import Amount
from fgpu_scheduler.errors import InvalidTransition
from fgpu_scheduler.store.schema import end_messages, is_live, resizes, sessions
from fgpu_scheduler.store.statements import put
from fgpu_scheduler.store.transaction import StorePart

MOST_MESSAGE_TEXT = 500
_live = select(sessions.c.id).where(is_live)


class EndMessages(StorePart):
    """The messages of administrators to the owners of sessions that they end.

    JupyterHub's API ends a server without a message. So the message is stored before the Hub is asked, and becomes the
    session's message if the session then ends by a user's wish.
    """

    def put(self, session_id: int, message: str, *, now_s: int) -> None:
        """Store the message for an end by a user's wish within `transaction.END_MESSAGE_VALID_S`."""
        with self._store.writing_unversioned() as connection:
            put(
                connection, end_messages, [{"session_id": session_id, "message": message, "said_at_s": now_s}]
            )

    def drop(self, session_id: int) -> None:
        """Delete the message, because the session was not ended."""
        with self._store.writing_unversioned() as connection:
            connection.execute(delete(end_messages).where(end_messages.c.session_id == session_id))


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


class Resizes(StorePart):
    """The owners' requests to resize running sessions."""

    def asked(self) -> tuple[Resize, ...]:
        """Return the pending requests, oldest first."""
        pending = select(resizes).where(resizes.c.state == ResizeState.ASKED.value)
        with self._store.reading() as connection:
            return _read(connection, pending.order_by(resizes.c.asked_at_s, resizes.c.session_id))

    def of_live(self) -> tuple[Resize, ...]:
        """Return the last request of each live session that has one, by session id."""
        of_live = select(resizes).where(resizes.c.session_id.in_(_live))
        with self._store.reading() as connection:
            return _read(connection, of_live.order_by(resizes.c.session_id))

    def ask(self, session_id: int, amount: Amount, *, by: str, now_s: int) -> Resize:
        """Store a request instead of the session's last one, and delete the requests of ended sessions.

        Raises:
            InvalidTransition: the session's last request is still pending.
        """
        new = Resize(session_id, amount, ResizeState.ASKED, None, by, now_s)
        with self._store.writing_unversioned() as connection:
            connection.execute(delete(resizes).where(resizes.c.session_id.not_in(_live)))
            state = select(resizes.c.state).where(resizes.c.session_id == session_id)
            if connection.execute(state).scalar_one_or_none() == ResizeState.ASKED:
                raise InvalidTransition(f"session {session_id} is being resized")
            row = {**asdict(new), **asdict(amount), "state": new.state.value}
            del row["amount"]
            put(connection, resizes, [row])
        return new

    def answer(self, session_id: int, state: ResizeState, message: str | None = None, *, now_s: int) -> None:
        """Store and log the result of a request, so that followers of the session look again."""
        with self._store.writing(now_s=now_s) as write:
            own = resizes.c.session_id == session_id
            values = {
                "state": state.value,
                "message": None if message is None else message[:MOST_MESSAGE_TEXT],
            }
            if write.connection.execute(update(resizes).where(own).values(**values)).rowcount:
                session = write.one(session_id)
                if session.state in UP:
                    write.event("answered", session, reason=state)


def _read(connection: Connection, chosen: Select[Any]) -> tuple[Resize, ...]:
    return tuple(
        Resize(
            row.session_id,
            Amount(row.fgpu_milli, row.gpu_memory_mib, row.compute_percent),
            ResizeState(row.state),
            row.message,
            row.asked_by,
            row.asked_at_s,
        )
        for row in connection.execute(chosen)
    )
