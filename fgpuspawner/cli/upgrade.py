"""The command ``fgpu upgrade --check``: what a new version needs before its first start, said by that version."""

from __future__ import annotations

import argparse
import contextlib
from typing import Any

from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from alembic.util import CommandError
from sqlalchemy import create_engine
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.pool import NullPool

from fgpu_scheduler import StoreUnavailable, missing_migrations
from fgpuspawner.backup.databases import SQLITE, file_of, kind_of
from fgpuspawner.cli.backup import HUB, SCHEDULER, here_of
from fgpuspawner.cli.check import NOT_YET, as_json
from fgpuspawner.cli.command import add_command, add_config, one_line
from fgpuspawner.cli.hub_config import quiet


def add_to(commands: Any) -> None:
    about = "Say what this version changes in the databases of an installation. It changes nothing itself."
    parser = add_command(commands, run, "upgrade", "say what an upgrade needs, before the Hub starts", about)
    parser.add_argument("--check", action="store_true", required=True, help="look, and change nothing")
    add_config(parser)


def run(given: argparse.Namespace) -> list[str]:
    """Return what is needed, as lines or as JSON."""
    return as_json(needed, given.config) if given.json else needed(given.config)


def needed(config: str) -> list[str]:
    """Return what this version needs, as lines, the first of them "OK".

    Raises:
        FGPUError: it cannot work with these databases or settings; one line that says why.
    """
    here = here_of(config)
    changes = _of_the_scheduler(here.databases[SCHEDULER][0])
    hub = _of_jupyterhub(*here.databases[HUB])
    if hub:
        changes.append(f"WARNING: {hub}; stop the Hub, and run: jupyterhub upgrade-db -f {config}")
    if not changes:
        return [f"OK: {config}", "  both databases are of this version"]
    backup = (
        "WARNING: make a backup first: fgpu backup FILE. To go back is to restore it with the old version"
    )
    kept = "sessions that run go on meanwhile, and those that wait keep their places"
    return [f"OK: {config}", *(f"  {line}" for line in (backup, *changes, kept))]


def _of_the_scheduler(url: str) -> list[str]:
    try:
        steps = missing_migrations(url)
    except StoreUnavailable as e:
        if str(e).endswith(NOT_YET):
            return []
        raise
    # What a revision is for is said by its docstring.
    words = [" ".join(step.split()).rstrip(".") for step in steps]
    return [f"WARNING: the Hub changes its tables when it starts: {one}" for one in words]


def _of_jupyterhub(url: str, setting: str) -> str:
    """Return what is to be done for JupyterHub's own database; empty where nothing is.

    Raises:
        StoreUnavailable: it cannot be read, or is of a newer JupyterHub.
    """
    # Imported here: it takes a second.
    from jupyterhub.dbutil import ALEMBIC_DIR

    if kind_of(url, setting) == SQLITE and not file_of(url).exists():
        return ""
    script = ScriptDirectory(ALEMBIC_DIR)
    engine = create_engine(url, poolclass=NullPool)
    try:
        with quiet(), contextlib.closing(engine.connect()) as connection:
            found = MigrationContext.configure(connection).get_current_revision()
    except SQLAlchemyError as e:
        raise StoreUnavailable(f"{setting}: {one_line(str(e.__cause__ or e))}") from None
    if found == script.get_current_head():
        return ""
    with contextlib.suppress(CommandError):
        script.get_revision(found or "base")
        return "JupyterHub's own database is of an older version"
    raise StoreUnavailable(
        f"{setting}: JupyterHub's own database is newer than this JupyterHub; install the newer version"
    )
