"""Several threads and processes on one database, some of them killed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from sqlalchemy import event, text
from store_worlds import (
    S,
    ask,
    assert_nothing_is_oversold,
    assert_the_log_tells_every_state,
    node,
    opened,
    schedule,
)

import fgpu_scheduler
from fgpu_scheduler.core.model import Quota, QuotaScope
from fgpu_scheduler.store.store import Store

HERE = Path(__file__).parent
SERVERS = 25


def started(script: str, *arguments: str) -> subprocess.Popen[str]:
    where = [str(HERE), str(Path(fgpu_scheduler.__file__).parent.parent)]
    child = subprocess.Popen(
        [sys.executable, str(HERE / script), *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(where)},
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    return child


def test_exactly_one_of_two_processes_gets_a_server(url: str) -> None:
    # The database does not exist yet: they also race to create and migrate it.
    rivals = [started("store_rival.py", url, str(SERVERS)) for _ in range(2)]
    for rival in rivals:
        assert rival.stdin is not None
        rival.stdin.write("go\n")
        rival.stdin.flush()
    won = []
    for rival in rivals:
        out, _ = rival.communicate(timeout=60)
        assert rival.returncode == 0
        won += [int(line) for line in out.splitlines()]
    assert sorted(won) == list(range(SERVERS))
    with opened(url) as store:
        assert len(store.snapshot(0).sessions) == SERVERS
        assert len(store.events(limit=1000)) == SERVERS
        assert store.version() == 1 + SERVERS


def test_killed_writer_loses_no_acknowledged_write_and_leaves_no_partial_one(url: str) -> None:
    acknowledged: list[tuple[int, S]] = []
    for life in range(3):
        with started("store_writer.py", url, f"life{life}-") as writer:
            assert writer.stdout is not None
            said = [writer.stdout.readline() for _ in range(20 + 7 * life)]
            writer.kill()
            said += writer.stdout.readlines()
        # The kill may have cut off the last line in the pipe.
        for session_id, state in (line.split() for line in said if line.endswith("\n")):
            acknowledged.append((int(session_id), S(state)))
        with opened(url) as store:
            assert_nothing_is_oversold(store)
            assert_the_log_tells_every_state(store)
            logged = {(event.session_id, event.to_state) for event in store.events(limit=10**6)}
            assert set(acknowledged) <= logged
            placed = [s for s in store.snapshot(0).sessions if s.state is not S.PENDING]
            assert all(s.placement and s.placement.shares for s in placed)
            if url.startswith("sqlite"):
                with store._database.reading() as connection:
                    assert connection.execute(text("PRAGMA integrity_check")).scalar_one() == "ok"
                    assert connection.execute(text("PRAGMA foreign_key_check")).all() == []


def test_snapshot_queries_do_not_grow_with_sessions_and_a_cached_one_takes_one_query(url: str) -> None:
    with opened(url) as hub, opened(url) as service:
        hub.set_nodes([node(devices=8)], now_s=0)
        hub.submit([ask(f"user{number}") for number in range(30)], now_s=0)
        assert len(schedule(hub)) == 16
        # The second read of the sessions counts requested amounts, the last one reads the lengths of runs.
        tables = ["meta", "sessions", "shares", "sessions", "nodes", "devices", "usage", "quotas", "sessions"]
        assert read_by(service) == tables
        assert read_by(service) == read_by(hub) == ["meta"]
        hub.set_held(1, True, now_s=2)
        assert read_by(hub) == ["meta"]
        assert read_by(service) == tables
        service.set_quotas([Quota(QuotaScope.ALL, "*", max_sessions=50)], now_s=3)
        assert read_by(hub) == tables
        assert service.snapshot(1) == hub.snapshot(1)


def read_by(store: Store) -> list[str]:
    """Return the tables that a snapshot reads."""
    reader = store._database._reader
    assert reader is not None
    statements: list[str] = []

    def seen(*given: Any) -> None:
        statements.append(given[2])

    event.listen(reader, "before_cursor_execute", seen)
    assert len(store.snapshot(1).sessions) == 30
    event.remove(reader, "before_cursor_execute", seen)
    selects = [statement for statement in statements if statement.startswith("SELECT")]
    read = [" ".join(select.split()).partition("FROM ")[2].split()[0] for select in selects]
    return [table.removeprefix("fgpu_") for table in read]
