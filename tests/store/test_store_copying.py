"""A database that is copied, from either kind into either, is the same installation."""

from __future__ import annotations

from pathlib import Path

import pytest
from sqlalchemy import NullPool, create_engine, delete, func, select
from store_worlds import S, ask, database, end, node, opened, run

from fgpu_scheduler import BadSettings
from fgpu_scheduler.store.copying import copy_database
from fgpu_scheduler.store.schema import metadata, sessions, shares

KINDS = ["sqlite", "postgresql"]


def rows(url: str) -> dict[str, list[str]]:
    """Return all that a database holds."""
    engine = create_engine(url, poolclass=NullPool)
    with engine.connect() as connection:
        return {t.name: sorted(map(repr, connection.execute(select(t)))) for t in metadata.sorted_tables}


@pytest.mark.parametrize("to", KINDS)
@pytest.mark.parametrize("kind", KINDS)
def test_everything_is_there_and_ids_go_on_where_they_were(tmp_path: Path, kind: str, to: str) -> None:
    with database(kind, tmp_path) as old, database(to, tmp_path) as new:
        with opened(old) as store:
            store.set_nodes([node(devices=8)], now_s=1)
            kept = run(store, ask("alice"), now_s=2)
            store.submit([ask(f"u{number}") for number in range(5)], now_s=3)
            last = run(store, ask("zoe"), now_s=4)
            end(store, last.id, now_s=5)
            installation = store.installation_id
        # The newest was forgotten: its id is in names of containers, and must not be another's.
        engine = create_engine(old, poolclass=NullPool)
        with engine.begin() as connection:
            connection.execute(delete(shares).where(shares.c.session_id == last.id))
            connection.execute(delete(sessions).where(sessions.c.id == last.id))
        before = rows(old)
        assert copy_database(old, new) == 6
        assert rows(new) == before == rows(old)
        with opened(new) as store:
            assert store.installation_id == installation
            assert store.session(kept.id).state is S.RUNNING
            (made,) = store.submit([ask("new")], now_s=9)
            assert made.id == last.id + 1


def test_what_holds_sessions_is_not_written_over(tmp_path: Path) -> None:
    with database("sqlite", tmp_path) as old, database("sqlite", tmp_path) as new:
        for url in (old, new):
            with opened(url) as store:
                store.submit([ask()], now_s=1)
        before = rows(new)
        with pytest.raises(BadSettings, match="holds sessions already; make an empty one"):
            copy_database(old, new)
        assert rows(new) == before


def test_what_breaks_off_leaves_the_new_one_empty_and_the_old_one_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with database("sqlite", tmp_path) as old, database("sqlite", tmp_path) as new:
        with opened(old) as store:
            store.set_nodes([node()], now_s=1)
            run(store, ask(), now_s=2)
        before = rows(old)

        def fails(*_: object) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patched:
            patched.setattr("fgpu_scheduler.store.copying._go_on", fails)
            with pytest.raises(KeyboardInterrupt):
                copy_database(old, new)
        assert rows(old) == before
        engine = create_engine(new, poolclass=NullPool)
        with engine.connect() as connection:
            assert connection.execute(select(func.count()).select_from(sessions)).scalar_one() == 0
        assert copy_database(old, new) == 1
