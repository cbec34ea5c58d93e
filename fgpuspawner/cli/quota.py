"""The command ``fgpu quota``: all quotas of an installation as one CSV file, written and read.

A line is one quota, whole: it takes the place of one for the same. A line without limits takes that quota out of force.
What no line is for stays as it is.
"""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fgpu_scheduler import (
    LARGEST_MILLI,
    BadSettings,
    Quota,
    QuotaEdits,
    format_milli,
    in_force,
    limits_words,
    quota_words,
)
from fgpuspawner.cli.command import JsonReport, add_command, add_commands, add_config, loaded, who, writable
from fgpuspawner.cli.csv_rows import Mistake, Row, printed, read_rows, refuse
from fgpuspawner.service.admin.quotas_view import key_of, spec_of
from fgpuspawner.service.csv_file import csv_text
from fgpuspawner.settings import FGPU
from fgpuspawner.settings.queue import QUOTA_AMOUNTS, QUOTA_KEYS, quota_of
from fgpuspawner.text.tables import printable, table

WHOLE = ("max_sessions", "max_pending", "max_lifetime_s")


def add_to(commands: Any) -> None:
    about = "Write the quotas in force into a CSV file, and read one."
    own = add_commands(commands, "quota", "all quotas as a CSV file", about)
    export = add_command(own, run_export, "export", "print the quotas in force as a CSV file")
    export.add_argument("--output", metavar="FILE", help="write it here, where there is no file yet")
    reading = add_command(
        own,
        run_import,
        "import",
        "put the quotas of a CSV file in force",
        "Put the quotas of a CSV file in force, all or none. Without --apply it only says what it would change.",
    )
    reading.add_argument("file", metavar="FILE.csv", help="the file, as export writes it")
    add_apply(reading)
    for one in (export, reading):
        add_config(one, "the Hub's configuration; default: ")


def add_apply(parser: argparse.ArgumentParser) -> None:
    """Add the options that say whether anything is changed."""
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--dry-run", action="store_true", help="only say what would change; this is the default")
    how.add_argument("--apply", action="store_true", help="change it")


@dataclass(frozen=True, slots=True)
class Change:
    """What a line of the file changes. None is no quota."""

    line: int
    quota: Quota
    before: Quota | None
    after: Quota | None

    def as_json(self) -> dict[str, Any]:
        """Return it for programs."""
        before, after = (None if q is None else spec_of(q) for q in (self.before, self.after))
        return {"line": self.line, "for": key_of(self.quota), "before": before, "after": after}


def run_export(given: argparse.Namespace) -> list[str]:
    """Return the quotas in force as a file's lines, or write the file."""
    _, settings = loaded(given.config)
    with writable(settings) as store:
        quotas = in_force(settings.quotas_given(), QuotaEdits(store).all())
    if given.json:
        return JsonReport({"version": 1, "quotas": [spec_of(quota) for quota in quotas]})
    return printed(written(quotas), given.output, f"{len(quotas)} quotas")


def written(quotas: Sequence[Quota]) -> str:
    """Return quotas as a CSV file."""
    return csv_text(QUOTA_KEYS, [[spec_of(quota).get(key) for key in QUOTA_KEYS] for quota in quotas])


def run_import(given: argparse.Namespace) -> list[str]:
    """Return what the file changes, and change it where that is asked for.

    Raises:
        BadFile: it cannot be read; nothing is changed.
    """
    _, settings = loaded(given.config)
    rows = read_rows(given.file, columns=QUOTA_KEYS)
    quotas = read_quotas(given.file, rows, settings)
    file = settings.quotas_given()
    with writable(settings) as store:
        edits = QuotaEdits(store)
        changes = changed(rows, quotas, in_force(file, edits.all()))
        if given.apply and changes:
            edits.put_all(
                [c.after for c in changes if c.after is not None],
                without=[c.before for c in changes if c.after is None and c.before is not None],
                file=file,
                by=f"{who()} (fgpu)",
                now_s=int(time.time()),
            )
    if given.json:
        found = {"version": 1, "applied": bool(given.apply), "changes": [c.as_json() for c in changes]}
        return JsonReport(found)
    words = [
        (str(c.line), printable(quota_words(c.quota)), _words(c.before), _words(c.after)) for c in changes
    ]
    return told(["line", "quota of", "now", "then"], words, applied=given.apply)


def told(heading: Sequence[str], changes: Sequence[Sequence[str]], *, applied: bool) -> list[str]:
    """Return what a file changes as a table, and whether it was done."""
    if not changes:
        return ["nothing to change: all of it is so already"]
    many = f"{len(changes)} change{'' if len(changes) == 1 else 's'}"
    return [*table(heading, changes), "", f"{many} made" if applied else f"{many}; --apply makes them"]


def read_quotas(path: str, rows: Sequence[Row], settings: FGPU) -> list[Quota]:
    """Return the quota that each row is for; one that limits nothing is to be taken out of force.

    Raises:
        BadFile: some are none; each with its line and column.
    """
    mistakes: list[Mistake] = []
    found: list[Quota] = []
    lines: dict[tuple[tuple[str, str], ...], int] = {}
    for row in rows:
        quota = _read(row, settings.resource_groups(), mistakes)
        if quota is None:
            continue
        key = tuple(key_of(quota).items())
        if key in lines:
            said = f"line {lines[key]} has a quota of {quota_words(quota)}, too; write them as one"
            mistakes.append(Mistake(row.line, "", said))
        lines.setdefault(key, row.line)
        found.append(quota)
    refuse(path, mistakes)
    return found


def _read(row: Row, resource_groups: Sequence[str], mistakes: list[Mistake]) -> Quota | None:
    spec: dict[str, Any] = dict(row.cells)
    before = len(mistakes)
    for key in WHOLE:
        if key in spec:
            if re.fullmatch(r"[0-9]{1,15}", spec[key]):
                spec[key] = int(spec[key])
            else:
                said = f"{printable(spec[key][:40])!r} is not a whole number; write one such as 4, or leave it empty"
                mistakes.append(Mistake(row.line, key, said))
    group = spec.get("resource_group")
    if group is not None and group not in resource_groups:
        said = f"there is no resource group {printable(group[:40])!r}; there are {', '.join(resource_groups)}"
        mistakes.append(Mistake(row.line, "resource_group", said))
    if len(mistakes) > before:
        return None
    limits = spec.keys() & set(QUOTA_AMOUNTS)
    try:
        quota = quota_of(spec if limits else {**spec, "max_sessions": 0}, "it")
    except BadSettings as e:
        column = next((key for key in QUOTA_AMOUNTS if re.search(rf"\b{key}\b( must|:)", str(e))), "")
        mistakes.append(Mistake(row.line, column, str(e).removeprefix("it: ").removeprefix(f"{column}: ")))
        return None
    if (quota.max_fgpu_milli or 0) > LARGEST_MILLI:
        mistakes.append(Mistake(row.line, "max_fgpu", f"it must be from 0 to {format_milli(LARGEST_MILLI)}"))
        return None
    return quota if limits else Quota(quota.scope, quota.name, quota.resource_group)


def changed(rows: Sequence[Row], quotas: Sequence[Quota], now: Sequence[Quota]) -> list[Change]:
    """Return what the rows change of the quotas that are in force."""
    before = {tuple(key_of(quota).items()): quota for quota in now}
    found = []
    for row, quota in zip(rows, quotas, strict=True):
        own = before.get(tuple(key_of(quota).items()))
        after = quota if row.cells.keys() & set(QUOTA_AMOUNTS) else None
        if after != own:
            found.append(Change(row.line, quota, own, after))
    return found


def _words(quota: Quota | None) -> str:
    return "none" if quota is None else limits_words(quota)
