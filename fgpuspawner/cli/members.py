"""The command ``fgpu members``: who is in which group of JupyterHub, as one CSV file, written and read.

Groups are JupyterHub's: they are read and changed through its API, with the token of an administrator of the Hub.
JupyterHub does not tell whether its authenticator brings groups: one that does makes them its own at each log-in.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import click

from fgpuspawner.cli.api import TOKEN, URL, Api
from fgpuspawner.cli.command import FILE, Group, Report
from fgpuspawner.cli.csv_rows import (
    BadFile,
    Mistake,
    Row,
    apply_options,
    changes_report,
    output_option,
    printed,
    read_rows,
    refuse,
)
from fgpuspawner.service.csv_file import csv_text
from fgpuspawner.text.tables import printable

COLUMNS = ("hub_group", "user")
PAGE = 200
AT_ONCE = 500

Members = dict[str, set[str]]


token_option = click.option(
    "--token-file", metavar="FILE", type=FILE, help=f"a file with the token, instead of {TOKEN}"
)


@click.group(cls=Group, epilog=f"{URL} is the Hub's address, {TOKEN} an administrator's token.")
def members_command() -> None:
    """Write who is in which group of JupyterHub into a CSV file, and read one."""


@members_command.command()
@output_option
@token_option
def export(output: str | None, token_file: str | None) -> list[str]:
    """Print the members of all groups as a CSV file."""
    found = members(Api.from_environment(token_file))
    rows = [(group, user) for group in sorted(found) for user in sorted(found[group]) or [""]]
    groups = {group: sorted(found[group]) for group in sorted(found)}
    lines = printed(csv_text(COLUMNS, rows), output, f"{len(found)} groups")
    return Report(lines, {"version": 1, "groups": groups})


@members_command.command("import", exclusive=("dry_run", "apply"))
@click.argument("file", type=FILE)
@apply_options
@click.option("--add-users", is_flag=True, help="add users that the Hub does not know")
@token_option
def import_members(file: str, apply: bool, add_users: bool, token_file: str | None) -> list[str]:
    """Make the members of the groups that a CSV file names those that it has.

    FILE is as export writes it. Other groups stay as they are. Without --apply the command only says what it would
    change.
    """
    rows = read_rows(file, columns=COLUMNS, needed=COLUMNS)
    wanted = _wanted(file, rows)
    api = Api.from_environment(token_file)
    now = members(api)
    lines = {row.cells["user"]: row.line for row in reversed(rows) if "user" in row.cells}
    known = {str(user["name"]) for user in _pages(api, "users")}
    unknown = sorted(lines.keys() - known, key=lines.__getitem__)
    if not add_users:
        said = "JupyterHub knows no such user; have them log in once, or give --add-users"
        refuse(file, [Mistake(lines[u], "user", f"{printable(u[:40])!r}: {said}") for u in unknown])
    changes = [("new user", "", user) for user in unknown]
    for group in wanted:
        if group not in now:
            changes.append(("new group", group, ""))
        changes += [("add", group, user) for user in sorted(wanted[group] - now.get(group, set()))]
        changes += [("remove", group, user) for user in sorted(now.get(group, set()) - wanted[group])]
    if apply:
        _apply(api, changes)
    found = [{"change": change, "hub_group": g or None, "user": u or None} for change, g, u in changes]
    shown = [[printable(cell) for cell in change] for change in changes]
    return changes_report(["change", *COLUMNS], shown, found, applied=apply)


def _wanted(path: str, rows: list[Row]) -> Members:
    found: Members = {}
    mistakes: list[Mistake] = []
    for row in rows:
        group, user = row.cells.get("hub_group"), row.cells.get("user")
        if group is None:
            mistakes.append(Mistake(row.line, "hub_group", "it is empty; write the name of the group"))
            continue
        found.setdefault(group, set())
        if user is not None:
            found[group].add(user)
    refuse(path, mistakes)
    if not found:
        raise BadFile(f"{path}: it names no group. Nothing was changed")
    return found


def members(api: Api) -> Members:
    """Return who is in which group of JupyterHub."""
    return {str(group["name"]): set(map(str, group["users"])) for group in _pages(api, "groups")}


def _pages(api: Api, what: str) -> Iterator[dict[str, Any]]:
    offset = 0
    while True:
        found = api.hub_call("GET", what, offset=offset, limit=PAGE)
        yield from found["items"]
        following = found["_pagination"]["next"]
        if following is None:
            return
        offset = int(following["offset"])


def _apply(api: Api, changes: list[tuple[str, str, str]]) -> None:
    """Make the changes, many at once. JupyterHub cannot undo them; the same file again makes those that are left."""

    def in_groups(change: str) -> Iterator[tuple[str, list[str]]]:
        for group in dict.fromkeys(g for c, g, _ in changes if c == change):
            users = [u for c, g, u in changes if (c, g) == (change, group)]
            for at in range(0, len(users), AT_ONCE):
                yield f"groups/{quote(group, safe='')}", users[at : at + AT_ONCE]

    for _, group, _ in (c for c in changes if c[0] == "new group"):
        api.hub_call("POST", f"groups/{quote(group, safe='')}")
    for _, users in in_groups("new user"):
        api.hub_call("POST", "users", body={"usernames": users})
    for path, users in in_groups("add"):
        api.hub_call("POST", f"{path}/users", body={"users": users})
    for path, users in in_groups("remove"):
        api.hub_call("DELETE", f"{path}/users", body={"users": users})
