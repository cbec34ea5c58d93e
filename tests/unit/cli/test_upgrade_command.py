"""``fgpu upgrade --check``: what a new version needs is said before its first start, and nothing is changed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from alembic import command
from alembic.script import ScriptDirectory
from jupyterhub import orm
from jupyterhub.dbutil import ALEMBIC_DIR
from sqlalchemy import create_engine, text

from commandline import failure, fgpu, filled, write_config
from fgpu_scheduler.store import migrations


@pytest.fixture
def databases(tmp_path: Path) -> tuple[str, str]:
    """Both databases, as this version and this JupyterHub make them."""
    scheduler, hub = f"sqlite:///{tmp_path}/fgpu.sqlite", f"sqlite:///{tmp_path}/jupyterhub.sqlite"
    filled(scheduler)
    # As the Hub does it; its own function sets up logging for good.
    engine = create_engine(hub)
    orm.Base.metadata.create_all(engine)
    engine.dispose()
    say(hub, "CREATE TABLE alembic_version (version_num VARCHAR(32) NOT NULL)")
    head = ScriptDirectory(ALEMBIC_DIR).get_current_head()
    say(hub, f"INSERT INTO alembic_version VALUES ('{head}')")
    return scheduler, hub


@pytest.fixture
def config(tmp_path: Path) -> str:
    """A configuration that names them."""
    own = f"c.JupyterHub.db_url = 'sqlite:///{tmp_path}/jupyterhub.sqlite'\n"
    return write_config(tmp_path, after=own, db_url=f"sqlite:///{tmp_path}/fgpu.sqlite")


def say(url: str, statement: str) -> None:
    engine = create_engine(url)
    with engine.begin() as connection:
        connection.execute(text(statement))
    engine.dispose()


def test_of_this_version_nothing_is_needed(capsys, databases, config):
    assert fgpu(capsys, "upgrade", "--check", "--config", config) == (
        0,
        f"OK: {config}\n  both databases are of this version\n",
        "",
    )


def test_databases_that_are_not_there_yet_need_nothing(capsys, config):
    assert fgpu(capsys, "upgrade", "--check", "--config", config)[0] == 0


def test_each_change_of_the_tables_is_named_and_none_is_made(capsys, tmp_path, config):
    url = f"sqlite:///{tmp_path}/fgpu.sqlite"
    engine = create_engine(url)
    with engine.begin() as connection:
        settings = migrations._config()
        settings.attributes["connection"] = connection
        command.upgrade(settings, "0011")
    engine.dispose()
    before = (tmp_path / "fgpu.sqlite").read_bytes()
    status, out, err = fgpu(capsys, "upgrade", "--check", "--config", config)
    assert (status, err) == (0, "")
    lines = out.splitlines()
    assert "make a backup first: fgpu backup FILE" in lines[1]
    changes = [line for line in lines if "the Hub changes its tables" in line]
    with engine.connect() as connection:
        assert len(changes) == len(migrations.missing(connection)) > 1
    assert any("Several GPU models" in line for line in changes)
    assert "sessions that run go on" in lines[-1]
    assert (tmp_path / "fgpu.sqlite").read_bytes() == before


def test_jupyterhubs_own_database_is_looked_at(capsys, databases, config):
    say(databases[1], "UPDATE alembic_version SET version_num = 'ff1860e38070'")
    status, out, _ = fgpu(capsys, "upgrade", "--check", "--config", config)
    assert status == 0
    assert f"stop the Hub, and run: jupyterhub upgrade-db -f {config}" in out


@pytest.mark.parametrize(
    ("which", "table"), [(0, "fgpu_alembic_version"), (1, "alembic_version")], ids=["scheduler", "jupyterhub"]
)
def test_a_newer_database_is_refused_in_one_line_and_as_json(capsys, databases, config, which, table):
    say(databases[which], f"UPDATE {table} SET version_num = 'zz99'")
    status, line = failure(capsys, "upgrade", "--check", "--config", config)
    assert status == 1
    assert "newer than this" in line
    status, out, err = fgpu(capsys, "upgrade", "--check", "--config", config, "--json")
    assert (status, err) == (1, "")
    assert json.loads(out)["level"] == "FAIL"


def test_a_damaged_database_is_no_database_without_need(capsys, tmp_path, databases, config):
    (tmp_path / "jupyterhub.sqlite").write_bytes(b"not a database" * 100)
    status, line = failure(capsys, "upgrade", "--check", "--config", config)
    assert status == 1
    assert "c.JupyterHub.db_url" in line


def test_without_check_it_says_that_it_only_looks(capsys):
    status, line = failure(capsys, "upgrade")
    assert status == 2
    assert "--check" in line
