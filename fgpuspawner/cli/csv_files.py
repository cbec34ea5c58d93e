"""The commands ``fgpu quota`` and ``fgpu members``: quotas, or the members of Hub groups, written and read as CSV files.

A file is read in four steps: its table, its rows, the changes that they make, and with ``--apply`` these changes.
Every mistake is reported with its line and column. What a spreadsheet does to a file is undone: a byte order mark,
semicolons where numbers have a comma, and the apostrophe that keeps a name from being computed.
"""

from __future__ import annotations

import csv
import io
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import click

from fgpu_scheduler import BadSettings, Quota, QuotaEdits, in_force, limits_words, quota_words
from fgpuspawner.cli.api import TOKEN, URL, ApiClient, token_option
from fgpuspawner.cli.command import FILE, Group, Report, config_option, who, writable
from fgpuspawner.cli.hub_config import loaded
from fgpuspawner.service.admin.quotas import key_of, spec_of
from fgpuspawner.service.csv_file import csv_text, plain
from fgpuspawner.settings.queue import QUOTA_AMOUNTS, QUOTA_KEYS, BadQuota, numbers_in, quota_of
from fgpuspawner.text.tables import printable, table

MOST_BYTES = 16 * 2**20
MOST_MISTAKES = 10
MEMBER_COLUMNS = ("hub_group", "user")
PAGE, USERS_IN_A_CALL = 200, 500


class BadFile(BadSettings):
    """A file that cannot be used. The message names lines, columns, and what would work."""

    code = "bad_file"


class Row(NamedTuple):
    """A line of the file and its cells by column, without empty ones."""

    line: int
    cells: dict[str, str]


def _mistake(line: int, column: str, message: str) -> str:
    return f"line {line}{f', column {column}' if column else ''}: {message}"


def _refuse(path: str, mistakes: Sequence[str]) -> None:
    if mistakes:
        more = f"; and {len(mistakes) - MOST_MISTAKES} more" if len(mistakes) > MOST_MISTAKES else ""
        raise BadFile(f"{path}: {'; '.join(mistakes[:MOST_MISTAKES])}{more}. Nothing was changed")


def _read_rows(path: str, *, columns: Sequence[str], required: Collection[str] = ()) -> list[Row]:
    with Path(path).open("rb") as file:
        data = file.read(MOST_BYTES + 1)
    if len(data) > MOST_BYTES:
        raise BadFile(f"{path}: it has more than {MOST_BYTES // 2**20} MiB; split it")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as e:
        line = data[: e.start].count(b"\n") + 1
        raise BadFile(f"{path}: line {line}: it is not UTF-8; save it as CSV UTF-8") from None
    first = text.partition("\n")[0]
    delimiter = ";" if ";" in first and "," not in first else ","
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    lines: list[tuple[int, list[str]]] = []
    began = 1
    try:
        for cells in reader:
            lines.append((began, [plain(cell.strip()) for cell in cells]))
            began = reader.line_num + 1
    except csv.Error as e:
        raise BadFile(f"{path}: line {began}: {e}; write a quote inside quotes twice") from None
    heading = lines[0][1] if lines else []
    if not any(heading):
        raise BadFile(f"{path}: its first line must name columns: {', '.join(columns)}")
    mistakes = []
    for name in heading:
        if name not in columns:
            near = get_close_matches(name.lower(), columns, n=1) or columns
            words = f"there is no such column; use {', '.join(near)}"
            mistakes.append(_mistake(1, printable(name[:40]) or "without a name", words))
    mistakes += [_mistake(1, name, "it is there twice") for name in columns if heading.count(name) > 1]
    mistakes += [_mistake(1, name, "it is missing") for name in required if name not in heading]
    _refuse(path, mistakes)
    rows = []
    for line, cells in lines[1:]:
        if any(cells[len(heading) :]):
            mistakes.append(_mistake(line, "", f"it has {len(cells)} cells, and the heading {len(heading)}"))
        if named := {name: cell for name, cell in zip(heading, cells, strict=False) if cell}:
            rows.append(Row(line, named))
    _refuse(path, mistakes)
    return rows


output_option = click.option(
    "--output", metavar="FILE", type=FILE, help="write it here, where there is no file yet"
)


def _import_options(does: Any) -> Any:
    what = "only say what would change; this is the default"
    does = click.option("--dry-run", is_flag=True, expose_value=False, help=what)(does)
    does = click.option("--apply", is_flag=True, help="change it")(does)
    return click.argument("file", type=FILE)(does)


def printed(text: str, output: str | None, what: str) -> list[str]:
    """Return the lines of a text, or write it into the new file ``output`` and return that ``what`` is in it."""
    if output is None:
        return text.rstrip("\n").splitlines()
    with Path(output).open("x", encoding="utf-8", newline="") as file:
        file.write(text)
    return [f"wrote {what} to {output}"]


def _changes_report(
    heading: Sequence[str], rows: Sequence[Sequence[str]], changes: list[dict[str, Any]], *, applied: bool
) -> Report:
    number = f"{len(rows)} change{'' if len(rows) == 1 else 's'}"
    lines = [*table(heading, rows), "", f"{number} made" if applied else f"{number}; --apply makes them"]
    found = {"version": 1, "applied": applied, "changes": changes}
    return Report(lines if rows else ["nothing to change: all of it is so already"], found)


# --- fgpu quota ---


@click.group(cls=Group)
def quota_command() -> None:
    """Write the quotas in force into a CSV file, and read one."""


@quota_command.command("export")
@output_option
@config_option
def export_quotas(output: str | None, config: str) -> list[str]:
    """Print the quotas in force as a CSV file."""
    settings = loaded(config)[1]
    with writable(settings) as store:
        quotas = [spec_of(quota) for quota in in_force(settings.quotas_given(), QuotaEdits(store).all())]
    text = csv_text(QUOTA_KEYS, [[quota.get(key) for key in QUOTA_KEYS] for quota in quotas])
    return Report(printed(text, output, f"{len(quotas)} quotas"), {"version": 1, "quotas": quotas})


@quota_command.command("import", exclusive=("dry_run", "apply"))
@_import_options
@config_option
def import_quotas(file: str, apply: bool, config: str) -> list[str]:
    """Put the quotas of a CSV file in force, all or none.

    FILE is as export writes it. A line is one whole quota: it replaces the one for the same user or group, and without
    limits it removes that. Other quotas stay as they are. Without --apply the command only says what it would change.
    """
    settings = loaded(config)[1]
    rows = _read_rows(file, columns=QUOTA_KEYS)
    quotas = _read_quotas(file, rows, settings.resource_groups())
    given = settings.quotas_given()
    with writable(settings) as store:
        edits = QuotaEdits(store)
        before = {_key(quota): quota for quota in in_force(given, edits.all())}
        changes: list[tuple[int, Quota, Quota | None, Quota | None]] = []
        for row, quota in zip(rows, quotas, strict=True):
            after = quota if row.cells.keys() & set(QUOTA_AMOUNTS) else None
            if after != before.get(_key(quota)):
                changes.append((row.line, quota, before.get(_key(quota)), after))
        if apply and changes:
            edits.put_all(
                [after for _, _, _, after in changes if after is not None],
                without=[old for _, _, old, after in changes if after is None and old is not None],
                file=given,
                by=f"{who()} (fgpu)",
                now_s=int(time.time()),
            )
    shown, found = [], []
    for line, quota, old, after in changes:
        words = ["none" if one is None else limits_words(one) for one in (old, after)]
        shown.append((str(line), printable(quota_words(quota)), *words))
        specs = [None if one is None else spec_of(one) for one in (old, after)]
        found.append({"line": line, "for": key_of(quota), "before": specs[0], "after": specs[1]})
    return _changes_report(["line", "quota of", "now", "then"], shown, found, applied=apply)


def _key(quota: Quota) -> tuple[tuple[str, str], ...]:
    return tuple(key_of(quota).items())


def _read_quotas(path: str, rows: Sequence[Row], resource_groups: Sequence[str]) -> list[Quota]:
    mistakes: list[str] = []
    found: list[Quota] = []
    lines: dict[object, int] = {}
    for row in rows:
        try:
            quota = quota_of(numbers_in(row.cells), "it", resource_groups=resource_groups, key_only=True)
        except BadQuota as e:
            words = str(e).removeprefix("it: ").removeprefix(f"{e.field}: ")
            mistakes.append(_mistake(row.line, e.field, words))
            continue
        first = lines.setdefault(_key(quota), row.line)
        if first != row.line:
            words = f"line {first} has a quota of {quota_words(quota)}, too; write them as one"
            mistakes.append(_mistake(row.line, "", words))
        found.append(quota)
    _refuse(path, mistakes)
    return found


# --- fgpu members ---


@click.group(cls=Group, epilog=f"{URL} is the Hub's address, {TOKEN} an administrator's token.")
def members_command() -> None:
    """Write who is in which group of JupyterHub into a CSV file, and read one."""


@members_command.command("export")
@output_option
@token_option
def export_members(output: str | None, token_file: str | None) -> list[str]:
    """Print the members of all groups as a CSV file."""
    groups = {
        group: sorted(users)
        for group, users in sorted(_members(ApiClient.from_environment(token_file)).items())
    }
    rows = [(group, user) for group, users in groups.items() for user in users or [""]]
    lines = printed(csv_text(MEMBER_COLUMNS, rows), output, f"{len(groups)} groups")
    return Report(lines, {"version": 1, "groups": groups})


@members_command.command("import", exclusive=("dry_run", "apply"))
@_import_options
@click.option("--add-users", is_flag=True, help="add users that the Hub does not know")
@token_option
def import_members(file: str, apply: bool, add_users: bool, token_file: str | None) -> list[str]:
    """Give the groups that a CSV file names exactly the members that it lists.

    FILE is as export writes it. Other groups stay as they are. Without --apply the command only says what it would
    change. An authenticator that manages groups sets them again at each log-in.
    """
    rows = _read_rows(file, columns=MEMBER_COLUMNS, required=MEMBER_COLUMNS)
    words = "it is empty; write the name of the group"
    _refuse(file, [_mistake(row.line, "hub_group", words) for row in rows if "hub_group" not in row.cells])
    wanted: dict[str, set[str]] = {}
    lines: dict[str, int] = {}
    for row in rows:
        users = wanted.setdefault(row.cells["hub_group"], set())
        if user := row.cells.get("user"):
            users.add(user)
            lines.setdefault(user, row.line)
    if not wanted:
        raise BadFile(f"{file}: it names no group. Nothing was changed")
    api = ApiClient.from_environment(token_file)
    now = _members(api)
    known = {str(user["name"]) for user in _pages(api, "users")}
    unknown = [user for user in lines if user not in known]
    if not add_users:
        words = "JupyterHub knows no such user; have them log in once, or give --add-users"
        _refuse(file, [_mistake(lines[u], "user", f"{printable(u[:40])!r}: {words}") for u in unknown])
    changes = [("new user", "", user) for user in unknown]
    for group, users in wanted.items():
        before = now.get(group, set())
        changes += [("new group", group, "")] * (group not in now)
        changes += [("add", group, user) for user in sorted(users - before)]
        changes += [("remove", group, user) for user in sorted(before - users)]
    if apply:
        _change_members(api, changes)
    found = [{"change": change, "hub_group": g or None, "user": u or None} for change, g, u in changes]
    shown = [[printable(cell) for cell in change] for change in changes]
    return _changes_report(["change", *MEMBER_COLUMNS], shown, found, applied=apply)


def _members(api: ApiClient) -> dict[str, set[str]]:
    return {str(group["name"]): set(map(str, group["users"])) for group in _pages(api, "groups")}


def _pages(api: ApiClient, what: str) -> Iterator[dict[str, Any]]:
    offset: int | None = 0
    while offset is not None:
        found = api.hub_call("GET", what, offset=offset, limit=PAGE)
        yield from found["items"]
        following = found["_pagination"]["next"]
        offset = int(following["offset"]) if following else None


def _change_members(api: ApiClient, changes: Sequence[tuple[str, str, str]]) -> None:
    """Make the changes in this order. JupyterHub cannot undo them; the same file again makes the remaining ones."""
    calls: tuple[tuple[str, str, str, Callable[[list[str]], object]], ...] = (
        ("new group", "POST", "groups/{}", lambda _: None),
        ("new user", "POST", "users", lambda users: {"usernames": users}),
        ("add", "POST", "groups/{}/users", lambda users: {"users": users}),
        ("remove", "DELETE", "groups/{}/users", lambda users: {"users": users}),
    )
    for change, method, path, body in calls:
        for group in dict.fromkeys(g for c, g, _ in changes if c == change):
            users = [u for c, g, u in changes if (c, g) == (change, group)]
            for at in range(0, len(users), USERS_IN_A_CALL):
                address = path.format(quote(group, safe=""))
                api.hub_call(method, address, body=body(users[at : at + USERS_IN_A_CALL]))
