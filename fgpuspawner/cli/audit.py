"""The command ``fgpu audit``: who did what, for administrators; of their group for who administers one."""

from __future__ import annotations

import argparse
from typing import Any

from fgpuspawner.cli.api import Api
from fgpuspawner.cli.command import JsonReport
from fgpuspawner.cli.completion import administered, offers
from fgpuspawner.cli.sessions import add_users_command
from fgpuspawner.text.tables import printable, table
from fgpuspawner.text.times import instant

FILTERS = {
    "group": "of this resource group",
    "actor": "of who did it",
    "action": "of what was done; node finds all of machines",
    "text": "with this in the target or the details",
    "before": "older than the line of this number",
    "limit": "so many at most, 500 or less; default: 50",
}
"""What the API calls each option, and its help."""


def add_to(commands: Any) -> None:
    about = "Show the audit log, newest first. Who administers a resource group sees that group's lines."
    parser = add_users_command(commands, audit, "audit", "who did what, for administrators", about)
    for name, what in FILTERS.items():
        option = parser.add_argument(f"--{name}", metavar="VALUE", help=what)
        if name == "group":
            offers(option, administered)


def audit(given: argparse.Namespace, api: Api) -> list[str]:
    """Return the lines of the log that the caller may read."""
    asked = {name: value for name in FILTERS if (value := getattr(given, name)) is not None}
    found = api.service_call("GET", "admin/audit", **asked)
    if given.json:
        return JsonReport(found)
    rows = [
        (
            str(line["id"]),
            instant(line["at_s"]),
            *(
                printable(line[name] or "-")
                for name in ("actor", "action", "resource_group", "target", "details")
            ),
        )
        for line in found["lines"]
    ]
    lines = table(("NUMBER", "WHEN", "WHO", "ACTION", "GROUP", "TARGET", "DETAILS"), rows)
    return lines if found["next"] is None else [*lines, f"older: --before {found['next']}"]
