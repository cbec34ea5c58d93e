"""Frequent queries take no longer with a long history.

Measured in steps of SQLite's virtual machine, which are the same in each run; PostgreSQL plans by its own statistics.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import pytest
from sqlalchemy import Connection, insert
from store_worlds import ask, database, end, node, opened, run

from fgpu_scheduler.core.model import EndCause, Session, SessionState
from fgpu_scheduler.core.records import SessionMeasurements
from fgpu_scheduler.store.history import _MEASURED_OF, History, Meters, read_experience
from fgpu_scheduler.store.rows import life_values, request_values
from fgpu_scheduler.store.schema import meters, sessions
from fgpu_scheduler.store.store import Store

MANY = 2000
EVERY = 10
"""Steps between two calls of SQLite's progress handler."""


@pytest.fixture
def filed(tmp_path: Path) -> Iterator[Store]:
    with database("sqlite", tmp_path) as url, opened(url) as store:
        yield store


def steps(store: Store, read: Callable[[Connection], object]) -> int:
    """Return the steps that a read takes, in tens."""
    taken = 0

    def step() -> int:
        nonlocal taken
        taken += 1
        return 0

    with store.reading() as connection:
        own = connection.connection.driver_connection
        assert own is not None
        read(connection)
        own.set_progress_handler(step, EVERY)
        try:
            read(connection)
        finally:
            own.set_progress_handler(None, 0)
    return taken


def fill_with_other_runs(store: Store, count: int) -> None:
    """Fill the history with measured runs of another user in another resource group."""
    asked = ask("mallory", group="busy")
    ended = Session(
        0, asked, SessionState.TERMINATED, 10, attempt=1, started_at_s=20, end_cause=EndCause.USER
    )
    row = {**request_values(asked), **life_values(ended)}
    measured = asdict(SessionMeasurements(0, 30, 1, 1, samples=9, covered_s=9))
    first = 1 + max((s.id for s in store.ended(user=None, limit=1)), default=0)
    ids = range(first, first + count)
    with store.writing_unversioned() as connection:
        connection.execute(insert(sessions), [{**row, "id": i, "ended_at_s": 1000 + i} for i in ids])
        connection.execute(insert(meters), [{**measured, "session_id": i} for i in ids])


def test_run_lengths_of_a_small_group_are_read_without_scanning_other_groups(filed: Store) -> None:
    filed.set_nodes([node()], now_s=0)
    for number in range(5):
        end(filed, run(filed, ask(), now_s=number).id, now_s=60 + number)

    def read(connection: Connection) -> object:
        return read_experience(connection, "lab")

    before = steps(filed, read)
    fill_with_other_runs(filed, MANY)
    assert steps(filed, read) <= 2 * before
    found = filed.experience("lab").lengths.rest("nobody", "none", 0)
    assert found is not None
    assert found.at_s([0.5]) == [60]


def test_measured_runs_of_one_user_are_read_without_scanning_other_users(filed: Store) -> None:
    filed.set_nodes([node()], now_s=0)
    measured, other = (end(filed, run(filed, ask(), now_s=1).id, now_s=9) for _ in range(2))
    Meters(filed).save(
        [SessionMeasurements(measured.id, 9, 1, 1, samples=3), SessionMeasurements(other.id, 9, 1, 1)]
    )

    def read(connection: Connection) -> object:
        return _MEASURED_OF.read(connection, user="alice", limit=5)

    before = steps(filed, read)
    fill_with_other_runs(filed, MANY)
    assert steps(filed, read) <= 2 * before
    found = History(filed).measured_runs("alice", limit=5)
    assert [past.session.id for past in found] == [measured.id]
