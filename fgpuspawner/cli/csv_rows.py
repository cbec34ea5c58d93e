"""CSV files that administrators write: by hand, by program, or with a spreadsheet. Pure but for the reading of the file.

Every mistake is told with its line and column. What a spreadsheet does to a file is taken back: a mark at its beginning,
semicolons where numbers have a comma, and the apostrophe that keeps a name from being computed.
"""

from __future__ import annotations

import csv
import difflib
import io
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from fgpu_scheduler import BadSettings
from fgpuspawner.cli.command import FILE, Report
from fgpuspawner.service.csv_file import plain
from fgpuspawner.text.tables import printable, table

MOST_BYTES = 16 * 2**20
MOST_TOLD = 10


class BadFile(BadSettings):
    """A file that cannot be read as it stands. The message says where, and what would work."""

    code = "bad_file"


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the file and its cells by column; those that are empty are left out."""

    line: int
    cells: dict[str, str]


@dataclass(frozen=True, slots=True)
class Mistake:
    """What is wrong with one cell, or with a line."""

    line: int
    column: str
    message: str

    def __str__(self) -> str:
        where = f"line {self.line}, column {self.column}" if self.column else f"line {self.line}"
        return f"{where}: {self.message}"


def refuse(path: str, mistakes: Sequence[Mistake]) -> None:
    """Raise what is wrong with a file, if anything is.

    Raises:
        BadFile: all of it, or the first ten.
    """
    if mistakes:
        told = "; ".join(map(str, mistakes[:MOST_TOLD]))
        more = f"; and {len(mistakes) - MOST_TOLD} more" if len(mistakes) > MOST_TOLD else ""
        raise BadFile(f"{path}: {told}{more}. Nothing was changed")


def read_rows(path: str, *, columns: Sequence[str], needed: Collection[str] = ()) -> list[Row]:
    """Return the rows of a file. Its first line names its columns, in any order.

    Raises:
        BadFile: the file is not such a table.
        OSError: it cannot be read.
    """
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
    if not lines or not any(lines[0][1]):
        raise BadFile(f"{path}: its first line must name columns: {', '.join(columns)}")
    heading = lines[0][1]
    mistakes = [
        Mistake(1, printable(name[:40]) or "without a name", _nearest(name, columns))
        for name in heading
        if name not in columns
    ]
    mistakes += [Mistake(1, name, "it is there twice") for name in columns if heading.count(name) > 1]
    mistakes += [Mistake(1, name, "it is missing") for name in needed if name not in heading]
    refuse(path, mistakes)
    rows = []
    for line, cells in lines[1:]:
        if len(cells) > len(heading) and any(cells[len(heading) :]):
            mistakes.append(Mistake(line, "", f"it has {len(cells)} cells, and the heading {len(heading)}"))
        named = {name: cell for name, cell in zip(heading, cells, strict=False) if cell}
        if named:
            rows.append(Row(line, named))
    refuse(path, mistakes)
    return rows


output_option = click.option(
    "--output", metavar="FILE", type=FILE, help="write it here, where there is no file yet"
)


def apply_options(does: Any) -> Any:
    """Add ``--apply``, and ``--dry-run`` for its absence."""
    what = "only say what would change; this is the default"
    does = click.option("--dry-run", is_flag=True, expose_value=False, help=what)(does)
    return click.option("--apply", is_flag=True, help="change it")(does)


def printed(text: str, output: str | None, what: str) -> list[str]:
    """Return a file's lines; or write them into the new file ``output``, and return that ``what`` is in it."""
    if output is None:
        return text.rstrip("\n").splitlines()
    with Path(output).open("x", encoding="utf-8", newline="") as file:
        file.write(text)
    return [f"wrote {what} to {output}"]


def changes_report(
    heading: Sequence[str], rows: Sequence[Sequence[str]], changes: list[dict[str, Any]], *, applied: bool
) -> Report:
    """Return what a file changes, and whether it was done."""
    many = f"{len(rows)} change{'' if len(rows) == 1 else 's'}"
    lines = [*table(heading, rows), "", f"{many} made" if applied else f"{many}; --apply makes them"]
    found = {"version": 1, "applied": applied, "changes": changes}
    return Report(lines if rows else ["nothing to change: all of it is so already"], found)


def _nearest(name: str, columns: Sequence[str]) -> str:
    near = difflib.get_close_matches(name.lower(), columns, n=1)
    return f"there is no such column; use {near[0] if near else ', '.join(columns)}"
