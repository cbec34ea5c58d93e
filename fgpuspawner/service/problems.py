"""Errors of the API: a status, a stable code, and a message that is safe to show."""

from __future__ import annotations

from typing import Any


class Problem(Exception):
    """A request that is answered with an error object."""

    def __init__(self, status: int, code: str, message: str, *, field: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.field = field

    def as_json(self) -> dict[str, Any]:
        """Return the API's error object."""
        return {"error": {"code": self.code, "field": self.field, "message": self.message}}


def hub_unavailable() -> Problem:
    """The Hub does not answer, so neither can this service."""
    return Problem(503, "hub_unavailable", "JupyterHub does not answer; try again in a moment")
