"""What the service refuses: its functions raise a `Problem` for what cannot be done, in words that are safe to show."""

from __future__ import annotations

from fgpuspawner.service import objects


class Problem(Exception):
    """A request that is answered with an error object."""

    def __init__(self, status: int, code: str, message: str, *, field: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.field = field

    def as_json(self) -> str:
        return objects.Error.of(error=self).as_json()


def bad_argument(field: str, message: str) -> Problem:
    """A field cannot be read, or is out of its bounds."""
    return Problem(400, "bad_argument", f"{field}: {message}", field=field)


def forbidden(message: str, *, field: str | None = None) -> Problem:
    return Problem(403, "forbidden", message, field=field)


def hub_unavailable() -> Problem:
    return Problem(503, "hub_unavailable", "JupyterHub does not answer; try again in a moment")


def no_such_session(session_id: str) -> Problem:
    """The session does not exist, or the caller may not know of it."""
    return Problem(404, "no_such_session", f"there is no session {session_id}")


def already_ended(session_id: str) -> Problem:
    return Problem(409, "already_ended", f"session {session_id} has ended already")
