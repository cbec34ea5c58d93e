"""Tables as CSV files that a spreadsheet opens without running what is in them. Pure."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence

Cell = str | int | float | bool | None

FORMULA = ("=", "+", "-", "@")
"""With these a spreadsheet begins to compute, also behind space, tabs and ends of lines."""


def csv_text(columns: Sequence[str], lines: Iterable[Sequence[Cell]]) -> str:
    """Return a table as CSV; what a spreadsheet would take for a formula begins with an apostrophe."""
    found = io.StringIO()
    writer = csv.writer(found)
    writer.writerow(columns)
    writer.writerows([_as_text(cell) for cell in line] for line in lines)
    return found.getvalue()


def _as_text(cell: Cell) -> Cell:
    if isinstance(cell, str) and (cell.lstrip().startswith(FORMULA) or cell[:1] in ("\t", "\r", "\n")):
        return f"'{cell}"
    return cell
