"""The command ``fgpu audit``."""

from __future__ import annotations

import click

from fgpuspawner.cli.api import Api
from fgpuspawner.cli.command import Report
from fgpuspawner.cli.completion import administered, offers
from fgpuspawner.cli.sessions import users_command
from fgpuspawner.text.tables import printable, table
from fgpuspawner.text.times import instant

SHOWN = ("actor", "action", "resource_group", "target", "details")


@users_command("audit")
@click.option(
    "--group", metavar="GROUP", shell_complete=offers(administered), help="lines of this resource group"
)
@click.option("--actor", metavar="NAME", help="lines of who did it")
@click.option("--action", metavar="ACTION", help="lines of what was done; node finds all of machines")
@click.option("--text", metavar="WORDS", help="lines with this in the target or the details")
@click.option("--before", metavar="NUMBER", help="lines older than the line of this number")
@click.option("--limit", metavar="NUMBER", help="how many at most, 500 or less; default: 50")
def audit_command(api: Api, **filters: str | None) -> list[str]:
    """Show the audit log, newest first.

    Administrators of a resource group see that group's lines.
    """
    asked = {name: value for name, value in filters.items() if value is not None}
    found = api.service_call("GET", "admin/audit", **asked)
    rows = [
        (str(line["id"]), instant(line["at_s"]), *(printable(line[name] or "-") for name in SHOWN))
        for line in found["lines"]
    ]
    lines = table(("NUMBER", "WHEN", "WHO", "ACTION", "GROUP", "TARGET", "DETAILS"), rows)
    return Report(
        [*lines, *([f"older: --before {found['next']}"] if found["next"] is not None else [])], found
    )
