"""A forecast for a request in place of a session of one's own."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fgpu_scheduler import Request, Session, SessionState, Snapshot
from fgpuspawner.service.api.forecast import without_session
from fgpuspawner.service.model import World
from fgpuspawner.service.problems import Problem


def session(session_id: int, user: str) -> Session:
    asked = Request(user, "", "python", "default", 500, 1000, 512)
    return Session(session_id, asked, SessionState.PENDING, 0)


WORLD = World(Snapshot(0, 1, (), (session(1, "alice"), session(2, "bob"))))


def test_only_that_session_is_left_out_and_the_world_itself_stays() -> None:
    left = without_session(WORLD, "alice", "1")
    assert [s.id for s in left.snapshot.sessions] == [2]
    assert left.session(1) is None
    assert [s.id for s in WORLD.snapshot.sessions] == [1, 2]
    assert left == replace(WORLD, snapshot=left.snapshot)


@pytest.mark.parametrize("bad", ["2", "3", "", "-1", "x", "1.0", "٣", "9" * 40])
def test_anothers_and_none_are_told_alike(bad: str) -> None:
    with pytest.raises(Problem) as told:
        without_session(WORLD, "alice", bad)
    assert (told.value.status, told.value.field) == (404, "instead_of")
    assert str(told.value) == "instead_of: you have no live session with this id"
