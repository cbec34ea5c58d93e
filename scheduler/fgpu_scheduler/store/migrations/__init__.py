"""The schema's revisions, which the store applies itself: an installed wheel needs no ``alembic.ini``.

An empty database gets the tables of `fgpu_scheduler.store.schema` and is marked with the newest revision. Only an older
database runs revisions. A change of the tables is therefore made twice: in the schema, and as a new revision in
``versions/``, which is written by hand and never changed after a release.
"""

from __future__ import annotations

import threading
from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection

from fgpu_scheduler.store.schema import metadata

VERSION_TABLE = "fgpu_alembic_version"

# Alembic keeps a run's environment in a global variable.
_one_at_a_time = threading.Lock()


class UnknownSchema(Exception):
    """The database has a revision, the message, that this code does not know."""


def _config() -> Config:
    config = Config()
    # Escape %, which the configuration would interpolate.
    config.set_main_option("script_location", str(Path(__file__).parent).replace("%", "%%"))
    return config


def schema_revision() -> str:
    """Return this code's newest revision."""
    return str(ScriptDirectory.from_config(_config()).get_current_head())


def _revision_of(connection: Connection) -> str | None:
    context = MigrationContext.configure(connection, opts={"version_table": VERSION_TABLE})
    found = context.get_current_revision()
    known = ScriptDirectory.from_config(_config()).walk_revisions()
    if found is not None and found not in {one.revision for one in known}:
        raise UnknownSchema(found)
    return found


def is_current(connection: Connection) -> bool:
    """Return whether the database has this code's schema, or False if it lacks revisions.

    Raises:
        UnknownSchema: it has a revision that this code does not know.
    """
    return _revision_of(connection) == schema_revision()


def upgrade(connection: Connection) -> None:
    """Create the tables or apply the missing revisions, in the caller's transaction; raises as `is_current` does."""
    found = _revision_of(connection)
    config = _config()
    config.attributes["connection"] = connection
    with _one_at_a_time:
        if found is None:
            # An error if there are tables without a revision: they would be of an unknown version.
            metadata.create_all(connection, checkfirst=False)
            command.stamp(config, "head")
        elif found != schema_revision():
            command.upgrade(config, "head")
