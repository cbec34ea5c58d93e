"""The schema's history, run by the store itself: an installed wheel needs no ``alembic.ini``.

A revision is written by hand in ``versions/`` and never changed once released; a test holds that all of
them together make exactly the tables of `fgpu_scheduler.store.schema`.
"""

from __future__ import annotations

import threading
from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection

VERSION_TABLE = "fgpu_alembic_version"

# Alembic keeps the environment of a run in a global.
_one_at_a_time = threading.Lock()


class UnknownSchema(Exception):
    """The database has a revision that this code does not know: the message."""


def _config() -> Config:
    config = Config()
    # The % of a path would be read as an interpolation.
    config.set_main_option("script_location", str(Path(__file__).parent).replace("%", "%%"))
    return config


def schema_revision() -> str:
    """Return the newest revision of this code, which names its schema."""
    return str(ScriptDirectory.from_config(_config()).get_current_head())


def is_current(connection: Connection) -> bool:
    """Return whether the database has this code's schema; False: it lacks revisions.

    Raises:
        UnknownSchema: it has a revision that this code does not know.
    """
    context = MigrationContext.configure(connection, opts={"version_table": VERSION_TABLE})
    found = context.get_current_revision()
    known = ScriptDirectory.from_config(_config()).walk_revisions()
    if found is not None and found not in {one.revision for one in known}:
        raise UnknownSchema(found)
    return found == schema_revision()


def upgrade(connection: Connection) -> None:
    """Bring the schema to this code's, inside the caller's transaction.

    Raises:
        UnknownSchema: the database has a revision that this code does not know.
    """
    if is_current(connection):
        return
    config = _config()
    config.attributes["connection"] = connection
    with _one_at_a_time:
        command.upgrade(config, "head")
