"""The command ``fgpu quota``: all quotas of an installation as one CSV file, written and read.

A line is one quota, whole: it takes the place of one for the same. A line without limits takes that quota out of force.
What no line is for stays as it is.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import click

from fgpu_scheduler import (
    Quota,
    QuotaEdits,
    in_force,
    limits_words,
    quota_words,
)
from fgpuspawner.cli.command import FILE, Group, Report, config_option, who, writable
from fgpuspawner.cli.csv_rows import (
    Mistake,
    Row,
    apply_options,
    changes_report,
    output_option,
    printed,
    read_rows,
    refuse,
)
from fgpuspawner.cli.hub_config import loaded
from fgpuspawner.service.admin.quotas import key_of, spec_of
from fgpuspawner.service.csv_file import csv_text
from fgpuspawner.settings import FGPU
from fgpuspawner.settings.queue import QUOTA_AMOUNTS, QUOTA_KEYS, BadQuota, numbers_in, quota_of
from fgpuspawner.text.tables import printable


@click.group(cls=Group)
def quota_command() -> None:
    """Write the quotas in force into a CSV file, and read one."""


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


@quota_command.command()
@output_option
@config_option
def export(output: str | None, config: str) -> list[str]:
    """Print the quotas in force as a CSV file."""
    _, settings = loaded(config)
    with writable(settings) as store:
        quotas = in_force(settings.quotas_given(), QuotaEdits(store).all())
    lines = printed(written(quotas), output, f"{len(quotas)} quotas")
    return Report(lines, {"version": 1, "quotas": [spec_of(quota) for quota in quotas]})


def written(quotas: Sequence[Quota]) -> str:
    """Return quotas as a CSV file."""
    return csv_text(QUOTA_KEYS, [[spec_of(quota).get(key) for key in QUOTA_KEYS] for quota in quotas])


@quota_command.command("import", exclusive=("dry_run", "apply"))
@click.argument("file", type=FILE)
@apply_options
@config_option
def import_quotas(file: str, apply: bool, config: str) -> list[str]:
    """Put the quotas of a CSV file in force, all or none.

    FILE is as export writes it. Without --apply the command only says what it would change.
    """
    _, settings = loaded(config)
    rows = read_rows(file, columns=QUOTA_KEYS)
    quotas = read_quotas(file, rows, settings)
    configured = settings.quotas_given()
    with writable(settings) as store:
        edits = QuotaEdits(store)
        changes = changed(rows, quotas, in_force(configured, edits.all()))
        if apply and changes:
            edits.put_all(
                [c.after for c in changes if c.after is not None],
                without=[c.before for c in changes if c.after is None and c.before is not None],
                file=configured,
                by=f"{who()} (fgpu)",
                now_s=int(time.time()),
            )
    words = [
        (str(c.line), printable(quota_words(c.quota)), _words(c.before), _words(c.after)) for c in changes
    ]
    heading = ["line", "quota of", "now", "then"]
    return changes_report(heading, words, [c.as_json() for c in changes], applied=apply)


def read_quotas(path: str, rows: Sequence[Row], settings: FGPU) -> list[Quota]:
    """Return the quota of each row; one without limits takes that quota out of force.

    Raises:
        BadFile: some rows are wrong; it names the line and column of each.
    """
    mistakes: list[Mistake] = []
    found: list[Quota] = []
    lines: dict[tuple[tuple[str, str], ...], int] = {}
    groups = settings.resource_groups()
    for row in rows:
        try:
            quota = quota_of(numbers_in(row.cells), "it", resource_groups=groups, key_only=True)
        except BadQuota as e:
            words = str(e).removeprefix("it: ").removeprefix(f"{e.field}: ")
            mistakes.append(Mistake(row.line, e.field, words))
            continue
        key = tuple(key_of(quota).items())
        if key in lines:
            said = f"line {lines[key]} has a quota of {quota_words(quota)}, too; write them as one"
            mistakes.append(Mistake(row.line, "", said))
        lines.setdefault(key, row.line)
        found.append(quota)
    refuse(path, mistakes)
    return found


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
