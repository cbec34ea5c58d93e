"""Every field of a session is read back unchanged, and the database refuses empty shares."""

from __future__ import annotations

from dataclasses import fields

import pytest
from sqlalchemy.exc import IntegrityError
from store_worlds import S, ask, node, run

from fgpu_scheduler.core.model import (
    EndCause,
    Placement,
    RefusedNode,
    Request,
    Session,
    Share,
    ShareMode,
    Size,
    WaitReason,
)
from fgpu_scheduler.store.rows import life_values, request_values, share_values
from fgpu_scheduler.store.schema import sessions, shares
from fgpu_scheduler.store.store import Store

FULL_REQUEST = Request(
    "alice",
    "work",
    "image@sha256:0",
    "lab",
    0,
    1000,
    1024,
    gpu_memory_mib=4096,
    compute_percent=35,
    gpu_models=("Test GPU", 'Other, "quoted"'),
    folders=("sets", "vision"),
    time_limit_s=3600,
    priority=-7,
    account="science/physics",
    groups=("a,b", "class", 'Zoë "quoted"'),
    name='Zoë "train"',
    setup=2**33,
    on_demand=True,
)
FULL_SESSION = Session(
    1,
    FULL_REQUEST,
    S.RUNNING,
    5,
    True,
    3,
    Placement("n1", (Share("GPU-n1-1", 500, 4096, 0, ShareMode.MEMORY),)),
    WaitReason.RESERVED,
    6,
    7,
    8,
    EndCause.OOM,
    "said",
    "box",
    12,
    2**33,
    2**33 + 1,
    EndCause.IDLE,
    2**33 + 2,
    2**33 + 3,
    11,
    -8,
    2**33 + 4,
    2**33 + 5,
    (RefusedNode("n1", 2**33 + 6, 3, 'no "room"'), RefusedNode("n2", 7, 1, "tainted")),
    (Size(2**33 + 7, 250, 250_000, 2048, 25), Size(2**33 + 8, 750, 750_000, 6144, 75)),
    2**33 + 9,
    2**33 + 10,
    "the driver refused",
    2**33 + 11,
    2**33 + 12,
)


def test_every_field_of_a_session_is_read_back(store: Store) -> None:
    # Each value must differ from its default, so that this test fails for a new field that it does not set.
    for value in (FULL_SESSION, FULL_REQUEST):
        assert [f.name for f in fields(value) if getattr(value, f.name) == f.default] == []
    with store._database.writing() as connection:
        row = {"id": 1, **request_values(FULL_REQUEST), **life_values(FULL_SESSION)}
        connection.execute(sessions.insert().values(row))
        connection.execute(shares.insert(), share_values(FULL_SESSION))
    assert store.session(1) == FULL_SESSION


@pytest.mark.parametrize("amounts", [(0, 4096, 50), (500, 0, 50), (500, 4096, -1)])
def test_database_constraint_refuses_an_empty_share(store: Store, amounts: tuple[int, int, int]) -> None:
    store.set_nodes([node()], now_s=0)
    session = run(store, ask())
    assert session.placement is not None
    fgpu_milli, memory_mib, compute_percent = amounts
    row = share_values(session)[0] | {"position": 5}
    row |= {"fgpu_milli": fgpu_milli, "memory_mib": memory_mib, "compute_percent": compute_percent}
    with pytest.raises(IntegrityError), store._database.writing() as connection:
        connection.execute(shares.insert(), [row])
