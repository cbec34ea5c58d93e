"""Looks at what sessions take of the disk: what one of them does hides no other."""

from __future__ import annotations

from pathlib import Path

import pytest

from fgpu_scheduler import EndCause, Placement, Request, Session, SessionState, Share
from fgpuspawner.engines.base import EngineSilent
from fgpuspawner.hub.disk_watch import SessionDisks
from fgpuspawner.meter.disk import DISK, DiskUse, Limit, Limits, Taken


def session(session_id: int) -> Session:
    request = Request("alice", "", "python", "default", 500, 1000, 2048)
    placement = Placement("lab", (Share("GPU-1", 500, 2048, 25),))
    return Session(session_id, request, SessionState.RUNNING, 0, placement=placement)


class Fake:
    """Engine and scheduler: session 1 cannot be looked at, the others take too much."""

    def __init__(self, failure: Exception) -> None:
        self.failure = failure
        self.warned: list[int] = []

    async def disk_use(self, session: Session) -> DiskUse:
        if session.id == 1:
            raise self.failure
        return DiskUse(Taken(2 << 30))

    async def live(self) -> tuple[Session, ...]:
        return session(1), session(2)

    async def warn(
        self, session_id: int, message: str | None, cause: EndCause = EndCause.DISK_LIMIT
    ) -> Session:
        self.warned.append(session_id)
        return session(session_id)

    async def end(self, session_id: int, cause: EndCause, message: str | None = None) -> Session:
        raise AssertionError


@pytest.mark.parametrize("failure", [EngineSilent("away"), OSError("gone"), KeyError("State")])
async def test_a_session_that_cannot_be_looked_at_hides_no_other(failure: Exception, tmp_path: Path) -> None:
    fake = Fake(failure)
    limits = Limits(Limit(1024), Limit(), 600)
    await SessionDisks(fake, fake, limits, data=tmp_path, every_s=60).look()
    assert fake.warned == [2]
    assert list(DISK.read(tmp_path).sessions) == [2]
