"""Tables as CSV files that a spreadsheet opens without running what is in them. Pure."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Sequence

Cell = str | int | float | bool | None

FORMULA = ("=", "+", "-", "@", "\uff1d", "\uff0b", "\uff0d", "\uff20")
"""With these a spreadsheet begins to compute, also behind space, tabs and ends of lines; with the wide ones in Japan."""
ELSEWHERE = re.compile(rf"(?<=[;\t\r\n])(?=\s*[{re.escape(''.join(FORMULA))}])")
"""Where a cell begins for a spreadsheet that separates otherwise: by semicolons where numbers have a comma."""

AGAIN = re.compile(rf"(?<=[;\t\r\n])'(?=\s*[{re.escape(''.join(FORMULA))}])")


def csv_text(columns: Sequence[str], lines: Iterable[Sequence[Cell]]) -> str:
    """Return a table as CSV; what a spreadsheet would take for a formula begins with an apostrophe."""
    found = io.StringIO()
    writer = csv.writer(found)
    writer.writerow(columns)
    writer.writerows([_as_text(cell) for cell in line] for line in lines)
    return found.getvalue()


def plain(cell: str) -> str:
    """Return what a cell of `csv_text` was written from; an apostrophe behind a semicolon may be lost."""
    return AGAIN.sub("", cell).removeprefix("'")


def _as_text(cell: Cell) -> Cell:
    if not isinstance(cell, str):
        return cell
    # One that has an apostrophe of its own gets another: so it is known whose the first is.
    if cell.lstrip().startswith(FORMULA) or cell[:1] in ("\t", "\r", "\n", "'"):
        cell = f"'{cell}"
    return ELSEWHERE.sub("'", cell)
