"""What a forecast of one resource group depends on."""

from __future__ import annotations

from fgpu_scheduler import Node, Quota, QuotaScope, Request, Session, SessionState, Snapshot, of_group
from fgpu_scheduler.core.model import Usage

S = SessionState
NODES = (Node("a", "default", 8000, 8192, ()), Node("b", "class", 8000, 8192, ()))


def session(number: int, group: str, state: SessionState) -> Session:
    return Session(number, Request("alice", str(number), "python", group, 500, 100, 128), state, 0)


EVERYTHING = Snapshot(
    7,
    3,
    NODES,
    (
        session(1, "default", S.RUNNING),
        session(2, "class", S.RUNNING),
        session(3, "class", S.PENDING),
        session(4, "default", S.PENDING),
    ),
    (Usage("alice", "class", 5), Usage("alice", "default", 6)),
)


def test_without_quotas_groups_share_nothing() -> None:
    own = of_group(EVERYTHING, "default")
    assert (own.now_s, own.version) == (7, 3)
    assert [n.id for n in own.nodes] == ["a"]
    assert [s.id for s in own.sessions] == [1, 4]
    assert [u.fgpu_milli_s for u in own.usage] == [6]


def test_with_quotas_what_is_held_elsewhere_counts_and_who_waits_there_does_not() -> None:
    quota = Quota(QuotaScope.USER, "*", max_sessions=1)
    limited = Snapshot(7, 3, NODES, EVERYTHING.sessions, EVERYTHING.usage, (quota,))
    own = of_group(limited, "default")
    assert own.quotas == (quota,)
    assert [n.id for n in own.nodes] == ["a", "b"]
    assert [s.id for s in own.sessions] == [1, 2, 4]
