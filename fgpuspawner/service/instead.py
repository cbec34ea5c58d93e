"""A request in place of a session of one's own: the world without that session. Pure."""

from __future__ import annotations

from dataclasses import replace

from fgpuspawner.service.problems import Problem
from fgpuspawner.service.view import World

INSTEAD_OF = "instead_of"
MOST_DIGITS = 15


def without(world: World, user: str, session_id: str) -> World:
    """Return the world as it will be when this session has ended.

    Raises:
        Problem: the user has no live session with this id, whoever else may have.
    """
    is_id = session_id.isascii() and session_id.isdigit() and len(session_id) <= MOST_DIGITS
    left_out = world.session(int(session_id)) if is_id else None
    if left_out is None or left_out.request.user != user:
        raise Problem(
            404, "no_such_session", "instead_of: you have no live session with this id", field=INSTEAD_OF
        )
    others = (s for s in world.snapshot.sessions if s is not left_out)
    return replace(world, snapshot=world.snapshot.with_sessions(others))
