"""The command ``fgpu members``: who is in which group of JupyterHub, as one CSV file, written and read.

Groups are JupyterHub's: they are read and changed through its API, with the token of an administrator of the Hub.
JupyterHub does not tell whether its authenticator brings groups: one that does makes them its own at each log-in.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

from fgpuspawner.cli.api import TOKEN, URL, Api
from fgpuspawner.cli.command import JsonReport, add_command, add_commands
from fgpuspawner.cli.csv_rows import BadFile, Mistake, Row, printed, read_rows, refuse
from fgpuspawner.cli.quota import add_apply, told
from fgpuspawner.service.csv_file import csv_text
from fgpuspawner.text.tables import printable

COLUMNS = ("hub_group", "user")
PAGE = 200
AT_ONCE = 500

Members = dict[str, set[str]]


def add_to(commands: Any) -> None:
    about = "Write who is in which group of JupyterHub into a CSV file, and read one."
    own = add_commands(commands, "members", "the members of JupyterHub's groups as a CSV file", about)
    where = f"{URL} is the Hub's address, {TOKEN} an administrator's token."
    what = "print the members of all groups as a CSV file"
    export = add_command(
        own, run_export, "export", what, f"Print the members of all groups as a CSV file. {where}"
    )
    export.add_argument("--output", metavar="FILE", help="write it here, where there is no file yet")
    reading = add_command(
        own,
        run_import,
        "import",
        "make the members of groups those of a CSV file",
        "Make the members of the groups that a CSV file names those that it has; other groups stay as they are. "
        f"Without --apply it only says what it would change. {where}",
    )
    reading.add_argument("file", metavar="FILE.csv", help="the file, as export writes it")
    add_apply(reading)
    reading.add_argument("--add-users", action="store_true", help="add users that the Hub does not know")
    for one in (export, reading):
        one.add_argument("--token-file", metavar="FILE", help=f"a file with the token, instead of {TOKEN}")


def run_export(given: argparse.Namespace) -> list[str]:
    """Return the members of every group as a file's lines, or write the file."""
    found = members(Api.from_environment(given.token_file))
    rows = [(group, user) for group in sorted(found) for user in sorted(found[group]) or [""]]
    if given.json:
        return JsonReport({"version": 1, "groups": {group: sorted(found[group]) for group in sorted(found)}})
    return printed(csv_text(COLUMNS, rows), given.output, f"{len(found)} groups")


def run_import(given: argparse.Namespace) -> list[str]:
    """Return what the file changes, and change it where that is asked for.

    Raises:
        BadFile: it cannot be read, or names users that there are not; nothing is changed.
    """
    rows = read_rows(given.file, columns=COLUMNS, needed=COLUMNS)
    wanted = _wanted(given.file, rows)
    api = Api.from_environment(given.token_file)
    now = members(api)
    lines = {row.cells["user"]: row.line for row in reversed(rows) if "user" in row.cells}
    known = {str(user["name"]) for user in _pages(api, "users")}
    unknown = sorted(lines.keys() - known, key=lines.__getitem__)
    if not given.add_users:
        said = "JupyterHub knows no such user; have them log in once, or give --add-users"
        refuse(given.file, [Mistake(lines[u], "user", f"{printable(u[:40])!r}: {said}") for u in unknown])
    changes = [("new user", "", user) for user in unknown]
    for group in wanted:
        if group not in now:
            changes.append(("new group", group, ""))
        changes += [("add", group, user) for user in sorted(wanted[group] - now.get(group, set()))]
        changes += [("remove", group, user) for user in sorted(now.get(group, set()) - wanted[group])]
    if given.apply:
        _apply(api, changes)
    if given.json:
        found = [{"change": change, "hub_group": g or None, "user": u or None} for change, g, u in changes]
        return JsonReport({"version": 1, "applied": bool(given.apply), "changes": found})
    shown = [[printable(cell) for cell in change] for change in changes]
    return told(["change", *COLUMNS], shown, applied=given.apply)


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
    """Make the changes, many at once. JupyterHub has no way to take several back: run again, it does what is left."""

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
