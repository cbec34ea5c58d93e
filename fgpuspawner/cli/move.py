"""The command ``fgpu move``: the scheduler's database from SQLite to PostgreSQL, or back."""

from __future__ import annotations

import argparse
import contextlib
from typing import Any

from fgpu_scheduler import Claim, copy_database, lock_file
from fgpuspawner.cli.command import add_command, add_config, loaded


def add_to(commands: Any) -> None:
    about = (
        "Copy the scheduler's database into an empty one of either kind, while no Hub runs. The installation stays the "
        "same: its sessions, queue, history and images. The old database stays as it is."
    )
    parser = add_command(commands, run, "move", "copy the database to another one", about)
    parser.add_argument("to", metavar="URL", help="the new database, as in c.FGPU.db_url")
    add_config(parser)


def run(given: argparse.Namespace) -> list[str]:
    """Copy it, and return what is to be done next."""
    _, settings = loaded(given.config)
    data = settings.data_path()
    with (
        lock_file(data / "hub.lock", f"a Hub runs on {data}; stop it first"),
        contextlib.closing(Claim(settings.database_url())) as old,
        contextlib.closing(Claim(given.to)) as new,
    ):
        old.take()
        new.take()
        count = copy_database(settings.database_url(), given.to)
    return [
        f"OK: {count} sessions, with all that belongs to them",
        "next: write this URL into c.FGPU.db_url, and start the Hub; then remove the old database",
    ]
