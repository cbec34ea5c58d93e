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
from alembic.util import CommandError
from sqlalchemy import Connection

VERSION_TABLE = "fgpu_alembic_version"

# Alembic keeps the environment of a run in a global.
_one_at_a_time = threading.Lock()


class SchemaIsNewer(Exception):
    """The database has a revision that this code does not know."""


def _config() -> Config:
    config = Config()
    # The % of a path would be read as an interpolation.
    config.set_main_option("script_location", str(Path(__file__).parent).replace("%", "%%"))
    return config


def missing(connection: Connection) -> list[str]:
    """Return what each revision does that the database lacks, in their order; none where it has this code's schema.

    Raises:
        SchemaIsNewer: it has one that this code does not know.
    """
    context = MigrationContext.configure(connection, opts={"version_table": VERSION_TABLE})
    current = context.get_current_revision()
    script = ScriptDirectory.from_config(_config())
    if current is not None:
        try:
            script.get_revision(current)
        except CommandError:
            raise SchemaIsNewer(current) from None
    found = list(script.iterate_revisions("head", current or "base"))
    return [one.doc for one in reversed(found)]


def upgrade(connection: Connection) -> None:
    """Bring the schema to this code's, inside the caller's transaction.

    Raises:
        SchemaIsNewer: the database has one that this code does not know.
    """
    if not missing(connection):
        return
    config = _config()
    config.attributes["connection"] = connection
    with _one_at_a_time:
        command.upgrade(config, "head")
