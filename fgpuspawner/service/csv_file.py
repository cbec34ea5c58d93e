"""Tables as CSV files, without cells that a spreadsheet would run as formulas. Pure."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Sequence

Cell = str | int | float | bool | None

FORMULA = ("=", "+", "-", "@", "\uff1d", "\uff0b", "\uff0d", "\uff20")
"""First characters of a formula, also after white space; the full-width forms count in Japanese spreadsheets."""
ELSEWHERE = re.compile(rf"(?<=[;\t\r\n])(?=\s*[{re.escape(''.join(FORMULA))}])")
"""Where a cell begins for a spreadsheet that splits at other separators, such as semicolons."""

AGAIN = re.compile(rf"(?<=[;\t\r\n])'(?=\s*[{re.escape(''.join(FORMULA))}])")


def csv_text(columns: Sequence[str], lines: Iterable[Sequence[Cell]]) -> str:
    """Return a table as CSV. A cell that looks like a formula gets an apostrophe in front."""
    found = io.StringIO()
    writer = csv.writer(found)
    writer.writerow(columns)
    writer.writerows([_as_text(cell) for cell in line] for line in lines)
    return found.getvalue()


def plain(cell: str) -> str:
    """Return the text that `csv_text` wrote as this cell; an apostrophe after a semicolon may be lost."""
    return AGAIN.sub("", cell).removeprefix("'")


def _as_text(cell: Cell) -> Cell:
    if not isinstance(cell, str):
        return cell
    # A cell with an apostrophe of its own gets another, so that reading knows which to remove.
    if cell.lstrip().startswith(FORMULA) or cell[:1] in ("\t", "\r", "\n", "'"):
        cell = f"'{cell}"
    return ELSEWHERE.sub("'", cell)
